"""Finding secrets in text, so that none is recorded or uploaded.

Command line, overrides, environment, diff and uploads pass through ``redact``; a configuration with a secret in it is
refused before anything is submitted (``problems_in``), because the frozen configuration is what colleagues read and share.

Forty hexadecimal digits are a W&B key *or* a git commit: they count as a key only behind a word like ``api_key``. A finding
names its kind and place, never the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from europa_exp.config.secret_names import is_secret_name

__all__ = ["Finding", "find", "is_harmless", "is_secret_name", "problems_in", "redact", "redact_args"]


@dataclass(frozen=True)
class Finding:
    """A secret in a text: what kind it is and in which line (from 1)."""

    kind: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind} in line {self.line}"


def _word_starts(prefix: str, rest: str) -> re.Pattern[str]:
    # A pattern that begins with plain letters is searched ten times as fast as one that begins with a word boundary.
    return re.compile(rf"{prefix}(?<=\b{prefix}){rest}")


# Group 1, where there is one, is the secret.
_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("Hugging Face token", _word_starts("hf_", r"[A-Za-z0-9]{30,}\b")),
    ("GitHub token", _word_starts("gh", r"[pousr]_[A-Za-z0-9]{36,}\b")),
    ("GitHub token", _word_starts("github_pat_", r"[A-Za-z0-9_]{22,}\b")),
    ("GitLab token", _word_starts("glpat-", r"[A-Za-z0-9_-]{20,}")),
    ("W&B key", _word_starts("wandb_v", r"\d+_[A-Za-z0-9_]{30,}\b")),
    ("W&B key", _word_starts("local-", r"[0-9a-f]{40}\b")),
    ("AWS key", _word_starts("AKIA", r"[0-9A-Z]{16}\b")),
    ("AWS key", _word_starts("ASIA", r"[0-9A-Z]{16}\b")),
    ("Google key", _word_starts("AIza", r"[0-9A-Za-z_-]{35}")),
    ("API key", _word_starts("sk-", r"(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}")),
    ("Slack token", _word_starts("xox", r"[abeoprs]-[A-Za-z0-9-]{10,}")),
    ("JSON web token", _word_starts("eyJ", r"[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}")),
    ("bearer token", re.compile(r"earer\s+(?<=[bB]earer\s)([A-Za-z0-9._~+/=-]{20,})")),
    ("password in a URL", re.compile(r"://[^\s/@:\"'<>{}$]{0,64}:([^\s/@\"'<>{}$]{1,256})@")),
)
_FORTY = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
_BEFORE_KEY = re.compile(
    r"(?i)(?:api[_-]?key|wandb[_-]?key|wandb login(?: --relogin)?|token|secret|password)[\"']?\s*[:=, ]\s*[\"']?$"
)

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?P<body>[^\n]*(?:\n[+\- ]?[ \t]*(?:[A-Za-z0-9+/=]+|[A-Za-z-]+: [^\n]*)?[ \t\r]*(?=\n|\Z))*)"
)

_ASSIGNED = re.compile(
    r"(?i)(?:pass|pwd|secret|token|key|cred)[a-z0-9_-]{0,32}\\?[\"']?\s{0,8}[=:]\s{0,8}"
    r"(?:\"(?P<double>(?:[^\"\\\n]|\\.){1,512})\"|'(?P<single>(?:[^'\\\n]|\\.){1,512})'"
    r"|\\\"(?P<inner_double>[^\"\n]{1,512}?)\\\"|\\'(?P<inner_single>[^'\n]{1,512}?)\\'"
    r"|(?P<bare>[^\s\"',;&)\]}]{1,512}))"
)
_NAME = re.compile(r"[A-Za-z0-9_-]*")
_NAME_BEFORE = re.compile(r"[A-Za-z0-9_-]{0,64}$")
_FLAGGED = re.compile(
    r"(?<![^\s\"'])--?(?P<flag>[A-Za-z][A-Za-z0-9_-]{0,48})\s+[\"']?(?P<value>[^\s\"';&|-][^\s\"';&|]{0,512})"
)
_PLACEHOLDER = re.compile(
    r"(?i)^(?:[<\[{$`].*|%[sdr(].*|\*+|.*(?:\$\{|\{\{|<redacted|\[redacted).*|x{3,}|\.{3,}|none|null|true|false|str|int|bytes|"
    r"(?:your|my|the|some|example|dummy|changeme|redacted|hidden)(?:[ _-].*)?|\?+)$"
)
_CODE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*(?:[.(\[].*)?$")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}|\d*\.\d*(?:e[+-]?\d+)?)")
_PATH = re.compile(r"(?:(?:~|\.{1,2})(?:/[\w.@+-]+)+|(?:/[\w.@+-]+){2,})/?")


def redact(text: str, *, strict: bool = False) -> tuple[str, list[Finding]]:
    """``text`` with every secret replaced by ``[redacted: <kind>]``, and what was found.

    Lines stay lines and the first character of a line stays, so a redacted patch keeps its structure. ``strict`` is for
    command lines and settings, where ``token=value`` is a secret whatever the value looks like; in code it is mostly not.
    """
    spans = _spans(text, strict)
    if not spans:
        return text, []
    parts: list[str] = []
    findings: list[Finding] = []
    at = line = 0
    for start, end, kind in spans:
        line += text.count("\n", at, start)
        findings.append(Finding(kind, line + 1))
        line += text.count("\n", start, end)
        parts += [text[at:start], _cover(text[start:end], kind)]
        at = end
    parts.append(text[at:])
    return "".join(parts), findings


def find(text: str, *, strict: bool = False) -> list[Finding]:
    """The secrets in ``text``; see ``redact``."""
    return redact(text, strict=strict)[1]


def redact_args(args: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """A command line or a list of overrides without secrets; ``line`` of a finding counts the arguments (from 1).

    Beside what ``redact`` finds, ``--token VALUE`` in two arguments counts.
    """
    clean: list[str] = []
    findings: list[Finding] = []
    for number, arg in enumerate(args, start=1):
        if number > 1 and _is_secret_flag(args[number - 2]) and not arg.startswith("-"):
            clean.append(_cover(arg, "secret"))
            findings.append(Finding("secret", number))
            continue
        text, found = redact(arg, strict=True)
        clean.append(text)
        findings += [Finding(f.kind, number) for f in found]
    return clean, findings


def problems_in(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(dotted field, kind)`` of every secret in a nested configuration, in its keys' order.

    A text is judged by its shape and, because ``{HF_TOKEN: ...}`` says so itself, by the name of its field.
    """
    return [(path, kind) for path, name, value in _leaves(config, "") if (kind := _kind(name, value))]


def is_harmless(value: str) -> bool:
    """A value that is no secret whatever its name: nothing, a placeholder, a small number, where a file lies."""
    if not value or _PLACEHOLDER.match(value) or _NUMBER.fullmatch(value):
        return True
    return _PATH.fullmatch(value) is not None and not any(map(_has_all_kinds, value.split("/")))


def _kind(name: str, value: str) -> str | None:
    if found := find(value, strict=True):
        return found[0].kind
    return "secret" if is_secret_name(name) and not is_harmless(value) else None


def _is_secret_flag(arg: str) -> bool:
    return arg.startswith("-") and "=" not in arg and is_secret_name(arg.lstrip("-"))


def _has_all_kinds(part: str) -> bool:
    """True for the long mixture of digits and both cases that a key is, and a folder hardly ever."""
    return len(part) >= 16 and all(
        any(test(c) for c in part) for test in (str.isdigit, str.islower, str.isupper)
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, path.rpartition(".")[2], value


def _spans(text: str, strict: bool) -> list[tuple[int, int, str]]:
    """Where the secrets are, in order and apart from each other."""
    found = [(*m.span("body"), "private key") for m in _PRIVATE_KEY.finditer(text) if m["body"].strip()]
    for kind, shape in _SHAPES:
        for match in shape.finditer(text):
            group = 1 if shape.groups else 0
            if kind != "password in a URL" or not _PLACEHOLDER.match(match[1]):
                found.append((*match.span(group), kind))
    # First the forty digits, which are rare, then the words before them.
    for match in _FORTY.finditer(text):
        if _BEFORE_KEY.search(text[max(0, match.start() - 40) : match.start()]):
            found.append((*match.span(), "W&B key"))
    found += _assignments(text, strict)
    apart: list[tuple[int, int, str]] = []
    for span in sorted(found, key=lambda s: (s[0], -s[1])):
        if apart and span[0] < apart[-1][1]:
            if span[1] > apart[-1][1]:
                apart[-1] = (apart[-1][0], span[1], apart[-1][2])
            continue
        apart.append(span)
    return apart


def _assignments(text: str, strict: bool) -> Iterator[tuple[int, int, str]]:
    for match in _ASSIGNED.finditer(text):
        group = match.lastgroup or "bare"
        value = match[group]
        before = _NAME_BEFORE.search(text, max(0, match.start() - 64), match.start())
        rest = _NAME.match(match[0])
        assert before is not None  # it takes nothing too
        assert rest is not None
        name = before[0] + rest[0]
        if not is_secret_name(name, in_code=not strict) or is_harmless(value.rstrip(":.")):
            continue
        # "another pass: twice the rate" is prose, whatever reads it.
        prose = name.lower() == "pass" and group == "bare" and "=" not in match[0]
        if (strict and not prose) or _looks_secret(value, quoted=group != "bare"):
            yield (*match.span(group), "secret")
    for match in _FLAGGED.finditer(text) if strict else ():
        value = match["value"]
        if is_secret_name(match["flag"]) and not is_harmless(value) and _looks_secret(value, quoted=True):
            yield (*match.span("value"), "secret")


def _looks_secret(value: str, *, quoted: bool) -> bool:
    """In code and prose most of what follows ``token:`` is a type, a name or a call; a secret has digits and length."""
    if not any(c.isdigit() for c in value) or not any(c.isalpha() for c in value) or len(value) < 6:
        return False
    if quoted:
        return " " not in value
    return not ("(" in value or "[" in value) and (_CODE.match(value) is None or _random(value))


def _random(value: str) -> bool:
    """True for a word in which digits sit between letters (hunter2x9), unlike a numbered name (layer_2, head12)."""
    return (
        "." not in value
        and "_" not in value
        and re.search(r"\d.*[A-Za-z].*\d|\d[A-Za-z]|[a-z]\d+$", value) is not None
    )


def _cover(secret: str, kind: str) -> str:
    marker = f"[redacted: {kind}]"
    first, *rest = secret.split("\n")
    covered = [marker if first.strip() or not rest else first]
    # In a patch the first character of a line is its sign; without it the patch would not apply any more.
    covered += [
        (line[0] if line[:1] in ("+", "-", " ") else "") + marker if line.strip("+- \r") else line
        for line in rest
    ]
    return "\n".join(covered)
