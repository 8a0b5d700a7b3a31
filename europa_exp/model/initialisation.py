"""Initial values that depend on the seed, the parameter's name and the place in the full tensor, and on nothing else.

A rank draws only the part of a parameter that it holds, without a collective, and the full tensor is bitwise the same
for every number of ranks and every mesh: shards differ, replicas are equal. PyTorch's own initialisation of sharded
tensors gives neither on CPU (every rank draws the same numbers for its shard).

A tensor is drawn in blocks of whole leading indices (an expert, some rows of a matrix). Each block has a generator of
its own, keyed by seed, name and block number. A rank draws every block that it touches whole and keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = ["TruncatedNormal", "bind", "local_indices"]

_BLOCK_VALUES = 65_536
"""Values a block should hold at least: large enough that seeding costs nothing, small enough to waste little at the
edges of a shard. Changing it changes every initialisation."""


@dataclass(frozen=True)
class TruncatedNormal:
    """Fills a parameter, or the shard of it that this rank holds, from a normal distribution cut at ``cut`` sigma.

    Values outside are drawn again from the same generator, so drawing always ends. ``name`` and ``seed`` are
    set by ``bind``; without them a call is an error, because the numbers would depend on the order of calls.

    On the CPU values come from NumPy's Philox with a 128-bit key (PyTorch's CPU generator keeps only 32 bits of a seed,
    too few for the blocks of a large model), on an accelerator from PyTorch's generator there. So tensors are bitwise
    equal across meshes on one kind of device, not across kinds.
    """

    std: float
    cut: float = 3.0
    name: str | None = None
    seed: int | None = None

    def __call__(self, param: torch.Tensor) -> None:
        if self.name is None or self.seed is None:
            raise RuntimeError("TruncatedNormal has no parameter name or seed yet; bind() sets them.")
        with torch.no_grad():
            local = param.to_local() if isinstance(param, DTensor) else param
            indices = local_indices(param)
            if local.numel() == 0:
                return
            _fill(local, tuple(param.shape), indices, self)


def bind(initialisers: dict | None, prefix: str, seed: int) -> dict | None:
    """The ``param_init`` of one module with names and seed filled in; ``prefix`` is the module's full name."""
    if initialisers is None:
        return None
    return {
        name: replace(init, name=f"{prefix}.{name}", seed=seed) if isinstance(init, TruncatedNormal) else init
        for name, init in initialisers.items()
    }


def local_indices(param: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each dimension of ``param``, which indices of the full tensor this rank holds, in local order.

    A plain tensor holds everything. For a DTensor the placements are applied to the index range in mesh order, the
    way that DTensor shards values, so uneven shards, several mesh dimensions on one tensor dimension and FSDP's strided
    shards come out right. Raises ValueError for placements that hold no plain part of the tensor (partial sums).
    """
    indices = [torch.arange(size) for size in param.shape]
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        if coordinate is None:
            return tuple(index[:0] for index in indices)
        for mesh_dim, placement in enumerate(param.placements):
            if placement.is_replicate():
                continue
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise ValueError(f"A parameter placed as {placement} can't be initialised shard by shard.")
            # Private, and the only call that knows every kind of shard; torch's public local-shape helper gives one
            # offset, which strided shards do not have in general. Replace once it gives index ranges.
            line = indices[dim].reshape([-1 if d == dim else 1 for d in range(param.ndim)])
            chunks, _ = placement._split_tensor(
                line, param.device_mesh.size(mesh_dim), with_padding=False, contiguous=True
            )
            indices[dim] = chunks[coordinate[mesh_dim]].flatten()
        if tuple(len(index) for index in indices) != tuple(param.to_local().shape):
            raise ValueError(
                f"Placements {param.placements} of a tensor {tuple(param.shape)} give a shard of "
                f"{tuple(len(i) for i in indices)}, but this rank holds {tuple(param.to_local().shape)}."
            )
    return tuple(indices)


def _fill(
    local: torch.Tensor, shape: tuple[int, ...], indices: tuple[torch.Tensor, ...], how: TruncatedNormal
) -> None:
    tail = shape[1:]
    row_values = 1
    for size in tail:
        row_values *= size
    rows = max(1, _BLOCK_VALUES // max(1, row_values))
    narrowed = {
        dim: index.to(local.device)
        for dim, index in enumerate(indices)
        if dim > 0 and len(index) < shape[dim]
    }
    for block, taken, target in _runs(indices[0], rows):
        height = min(rows, shape[0] - block * rows)
        values = _draw((height, *tail), f"{how.seed}\0{how.name}\0{block}", how.cut, local.device)
        values = values.mul_(how.std)[taken]
        for dim, index in narrowed.items():
            values = values.index_select(dim, index)
        local[target].copy_(values)


def _runs(index: torch.Tensor, rows: int) -> Iterator[tuple[int, slice, slice]]:
    """Split held leading indices into runs: (block number, rows of the block, rows of the shard)."""
    held = index.tolist()
    start = 0
    while start < len(held):
        block = held[start] // rows
        end = start + 1
        while end < len(held) and held[end] == held[end - 1] + 1 and held[end] // rows == block:
            end += 1
        first = held[start] - block * rows
        yield block, slice(first, first + end - start), slice(start, end)
        start = end


def _draw(shape: tuple[int, ...], key: str, cut: float, device: torch.device) -> torch.Tensor:
    """Standard normal values in [-cut, cut] as fp32, from ``key`` and ``shape`` alone."""
    digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    if device.type == "cpu":
        rng = np.random.Generator(np.random.Philox(key=digest))
        values = rng.standard_normal(shape, dtype=np.float32)
        flat = values.reshape(-1)
        outside = np.flatnonzero(np.abs(flat) > cut)
        while outside.size:
            flat[outside] = rng.standard_normal(outside.size, dtype=np.float32)
            outside = outside[np.abs(flat[outside]) > cut]
        return torch.from_numpy(values)
    generator = torch.Generator(device=device)
    generator.manual_seed(digest & (2**63 - 1))
    values = torch.empty(shape, dtype=torch.float32, device=device).normal_(generator=generator)
    while bool((outside := values.abs() > cut).any()):
        values = torch.where(outside, torch.empty_like(values).normal_(generator=generator), values)
    return values
