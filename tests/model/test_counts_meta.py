"""The torchtitan model itself, on the meta device, against the closed forms and the published figures."""

from __future__ import annotations

import pytest
import torch
from configured import build, configured

from europa_exp.config import counts

GIB, MIB = 2**30, 2**20
SEQ_LEN = 65_536


@pytest.fixture(scope="module", params=["europa_1t", "debug"])
def both(request: pytest.FixtureRequest):
    description, config = configured(name=request.param, seq_len=SEQ_LEN)
    return description, config, build(config, "meta")


@pytest.fixture(scope="module")
def europa():
    description, config = configured(name="europa_1t", seq_len=SEQ_LEN)
    return description, config, build(config, "meta")


def _size(model: torch.nn.Module, *parts: str) -> int:
    """Values of the parameters whose name has one of these parts."""
    return sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in parts))


def _muon(model: torch.nn.Module) -> int:
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim > 1 and not any(part in name for part in ("tok_embeddings", "lm_head", "router"))
    )


def _caches(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    return {
        int(name.split(".")[1]): buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.endswith("rope.cache")
    }


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_closed_forms_count_the_model(both) -> None:
    description, config, model = both
    total = sum(p.numel() for p in model.parameters())
    experts = _size(model, "inner_experts")
    idle = experts * (description.n_experts - description.top_k) // description.n_experts
    assert counts.total_params(description) == total
    assert counts.active_params(description) == total - idle
    assert counts.muon_params(description) == _muon(model)
    assert counts.norm_params(description) == _size(model, "norm")
    assert counts.attention_params(description) == _size(model, "layers.0.attention.")
    assert counts.router_params(description) == _size(model, "layers.0.moe.router")
    assert counts.expert_params(description) * description.n_experts == _size(
        model, "layers.0.moe.routed_experts"
    )
    assert config.model_spec.model.get_nparams_and_flops(model, SEQ_LEN)[0] == total


def test_closed_forms_know_the_rotary_caches(both) -> None:
    description, _, model = both
    caches = _caches(model)
    assert sorted(caches) == counts.rope_layers(description)
    long = {layer for layer, cache in caches.items() if cache.shape[0] > SEQ_LEN}
    assert sorted(long) == counts.long_rope_layers(description)
    assert {caches[layer].shape[0] for layer in long} == {SEQ_LEN * description.long_rope_factor}
    assert _bytes(list(caches.values())) == counts.rope_cache_bytes(description, SEQ_LEN, shared=False)
    distinct = {cache.shape: cache for cache in caches.values()}
    assert _bytes(list(distinct.values())) == counts.rope_cache_bytes(description, SEQ_LEN, shared=True)


def test_published_parameter_counts(europa) -> None:
    description, _, model = europa
    total = sum(p.numel() for p in model.parameters())
    idle = _size(model, "inner_experts") * (384 - 8) // 384
    assert total == pytest.approx(951.9e9, abs=0.05e9)
    assert total - idle == pytest.approx(32.8e9, abs=0.05e9)
    assert _muon(model) / total == pytest.approx(0.995, abs=0.0005)
    assert description.n_layers == len(model.layers) == 74


def test_published_sizes(europa) -> None:
    description, _, model = europa
    dense_layer = 2 * _size(model, "layers.0.attention.", "layers.0.moe.router", "layers.0.ffn_norm")
    dense = 2 * sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.startswith("layers.") and "inner_experts" not in name
    )
    assert dense_layer / 4 / MIB == pytest.approx(55, abs=0.5)
    assert dense / 4 / GIB == pytest.approx(4, abs=0.1)
    assert dense / GIB == pytest.approx(16, abs=0.1)
    boundary = len(model.layers) * SEQ_LEN * description.dim * 2
    assert boundary / GIB == 55.5


def test_published_rotary_caches(europa) -> None:
    _, _, model = europa
    caches = _caches(model)
    assert len(caches) == 37
    assert _bytes(list(caches.values())) / GIB == 2.75
    distinct = {cache.shape: cache for cache in caches.values()}
    assert len(distinct) == 2
    assert _bytes(list(distinct.values())) / GIB == pytest.approx(0.19, abs=0.005)


def test_sequence_length_can_be_set_again() -> None:
    description, config = configured(seq_len=256)
    config.training.seq_len = 512
    config.model_spec.model.update_from_config(config=config)
    caches = _caches(build(config, "meta"))
    long = counts.long_rope_layers(description)
    assert {layer: cache.shape[0] for layer, cache in caches.items()} == {
        layer: 1024 if layer in long else 512 for layer in counts.rope_layers(description)
    }


def test_every_random_parameter_knows_its_name() -> None:
    _, config = configured(seq_len=64)
    model = build(config, "meta")
    named = {
        f"{module_name}.{name}": init.name
        for module_name, module in model.named_modules()
        for name, init in (getattr(module, "_param_init", None) or {}).items()
        if hasattr(init, "seed")
    }
    assert named == {name: name for name in named}
    assert set(named) == {name for name, _ in model.named_parameters() if "norm" not in name}


def test_a_seed_is_needed() -> None:
    with pytest.raises(ValueError, match=r"debug\.seed"):
        configured(seq_len=64, seed=None)


def test_no_load_balance_bias_when_off() -> None:
    _, config = configured("load_balance_coeff=0", seq_len=64)
    assert not [name for name, _ in build(config, "meta").named_buffers() if "expert_bias" in name]


def test_accelerators_get_the_configured_attention() -> None:
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    for backend, expected in (("flex", FlexAttention), ("varlen", VarlenAttention)):
        _, config = configured(f"attention_backend={backend}", seq_len=64, device_type="cuda")
        inner = config.model_spec.model.layers[0].attention.inner_attention
        assert type(inner) is expected.Config
