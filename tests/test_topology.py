"""Topology: the text form, Linux's files, what is in use, and how `mrb doctor` names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench.roofs import Roofs, store_roofs
from moe_routing_bench.core import topology
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.topology import Node, Topology, nodes_in_use, system_nodes, use_nodes

TWO = (Node((0, 1, 4, 5), 0), Node((2, 3, 6, 7), 1))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two nodes that this process may use as a whole, and nothing asked for."""
    monkeypatch.setattr(topology, "system_nodes", lambda: TWO)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in topology.BINDING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(topology, "_asked", None)
    topology._of.cache_clear()
    yield
    topology._of.cache_clear()


def linux(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    return folder


def test_the_example() -> None:
    made = Topology.parse("0-2,8;4-5 pinned")
    assert made == Topology((Node((0, 1, 2, 8)), Node((4, 5))), pinned=True)
    assert made.text == "0-2,8;4-5 pinned" and Topology.parse(made.text) == made
    assert Topology.parse("7;0,1") == Topology((Node((7,)), Node((0, 1))))


def test_nodes_have_the_memory_near_them() -> None:
    def memory(text: str) -> list[int | None]:
        return [node.memory for node in Topology.parse(text, TWO).nodes]

    assert memory("0,4;1,5;2-3;6-7") == [0, 0, 1, 1]
    assert memory("1-2;3") == [None, 1], "processors of two nodes are near neither's memory"
    assert [node.memory for node in Topology.parse("0;1").nodes] == [None, None]


BAD = {
    "": "a node has no processor",
    "0-1;": "a node has no processor",
    "on": "'on' is no number",
    "0-1;two": "'two' is no number",
    "0-1;-3": "'-3' is no number",
    "0x1;2": "'0x1' is no number",
    "\u0661;2": "is no number",
    "3-2;1": "3-2 does not rise",
    "0-1024;1": "ends past 1023",
    "0-99999;1": "is no number",
    "0,0;1": "a node has a processor twice",
    "0-1;1-2": "processor 1 is in two of them, which needs pinned",
    "0;1 pin": "only pinned may follow them",
    "0;1 pinned now": "only pinned may follow them",
    "auto please": "only pinned may follow them",
    ";".join(["0"] * 65) + " pinned": "there are at most 64",
    "0," * 6000: "at most 10000 letters, not 12000",
    "0;8": "this machine has no processor 8 in use",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_bad_texts_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError) as error:
        Topology.parse(text, TWO)
    sentence = str(error.value)
    assert BAD[text] in sentence and "\n" not in sentence and len(sentence) < 300


def test_a_text_in_the_environment_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRB_NODES", "0-1,two")
    with pytest.raises(ValueError, match="off, auto or"):
        nodes_in_use()
    with pytest.raises(ValueError, match="no processor 8"):
        use_nodes("0;8")
    assert topology._asked is None, "what was refused is not in use"


def test_linux_is_read(tmp_path: Path) -> None:
    """Node 1 is memory alone (CXL), node 3 has processors alone."""
    folder = linux(
        tmp_path, online="0-1,3-4", has_memory="0-1,4", node0__cpulist="0-1,4-5", node1__cpulist="",
        node3__cpulist="6", node4__cpulist="2-3",
    )  # fmt: skip
    assert system_nodes(folder) == (Node((0, 1, 4, 5), 0), Node((6,), None), Node((2, 3), 4))
    assert system_nodes(tmp_path / "absent") == ()


@pytest.mark.parametrize(
    ("name", "text"), [("online", "0;1"), ("node0__cpulist", "0-\x00"), ("has_memory", "9" * 20_000)]
)
def test_files_that_are_no_lists_are_refused(name: str, text: str, tmp_path: Path) -> None:
    linux(tmp_path, **{"online": "0", "has_memory": "0", "node0__cpulist": "0-1", name: text})
    with pytest.raises(ValueError, match=r"is no number") as error:
        system_nodes(tmp_path)
    assert len(str(error.value)) < 300


@pytest.mark.skipif(not topology.SYSTEM.exists(), reason="Linux without nodes")
def test_this_machine_is_read() -> None:
    cpus = [cpu for node in system_nodes() for cpu in node.cpus]
    assert cpus and len(set(cpus)) == len(cpus) and len(cpus) == os.cpu_count()


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MRB_NODES", raising=False)
    monkeypatch.setattr(topology, "system_nodes", lambda: pytest.fail("looked at the machine"))
    assert nodes_in_use() is None
    for text in ("off", "", "  "):
        assert use_nodes(text) is None and nodes_in_use() is None


def test_auto_is_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRB_NODES", "auto")
    assert nodes_in_use() == Topology(TWO)
    assert use_nodes("auto pinned") == Topology(TWO, pinned=True) == nodes_in_use()
    assert use_nodes("off") is None and nodes_in_use() is None, "a program's word goes before"
    assert use_nodes(None) == Topology(TWO)
    for allowed, left in (({1, 2, 3}, Topology((Node((1,), 0), Node((2, 3), 1)))), ({0, 5}, None)):
        topology._of.cache_clear()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: allowed)
        assert nodes_in_use() == left
    topology._of.cache_clear()
    monkeypatch.setenv("OMP_PROC_BIND", "spread")  # {0, 5} are then this thread's alone
    assert nodes_in_use() == Topology(TWO)


def test_one_node_is_as_good_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_nodes("0-1") is None
    for system in ((), TWO[:1]):
        topology._of.cache_clear()
        monkeypatch.setattr(topology, "system_nodes", lambda system=system: system)
        assert use_nodes("auto") is None and use_nodes("auto pinned") is None


def test_doctor_names_nodes_if_there_are_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    rates = {1: 1e10}
    store_roofs(Roofs(
        machine=this_machine().name, read_bytes=rates, copy_bytes=rates, gemm_flops={"float32": rates},
        seconds=1, how="C++",
    ))  # fmt: skip
    monkeypatch.setattr("moe_routing_bench.cli.doctor.system_nodes", lambda: TWO[:1])
    assert "of memory" not in mrb("doctor").stdout and mrb_json("doctor")["nodes"]["used"] is None
    monkeypatch.setattr("moe_routing_bench.cli.doctor.system_nodes", lambda: TWO)
    assert "2 of memory, processors 0-1,4-5;2-3,6-7" in mrb("doctor").stdout
    monkeypatch.setenv("MRB_NODES", "0-1;2-3")
    assert "kernels use 0-1;2-3" in " ".join(mrb("doctor").stdout.split())
    assert mrb_json("doctor")["nodes"] == {"system": "0-1,4-5;2-3,6-7", "used": "0-1;2-3"}
    monkeypatch.setenv("MRB_NODES", "0-1;2-")
    assert "'2-' is no number" in refused("doctor")
