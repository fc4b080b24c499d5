"""expert_ffn.native on several pretended NUMA nodes: the same bits, every task once, one's own first.

Nodes "0-1;0-1 pinned" share this machine's processors, so threads belong to nodes by their number.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from child_process import python
from moe_routing_bench import ExpertWeights
from moe_routing_bench.core import cpp, topology
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.core.topology import Node, Topology, nodes_in_use, system_nodes, use_nodes
from moe_routing_bench.ops import nodes
from moe_routing_bench.ops.expert_ffn import native
from tiny_layers import Arguments, arguments

pytestmark = pytest.mark.slow

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

CPUS = ",".join(map(str, sorted(os.sched_getaffinity(0))))
HAVE_TWO = len(os.sched_getaffinity(0)) > 1
STORES = [None, "int8", "int4_g128", "int8_a8", "mxfp4"]
CALLS = {"x86_64": {"move_pages": 279, "get_mempolicy": 239, "set_mempolicy": 238}}.get(platform.machine())
on_x86 = pytest.mark.skipif(CALLS is None, reason="the numbers of the system calls are x86's")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(topology, "_asked", None)
    nodes.say_once.cache_clear()
    for_c = nodes.for_c
    for_c.cache_clear()
    yield
    for_c.cache_clear()


def pretended(count: int) -> str:
    return ";".join([CPUS] * count) + " pinned"


def run(args: Arguments, weights: ExpertWeights, store: str | None) -> Tensor:
    """After another call has filled the workspace, so that what is left out cannot be right by chance."""
    fill_workspace(args, weights, store)
    return native.run(*args[:3], weights, store=store)


def fill_workspace(args: Arguments, weights: ExpertWeights, store: str | None) -> None:
    x_TD, gate_TK, plan, _ = args
    native.run(torch.full_like(x_TD, 3.0), gate_TK, plan, weights, store=store)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("store", STORES)
def test_the_same_bits_for_any_nodes_and_threads(store: str | None, activation: str) -> None:
    for T, dtype in ((1, torch.float32), (7, torch.bfloat16), (64, torch.float32), (64, torch.bfloat16)):
        args = arguments(T, 2, 5, 296, 200, dtype=dtype, activation=activation, bias=True)
        assert use_nodes("off") is None
        plain = native.freeze(args[3], store=store)
        expected_TD = run(args, plain, store)
        for count in (2, 3, 4):
            assert len(use_nodes(pretended(count)).nodes) == count
            placed = native.freeze(args[3], store=store)
            for threads in (1, 2, 5):
                with torch_threads(threads):
                    for weights in (plain, placed):
                        assert torch.equal(run(args, weights, store), expected_TD), (T, count, threads)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("D", "F"), [(40, 24), (1, 1), (32, 48)])
def test_more_nodes_than_panels(D: int, F: int, store: str | None) -> None:
    for activation in ("swiglu", "relu"):
        args = arguments(9, 2, 5, D, F, activation=activation, bias=True)
        use_nodes("off")
        expected_TD = run(args, native.freeze(args[3], store=store), store)
        for count in (4, 9):
            use_nodes(pretended(count))
            weights = native.freeze(args[3], store=store)
            for threads in (1, 2):
                with torch_threads(threads):
                    assert torch.equal(run(args, weights, store), expected_TD), (count, threads)


def test_several_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a workspace holds: each group has counters of its own."""
    args = arguments(3000, 2, 3, 1000, 300)
    use_nodes("off")
    weights = native.freeze(args[3])
    expected_TD = run(args, weights, None)
    use_nodes(pretended(3))
    taken = watch(monkeypatch)
    with torch_threads(2):
        assert torch.equal(run(args, weights, None), expected_TD)
    assert {one.loop for one in taken()} >= set(range(4)), "one group: make it larger"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.skipif(not HAVE_TWO, reason="one processor")
def test_threads_that_are_not_pinned_belong_to_where_they_are(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0), reverse=turned)[:2]
    args = arguments(64, 2, 5, 296, 200)
    weights = native.freeze(args[3])
    expected_TD = run(args, weights, None)
    use_nodes(f"{cpus[0]};{cpus[1]}")
    taken = watch(monkeypatch)
    with torch_threads(2):
        for _ in range(5):
            assert torch.equal(run(args, weights, None), expected_TD)
    # a thread may be moved between the look and the task
    at_home = [one.cpu == cpus[one.home] for one in taken()]
    assert sum(at_home) > 0.7 * len(at_home)


# ---- every task once, one's own first


def watch(monkeypatch: pytest.MonkeyPatch, room: int = 20_000) -> Callable[[], list[nodes.CTaken]]:
    """What the last call did is what the result gives, in the order in which it was begun."""
    used = nodes_in_use()
    assert used is not None
    made, log = nodes.for_c.__wrapped__(used), (nodes.CTaken * room)()
    made.log, made.room = log, room
    monkeypatch.setattr(nodes, "for_c", lambda _: made)

    def taken() -> list[nodes.CTaken]:
        assert 0 < made.taken <= room
        return log[: made.taken]

    return taken


def share(panels: int, node: int, count: int) -> range:
    return range(panels * node // count, panels * (node + 1) // count)


def must_be_once(taken: list[nodes.CTaken], loop: int, items: int, panels: int, count: int) -> None:
    """Every panel of every item was computed once, as one of the node that owns it."""
    done = Counter()
    for one in taken:
        if one.loop == loop:
            assert set(range(one.begin, one.end)) <= set(share(panels, one.node, count))
            done.update((one.item, panel) for panel in range(one.begin, one.end))
    assert done == Counter((item, panel) for item in range(items) for panel in range(panels))


def must_begin_at_home(taken: list[nodes.CTaken], count: int) -> None:
    """A thread takes from the next node only what it takes after the last of its own."""
    far: dict[tuple[int, int], int] = {}
    for one in taken:
        distance = (one.node - one.home) % count
        assert distance >= far.get((one.loop, one.thread), 0)
        far[one.loop, one.thread] = distance


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[nodes.CTaken]]:
    def log(count: int, threads: int) -> list[nodes.CTaken]:
        args = arguments(64, 2, 5, 296, 200)
        assert int((args[2].count_E > 0).sum()) == 5
        use_nodes(pretended(count))
        weights = native.freeze(args[3])
        taken = watch(monkeypatch)
        with torch_threads(threads):
            native.run(*args[:3], weights)
        return taken()

    return log


FIRST, SECOND = 14, 10  # panels of 2 x 200 gated columns, of 296


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [2, 3, 4, 20])
def test_every_task_is_done_once_and_ones_own_first(count: int, threads: int, watched) -> None:
    taken = watched(count, threads)
    must_be_once(taken, 0, 5, FIRST, count)
    must_be_once(taken, 1, 1, SECOND, count)
    assert {one.loop for one in taken} == {0, 1}
    must_begin_at_home(taken, count)
    cpus = len(CPUS.split(","))
    by_number = {t: t * count * cpus // threads // cpus for t in range(threads)}
    assert all(one.home == by_number[one.thread] for one in taken)


def test_a_log_with_a_fault_is_noticed(watched) -> None:
    """The judges of the tests above, with what a kernel may do wrong."""
    taken = watched(3, 2)
    without = [one for one in taken if not (one.loop == 0 and one.node == 1)]
    with pytest.raises(AssertionError):
        must_be_once(without, 0, 5, FIRST, 3)
    with pytest.raises(AssertionError):
        must_be_once([*taken, *(one for one in taken if one.node == 2)], 1, 1, SECOND, 3)
    with pytest.raises(AssertionError):
        must_be_once(taken, 0, 5, FIRST, 2)
    with pytest.raises(AssertionError):
        must_begin_at_home(taken[::-1], 3)


TASK, NEXT_SHARE = "      task(i / strips, begin, end);", ", to = share_begin("
# changes of nodes.h, threads, what sees it: bits of the result, or the log alone
FAULTS = {
    "the last share left out": ({"k < nodes.count; k++": "k < nodes.count - 1; k++"}, 1, "bits"),
    "nobody helps": ({"k < nodes.count; k++": "k < 1; k++"}, 2, "bits"),
    "a panel between two shares left out": ({NEXT_SHARE: ", to = -1 + share_begin("}, 3, "bits"),
    "tasks done twice": ({TASK: TASK * 2}, 3, "bits"),
    "shares overlap": ({NEXT_SHARE: ", to = (node + 1 < nodes.count) + share_begin("}, 3, "bits"),
    "no barrier": (
        {"#pragma omp barrier": "", TASK: "if (omp_get_thread_num()) usleep(20000);" + TASK}, 3, "bits",
    ),
    "the next node's first": ({"(home + k) %": "(home + k + 1) %"}, 3, "log"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes, threads, by = FAULTS[fault]
    args = arguments(64, 2, 5, 296, 200)
    weights = native.freeze(args[3])
    expected_TD = run(args, weights, None)
    ops = native.SOURCE.parents[1]
    (tmp_path / "expert_ffn").mkdir()
    for path in (*ops.glob("*.h"), native.SOURCE):
        shutil.copy(path, tmp_path / path.relative_to(ops))
    header = tmp_path / "nodes.h"
    for old, new in changes.items():
        assert header.read_text().count(old) == 1
        header.write_text(header.read_text().replace(old, new))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "expert_ffn" / "native.cpp")
    native._library.cache_clear()
    try:
        use_nodes(pretended(3))
        with torch_threads(threads):
            fill_workspace(args, weights, None)
            taken = watch(monkeypatch)
            y_TD = native.run(*args[:3], weights)
        if by == "bits":
            assert not torch.equal(y_TD, expected_TD)
        else:
            assert torch.equal(y_TD, expected_TD)
            with pytest.raises(AssertionError):
                must_begin_at_home(taken(), 3)
    finally:
        native._library.cache_clear()


# ---- threads


@pytest.mark.skipif(not HAVE_TWO, reason="one processor")
def test_pinned_threads_stay_on_their_node_and_are_free_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    args = arguments(64, 2, 5, 296, 200)
    weights = native.freeze(args[3])
    use_nodes(f"{cpus[0]};{cpus[1]} pinned")
    taken = watch(monkeypatch)
    with torch_threads(2):
        native.run(*args[:3], weights)
    assert all(one.cpu == cpus[one.home] and one.home == one.thread for one in taken())
    for thread in Path("/proc/self/task").iterdir():
        assert os.sched_getaffinity(int(thread.name)) == os.sched_getaffinity(0) >= set(cpus)


def test_threads_that_cannot_be_pinned_are_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    args = arguments(7)
    weights = native.freeze(args[3])
    expected_TD = run(args, weights, None)
    absent = Topology((Node((1022,), 0), Node((1023,), 0)), pinned=True)
    monkeypatch.setattr(native, "nodes_in_use", lambda: absent)
    assert torch.equal(run(args, weights, None), expected_TD)
    said = capfd.readouterr().err
    assert "not pinned" in said and "Invalid argument" in said and said.count("\n") == 1


@pytest.mark.skipif(not HAVE_TWO, reason="one processor")
def test_no_thread_goes_where_it_may_not_be(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    allowed = os.sched_getaffinity(0)
    here, there = sorted(allowed)[:2]
    args = arguments(64, 2, 5, 296, 200)
    weights = native.freeze(args[3])
    use_nodes(f"{there};{here} pinned")
    taken = watch(monkeypatch)
    try:
        os.sched_setaffinity(0, {here})
        native.run(*args[:3], weights)
        assert os.sched_getaffinity(0) == {here}
    finally:
        os.sched_setaffinity(0, allowed)
    assert {(one.cpu, one.home) for one in taken()} == {(here, 1)}
    assert "not pinned" in capfd.readouterr().err


# ---- memory


def call(name: str, *args: object) -> int:
    assert CALLS is not None
    return ctypes.CDLL(None, use_errno=True).syscall(CALLS[name], *args)


def nodes_of_pages(tensor: Tensor) -> set[int]:
    size = os.sysconf("SC_PAGE_SIZE")
    first = tensor.data_ptr() // size * size
    pages = list(range(first, tensor.data_ptr() + tensor.nbytes, size))
    lies = (ctypes.c_int * len(pages))()
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    assert call("move_pages", 0, ctypes.c_ulong(len(pages)), addresses, None, lies, 0) == 0
    return set(lies)


def policy() -> tuple[int, int]:
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    assert call("get_mempolicy", ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, 0) == 0
    return mode.value, mask[0]


@on_x86
@pytest.mark.parametrize("store", STORES)
def test_frozen_weights_are_placed(store: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    """On the one node there is here; that pages of two nodes differ, only a machine with two can show."""
    args = arguments(7, 2, 5, 296, 200)
    as_usual, before = native.freeze(args[3], store=store), policy()
    used = use_nodes(pretended(3))
    assert used is not None and {node.memory for node in used.nodes} == {system_nodes()[0].memory}
    placed = native.freeze(args[3], store=store)
    for name in ("w_in_EDG", "w_out_EFD"):
        panels = getattr(placed, name).panels
        assert torch.equal(panels, getattr(as_usual, name).panels)
        assert nodes_of_pages(panels) == {system_nodes()[0].memory}
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        maps = {int(line.split()[0], 16): line for line in lines}
        mine = maps[max(first for first in maps if first <= panels.data_ptr())]
        assert f" N{system_nodes()[0].memory}=" in mine
    assert policy() == before
    if store is None:
        assert torch.equal(placed.w_in_EDG.clone(), args[3].w_in_EDG)
    assert capfd.readouterr().err == ""


@on_x86
def test_the_threads_own_policy_is_left_alone() -> None:
    interleave, mask = 3, (ctypes.c_ulong * 16)(1)
    args = arguments(7)
    assert call("set_mempolicy", interleave, mask, ctypes.c_ulong(1024)) == 0
    try:
        use_nodes(pretended(2))
        native.freeze(args[3])
        assert policy() == (interleave, 1)
    finally:
        assert call("set_mempolicy", 0, None, ctypes.c_ulong(0)) == 0


def test_a_node_that_is_not_there_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    args = arguments(7)
    expected_TD = run(args, native.freeze(args[3]), None)
    absent = Topology((Node((0,), 0), Node((1,), 900)))
    monkeypatch.setattr(native, "nodes_in_use", lambda: absent)
    for _ in range(2):
        assert torch.equal(run(args, native.freeze(args[3]), None), expected_TD)
    said = capfd.readouterr().err
    assert said.startswith("moe_routing_bench: frozen weights are not placed on NUMA nodes, because ")
    assert said.count("\n") == 1 and "Invalid argument" in said


# a filter of system calls as in a container: get_mempolicy is not permitted
IN_A_CONTAINER = """
import ctypes, struct, sys, torch
from moe_routing_bench.ops.expert_ffn import native
from moe_routing_bench.core.topology import use_nodes
from tiny_layers import arguments
torch.set_num_threads(1)
args = arguments(7)
before = native.freeze(args[3])
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x50000 | 1), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
handed = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(handed), 0, 0) == 0
use_nodes(sys.argv[2])
for _ in range(2):
    after = native.freeze(args[3])
    assert torch.equal(after.w_in_EDG.panels, before.w_in_EDG.panels)
native.run(*args[:3], after)
"""


@on_x86
def test_a_container_that_forbids_it_is_one_sentence() -> None:
    assert CALLS is not None
    said = python(IN_A_CONTAINER, CALLS["get_mempolicy"], pretended(2)).stderr
    assert "Operation not permitted" in said and "CAP_SYS_NICE" in said and said.count("\n") == 1


class FullNode:
    """Copies, and says that a share lies elsewhere."""

    @staticmethod
    def mrb_copy_by_node(to: int, from_: int, E: int, panels: int, size: int, _: object, out: object) -> int:
        ctypes.memmove(to, from_, E * panels * size)
        out._obj.value = 1  # type: ignore[attr-defined]
        return 0


def test_memory_that_is_full_or_nobodys_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    panels = torch.arange(4 * 3 * 1024.0).view(4, -1)
    two = Topology((Node((0,), 0), Node((1,), None)))
    assert torch.equal(nodes.placed(panels, 4096, two, FullNode()), panels)  # type: ignore[arg-type]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and "no memory" in said[0] and "full" in said[1]


def test_weights_of_files_are_not_placed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = arguments(7)
    use_nodes("off")
    expected_TD = run(args, native.freeze(args[3]), None)
    use_nodes(pretended(2))
    weights = native.freeze(args[3], kept=PackedFiles(tmp_path))
    assert torch.equal(run(args, weights, None), expected_TD)
    said = capfd.readouterr().err
    assert "not placed" in said and "files" in said and said.count("\n") == 1
