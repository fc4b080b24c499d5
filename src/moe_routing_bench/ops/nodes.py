"""Several NUMA nodes for the C++ kernels: the struct of nodes.h, and frozen weights near their threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from moe_routing_bench.core.topology import Topology


class CTaken(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("loop", "thread", "home", "node", "item", "begin", "end", "cpu")
    )


class CNodes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "pinned")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("memory", "first_N1", "cpus")),
        ("refused", ctypes.c_int64),
        ("log", ctypes.POINTER(CTaken)),
        *((name, ctypes.c_int64) for name in ("room", "taken")),
    )


@cache
def for_c(topology: Topology) -> CNodes:
    nodes = topology.nodes
    memory = [-1 if node.memory is None else node.memory for node in nodes]
    first_N1 = [0, *accumulate(len(node.cpus) for node in nodes)]
    cpus = [cpu for node in nodes for cpu in node.cpus]
    return CNodes(len(nodes), topology.pinned, *map(_int64, (memory, first_N1, cpus)))


def _int64(numbers: list[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def placed(panels: Tensor, panel_bytes: int, topology: Topology, library: ctypes.CDLL) -> Tensor:
    """Copies the panels, experts x bytes, to the memory of the nodes that own them. If the system refuses, it
    returns them unchanged and prints a line on stderr. library: the compiled nodes.h."""
    if not panels.nbytes:
        return panels
    if any(node.memory is None for node in topology.nodes):
        say_once("some nodes have no memory of their own, so their frozen weights may lie anywhere")
    memory = mmap.mmap(-1, panels.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MiB would hold panels of several nodes
    there = torch.frombuffer(memory, dtype=panels.dtype).view(panels.shape)
    elsewhere = ctypes.c_int64()
    number = panels.nbytes // panels.shape[0] // panel_bytes
    failed = library.mrb_copy_by_node(
        there.data_ptr(), panels.data_ptr(), panels.shape[0], number, panel_bytes, for_c(topology),
        ctypes.byref(elsewhere),
    )  # fmt: skip
    if failed:
        say_once(
            f"frozen weights are not placed on NUMA nodes, because the system refuses: {os.strerror(failed)} "
            "(containers often refuse; CAP_SYS_NICE allows it)"
        )
        return panels
    if elsewhere.value:
        say_once("some frozen weights are on another NUMA node than requested; its memory may be full")
    return there


def say_refused(nodes: CNodes) -> None:
    """Prints that threads could not be pinned, if that happened."""
    if nodes.refused:
        say_once(f"threads are not pinned to their NUMA nodes: {os.strerror(nodes.refused)}")


@cache
def say_once(sentence: str) -> None:
    print(f"moe_routing_bench: {sentence}", file=sys.stderr, flush=True)
