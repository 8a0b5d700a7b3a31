"""Where ranks of several nodes meet: the address of the first one, and a port that all of them can work out alone.

No rank talks to another before the address is known, so each finds it by itself; what it finds depends on the strategy, the
list of nodes and the site's name service, never on which node asks. One trap is taken care of: ``/etc/hosts`` of a node often
maps its own name to the loopback, where nobody else could reach it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from europa_exp.config.schema import MasterAddr

_FIRST_PORT, _PORTS = 20480, 12288  # below the ports that systems hand out by themselves (32768 and up)

Resolve = Callable[[str], "str | None"]
"""Name -> IPv4 address, or None."""


class RendezvousError(Exception):
    """No address of the first node can be found; the message names the strategy, what was tried and a way out."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet. ``how`` says what was found on the way, for the record."""

    address: str
    how: str


def port(job: int, restarts: int, turn: int) -> int:
    """A port for the ``turn``-th run of one start of a job: the same on every rank, another one for neighbours and restarts."""
    return _FIRST_PORT + (job + 4099 * restarts + 401 * turn) % _PORTS


def meeting(
    strategy: MasterAddr,
    first: str,
    *,
    resolve: Resolve | None = None,
    node_addr: Callable[[str], str | None] | None = None,
) -> Meeting:
    """The address under which every rank finds rank 0, which runs on the node ``first``.

    ``resolve`` and ``node_addr`` (Slurm's NodeAddr of a node) can be replaced in tests. Raises RendezvousError.
    """
    resolve = resolve or _ipv4
    node_addr = node_addr or _node_addr
    if _is_address(first):
        return Meeting(first, f"{strategy.name}: the node's name is an address")
    match strategy:
        case MasterAddr.first_host:
            return Meeting(first, "first_host: the name, as Slurm lists it")
        case MasterAddr.first_host_i:
            return Meeting(f"{first}i", "first_host_i: the name and an i")
        case MasterAddr.jupiter_interconnect:
            name = f"{first}-interconnect-1.jupiter.internal"
            if resolve(name) is not None:
                return Meeting(name, "jupiter_interconnect: the name resolves")
            found = _by_ipv4(first, resolve, node_addr)
            return Meeting(found.address, f"jupiter_interconnect: {name} does not resolve; {found.how}")
        case MasterAddr.first_host_ipv4:
            return _by_ipv4(first, resolve, node_addr)
        case MasterAddr.node_addr:
            address = node_addr(first)
            if address is None:
                raise _nothing(strategy, first, "scontrol show node names no NodeAddr")
            return Meeting(address, "node_addr: what scontrol show node says")


def _by_ipv4(first: str, resolve: Resolve, node_addr: Callable[[str], str | None]) -> Meeting:
    address = resolve(first)
    if address is not None and not _is_loopback(address):
        return Meeting(address, f"first_host_ipv4: {first} is {address}")
    # On the first node itself the name may be the loopback. Slurm's own record is the same on all nodes.
    trouble = f"{first} is {address} here" if address else f"{first} does not resolve here"
    other = node_addr(first)
    address = None if other is None else (other if _is_address(other) else resolve(other))
    if address is not None and not _is_loopback(address):
        return Meeting(address, f"first_host_ipv4: {trouble}; NodeAddr is {other}")
    if other is None:
        raise _nothing(
            MasterAddr.first_host_ipv4, first, f"{trouble}, and scontrol show node names no NodeAddr"
        )
    # The name serves: other nodes resolve it to the real address, and ranks of this node reach rank 0 by the loopback.
    return Meeting(first, f"first_host_ipv4: {trouble}, NodeAddr {other} too; the name is used")


def _nothing(strategy: MasterAddr, first: str, why: str) -> RendezvousError:
    return RendezvousError(
        f"cluster.master_addr={strategy.name}: no address of {first}: {why}; choose another strategy"
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(text: str) -> bool:
    return _is_address(text) and ipaddress.ip_address(text).is_loopback


def _ipv4(name: str) -> str | None:
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except (OSError, IndexError, UnicodeError):
        return None


def _node_addr(node: str) -> str | None:
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found.group(1) if done.returncode == 0 and found else None
