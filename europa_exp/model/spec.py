"""From the model group of a configuration to a torchtitan ModelSpec."""

from __future__ import annotations

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from europa_exp.config import counts, schema
from europa_exp.cpu.attention import DocumentAttention
from europa_exp.cpu.linear import Float32Linear
from europa_exp.model.decoder import EuropaModel, NoPositions, Rotary
from europa_exp.model.initialisation import TruncatedNormal

__all__ = ["model_spec"]


def model_spec(model: schema.Model, *, device_type: str) -> ModelSpec:
    """The decoder that ``model`` describes, for torchtitan's Trainer.

    ``device_type`` is where it will run ("cpu" or an accelerator's name): on CPU the document-masked attention that
    trains there takes the place of ``model.attention_backend``, and router logits are fp32 as on an accelerator. The sequence length and the seed of the initialisation
    come later, when the Trainer calls ``update_from_config``.
    """
    rotary, long = set(counts.rope_layers(model)), set(counts.long_rope_layers(model))
    weight = {"weight": TruncatedNormal(model.init_std)}
    config = EuropaModel.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size, embedding_dim=model.dim, param_init=weight
        ),
        lm_head=Linear.Config(in_features=model.dim, out_features=model.vocab_size, param_init=weight),
        norm=_norm(model),
        layers=[
            Qwen3TransformerBlock.Config(
                attention_norm=_norm(model),
                ffn_norm=_norm(model),
                attention=_attention(model, device_type, rotary=i in rotary, long=i in long),
                moe=_experts(model, device_type),
            )
            for i in range(model.n_layers)
        ],
    )
    return ModelSpec(
        name="europa",
        flavor=model.flavor,
        model=config,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )


def _norm(model: schema.Model) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=model.dim, eps=model.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _residual_output(model: schema.Model) -> TruncatedNormal:
    """Matrices that write into the residual stream: 2 a layer, so their sum keeps the variance of one."""
    return TruncatedNormal(model.init_std / (2 * model.n_layers) ** 0.5)


def _attention(model: schema.Model, device_type: str, *, rotary: bool, long: bool) -> Module.Config:
    config = make_gqa_config(
        dim=model.dim,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        wqkv_param_init={},
        wo_param_init={"weight": _residual_output(model)},
        inner_attention=_inner_attention(model, device_type),
        fuse_qkv=True,
        rope=(
            # The length is a placeholder until the Trainer sets the sequence length.
            Rotary.Config(
                dim=model.head_dim,
                max_seq_len=1,
                theta=model.rope_theta,
                length_factor=model.long_rope_factor if long else 1,
            )
            if rotary
            else NoPositions.Config()
        ),
    )
    # torchtitan's initialiser of the fused matrix draws queries, keys and values as three full tensors; all entries
    # have one distribution, so the fused matrix is drawn like any other, shard by shard.
    config.qkv_linear.wqkv.param_init = {"weight": TruncatedNormal(model.init_std)}
    return config


def _inner_attention(model: schema.Model, device_type: str) -> Module.Config:
    if device_type == "cpu":
        return DocumentAttention.Config()
    return get_attention_config(model.attention_backend.value)


def _experts(model: schema.Model, device_type: str) -> Module.Config:
    std = TruncatedNormal(model.init_std)
    router = make_router_config(
        dim=model.dim,
        num_experts=model.n_experts,
        gate_param_init={"weight": std},
        top_k=model.top_k,
        score_func=model.score_function.value,
        route_norm=model.normalize_top_k,
    )
    if device_type == "cpu":
        router.gate = Float32Linear.Config(
            in_features=model.dim, out_features=model.n_experts, param_init={"weight": std}
        )
    return make_moe_config(
        num_experts=model.n_experts,
        load_balance_coeff=model.load_balance_coeff or None,
        router=router,
        routed_experts=make_routed_experts_config(
            dim=model.dim,
            hidden_dim=model.expert_hidden_dim,
            num_experts=model.n_experts,
            top_k=model.top_k,
            param_init={"w1_EFD": std, "w2_EDF": _residual_output(model), "w3_EFD": std},
            comm_backend="standard",
        ),
    )
