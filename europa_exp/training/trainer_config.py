"""From our configuration to torchtitan's ``Trainer.Config``: every field of ours that torchtitan has a place for."""

from __future__ import annotations

from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import (
    FullAC,
    SelectiveAC,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from europa_exp.config import schema
from europa_exp.cpu import device
from europa_exp.data.loader import dataloader_config, tokenizer_config
from europa_exp.runs import checkpoints
from europa_exp.runs.folder import RunFolder
from europa_exp.training.checkpointing import KeepingCheckpointManager
from europa_exp.training.metrics import RunMetrics


def trainer_config(cfg: schema.Config, spec: ModelSpec, run_dir: Path) -> Trainer.Config:
    """The torchtitan configuration of a run.

    Args:
        cfg: a checked configuration.
        spec: the model, see ``europa_exp.model.model_spec``.
        run_dir: the run folder; checkpoints lie below it, or where ``cluster.checkpoint_dir`` has them.
    """
    on_cpu = device.device_type() == "cpu"
    training = cfg.training
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(run_dir),
        loss=_loss(cfg),
        tokenizer=tokenizer_config(cfg.data),
        dataloader=dataloader_config(cfg.data, cfg.model.vocab_size),
        optimizer=_optimizer(cfg.optimizer),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=cfg.optimizer.warmup_steps,
            decay_ratio=cfg.optimizer.decay_ratio,
            decay_type=cfg.optimizer.decay_type.value,
            min_lr_factor=cfg.optimizer.min_lr_factor,
        ),
        training=TrainingConfig(
            local_batch_size=training.local_batch_size,
            global_batch_size=-1 if training.global_batch_size is None else training.global_batch_size,
            seq_len=training.seq_len,
            max_norm=cfg.optimizer.max_grad_norm,
            steps=training.steps,
            enable_cpu_offload=cfg.offload.fsdp_cpu,
            mixed_precision_param=training.param_precision.value,
            # The MoE dispatch synchronises with the host, which a CUDA graph can't capture.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=cfg.parallelism.data_parallel_replicate_degree,
            data_parallel_shard_degree=cfg.parallelism.data_parallel_shard_degree,
            expert_parallel_degree=cfg.parallelism.expert_parallel_degree,
            fsdp_reshard_after_forward=cfg.parallelism.reshard_after_forward.value,
        ),
        checkpoint=_checkpoint(cfg, run_dir),
        activation_checkpoint=_activation_checkpoint(training.activation_checkpoint),
        compile=CompileConfig(enable=training.compile, components=["model"]),
        comm=CommConfig(
            init_timeout_seconds=training.init_timeout_s,
            train_timeout_seconds=training.train_timeout_s,
            # The flight recorder belongs to NCCL.
            trace_buf_size=0 if on_cpu else 20000,
        ),
        metrics=RunMetrics.Config(log_freq=training.log_every, disable_color_printing=True),
        debug=DebugConfig(seed=training.seed, deterministic=training.deterministic),
    )


def _loss(cfg: schema.Config) -> BaseLoss.Config:
    loss = CrossEntropyLoss.Config(global_vocab_size=cfg.model.vocab_size)
    if cfg.training.loss_chunks == 1:
        return loss
    return ChunkedLossWrapper.Config(num_chunks=cfg.training.loss_chunks, loss_fn=loss)


def _optimizer(optimizer: schema.Optimizer) -> OptimizersContainer.Config:
    match optimizer.name:
        case schema.OptimizerName.adamw:
            return default_adamw(
                lr=optimizer.lr,
                betas=(optimizer.beta1, optimizer.beta2),
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
            )


def _checkpoint(cfg: schema.Config, run_dir: Path) -> CheckpointManager.Config:
    training = cfg.training
    if training.checkpoint_every == 0 and training.initial_checkpoint is None:
        return CheckpointManager.Config(enable=False, initial_load_model_only=False)
    initial = (
        None if training.initial_checkpoint is None else str(Path(training.initial_checkpoint).absolute())
    )
    return KeepingCheckpointManager.Config(
        enable=True,
        folder=str(checkpoints.place(RunFolder(run_dir), cfg.cluster.checkpoint_dir)),
        interval=training.checkpoint_every or training.steps,
        load_only=training.checkpoint_every == 0,
        keep_latest_k=training.checkpoint_keep,
        keep_every=training.checkpoint_keep_every,
        steps=training.steps,
        async_mode="async" if training.checkpoint_async else "disabled",
        # A run goes on from what it saved last, with optimizer, dataloader and schedule.
        last_save_model_only=False,
        initial_load_path=initial,
        initial_load_model_only=False,
    )


def _activation_checkpoint(mode: schema.ActivationCheckpoint) -> FullAC.Config | SelectiveAC.Config | None:
    match mode:
        case schema.ActivationCheckpoint.none:
            return None
        case schema.ActivationCheckpoint.selective:
            return SelectiveAC.Config()
        case schema.ActivationCheckpoint.full:
            return FullAC.Config()
