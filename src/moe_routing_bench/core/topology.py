"""Topology: which processors are near which memory, and whether kernels use that.

    MRB_NODES=off                               the default: kernels see one machine
    MRB_NODES=auto                              the NUMA nodes that Linux reports
    MRB_NODES="0-15,32-47;16-31,48-63"          the processors of each node, given by the user
    MRB_NODES="auto pinned"                     a kernel's threads also stay on their node

use_nodes(text) does the same inside a program. One node has the same effect as off.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_routing_bench.core.names import ranges, read_numbers

SYSTEM = Path("/sys/devices/system/node")
MAX_CPUS = 1024  # a cpu_set_t of the C library
MAX_NODES = 64
MAX_TEXT = 10_000
PINNED = "pinned"
# if one of these is set, OpenMP has bound this thread, so its processors are not those of the process
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class Node:
    """Node((0, 1), memory=0): processors 0 and 1, and the system's number of the memory near them; None if
    that is not one node's memory."""

    cpus: tuple[int, ...]
    memory: int | None = None


@dataclass(frozen=True)
class Topology:
    """The nodes that share the work.

    Topology.parse("0-2,8;4-5 pinned") is Topology((Node((0, 1, 2, 8)), Node((4, 5))), pinned=True), and its
    text is "0-2,8;4-5 pinned" again. With system=system_nodes() each node also has its memory.
    """

    nodes: tuple[Node, ...]
    pinned: bool = False

    @staticmethod
    def parse(text: str, system: tuple[Node, ...] = ()) -> Topology:
        """Reads the processors of each node. A processor may be in several nodes only if threads are pinned;
        threads then go to nodes by their number. Tests simulate a topology this way."""
        if len(text) > MAX_TEXT:
            raise ValueError(f"nodes are at most {MAX_TEXT} letters, not {len(text)}")
        listed, _, word = text.strip().partition(" ")
        try:
            if word.strip() not in ("", PINNED):
                raise ValueError(f"only {PINNED} may follow them")
            nodes = tuple(
                _node(tuple(read_numbers(part, MAX_CPUS - 1)), system) for part in listed.split(";")
            )
            if len(nodes) > MAX_NODES:
                raise ValueError(f"there are at most {MAX_NODES}")
            twice = [cpu for cpu, n in Counter(cpu for node in nodes for cpu in node.cpus).items() if n > 1]
            if twice and not word:
                raise ValueError(f"processor {twice[0]} is in two of them, which needs {PINNED}")
        except ValueError as why:
            raise ValueError(
                f'nodes are off, auto or processors as in "0-15,32-47;16-31,48-63", not {text[:80]!r}: {why}'
            ) from None
        return Topology(nodes, pinned=bool(word))

    @property
    def text(self) -> str:
        return ";".join(ranges(node.cpus) for node in self.nodes) + (f" {PINNED}" if self.pinned else "")


def system_nodes(folder: Path = SYSTEM) -> tuple[Node, ...]:
    """The nodes with processors that Linux reports; none on other systems."""
    if not (folder / "online").exists():
        return ()
    with_memory = _read(folder / "has_memory") if (folder / "has_memory").exists() else ()
    nodes = [
        Node(_read(folder / f"node{number}" / "cpulist"), number if number in with_memory else None)
        for number in _read(folder / "online")
    ]
    return tuple(node for node in nodes if node.cpus)


_asked: str | None = None


def use_nodes(text: str | None) -> Topology | None:
    """Overrides MRB_NODES for this process; None returns to MRB_NODES. Freeze weights afterwards to place
    them on the nodes. Returns the topology now in use; raises ValueError if there are no such nodes."""
    global _asked
    topology = _of(text, os.getpid()) if text is not None else None
    _asked = text
    return nodes_in_use() if text is None else topology


def nodes_in_use() -> Topology | None:
    """None: kernels see one machine."""
    return _of(os.environ.get("MRB_NODES", "off") if _asked is None else _asked, os.getpid())


@cache  # for each process, because a forked worker may have fewer processors
def _of(text: str, process: int) -> Topology | None:
    words = text.split()
    if words in ([], ["off"]):
        return None
    system = system_nodes()
    if words[0] == "auto" and words[1:] in ([], [PINNED]):
        allowed = _allowed()
        mine = (Node(tuple(c for c in n.cpus if allowed is None or c in allowed), n.memory) for n in system)
        topology = Topology(tuple(node for node in mine if node.cpus), pinned=PINNED in words)
    else:
        topology = Topology.parse(text, system)
    return topology if len(topology.nodes) > 1 else None


def _allowed() -> set[int] | None:
    """The processors of this process; None if unknown, and then all are used."""
    if any(name in os.environ for name in BINDING) or not hasattr(os, "sched_getaffinity"):
        return None
    return os.sched_getaffinity(0)


def _node(cpus: tuple[int, ...], system: tuple[Node, ...]) -> Node:
    if not cpus:
        raise ValueError("a node has no processor")
    if len(set(cpus)) < len(cpus):
        raise ValueError("a node has a processor twice")
    near = [[node.memory for node in system if cpu in node.cpus] for cpu in cpus] if system else []
    if [] in near:
        raise ValueError(f"this machine has no processor {cpus[near.index([])]} in use")
    memory = {number for numbers in near for number in numbers}
    return Node(cpus, memory.pop() if len(memory) == 1 else None)


def _read(path: Path) -> tuple[int, ...]:
    with path.open() as file:
        text = file.read(MAX_TEXT).strip()
    try:
        return tuple(read_numbers(text, MAX_CPUS - 1))
    except ValueError as why:
        raise ValueError(f"{path} lists no numbers: {why}") from None
