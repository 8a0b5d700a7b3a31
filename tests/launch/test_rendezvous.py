"""Where ranks meet: strategies, without any cluster."""

from __future__ import annotations

import pytest

from europa_exp.config.schema import MasterAddr
from europa_exp.launch.rendezvous import RendezvousError, meeting, port

FABRIC = "jpbo-001-01-interconnect-1.jupiter.internal"


def at(strategy: MasterAddr, names: dict[str, str], node_addr: str | None = None, first: str = "jpbo-001-01"):
    return meeting(strategy, first, resolve=names.get, node_addr=lambda node: node_addr)


def test_the_plain_name_is_asked_of_nobody():
    found = at(MasterAddr.first_host, {})
    assert found.address == "jpbo-001-01"
    assert at(MasterAddr.first_host_i, {}).address == "jpbo-001-01i"


def test_jupiter_takes_the_interconnect_where_it_resolves():
    assert at(MasterAddr.jupiter_interconnect, {FABRIC: "10.1.2.3"}).address == FABRIC
    found = at(MasterAddr.jupiter_interconnect, {"jpbo-001-01": "10.0.0.7"})
    assert found.address == "10.0.0.7"
    assert f"{FABRIC} does not resolve" in found.how


def test_ipv4():
    assert at(MasterAddr.first_host_ipv4, {"jpbo-001-01": "10.0.0.7"}).address == "10.0.0.7"


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1"])
def test_the_first_node_itself_finds_the_same_address_as_the_others(loopback):
    """/etc/hosts maps a node's own name to the loopback."""
    elsewhere = at(MasterAddr.first_host_ipv4, {"jpbo-001-01": "10.0.0.7"}, "10.0.0.7")
    there = at(MasterAddr.first_host_ipv4, {"jpbo-001-01": loopback}, "10.0.0.7")
    assert there.address == elsewhere.address == "10.0.0.7"
    assert loopback in there.how
    by_name = at(MasterAddr.first_host_ipv4, {"jpbo-001-01": loopback, "fabric": "10.0.0.7"}, "fabric")
    assert by_name.address == "10.0.0.7"


def test_where_all_is_loopback_the_name_serves():
    found = at(MasterAddr.first_host_ipv4, {"jpbo-001-01": "127.0.1.1"}, "jpbo-001-01")
    assert found.address == "jpbo-001-01"


def test_node_addr():
    assert at(MasterAddr.node_addr, {}, "10.9.9.9").address == "10.9.9.9"
    with pytest.raises(RendezvousError, match=r"cluster\.master_addr=node_addr.*NodeAddr.*another strategy"):
        at(MasterAddr.node_addr, {})


def test_a_name_that_nobody_knows_is_an_error():
    with pytest.raises(RendezvousError, match="does not resolve here"):
        at(MasterAddr.first_host_ipv4, {})


@pytest.mark.parametrize("strategy", MasterAddr)
def test_a_node_that_is_called_by_its_address_needs_no_strategy(strategy):
    assert at(strategy, {}, first="127.0.0.3").address == "127.0.0.3"


def test_ports_differ_between_neighbours_restarts_and_runs_of_a_job():
    used = [
        port(job, restarts, turn) for job in range(100, 140) for restarts in range(3) for turn in range(4)
    ]
    assert len(set(used)) == len(used)
    assert all(20480 <= p < 32768 for p in used)
    assert port(10**8 + 3, 2, 1) == port(10**8 + 3, 2, 1) < 32768
