"""What NCCL says it took: read from its log."""

from __future__ import annotations

import importlib.util
import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from europa_exp.comm.nccl import environment
from europa_exp.comm.nccl_report import Communicator, ignored, parse, section, warnings
from europa_exp.config.schema import Nccl

# Composed by hand in the formats of NCCL 2.30.7: rank 0 of 8 ranks on two nodes, a cap of 16, a minimum above it. The first
# two lines and those of the bootstrap are real ones of that library on a machine without a GPU; the others follow the format
# strings of its sources (test_the_installed_library_has_these_formats holds them against the library). The second and the
# third communicator are created at the same time, by threads 412 and 413.
LOG = """\
n01:400:400 [0] NCCL INFO ncclOsDlopen(libnccl-env.so) failed: libnccl-env.so: cannot open shared object file: No such file or directory
n01:400:400 [0] NCCL INFO ENV/Plugin: Could not find: libnccl-env.so
n01:400:400 [0] NCCL INFO NCCL_SOCKET_FAMILY set by environment to AF_INET
n01:400:400 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0
n01:400:400 [0] NCCL INFO Bootstrap: Using ib0:10.0.0.1<0>
n01:400:400 [0] NCCL INFO NCCL version 2.30.7+cuda13.3
n01:400:400 [0] NCCL INFO NCCL git version master 5067397
n01:400:400 [0] NCCL INFO NCCL_MIN_CTAS set by environment to 32.
n01:400:400 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 16.
n01:400:400 [0] NCCL INFO minCTAs 32 is larger than maxCTAs 16, set both to 16
n01:400:411 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0,mlx5_1
n01:400:411 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>
n01:400:411 [0] NCCL INFO Using network IB
n01:400:411 [0] NCCL INFO [Rank 0] ncclCommInitRankConfig comm 0x5581 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 901000 commId 0xa1 - Init START
n01:400:411 [0] NCCL INFO comm 0x5581 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0
n01:400:411 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer
n01:400:411 [0] NCCL INFO ncclCommInitRankConfig comm 0x5581 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 901000 commId 0xa1 - Init COMPLETE
n01:400:411 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 0 nranks 8 total 0.71 (kernels 0.20, alloc 0.10, bootstrap 0.11, allgathers 0.02, topo 0.08, graphs 0.00, connections 0.18, rest 0.02)

[2026-01-01 00:00:00] n01:400:411 [0] misc/socket.cc:80 (socketProgress) NCCL WARN socketProgress: Connection closed by remote peer n02<40000>
n01:400:412 [0] NCCL INFO Using network IB
n01:400:413 [0] NCCL INFO Using network Socket
n01:400:413 [0] NCCL INFO ncclCommSplit comm 0x5583 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 901000 parent 0x5581 childCount 1 color 7 key 0- Init START
n01:400:412 [0] NCCL INFO [Rank 0] ncclCommInitRankConfig comm 0x5582 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 901000 commId 0xa2 - Init START
n01:400:413 [0] NCCL INFO 12 coll channels, 12 collnet channels, 0 nvls channels, 16 p2p channels, 4 p2p channels per peer
n01:400:413 [0] NCCL INFO comm 0x5583 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
n01:400:412 [0] NCCL INFO comm 0x5582 rank 0 nRanks 4 nNodes 1 localRanks 4 localRank 0 MNNVL 0
n01:400:412 [0] NCCL INFO 16 coll channels, 16 collnet channels, 16 nvls channels, 16 p2p channels, 16 p2p channels per peer
n01:400:413 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 18.
n01:400:400 [0] NCCL INFO AllGather: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..11}
n01:400:400 [0] NCCL INFO AllGather: 4194304 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}
n01:400:400 [0] NCCL INFO ReduceScatter: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={3..3}
"""
SET = {
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_SOCKET_IFNAME": "ib0",
    "NCCL_MIN_CTAS": "32",
    "NCCL_MAX_CTAS": "16",
    "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    "NCCL_IB_TIMEOUT": "18",
}
FIRST = Communicator(0, 8, 2, "IB", 16, 0, 16, 2)


def read(text: str):
    return parse(text.splitlines(keepends=True))


def test_variables_as_nccl_read_them():
    report = read(LOG)
    assert report.version == "2.30.7+cuda13.3"
    assert report.variables == SET


def test_channels_go_to_the_communicator_of_their_thread():
    split = Communicator(0, 2, 2, "Socket", 12, 0, 16, 4)
    assert read(LOG).communicators == [FIRST, split, Communicator(0, 4, 1, "IB", 16, 16, 16, 16)]


def test_an_address_that_is_used_again_is_another_communicator():
    again = LOG + LOG.replace("nNodes 2", "nNodes 9")
    assert [c.nodes for c in read(again).communicators] == [2, 2, 1, 9, 9, 1]


def test_most_channels_of_each_kind_of_collective():
    assert read(LOG).collectives == {"AllGather": 16, "ReduceScatter": 1}


def test_values_that_nccl_changed_and_its_warnings_are_remarks():
    assert read(LOG).remarks == [
        "minCTAs 32 is larger than maxCTAs 16, set both to 16",
        "socketProgress: Connection closed by remote peer n02<40000>",
    ]


@pytest.mark.parametrize(
    ("text", "variables", "remark"),
    [
        ("NCCL_MAX_CTAS set by environment to 16.", {"NCCL_MAX_CTAS": "16"}, False),
        ("NCCL_SOCKET_IFNAME set by environment to eth0.8", {"NCCL_SOCKET_IFNAME": "eth0.8"}, False),
        ("NCCL_ALGO set by environment to Ring", {"NCCL_ALGO": "Ring"}, False),
        ("Parsed environment variable NCCL_CTA_POLICY=ZERO to 2", {"NCCL_CTA_POLICY": "ZERO"}, False),
        ("Comm config maxCTAs reset to NCCL_MAX_CTAS=16", {"NCCL_MAX_CTAS": "16"}, True),
        ("NCCL_MAX_CTAS 0 is too low, leaving it set at 32", {}, True),
        ("maxCTAs 99 is larger than #channels upper limit 64, cap it to 64", {}, True),
        ("Invalid value many for NCCL_MAX_CTAS, using default -2147483648.", {}, True),
        ("Comm config Max CTAs set to 8", {}, True),
        ("User asked for a maximum of 0 channels, setting it to 1", {}, True),
        ("DMA-BUF is available on GPU device 0", {}, False),
    ],
)
def test_one_line(text, variables, remark):
    report = read(f"n01:1:1 [0] NCCL INFO {text}\n")
    assert report.variables == variables
    assert report.remarks == ([text] if remark else [])


def test_a_timestamp_or_another_host_name_before_the_line_changes_nothing():
    stamped = "".join(f"[2026-01-01 00:00:00] odd [1]:host-{line}" for line in LOG.splitlines(keepends=True))
    assert read(stamped) == read(LOG)


def test_a_line_that_is_still_being_written_counts_for_nothing():
    assert read("n01:1:1 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 1").variables == {}


@given(st.integers(0, len(LOG)))
@settings(deadline=None, max_examples=150)
def test_a_log_may_end_anywhere(end):
    """What the beginning says stays true: entries are added, and those of a communicator filled in."""
    part, whole = read(LOG[:end]), read(LOG)
    assert part.variables.items() <= whole.variables.items()
    assert part.remarks == whole.remarks[: len(part.remarks)]
    for early, late in zip(part.communicators, whole.communicators, strict=False):
        unknown = {name: None for name, value in vars(early).items() if value is None}
        assert replace(late, **unknown) == early


@given(st.lists(st.text(max_size=60) | st.sampled_from(LOG.splitlines()), max_size=30), st.randoms())
@settings(deadline=None, max_examples=150)
def test_lines_that_are_not_understood_change_nothing(lines, random):
    """Strange lines between those of the log, in any place."""
    strange = [line for line in lines if "NCCL" not in line]
    mixed = LOG.splitlines(keepends=True)
    for line in strange:
        mixed.insert(random.randrange(len(mixed) + 1), line.replace("\n", " ") + "\n")
    assert parse(mixed) == read(LOG)
    parse(f"{line}\n" for line in lines)


def test_ignored_is_what_was_set_and_not_mentioned():
    asked = SET | {"NCCL_NO_SUCH": "1", "NCCL_IB_RETRY_CNT": "20"} | environment(Nccl(record=True), Path("x"))
    asked["NCCL_NET"] = "IB"  # NCCL answers with the network that it uses
    assert ignored(asked, read(LOG)) == {"NCCL_NO_SUCH": "1", "NCCL_IB_RETRY_CNT": "20"}
    assert ignored(SET, read(LOG)) == {}


def test_the_section_of_the_record(tmp_path):
    log = tmp_path / "logs" / "nccl_rank_0.log"
    log.parent.mkdir()
    log.write_bytes(LOG.encode() + b"\xff\xfe cut")
    found = section({"RANK": "0", "NCCL_MAX_CTAS": "16", "NCCL_OTHER": "1"}, log)
    assert found["set"] == {"NCCL_MAX_CTAS": "16", "NCCL_OTHER": "1"}
    assert (found["reported"], found["ignored"]) == (SET, {"NCCL_OTHER": "1"})
    assert found["communicators"][0] == vars(FIRST)
    assert found["log"] == "logs/nccl_rank_0.log"
    assert json.loads(json.dumps(found)) == found
    told = warnings(found)
    assert "NCCL does not mention NCCL_OTHER=1: it doesn't know it, or had no need of it so far" in told
    assert any("NCCL read NCCL_IB_TIMEOUT=18, which the configuration doesn't set" in text for text in told)
    assert "NCCL: minCTAs 32 is larger than maxCTAs 16, set both to 16" in told
    assert not any("NCCL_MAX_CTAS=16" in text for text in told)
    with pytest.raises(OSError, match="nothing"):
        section({}, tmp_path / "nothing")


# ------------------------------------------------------------------------------------------- the library that is installed


def library() -> Path:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [path for place in places for path in Path(place).glob("nccl/lib/libnccl.so.2")]
    if not found:
        pytest.skip("torch came without NCCL")
    return found[0]


FORMATS = [
    "NCCL version 2.",
    "Using network %s",
    "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx parent %p childCount %d color %d key %d- Init START",
    "[Rank %d] %s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START",
    "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL %d",
    "%d coll channels, %d collnet channels, %d nvls channels, %d p2p channels, %d p2p channels per peer",
    "%s: %ld Bytes -> Algo %s proto %s channel{Lo..Hi}={%d..%d}",
    "%s set by environment to %lld.",
    "NCCL_SOCKET_IFNAME set by environment to %s",
    "NCCL_IB_HCA set to %s",
    "Parsed environment variable NCCL_CTA_POLICY=%s to %d",
    "Comm config maxCTAs reset to NCCL_MAX_CTAS=%d",
    "NCCL_MAX_CTAS %d is too low, leaving it set at %d",
    "minCTAs %d is larger than maxCTAs %d, set both to %d",
    "Comm config Max CTAs set to %d",
    "[%d] NCCL INFO %s",
    "[%d] %s:%d (%s) NCCL WARN %s",
]


@pytest.mark.slow
def test_the_installed_library_has_these_formats():
    """After an update of torch: which lines the reader would miss."""
    with open(library(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        missing = [text for text in FORMATS if content.find(text.encode()) < 0]
    assert missing == []


def test_the_installed_library_writes_a_log_that_is_read(tmp_path):
    """Real lines, as far as NCCL gets without a GPU: the bootstrap, with its interface."""
    log = tmp_path / "100%h" / "nccl.log"
    log.parent.mkdir()
    chosen = Nccl(
        max_ctas=16, socket_ifname="lo", socket_family="AF_INET", record=True, extra={"NCCL_NO_SUCH": "1"}
    )
    variables = environment(chosen, log)
    code = f"import ctypes; ctypes.CDLL({str(library())!r}).ncclGetUniqueId(ctypes.create_string_buffer(128))"
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=60)
    found = section(variables, log)
    assert found["reported"] == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
    assert found["ignored"] == {"NCCL_MAX_CTAS": "16", "NCCL_NO_SUCH": "1"}
    assert found["communicators"] == []
