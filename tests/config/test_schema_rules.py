"""Every knob is declared as the schema's introduction says."""

from __future__ import annotations

import enum
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path

import omegaconf
import pytest

from europa_exp.config import schema
from europa_exp.config.fields import describe, field_docs, groups
from europa_exp.config.io import hints
from europa_exp.config.rules.values import Interval


def leaves(cls=schema.Config, prefix=""):
    for f in fields(cls):
        hint = hints(cls)[f.name]
        if is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{f.name}.")
        else:
            yield pytest.param(cls, f, id=f"{prefix}{f.name}")


@pytest.mark.parametrize(("cls", "f"), list(leaves()))
def test_field_has_an_off_value_that_is_its_default(cls, f):
    off = f.metadata["off"]
    default = f.default if f.default is not NO_DEFAULT else f.default_factory()
    if off == schema.NEVER_OFF:
        assert default == omegaconf.MISSING
        return
    assert default == off
    assert type(default) is type(off)
    assert off is None or isinstance(off, (bool, int, float, str, enum.Enum)) or not off


@pytest.mark.parametrize(("cls", "f"), list(leaves()))
def test_field_has_a_docstring(cls, f):
    assert len(field_docs(schema).get((cls.__name__, f.name), "")) > 10


@pytest.mark.parametrize(("cls", "f"), list(leaves()))
def test_number_has_a_range_that_its_off_value_lies_in(cls, f):
    is_number = any(
        t in (int, float) for t in (hints(cls)[f.name], *getattr(hints(cls)[f.name], "__args__", ()))
    )
    within = f.metadata.get("within")
    assert (within is not None) == is_number
    if within and isinstance(f.metadata["off"], (int, float)):
        assert f.metadata["off"] in Interval.parse(within)


def test_every_exclusion_names_a_field_or_group():
    known = {d.field for d in describe()} | set(groups())
    assert known >= schema.IDENTITY_EXCLUDES


def test_every_group_has_a_folder_of_options():

    conf = Path(__file__).parents[2] / "conf"
    folders = {p.name for p in conf.iterdir() if p.is_dir()}
    assert set(groups()) <= folders


def test_knobs_do_not_share_their_empty_containers():
    a, b = schema.Nccl(), schema.Nccl()
    a.extra["NCCL_ALGO"] = "Ring"
    assert b.extra == {}
    assert schema.Nccl.__dataclass_fields__["extra"].metadata["off"] == {}
