"""Overrides as text: quoting, normalising, and what is said about a wrong one."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from europa_exp.launch.fields import field_types, group_names, hint_of, near, takes_text
from europa_exp.launch.override_problems import problems_of, type_problem
from europa_exp.launch.overrides import normalize, parse, split, write
from europa_exp.runs.commands import for_shell

OPTIONS = {"comm": ["bf16", "fp8"], "nccl": ["default", "jupiter"]}


def options(group: str) -> list[str]:
    return OPTIONS.get(group, [])


def problems(*texts: str, multirun: bool = False) -> list[str]:
    return [str(p) for p in problems_of(texts, options, multirun=multirun)]


text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20).filter(
    lambda s: "${" not in s
)


@settings(max_examples=150, deadline=None)
@given(text)
def test_advice_for_the_shell_gives_back_exactly_that_value(value):
    (argument,) = shlex.split(for_shell("tracking.notes", value))
    assert parse(argument).value() == value


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_written_values_are_read_back_unchanged(value):
    override = parse(f"k={write(value)}")
    assert not override.is_sweep_override()
    assert override.value() == value
    assert type(override.value()) is type(value)


@pytest.mark.parametrize(
    "word", ["true", "null", "16", "1e3", "nan", "None", "inf", "1_000", "a,b", "a b", "", "-"]
)
def test_words_with_a_meaning_stay_text(word):
    value = parse(f"k={write(word)}").value()
    assert value == word
    assert isinstance(value, str)


@pytest.mark.parametrize(
    "value", ["a=b", "x#y", "ü→", "(a)", "a'b", "hello!", "[a", "8;ls", '"a', "two  blanks = three"]
)
def test_unquoted_grammar_characters_get_the_right_quoting(value):
    (message,) = problems(f"tracking.notes={value}")
    assert message.startswith("tracking.notes=")
    assert for_shell("tracking.notes", value) in message


def test_a_comma_without_m_names_all_ways_out():
    (message,) = problems("tracking.notes=a,b")
    assert "-m" in message
    assert for_shell("tracking.notes", "a,b") in message
    (message,) = problems("tags=a,b")
    assert "tags=[a,b]" in message
    (message,) = problems("nccl.max_ctas=8,16")
    assert "-m" in message
    assert '"' not in message
    assert problems("nccl.max_ctas=8,16", multirun=True) == []
    assert len(problems("nccl.max_ctas=range(1,3)")) == 1


def test_a_space_that_the_shell_took_apart():
    (message,) = problems("tracking.notes=two", "words")
    assert for_shell("tracking.notes", "two words") in message
    assert problems("tracking.notes=two words") == []
    assert "field=value" in problems("words")[0]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("comm=fp9", ["comm='fp9'", "bf16, fp8"]),
        ("comm=fp", ["Perhaps comm=fp8 was meant"]),
        ("nccl=null", ["nccl=null", "default, jupiter"]),
        ("nccl.max_cta=16", ["nccl.max_cta=16", "nccl.max_ctas"]),
        ("lr=3", ["optimizer.lr"]),
        ("training.lr=3", ["optimizer.lr"]),
        ("nonsense=1", ["no such field or group", "training"]),
        ("training.steps=1e3", ["training.steps='1e3'", "whole number", "training.steps=1000"]),
        ("training.steps=ten", ["whole number"]),
        ("training.seq_len=None", ["training.seq_len='None'", "whole number"]),
        ("nccl.max_ctas=None", ["nccl.max_ctas='None'", "nccl.max_ctas=null"]),
        ("comm.expert_all_gather=fp9", ["bf16 | fp8"]),
        ("training.compile=maybe", ["must be true or false. Write training.compile=true or"]),
        ("comm.node_local_reshard=2", ["=2: must be true or false. Write comm.node_local_reshard=true or"]),
        ("training.deterministic=-3", ["=-3: must be true or false"]),
        ("offload.fsdp_cpu='7'", ["must be true or false"]),
        ("training.steps=true", ["whole number", "`europa fields training.steps`"]),
        ("tags=word", ["a list of text"]),
        ("nccl.extra=3", ["mapping"]),
        ("a b=3", ["no name of a field"]),
    ],
)
def test_one_line_names_field_value_rule_and_way_out(override, parts):
    (message,) = problems(override)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_all_problems_of_a_line_are_told_and_none_twice():
    found = problems("comm=fp9", "nccl.max_cta=1", "training.steps=1e3,2,x", "comm=fp9", multirun=True)
    assert len(found) == 4


@pytest.mark.parametrize(
    "override",
    [
        "comm=fp8",
        "comm.expert_all_gather=fp8",
        "training.steps=10",
        "nccl.max_ctas=null",
        "optimizer.lr=1e-3",
        "optimizer.lr=1",
        "comm.node_local_reshard=yes",
        "comm.node_local_reshard=off",
        "comm.node_local_reshard=1",
        "comm.node_local_reshard=0",
        "tags=[a,b]",
        "+tags=[a]",
        "~nccl",
        "nccl.extra.NCCL_ALGO=Ring",
        "nccl.max_ctas=${training.steps}",
        "training.steps=???",
    ],
)
def test_right_overrides_have_no_problem(override):
    assert problems(normalize(override)) == []


def test_entries_of_free_mappings_need_no_plus():
    assert normalize("nccl.extra.NCCL_ALGO=Ring") == "++nccl.extra.NCCL_ALGO=Ring"
    assert normalize("cluster.env.TZ=UTC") == "++cluster.env.TZ=UTC"
    assert normalize("nccl.max_ctas=8") == "nccl.max_ctas=8"
    assert normalize("~nccl.extra.NCCL_ALGO") == "~nccl.extra.NCCL_ALGO"


@pytest.mark.parametrize("value", ["3,", "3,,4", "\uff11\uff16", "3;4"])
def test_quotes_are_not_advised_where_they_would_not_help(value):
    (message,) = problems(f"training.steps={value}", multirun=True)
    assert "must be a whole number" in message
    assert '"' not in message


def test_a_blank_after_a_comma_of_a_sweep():
    assert "training.steps=3,4" in problems("training.steps=3,", "4", multirun=True)[1]


def test_lists_are_shown_how_to_be_written():
    for wrong in ("tags=word", "tags=null"):
        assert "tags=[a,b], or tags=[] for none" in problems(wrong)[0]


@pytest.mark.parametrize("key", ["nccl.extra", "cluster.env", "cluster.sbatch_args"])
def test_several_entries_of_a_free_mapping_in_one(key):
    assert normalize(f"{key}={{A:x,B:1e3, C: true,D:'007'}}") == f'++{key}={{A:x,B:"1e3",C:"true",D:"007"}}'
    assert normalize(f"+{key}={{}}") == f"++{key}={{}}"
    assert problems(normalize(f"{key}={{A:x}}")) == []
    for wrong in ("3", "null", "[a]", "{A:[b]}", "{A:null}", "{A:b", "word"):
        (message,) = problems(normalize(f"{key}={wrong}"))
        assert message.startswith(f"{key}=")
        assert f"+{key}.NAME=text" in message


@pytest.mark.parametrize("value", ["1e3", "true", "007", "1_000", "0x"])
def test_text_fields_take_what_was_typed(value):
    for key in ("tracking.notes", "cluster.env.X"):
        assert parse(normalize(f"{key}={value}")).value() == value
    assert parse(normalize("tracking.notes=null")).value() is None


def test_split_takes_any_text():
    assert split("++a.b=c=d") == ("++", "a.b", "c=d")
    assert split("~a") == ("~", "a", None)
    assert split("") == ("", "", None)


def test_field_names_come_from_the_schema():
    assert "nccl.max_ctas" in field_types()
    assert "comm" in group_names()
    assert hint_of("nccl.extra.NCCL_ALGO") is str
    assert hint_of("nccl.nothing") is None
    assert takes_text(hint_of("tracking.notes"))
    assert not takes_text(hint_of("tags"))
    assert near("max_ctas", field_types()) == ["nccl.max_ctas"]
    assert type_problem("training.steps", 3) is None
