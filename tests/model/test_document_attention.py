"""Attention inside documents on CPU against a dense reference, and the offsets that the model makes."""

from __future__ import annotations

import copy

import pytest
import torch
from configured import build, configured
from torchtitan.models.common.attention import VarlenMetadata

from europa_exp.cpu.attention import DocumentAttention

B, L, N, K, H = 2, 48, 4, 2, 8


def metadata(offsets: list[int], *, host: bool) -> VarlenMetadata:
    cu = torch.tensor(offsets, dtype=torch.int32)
    return VarlenMetadata(cu, cu, L, L, tuple(offsets) if host else None)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, L, heads, H, generator=generator).to(dtype).requires_grad_() for heads in (N, K, K)
    ]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    """Plain softmax attention under an explicit mask, query head n on key head n // (N / K)."""
    token = torch.arange(B * L)
    document = torch.searchsorted(torch.tensor(sorted(set(offsets))), token, right=True).view(B, L)
    mask = (document[:, :, None] == document[:, None, :]) & torch.ones(L, L, dtype=torch.bool).tril()
    out = torch.empty(B, L, N, H)
    for n in range(N):
        scores = q[:, :, n] @ k[:, :, n // (N // K)].transpose(1, 2) / H**0.5
        out[:, :, n] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, :, n // (N // K)]
    return out


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    "offsets",
    [[0, L, 2 * L], [0, 1, 20, L, L + 30, 2 * L], [0, 7, 7, 7, L, 2 * L - 1, 2 * L, 2 * L]],
    ids=["whole rows", "several documents", "empty documents"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_matches_dense_attention_with_gradients(
    offsets: list[int], host: bool, dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = inputs(dtype), [t.detach().float().requires_grad_() for t in inputs(dtype)]
    out = DocumentAttention.Config().build()(
        *ours, attention_masks=metadata(offsets, host=host), enable_gqa=True
    )
    expected = reference(*theirs, offsets)
    assert out.shape == (B, L, N, H)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    weight = torch.randn(B, L, N, H, generator=torch.Generator().manual_seed(1))
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad.float(), b.grad, atol=10 * tolerance, rtol=10 * tolerance)


def test_scale_is_used() -> None:
    q, k, v = inputs(torch.float32)
    attention, masks = DocumentAttention.Config().build(), metadata([0, L, 2 * L], host=True)
    assert torch.allclose(
        attention(q, k, v, attention_masks=masks, scale=0.5),
        attention(q * 0.5 * H**0.5, k, v, attention_masks=masks),
        atol=1e-5,
    )


@pytest.mark.parametrize("offsets", [[3, L, 2 * L], [0, L]])
def test_offsets_that_leave_tokens_out_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        DocumentAttention.Config().build()(
            *inputs(torch.float32), attention_masks=metadata(offsets, host=True)
        )


def test_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="window_size"):
        DocumentAttention.Config(window_size=(16, 0)).build()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    _, config = configured("init_std=0.2", seq_len=L)
    return build(config, "cpu")


def logits(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))


def test_documents_of_a_row_do_not_meet(model: torch.nn.Module) -> None:
    tokens = torch.randint(0, 256, (1, L), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, :20] = 255 - other[0, :20]
    packed = torch.cat([torch.arange(20), torch.arange(L - 20)])[None]
    torch.testing.assert_close(
        logits(model, tokens, packed)[:, 20:], logits(model, other, packed)[:, 20:], atol=0, rtol=0
    )
    whole = torch.arange(L)[None]
    assert not torch.equal(logits(model, tokens, whole)[:, 20:], logits(model, other, whole)[:, 20:])


def test_rows_do_not_meet_even_where_a_row_begins_inside_a_document(model: torch.nn.Module) -> None:
    tokens = torch.randint(0, 256, (2, L), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0] = 255 - other[0]
    positions = torch.stack([torch.arange(L), torch.cat([torch.arange(30, L), torch.arange(30)])])
    before = positions.clone()
    torch.testing.assert_close(
        logits(model, tokens, positions)[1], logits(model, other, positions)[1], atol=0, rtol=0
    )
    assert torch.equal(positions, before)


def test_positions_turn_only_the_rotary_layers(model: torch.nn.Module) -> None:
    q = torch.randn(1, 4, 4, 16)
    positions = torch.tensor([[0, 1, 2, 3]])
    turned = [not torch.equal(layer.attention.rope(q, q, positions)[0], q) for layer in model.layers.values()]
    assert turned == [False, True, False, True]


def test_router_logits_are_float32_on_cpu(model: torch.nn.Module) -> None:
    gate = model.layers["0"].moe.router.gate
    x = torch.randn(3, 64).bfloat16()
    out = copy.deepcopy(gate).bfloat16()(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, x.float() @ gate.weight.bfloat16().float().T)
