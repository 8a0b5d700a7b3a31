"""NCCL settings as environment variables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from europa_exp.comm.nccl import environment
from europa_exp.config.schema import Nccl


def test_unset_fields_leave_nccl_alone():
    assert environment(Nccl()) == {}


def test_every_field_has_its_variable():
    values = {f.name: 7 for f in dataclasses.fields(Nccl) if f.name not in ("extra", "record")}
    assert environment(Nccl(**values)) == {f"NCCL_{name.upper()}": "7" for name in values}


def test_recording_makes_nccl_say_what_it_takes():
    assert environment(Nccl(record=True)) == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,BOOTSTRAP"}
    chosen = Nccl(record=True, debug="TRACE", extra={"NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"})
    assert environment(chosen) == {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}


def test_the_log_goes_where_it_is_told_even_to_odd_places():
    assert (
        environment(Nccl(record=True), Path("/runs/a%h/nccl.log"))["NCCL_DEBUG_FILE"] == "/runs/a%%h/nccl.log"
    )
    assert "NCCL_DEBUG_FILE" not in environment(Nccl(debug="INFO"), Path("/runs/nccl.log"))


def test_extra_takes_any_other_variable():
    found = environment(Nccl(max_ctas=16, extra={"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1"}))
    assert found == {"NCCL_MAX_CTAS": "16", "NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_PRELOAD", "x"),
        ("nccl_algo", "Ring"),
        ("XNCCL_ALGO", "Ring"),
        ("NCCL_ALGO\n", "Ring"),
        ("NCCL_NET_PLUGIN", "mine"),
        ("NCCL_TUNER_PLUGIN", "mine"),
        ("NCCL_TOPO_FILE", "t.xml"),
        ("NCCL_DEBUG_FILE", "out"),
        ("NCCL_TUNER_CONFIG_PATH", "x"),
        ("NCCL_ALGO", "/etc/passwd"),
    ],
)
def test_extra_can_not_reach_out(name, value):
    with pytest.raises(ValueError, match=r"nccl\.extra"):
        environment(Nccl(extra={name: value}))


def test_extra_does_not_contradict_a_field():
    with pytest.raises(ValueError, match=r"nccl\.max_ctas=16 sets it already"):
        environment(Nccl(max_ctas=16, extra={"NCCL_MAX_CTAS": "8"}))
