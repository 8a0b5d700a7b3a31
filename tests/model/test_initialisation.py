"""The initialiser alone: distribution, keys, and parts of a tensor."""

from __future__ import annotations

import pytest
import torch
from configured import build, configured

from europa_exp.model.initialisation import TruncatedNormal, bind, local_indices


def drawn(shape: tuple[int, ...], name: str = "w", seed: int = 0, std: float = 0.02) -> torch.Tensor:
    tensor = torch.full(shape, float("nan"))
    TruncatedNormal(std, name=name, seed=seed)(tensor)
    return tensor


def test_truncated_normal_distribution() -> None:
    x = drawn((512, 1024)) / 0.02
    assert x.abs().max() <= 3
    assert x.mean().abs() < 0.01
    # Standard deviation of a normal cut at 3 sigma.
    assert x.std() == pytest.approx(0.98658, abs=0.005)
    assert (x.abs() > 2.9).float().mean() == pytest.approx(0.00103, abs=0.0002)


def test_values_depend_on_name_and_seed_only() -> None:
    torch.manual_seed(1)
    first = drawn((40, 8))
    torch.manual_seed(2)
    assert torch.equal(first, drawn((40, 8)))
    assert not torch.equal(first, drawn((40, 8), name="v"))
    assert not torch.equal(first, drawn((40, 8), seed=1))


def test_no_two_rows_or_experts_are_alike() -> None:
    for shape in [(3000, 64), (16, 300, 300)]:
        x = drawn(shape).reshape(shape[0], -1)
        assert not x.isnan().any()
        assert len({row.numpy().tobytes() for row in x}) == shape[0]
    vector = drawn((70_000,))
    assert not vector.isnan().any()
    assert not torch.equal(vector[65_536:], vector[: 70_000 - 65_536])


def test_lower_precision_parameters_round_the_same_values() -> None:
    tensor = torch.empty((70, 2000), dtype=torch.bfloat16)
    TruncatedNormal(0.02, name="w", seed=0)(tensor)
    assert torch.equal(tensor, drawn((70, 2000)).bfloat16())


def test_an_unbound_initialiser_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bind"):
        TruncatedNormal(0.02)(torch.empty(2, 2))


def test_bind_leaves_other_initialisers() -> None:
    bound = bind({"weight": TruncatedNormal(0.1), "bias": torch.nn.init.zeros_}, "layers.0.wo", 7)
    assert bound == {
        "weight": TruncatedNormal(0.1, name="layers.0.wo.weight", seed=7),
        "bias": torch.nn.init.zeros_,
    }
    assert bind(None, "norm", 7) is None


def test_plain_tensor_holds_everything() -> None:
    assert [index.tolist() for index in local_indices(torch.empty(3, 2))] == [[0, 1, 2], [0, 1]]


def test_residual_outputs_are_scaled_by_depth() -> None:
    _, config = configured("n_layers=8", seq_len=64)
    model = build(config, "cpu")
    state = dict(model.named_parameters())
    for name in ("attention.wo.weight", "moe.routed_experts.inner_experts.w2_EDF"):
        assert state[f"layers.5.{name}"].std().item() == pytest.approx(0.02 * 0.98658 / 4, rel=0.05)
    for name in ("attention.qkv_linear.wqkv.weight", "moe.routed_experts.inner_experts.w1_EFD"):
        assert state[f"layers.5.{name}"].std().item() == pytest.approx(0.02 * 0.98658, rel=0.05)
