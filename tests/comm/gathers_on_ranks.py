"""What FSDP gathers, from which ranks and when; functions that tests run on several ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_moe import Case, local, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import Shard

from europa_exp.comm.compute_stream_gather import apply_compute_stream_gather
from europa_exp.comm.embedding_gather import skip_embedding_gather_in_backward
from europa_exp.comm.fp8_all_gather import apply_fp8_all_gather
from europa_exp.comm.fsdp_groups import groups, set_all_gather
from europa_exp.comm.node_local_reshard import apply_node_local_reshard

MECHANISMS: dict[str, Callable[[nn.Module], Any]] = {
    "node": lambda model: apply_node_local_reshard(model, 2),
    "stream": apply_compute_stream_gather,
    "fp8": apply_fp8_all_gather,
}


@dataclass
class Gather:
    """One all-gather of this rank: of which group, over which ranks, how many bytes it hands over.

    `after` is the FSDP unit whose forward was the last to begin when the gather was issued, empty before the first one.
    """

    name: str
    role: str
    ranks: tuple[int, ...]
    nbytes: int
    backward: bool
    asynchronous: bool
    after: str
    waits: int = 0


class Watch(list[Gather]):
    """All gathers of a model since they were last cleared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = ""
        for group in groups(model):
            set_all_gather(group, _Watched(group.all_gather, group.name, group.role.value, self))
            if group.module is not model:
                # Runs after FSDP's own hook, which gathers this unit and prefetches others.
                group.module.register_forward_pre_hook(lambda *_, name=group.name: self.run(name))

    def run(self, unit: str) -> None:
        self.running = unit

    def clear(self) -> None:
        super().clear()
        self.running = ""


class _Watched(AllGather):
    def __init__(self, inner: AllGather, name: str, role: str, seen: Watch) -> None:
        self.inner, self.name, self.role, self.seen = inner, name, role, seen

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = self.inner(output_tensor, input_tensor, group, async_op)
        gather = Gather(
            self.name,
            self.role,
            tuple(dist.get_process_group_ranks(group)),
            input_tensor.nbytes,
            torch._C._current_graph_task_id() != -1,
            async_op,
            self.seen.running,
        )
        self.seen.append(gather)
        return work if work is None else _WatchedWork(work, gather)


class _WatchedWork(dist.Work):
    def __init__(self, work: dist.Work, gather: Gather) -> None:
        super().__init__()
        self.work, self.gather = work, gather

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.gather.waits += 1
        return self.work.wait()


def live_bytes() -> int:
    """Bytes of all tensors that were made since the last `gc.freeze()` and that Python can reach."""
    readings = []
    for _ in range(4):  # gloo's threads let go of a collective's tensors a moment after it has returned
        gc.collect()
        plain = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
        readings.append(sum(storages.values()))
        time.sleep(0.05)
    return min(readings)


@dataclass
class Ran:
    """Two steps of this rank; the gathers of the second one."""

    gathers: list[Gather]
    losses: list[float]
    grads: dict[str, Any]
    held: int
    """Bytes that the second forward left behind."""


def run(model: nn.Module, inputs: Sequence[Tensor], micro_batches: int = 1, look: bool = False) -> Ran:
    """Two optimizer steps; `look` reads the state dict between forward and backward, as a checkpoint would."""
    gc.collect()
    gc.freeze()  # torchtitan's many objects need no look, again and again, by `live_bytes`
    seen = Watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads, held = [], {}, 0
    for _ in range(2):
        optimizer.zero_grad()
        seen.clear()
        for x in inputs[:micro_batches]:
            before = live_bytes()
            loss = model(x).float().pow(2).mean()
            held = live_bytes() - before
            if look:
                states = model.state_dict()
                assert all(torch.equal(local(states[name]), local(p)) for name, p in model.named_parameters())
            loss.backward()
            losses.append(loss.item())
        grads = {name: local(param.grad).clone() for name, param in model.named_parameters()}
        optimizer.step()
    return Ran(list(seen), losses, {name: grad.float().numpy() for name, grad in grads.items()}, held)


def trained(case: Case, mechanisms: Sequence[str], micro_batches: int = 1, look: bool = False) -> Ran:
    """Two steps of the small mixture of experts with these mechanisms, in this order."""
    model, _ = sharded(case)
    for name in mechanisms:
        MECHANISMS[name](model)
    torch.manual_seed(100 + dist.get_rank())
    inputs = [torch.randn(16, case.width, dtype=case.param_dtype, requires_grad=True) for _ in range(2)]
    return run(model, inputs, micro_batches, look)


def both(
    case: Case, mechanisms: Sequence[str], micro_batches: int = 1, look: bool = False
) -> tuple[Ran, Ran]:
    """`trained` without mechanisms and with them."""
    return trained(case, (), micro_batches, look), trained(case, mechanisms, micro_batches, look)


def refusal(case: Case, ranks_per_node: int) -> str:
    """What node-local resharding says to the small mixture of experts."""
    model, _ = sharded(case)
    try:
        apply_node_local_reshard(model, ranks_per_node)
    except ValueError as e:
        return str(e)
    return ""


def refusal_of_columns() -> str:
    """What node-local resharding says to layers that are sharded along their second dimension."""
    dist.init_process_group("gloo")
    model = Reader(tied=False)
    for layer in model.layers.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda _: Shard(1))
    try:
        apply_node_local_reshard(model, 2)
    except ValueError as e:
        return str(e)
    return ""


def setters_called(public: bool) -> list[str]:
    """Which of FSDP's setters of asynchronous unshard the mechanism calls, where there is a public one and where not."""
    model, _ = sharded(Case(ep=0))
    called: list[str] = []
    FSDPModule._set_unshard_async_op = lambda module, on: called.append(f"private {on}")
    if public:
        FSDPModule.set_unshard_async_op = lambda module, on: called.append(f"public {on}")
    apply_compute_stream_gather(model)
    return called


class Reader(nn.Module):
    """An embedding, two layers and an LM head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 16)
        self.layers = nn.ModuleDict({str(i): nn.Linear(16, 16, bias=False) for i in range(2)})
        self.lm_head = nn.Linear(16, 50, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.lm_head(x)


def reader(units: str = "alone", reshard: bool = True) -> Reader:
    """The sharded reader; `units`: the embedding is sharded alone, together with the head, tied to it, or with the root."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Reader(tied=units == "tied")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    if units == "alone":
        fully_shard(model.tok_embeddings, **shared)
        fully_shard(model.lm_head, **shared)
    elif units != "root":
        fully_shard([model.tok_embeddings, model.lm_head], **shared)
    for layer in model.layers.values():
        fully_shard(layer, **shared)
    fully_shard(model, **shared)
    for module in (model, *(group.module for group in groups(model))):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def read_both(micro_batches: int) -> tuple[Ran, Ran]:
    """Two steps of the reader, gathering the embedding in backward and not."""
    ran = []
    for mechanism in (lambda _: None, skip_embedding_gather_in_backward):
        model = reader()
        mechanism(model)
        torch.manual_seed(100 + dist.get_rank())
        ran.append(run(model, [torch.randint(0, 50, (4, 8)) for _ in range(2)], micro_batches))
    return ran[0], ran[1]


def embedding_refusal(units: str) -> str:
    """What the embedding's mechanism says to a reader sharded so; without an error, what backward gathers of the table."""
    try:
        skip_embedding_gather_in_backward(reader(units))
    except ValueError as e:
        return str(e)
    return ""


# ------------------------------------------------------------------------------------------------ torchtitan's trainer


@dataclass
class Steps:
    """What rank 0's trainer reported (of a step: loss, gradient norm), and this rank's gathers of each step."""

    numbers: list[tuple[float, float]]
    gathers: list[list[Gather]]


def train(frozen: str, folder: str) -> Steps:
    """The configuration's run, with its mechanisms."""
    from europa_exp.config import io
    from europa_exp.training.assemble import build_trainer

    trainer, _ = build_trainer(io.from_yaml(frozen), Path(folder))
    seen = Watch(trainer.model_parts[0])
    numbers: list[tuple[float, float]] = []
    gathers: list[list[Gather]] = []
    train_step = trainer.train_step

    def counted(*args: Any) -> None:
        train_step(*args)
        gathers.append(list(seen))
        seen.clear()

    trainer.train_step = counted
    trainer.metrics_processor.attach(
        [lambda metrics, _: numbers.append((metrics["loss/global_avg"], metrics["grad_norm"]))], dict
    )
    trainer.train()
    trainer.close()
    return Steps(numbers, gathers)
