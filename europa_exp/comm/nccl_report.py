"""What NCCL says it took: reading the log that ``nccl.record`` makes it write.

NCCL prints a variable once, when it first reads it, and a few lines for each communicator that it creates. The formats are
those of NCCL 2.30.7 (``src/init.cc``, ``src/misc/param.cc``, ``src/misc/socket.cc``, ``src/enqueue.cc``). Lines of any other
form are passed over, so another version costs entries of the report and nothing else.

What a limit of thread blocks (CTAs) does shows in the channels, one thread block each: a communicator has at most
``NCCL_MAX_CTAS`` of them for collectives. For point-to-point, which all-to-alls are made of, NCCL rounds that up to a power
of two: a limit of 20 lets an all-to-all use 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_MOST_REMARKS = 20

_LINE = re.compile(r"(?P<thread>\d+:\d+) \[\d+\] (?:NCCL INFO |.*?NCCL WARN (?P<warning>))(?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (\S+)")
_START = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .*- ?Init START")
_NODES = re.compile(r"comm (0x[0-9a-f]+) rank \d+ nRanks \d+ nNodes (\d+)")
_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels, (\d+) p2p channels, (\d+) p2p channels per peer"
)
_COLLECTIVE = re.compile(r"(\w+): \d+ Bytes -> Algo \S+ proto \S+ channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_VARIABLE = (
    re.compile(r"(NCCL_[A-Z0-9_]+) set by environment to (.*?)(?:(?<=\d)\.)?"),
    re.compile(r"(NCCL_[A-Z0-9_]+) set to (.*)"),
    re.compile(r"Parsed environment variable (NCCL_[A-Z0-9_]+)=(.*) to -?\d+"),
    re.compile(r"Comm config \w+ reset to (NCCL_[A-Z0-9_]+)=(.*)"),
)
# Where NCCL takes another value than it was given.
_CHANGED = re.compile(
    r"is too (low|high|big)|is larger than|is not (a )?valid|Invalid value|Comm config .*CTAs (re)?set to"
    r"|User asked for a (minimum|maximum) of|No valid CTA policies|Unknown CTA policy|Unable to recognize"
)

# NCCL says nothing of these; that there is a log, and which network it names, shows that they were taken.
_SILENT = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_NET"})


@dataclass
class Communicator:
    """One communicator of the rank that wrote the log. What the log doesn't say (it was cut off, another version) is None."""

    rank: int
    ranks: int
    nodes: int | None = None
    network: str | None = None
    """NCCL's name of it: IB, Socket, or a plugin's."""

    coll_channels: int | None = None
    """Most thread blocks that a collective can use."""

    nvls_channels: int | None = None
    p2p_channels: int | None = None
    """Most thread blocks that sends and receives can use together."""

    p2p_channels_per_peer: int | None = None


@dataclass
class Report:
    """What one rank's NCCL said of itself."""

    version: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that NCCL read, with the values that it named."""

    communicators: list[Communicator] = field(default_factory=list)
    """In the order of their creation."""

    collectives: dict[str, int] = field(default_factory=dict)
    """Kind of collective -> most channels that one used. Only with ``'nccl.extra.NCCL_DEBUG_SUBSYS="INIT,ENV,TUNING"'``, where
    NCCL writes a line for each collective."""

    remarks: list[str] = field(default_factory=list)
    """NCCL's warnings, and where it took another value than it was given."""


def parse(lines: Iterable[str]) -> Report:
    """Read a log, given as lines with their ends. It may stop anywhere: a last line without an end counts for nothing, as
    do lines that are not understood."""
    report = Report()
    # Communicators may be created at the same time, each in a thread of its own, and few lines name theirs.
    network: dict[str, str] = {}
    current: dict[str, Communicator] = {}
    by_address: dict[str, Communicator] = {}
    for line in lines:
        found = _LINE.search(line.rstrip("\n")) if line.endswith("\n") else None
        if found is None:
            continue
        thread, text = found["thread"], found["text"]
        if found["warning"] is not None or _CHANGED.search(text):
            if text not in report.remarks and len(report.remarks) < _MOST_REMARKS:
                report.remarks.append(text)
        elif m := _VERSION.match(text):
            report.version = report.version or m[1]
        elif m := _NETWORK.match(text):
            network[thread] = m[1]
        elif m := _START.search(text):
            made = Communicator(rank=int(m[2]), ranks=int(m[3]), network=network.pop(thread, None))
            report.communicators.append(made)
            current[thread] = by_address[m[1]] = made
        elif (m := _NODES.match(text)) and m[1] in by_address:
            by_address[m[1]].nodes = int(m[2])
        elif (m := _CHANNELS.match(text)) and thread in current:
            made = current[thread]
            made.coll_channels, made.nvls_channels = int(m[1]), int(m[2])
            made.p2p_channels, made.p2p_channels_per_peer = int(m[3]), int(m[4])
        elif m := _COLLECTIVE.match(text):
            used = int(m[3]) - int(m[2]) + 1
            report.collectives[m[1]] = max(used, report.collectives.get(m[1], 0))
        for pattern in _VARIABLE:
            if m := pattern.fullmatch(text):
                report.variables[m[1]] = m[2]
    return report


def ignored(asked: Mapping[str, str], report: Report) -> dict[str, str]:
    """Variables that were set and that NCCL did not mention: it doesn't know them, or had no need of them so far."""
    return {
        name: value for name, value in asked.items() if name not in report.variables and name not in _SILENT
    }


def warnings(section: Mapping[str, Any]) -> list[str]:
    """What of a ``section`` nobody expects: settings that did not arrive, that NCCL changed, or that came from elsewhere."""
    found = [
        f"NCCL does not mention {name}={value}: it doesn't know it, or had no need of it so far"
        for name, value in section["ignored"].items()
    ]
    found += [
        f"NCCL read {name}={value}, which the configuration doesn't set; look for a nccl.conf of the machine or of yours"
        for name, value in section["reported"].items()
        if name not in section["set"]
    ]
    return found + [f"NCCL: {remark}" for remark in section["remarks"]]


def section(environment: Mapping[str, str], log: Path) -> dict[str, Any]:
    """The ``nccl`` section of ``runtime.json``: ``set`` (what this rank was given), ``reported`` (what NCCL says it read),
    ``ignored`` (set, and not mentioned), ``version``, ``communicators``, ``collectives``, ``remarks``, and ``log``, a path
    below the run folder.

    Args:
        environment: all variables that the worker set; NCCL's are picked out.
        log: NCCL's file of this rank.

    Raises:
        OSError: the log can't be read.
    """
    asked = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    with open(log, encoding="utf-8", errors="replace") as lines:
        report = parse(lines)
    return {
        "version": report.version,
        "set": asked,
        "reported": report.variables,
        "ignored": ignored(asked, report),
        "communicators": [asdict(each) for each in report.communicators],
        "collectives": report.collectives,
        "remarks": report.remarks,
        "log": f"{log.parent.name}/{log.name}",
    }
