"""The explanations that `europa fields` prints."""

from __future__ import annotations

import pytest

from europa_exp.config.errors import ConfigError
from europa_exp.config.fields import describe, groups


def test_one_group_with_ranges_choices_and_off_values():
    nccl = {d.field: d for d in describe("nccl")}
    assert next(iter(nccl)) == "nccl.max_ctas"
    assert nccl["nccl.max_ctas"].type == "a whole number, 1 to 64, or null"
    assert nccl["nccl.max_ctas"].off == "null"
    assert nccl["nccl.max_ctas"].doc.startswith("NCCL_MAX_CTAS: ")
    comm = describe("comm")[0]
    assert comm.type == "bf16 | fp8"
    assert comm.off == "bf16"
    assert "\n" not in comm.doc


def test_one_field_and_all_fields():
    assert [d.field for d in describe("nccl.max_ctas")] == ["nccl.max_ctas"]
    everything = [d.field for d in describe()]
    assert everything[0] == "model.flavor"
    assert {"tags", "trust"} <= set(everything)
    assert {f.split(".")[0] for f in everything} == {*groups(), "tags", "trust"}
    assert next(d for d in describe() if d.field == "training.steps").off == "required"


@pytest.mark.parametrize("name", ["ncll", "", "nccl.", "nccl.max_cta"])
def test_unknown_name_says_what_there_is(name):
    with pytest.raises(ConfigError, match="no such group or field") as e:
        describe(name)
    assert "nccl" in str(e.value)
