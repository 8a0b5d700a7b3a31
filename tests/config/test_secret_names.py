"""Names that hold secrets, and the many that only look so."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from europa_exp.config.errors import ConfigError, Problem
from europa_exp.config.rules.names import NCCL_FIELDS
from europa_exp.config.secret_names import is_secret_name
from europa_exp.config.secrets import is_harmless, problems_in, redact, redact_args
from europa_exp.launch.fields import field_types

KINDS = ["pass", "passwd", "password", "passphrase", "secret", "token", "api_key", "access_key", "credential"]
OWNERS = ["foo", "db", "wandb", "hf", "aws", "mail", "europa", "my_site", "jupiter2"]
HARMLESS = [
    "bypass", "compass", "passes", "passage", "passive", "passthrough", "surpass", "monkey", "turkey", "hotkey", "keyboard",
    "keys", "keyed", "tokenizer", "tokenizers", "tokens", "tokenized", "secretary", "n_tokens", "key_size", "token_file",
    "password_file", "secret_name", "eos_token", "backward_pass", "sort_key", "access_key_id",
]  # fmt: skip
STYLES = {
    "snake": "_".join,
    "upper": lambda words: "_".join(words).upper(),
    "kebab": "-".join,
    "camel": lambda words: words[0] + "".join(w.capitalize() for w in words[1:]),
}

styles = st.sampled_from(sorted(STYLES))
owners = st.lists(st.sampled_from(OWNERS), max_size=2)
value = st.text(st.sampled_from("abcdefXYZ0123456789!?/+#~^ '\""), min_size=4, max_size=80).filter(
    lambda v: v == v.strip() and not is_harmless(v) and len(set(v)) > 2
)


def named(style: str, *parts: str) -> str:
    return STYLES[style]([w for part in parts for w in part.split("_")])


@settings(max_examples=200, deadline=None)
@given(styles, owners, st.sampled_from(KINDS), st.sampled_from(["", "2", "_1"]))
def test_a_word_for_a_secret_at_the_end_makes_one_in_every_style(style, before, kind, number):
    name = named(style, *before, kind) + number
    assert is_secret_name(name)
    assert problems_in({"cluster": {"env": {name: "abcdef"}}})
    for line in (f"export {name}=abcdef", f"{name}: 'ab cd'", f'"{name}": "ab\\"cd"', f"--{name}=abcdef"):
        clean, findings = redact(line, strict=True)
        assert len(findings) == 1
        assert "ab" not in clean.partition(name)[2]


@settings(max_examples=200, deadline=None)
@given(styles, owners, st.sampled_from(HARMLESS))
def test_a_part_of_another_word_or_another_kind_of_key_is_none(style, before, name):
    whole = named(style, *before, name)
    assert not is_secret_name(whole)
    line = f"{whole}=abcdef; --{whole} a1b2c3d4; {whole}: 'ab12cd34ef'"
    assert redact(line, strict=True) == (line, [])


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "GITHUBTOKEN", "dbpass", "db.passwd", "authToken", "FOO_KEY", "HFToken"]
)
def test_names_of_secrets_without_borders(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", [*field_types(), *NCCL_FIELDS, "PWD", "OLDPWD", "key", "", "_", "NCCL_PROTO", "TRITON_CACHE_KEY"]
)
def test_no_field_here_and_no_variable_of_nccl_is_one(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize("name", ["cache_key", "model_key", "password_of", "secret_of_success"])
def test_code_speaks_of_secrets_where_settings_hold_them(name):
    assert not is_secret_name(name, in_code=True)


@settings(max_examples=200, deadline=None)
@given(styles, owners, st.sampled_from(KINDS), value)
@example("upper", ["wandb"], "api_key", "it's \"so")
def test_no_message_shows_a_secret(style, before, kind, secret):
    name = named(style, *before, kind)
    typed = f"+cluster.env.{name}={secret!r}"
    problem = Problem(f"cluster.env.{name}", secret, "is refused", "Leave it out")
    in_a_list = Problem(
        "cluster.setup", [f"export {name}={secret!r}"], f"what was typed: {typed}", f"Type {typed}"
    )
    in_a_mapping = Problem("cluster.env", {name: secret}, "is refused", "Leave it out")
    message = str(ConfigError([(f"point 1 ({typed})", p) for p in (problem, in_a_list, in_a_mapping)]))
    for form in (secret, repr(secret)[1:-1]):
        assert form not in message
    assert f"cluster.env.{name}=<hidden>: is refused" in message
    assert all(form not in " ".join(redact_args([typed])[0]) for form in (secret, repr(secret)[1:-1]))


def test_a_key_is_hidden_before_a_long_value_is_cut():
    key = "hf_" + "aB3dE" * 7
    for at in range(60, 140):
        text = str(Problem("tracking.notes", "x" * at + f" {key} " + "y" * 300, "too long", "Cut it"))
        assert not re.search(r"(aB3dE){2}", text)


def test_messages_show_what_is_no_secret():
    problem = Problem("cluster.env.TOKENIZERS_PARALLELISM", "maybe", "must be true or false", "Write true")
    assert str(problem) == "cluster.env.TOKENIZERS_PARALLELISM='maybe': must be true or false. Write true."
    assert "=null:" in str(Problem("x.password", None, "is empty", "Leave it so"))
    assert "too long to print" in str(Problem("x.password", 10**5000, "is long", "Leave it out"))
