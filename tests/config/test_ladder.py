"""The ladder of experiments: each rung is the one before it and what it says, at any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from europa_exp.config.checks import check
from europa_exp.config.counts import GIB
from europa_exp.config.identity import delta, identity
from europa_exp.config.rules.memory import split

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "conf" / "experiment"

RUNGS = {
    "00_baseline": {},
    "01_full_recompute": {"training.activation_checkpoint": "full"},
    "08_fp8_gather": {"comm.expert_all_gather": "fp8"},
    "09_bf16_all_to_all": {"comm.gradient_reduce": "bf16_all_to_all"},
    "10_node_local_reshard": {"comm.node_local_reshard": True},
    "11_norm_in_backward": {
        "comm.embedding_gather_in_backward": False,
        "optimizer.grad_norm": "in_backward",
    },
    "12_stream_pools": {
        "comm.gradient_release_lag": 2,
        "allocator.all_gather_on_compute_stream": True,
        "allocator.receive_buffer_on_compute_stream": True,
    },
    "13_nccl_ctas": {"nccl.max_ctas": 16},
}
"""Every rung, and the fields in which it differs from the one before it."""

SIZES = {
    "debug": (),
    "384 GPUs": (
        "model=europa_1t",
        "parallelism=fsdp384_ep4",
        "cluster=jupiter",
        "cluster.account=me",
        "nccl=jupiter",
        "offload.fsdp_cpu=true",
        "training.local_batch_size=1",
        "training.seq_len=8192",
    ),
}


@pytest.fixture(params=list(SIZES))
def size(request) -> tuple[str, ...]:
    return SIZES[request.param]


def test_there_is_a_file_for_each_rung():
    assert sorted(path.stem for path in (EXPERIMENTS / "ladder").glob("*.yaml")) == list(RUNGS)


@pytest.mark.parametrize("rung", list(RUNGS))
def test_a_rung_passes_the_checks(make, size, rung):
    assert check(make(f"experiment=ladder/{rung}", *size)) == []


@pytest.mark.parametrize("rung", list(RUNGS)[1:])
def test_a_rung_differs_from_the_one_before_in_what_it_says_and_no_more(make, size, rung):
    names = list(RUNGS)
    before = names[names.index(rung) - 1]
    found = delta(make(f"experiment=ladder/{rung}", *size), make(f"experiment=ladder/{before}", *size))
    assert found == RUNGS[rung]


def test_the_first_rung_switches_every_mechanism_off(make):
    """Whatever the defaults become: what a later rung switches on is off on the first."""
    first, default = make("experiment=ladder/00_baseline"), make()
    assert delta(first, default) == {"training.activation_checkpoint": "selective"}


def test_the_sweep_climbs_the_rungs_in_order():
    sweep = yaml.safe_load((ROOT / "sweeps" / "throughput_ladder.yaml").read_text())
    assert sweep == {"params": {"experiment": [f"ladder/{rung}" for rung in RUNGS]}}


def test_europa_1t_is_the_last_rung_at_its_size(make):
    """And nothing else, except for the NCCL settings of the machine."""
    cfg = make("experiment=europa_1t")
    last = f"experiment=ladder/{list(RUNGS)[-1]}"
    assert cfg == make(
        last,
        "model=europa_1t",
        "parallelism=fsdp384_ep4",
        "nccl=jupiter",
        "nccl.max_ctas=16",
        "offload.fsdp_cpu=true",
        "training.seq_len=65536",
        "training.local_batch_size=1",
    )
    for fields in RUNGS.values():
        for field, value in fields.items():
            group, name = field.split(".")
            found = getattr(getattr(cfg, group), name)
            assert getattr(found, "name", found) == value


def test_europa_1t_passes_the_checks_of_its_machine(make):
    cfg = make("experiment=europa_1t", "cluster=jupiter", "cluster.account=me")
    assert check(cfg) == []
    on_device, _ = split(cfg)
    # GiB of layer inputs, one layer's experts, and dense weights that rung 10 keeps in the node
    assert on_device.total / GIB == pytest.approx(55.5 + 5.91 + 3.98, abs=0.01)


def test_hashes_of_the_rungs_stay(make):
    """Recorded runs carry them; see test_identity."""
    assert {rung: identity(make(f"experiment=ladder/{rung}")) for rung in RUNGS} == {
        "00_baseline": "0967a5b4f01e",
        "01_full_recompute": "ab4519a33132",
        "08_fp8_gather": "73fed7504307",
        "09_bf16_all_to_all": "7a58fe280e9b",
        "10_node_local_reshard": "6d9bcf7cc590",
        "11_norm_in_backward": "caf0854e44a5",
        "12_stream_pools": "f38bd6cb5464",
        "13_nccl_ctas": "8364b03ac7a2",
    }
