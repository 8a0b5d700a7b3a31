"""What changes the hash of a run and what does not, and the names of runs."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from europa_exp.config import schema
from europa_exp.config.errors import ConfigError
from europa_exp.config.identity import canonical, delta, identity, is_excluded, run_name
from europa_exp.config.io import from_yaml, to_yaml

GOLDEN = {
    (): "6f9db4e75be3",
    ("comm=fp8",): "9fdc009600f0",
    ("nccl.max_ctas=16",): "0c8ce719738a",
    ("nccl=jupiter",): "64fa723c490e",
    ("model=europa_1t", "parallelism=fsdp384_ep4"): "4c2b2b87137f",
    (
        "model=europa_1t",
        "parallelism=hsdp1536_ep4",
        "comm=fp8",
        "nccl=jupiter",
        "nccl.max_ctas=16",
    ): "e141d30dd860",
    ("data=synthetic", "optimizer.lr=1e-5", "training.seq_len=65536"): "1f18fa139b40",
}
"""Recorded runs have these names: a hash that changes here orphans every record. Change one only when a default in conf/
changes on purpose."""


@pytest.mark.parametrize("overrides", list(GOLDEN), ids=" ".join)
def test_golden_hashes(make, overrides):
    assert identity(make(*overrides)) == GOLDEN[overrides]


# ------------------------------------------------------------------------------------------------- what doesn't matter


@dataclass
class CommWithMore(schema.Comm):
    """A later version's group: three more knobs, off."""

    gradients_in_bf16: bool = schema.knob(False)
    chunks: int | None = schema.knob(None)
    groups: list[str] = schema.knob(())


@dataclass
class Moe:
    """A later version's group."""

    balanced: bool = schema.knob(False)
    extra: dict[str, str] = schema.knob({})


@dataclass
class LaterConfig(schema.Config):
    """A later version's configuration."""

    moe: Moe = field(default_factory=Moe)
    note: str | None = schema.knob(None)


def later(cfg, **comm):
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    values["comm"] = CommWithMore(expert_all_gather=cfg.comm.expert_all_gather, **comm)
    return LaterConfig(**values)


@pytest.mark.parametrize("overrides", list(GOLDEN), ids=" ".join)
def test_fields_and_groups_that_a_later_version_adds_change_no_hash(make, overrides):
    cfg = make(*overrides)
    assert canonical(later(cfg)) == canonical(cfg)
    assert identity(later(cfg)) == GOLDEN[overrides]


def test_an_added_knob_that_is_on_changes_the_hash(make):
    cfg = make()
    seen = {identity(cfg), identity(later(cfg, gradients_in_bf16=True)), identity(later(cfg, chunks=0))}
    seen |= {identity(later(cfg, groups=["a"])), identity(later(cfg, groups=["a", "b"]))}
    assert len(seen) == 5


EXCLUDED = [
    "tracking=disabled",
    "tracking.project=other",
    "launch.repeat=3",
    "launch.runs_dir=elsewhere",
    "tags=[a]",
    "trust=true",
    "cluster.name=elsewhere",
    "cluster.preload=false",
    "cluster.device_memory_gib=96",
    "training.train_timeout_s=7",
]


def test_what_can_change_no_result_changes_no_hash(make):
    assert identity(make(*EXCLUDED)) == GOLDEN[()]
    assert delta(make(*EXCLUDED), make()) == {}


@pytest.mark.parametrize(
    "override",
    ["cluster.threads_per_rank=2", "+cluster.env.A=1", "+nccl.extra.NCCL_ALGO=Ring", "training.seed=1"],
)
def test_what_can_change_a_result_changes_the_hash(make, override):
    assert identity(make(override)) != GOLDEN[()]


def test_a_changed_default_in_conf_changes_the_hash(make):
    # what conf/ gives is a value like any other: only `off` is left out
    cfg = make()
    assert "weight_decay" in canonical(cfg)["optimizer"]
    cfg.optimizer.weight_decay = 0.0
    assert "weight_decay" not in canonical(cfg)["optimizer"]
    assert identity(cfg) != GOLDEN[()]


def test_explicit_off_is_the_same_as_left_out(make):
    assert identity(make("nccl.max_ctas=null", "comm=bf16", "nccl.extra={}")) == GOLDEN[()]


def test_is_excluded_knows_groups_and_fields():
    assert is_excluded("tracking.mode")
    assert is_excluded("cluster.name")
    assert not is_excluded("cluster.env")
    assert not is_excluded("cluster.name2")


# ------------------------------------------------------------------------------------------------------ stable values


def test_same_number_same_hash(make):
    one, zero = make("optimizer.weight_decay=1"), make("optimizer.min_lr_factor=0.5")
    by_hand = make()
    by_hand.optimizer.weight_decay = 1  # an int where the schema says float
    assert identity(one) == identity(by_hand) == identity(make("optimizer.weight_decay=1.0"))
    zero.optimizer.min_lr_factor = -0.0
    assert identity(zero) == GOLDEN[()]
    assert identity(make("optimizer.eps=-0.0")) == identity(make("optimizer.eps=0"))


def test_order_of_a_mapping_does_not_matter_and_of_a_list_does(make):
    cfg = make()
    cfg.cluster.env = {"B": "1", "A": "2"}
    other = make()
    other.cluster.env = {"A": "2", "B": "1"}
    assert identity(cfg) == identity(other)
    assert identity(later(cfg, groups=["a", "b"])) != identity(later(cfg, groups=["b", "a"]))


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("optimizer", "lr", math.nan),
        ("optimizer", "lr", math.inf),
        ("optimizer", "lr", 10**400),
        ("optimizer", "lr", "0.1"),
        ("training", "seed", 2**63),
        ("training", "seed", -(2**63) - 1),
        ("training", "seed", 1.0),
        ("training", "seed", True),
        ("training", "deterministic", 1),
        ("training", "steps", "???"),
        ("comm", "expert_all_gather", "fp9"),
        ("cluster", "env", {"A": 1}),
        ("data", "path", "${oc.env:HOME}"),
    ],
)
def test_values_without_a_stable_form_are_refused_by_name(make, group, name, value):
    cfg = make()
    setattr(cfg, group, replace(getattr(cfg, group), **{name: value}))
    with pytest.raises(ConfigError, match=rf"{group}\.{name}="):
        identity(cfg)
    with pytest.raises(ConfigError, match=rf"{group}\.{name}="):
        delta(cfg, make())


@settings(deadline=None, max_examples=60)
@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1))
def test_hash_survives_writing_and_reading(make, text, x, n):
    cfg = make()
    text = text.replace("${", "").replace("???", "")
    cfg.cluster.env, cfg.optimizer.lr, cfg.training.seed = {"A": text}, x, n
    digest = identity(cfg)
    assert re.fullmatch(r"[0-9a-f]{12}", digest)
    assert identity(from_yaml(to_yaml(cfg))) == digest


# --------------------------------------------------------------------------------------------------------------- delta


def test_delta_is_what_differs_in_schema_order(make):
    base = make()
    cfg = make(
        "training.steps=7", "comm=fp8", "nccl.max_ctas=16", "+nccl.extra.NCCL_ALGO=Ring", "tracking=disabled"
    )
    assert list(delta(cfg, base).items()) == [
        ("comm.expert_all_gather", "fp8"),
        ("nccl.max_ctas", 16),
        ("nccl.extra.NCCL_ALGO", "Ring"),
        ("training.steps", 7),
    ]
    assert delta(base, cfg)["nccl.extra.NCCL_ALGO"] is None
    assert delta(base, cfg)["nccl.max_ctas"] is None
    assert delta(cfg, cfg) == {}


# --------------------------------------------------------------------------------------------------------------- names

SAFE = re.compile(r"[A-Za-z0-9_=][A-Za-z0-9._=-]*")
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.text(max_size=5), max_size=3)
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=40), VALUES, max_size=30), st.text(max_size=30))
def test_any_name_is_safe_short_and_does_not_depend_on_order(changes, digest):
    name = run_name(changes, digest)
    assert SAFE.fullmatch(name)
    assert len(name) <= 92
    items = list(changes.items())
    random.Random(0).shuffle(items)
    assert run_name(dict(items), digest) == name


def test_names_are_readable(make):
    base = make()

    def name(*overrides):
        cfg = make(*overrides)
        return run_name(delta(cfg, base), "0123456789ab")

    assert name() == "default-0123456789ab"
    assert name("comm=fp8", "nccl.max_ctas=16") == "expert_all_gather=fp8-max_ctas=16-0123456789ab"
    assert name("optimizer.lr=1e-5") == "lr=1e-05-0123456789ab"
    assert name("+nccl.extra.NCCL_ALGO=Ring") == "NCCL_ALGO=Ring-0123456789ab"
    assert name("training.deterministic=true") == "deterministic=true-0123456789ab"
    big = name("model=europa_1t", "parallelism=fsdp384_ep4", "comm=fp8")
    assert big.startswith("flavor=europa_1t-nodes=96-")
    assert big.endswith("-0123456789ab")
    assert "-plus" in big


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data.path": "/a/b/texts/"}, "path=texts-h"),
        ({"data.path": "../.."}, "path=-h"),
        ({"x.y": "ä,b c#d=e"}, "y=b_c_d=e-h"),
        ({"a.seed": 1, "b.seed": 2}, "a.seed=1-b.seed=2-h"),
        ({"x.y": "z" * 300}, f"y={'z' * 24}-h"),
        ({"x.y": 10**5000}, "y=huge-h"),
        ({".x": 1}, "x=1-h"),
        ({"-x": 1}, "x=1-h"),
    ],
)
def test_odd_values_become_safe_names(changes, expected):
    assert run_name(changes, "h") == expected


def test_every_name_ends_with_the_whole_hash(make):
    long = {f"model.some_quite_long_field_name_{i}": "v" * 40 for i in range(40)}
    assert run_name(long, "0123456789ab").endswith("-0123456789ab")
