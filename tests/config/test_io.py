"""The frozen form: what is written is read back, and nothing else is."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from europa_exp.config.errors import ConfigError
from europa_exp.config.io import from_dict, from_yaml, load, to_dict, to_yaml
from europa_exp.config.schema import Config, Executor, ExpertAllGather


def problems(text):
    with pytest.raises(ConfigError) as e:
        from_yaml(text)
    return {p.field: p for _, p in e.value.problems}


def test_round_trip_keeps_everything(make):
    cfg = make("comm=fp8", "nccl=jupiter", "+nccl.extra.NCCL_ALGO=Ring", "tags=[a,b]", "optimizer.eps=1e-12")
    text = to_yaml(cfg)
    assert from_yaml(text) == cfg
    assert to_yaml(from_yaml(text)) == text
    assert from_yaml(text).comm.expert_all_gather is ExpertAllGather.fp8


def test_written_form_is_plain_ordered_and_json_able(make):
    cfg = make("nccl=jupiter", "+nccl.extra.NCCL_PROTO=LL", "+nccl.extra.NCCL_ALGO=Ring")
    text = to_yaml(cfg)
    assert "!!" not in text
    assert "${" not in text
    data = yaml.safe_load(text)
    assert data == to_dict(cfg) == json.loads(json.dumps(to_dict(cfg)))
    assert list(data) == [f.name for f in dataclasses.fields(Config)]
    assert list(data["nccl"]["extra"]) == ["NCCL_ALGO", "NCCL_PROTO"]


NASTY = [
    "1e3",
    "1e-3",
    "on",
    "null",
    "~",
    "yes",
    "0x10",
    "1:30",
    "2020-01-01",
    "a: b",
    "# no",
    "- x",
    "!!int 3",
    "&a",
    "é,=",
    " ",
]


@pytest.mark.parametrize("text", NASTY)
def test_text_stays_text_for_both_readers(make, text):
    cfg = make()
    cfg.tracking.notes, cfg.cluster.env = text, {"A": text}
    frozen = to_yaml(cfg)
    assert from_yaml(frozen) == cfg
    assert OmegaConf.create(frozen).tracking.notes == text


@settings(deadline=None, max_examples=60)
@given(
    st.text().filter(lambda s: "${" not in s and s != "???"),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
)
def test_any_text_and_number_survive(make, text, x, n):
    cfg = make()
    cfg.tracking.notes, cfg.optimizer.lr, cfg.training.seed = text, x, n
    back = from_yaml(to_yaml(cfg))
    assert (back.tracking.notes, back.optimizer.lr, back.training.seed) == (text, x, n)


def test_knob_that_a_record_lacks_is_off_and_a_lacking_quantity_is_an_error(make):
    data = to_dict(make("comm=fp8", "nccl.max_ctas=16"))
    del data["comm"], data["nccl"]["max_ctas"], data["tags"]
    cfg = from_dict(data)
    assert cfg.comm.expert_all_gather is ExpertAllGather.bf16
    assert cfg.nccl.max_ctas is None
    assert cfg.tags == []
    del data["model"]["dim"]
    with pytest.raises(ConfigError, match=r"model\.dim=.*needs a value"):
        from_dict(data)


def test_unknown_fields_are_told_with_the_nearest_one(make):
    text = to_yaml(make()).replace("max_ctas:", "max_cta:") + "surprise: 1\n"
    found = problems(text)
    assert "Did you mean max_ctas?" in found["nccl.max_cta"].way_out
    assert "surprise" in found


def test_all_problems_come_at_once(make):
    data = to_dict(make())
    data["training"] |= {"steps": 1.5, "seq_len": "many", "deterministic": 1, "seed": True}
    data["comm"]["expert_all_gather"] = "fp9"
    data["nccl"]["extra"] = {"NCCL_ALGO": 3}
    data["tags"] = "a"
    found = problems(yaml.safe_dump(data))
    assert set(found) == {
        "training.steps",
        "training.seq_len",
        "training.deterministic",
        "training.seed",
        "comm.expert_all_gather",
        "nccl.extra",
        "tags",
    }
    assert "bf16, fp8" in found["comm.expert_all_gather"].rule
    assert str(found["training.deterministic"]).count("true or false") == 1


def test_duplicate_key_names_file_and_both_lines(make, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("trust: false\ntags: []\ntrust: true\n")
    with pytest.raises(ConfigError) as e:
        load(file)
    assert f"{file}, line 3" in str(e.value)
    assert "line 1 and again in line 3" in str(e.value)
    nested = to_yaml(make()).replace("  max_ctas: null\n", "  max_ctas: null\n  max_ctas: 8\n")
    assert "'max_ctas'" in str(problems(nested)["config"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "just text",
        "model: 3",
        "model: [",
        "\ttags: []",
        "a: &x [1]\nb: *x",
        "tags: !!python/object/apply:os.system ['exit 3']",
        "? [a]\n: b",
        "{" * 500,
        "trust: \x00",
        "tags: [a]\n---\ntags: [b]",
        "training: {steps: " + "9" * 5000 + "}",
    ],
)
def test_what_is_no_configuration_is_one_clear_error(text):
    with pytest.raises(ConfigError) as e:
        from_yaml(text)
    message = str(e.value)
    assert message
    assert len(message) < 20_000


def test_recorded_interpolations_are_refused_and_never_resolved(make, monkeypatch):
    monkeypatch.setenv("EUROPA_TEST_SECRET", "gold")
    text = to_yaml(make()).replace("project: europa_exp", "project: ${oc.env:EUROPA_TEST_SECRET}")
    found = problems(text)
    assert "resolved" in found["tracking.project"].rule
    assert "gold" not in str(found["tracking.project"])


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_unreadable_file_is_named(tmp_path, kind):
    file = tmp_path / "config.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as e:
        load(file)
    assert str(file) in str(e.value)


def test_enums_are_read_by_name_only(make):
    data = to_dict(make())
    assert from_dict(data).cluster.executor is Executor.local
    data["cluster"]["executor"] = "Local"
    with pytest.raises(ConfigError, match="must be one of"):
        from_dict(data)
