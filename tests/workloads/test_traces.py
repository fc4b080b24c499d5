"""Traces: written, replayed, cut into parts and summarised; and files that are damaged get one sentence."""

from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from damaged_files import apart, joined
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.workloads.trace import ENTRY, Trace, ids_checksum, read_trace, write_trace
from moe_routing_bench.workloads.trace_summary import Overlap, lift_EE, summarise
from moe_routing_bench.workloads.workload import make_workload


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Routing]:
    path = tmp_path / "one, two=(3).safetensors"
    routing = make_workload("zipf(1)", T=50, E=8, K=2).routing
    write_trace(path, routing, source="test", position_T=torch.arange(50), layer_T=torch.zeros(50).long())
    return path, routing


def test_a_trace_comes_back_as_it_was(recorded):
    path, routing = recorded
    trace = read_trace(path)
    assert torch.equal(trace.routing.expert_TK, routing.expert_TK)
    assert torch.equal(trace.routing.gate_TK, routing.gate_TK)
    assert trace.routing.num_experts == 8 and not trace.routing.ragged and trace.source == "test"
    assert trace.position_T is not None and trace.position_T.tolist() == [*range(50)]
    assert trace.layer_T is not None and trace.document_T is None
    assert trace.checksum == ids_checksum(routing.expert_TK.int(), 8)
    assert [*path.parent.iterdir()] == [path]
    write_trace(path, routing, routing, source="twice")
    assert read_trace(path).routing.num_tokens == 100


def test_a_trace_is_replayed_around_its_end(recorded, tmp_path):
    path, routing = recorded
    first, second = (make_workload(f"trace({path})", T=40, E=8, K=2, W=4, step=step) for step in (0, 1))
    replayed_TK = torch.cat([first.routing.expert_TK, second.routing.expert_TK])
    starts = [s for s in range(50) if torch.equal(replayed_TK, routing.expert_TK.repeat(3, 1)[s : s + 80])]
    assert len(starts) == 1
    assert torch.equal(first.routing.gate_TK, routing.gate_TK.repeat(2, 1)[starts[0] :][:40])
    assert first.name == f"trace({path})" == make_workload(first.name, T=1, E=8, K=2).name
    seeds = {make_workload(f"trace(file={path})", T=40, E=8, K=2, seed=seed).checksum for seed in range(9)}
    assert len(seeds) > 4
    moved = path.rename(tmp_path / "moved")
    assert make_workload(f"trace({moved})", T=40, E=8, K=2, W=4).checksum == first.checksum
    for E, K, reason in ((16, 2, "E=8 and K=2, not E=16"), (8, 3, "ask for the sizes")):
        with pytest.raises(ValueError, match=reason):
            make_workload(f"trace({moved})", T=4, E=E, K=K)
    write_trace(moved, make_workload("balanced", T=0, E=8, K=2).routing, source="empty")
    with pytest.raises(ValueError, match="no tokens"):
        make_workload(f"trace({moved})", T=4, E=8, K=2)


def about(tensors: dict[str, torch.Tensor], **change: Any) -> dict[str, str]:
    checksum = (
        ids_checksum(tensors["expert_TK"], 8) if tensors.get("expert_TK", torch.zeros(0)).ndim == 2 else ""
    )
    document = {"version": 1, "num_experts": 8, "checksum": checksum, "source": "test", **change}
    return {ENTRY: json.dumps({key: value for key, value in document.items() if value is not None})}


IDS, GATES = torch.tensor([[0, 1], [7, 2], [3, 4]]), torch.full((3, 2), 0.5)


WRONG_TENSORS = {
    "no ids": ({"expert_TK": None}, "has no tensor expert_TK"),
    "no gates": ({"gate_TK": None}, "has no tensor gate_TK"),
    "float ids": ({"expert_TK": IDS.float()}, "expert_TK in .* is F32; it must be I32 or I64"),
    "short ids": ({"expert_TK": IDS.short()}, "is I16; it must be I32 or I64"),
    "half gates": ({"gate_TK": GATES.half()}, "gate_TK in .* is F16; it must be F32"),
    "flat ids": ({"expert_TK": IDS.flatten()}, r"shape \[6\]; it must be tokens x choices"),
    "too few gates": ({"gate_TK": GATES[:2]}, r"gate_TK in .* has shape \[2, 2\]"),
    "long label": ({"layer_T": torch.zeros(4).long()}, r"layer_T in .* has shape \[4\]"),
    "float label": ({"position_T": torch.zeros(3)}, "position_T in .* is F32; it must be I64"),
    "large id": ({"expert_TK": IDS + 1}, r"chose expert 8, outside 0 \.\. 7"),
    "negative id": ({"expert_TK": IDS - 1}, "chose expert -1, outside"),
    "repeated id": ({"expert_TK": IDS.clamp(max=2)}, "token 1 chose expert 2 twice"),
    "gate is NaN": ({"gate_TK": GATES * math.nan}, "gate of token 0, choice 0 is nan"),
}


WRONG_WORDS = {
    "other version": ({"version": 2}, "trace of version 2; this library reads version 1"),
    "no version": ({"version": None}, "trace of version None"),
    "wrong checksum": ({"checksum": "0" * 64}, "the file was changed or damaged"),
    "no checksum": ({"checksum": None}, r"must have checksum \(str\)"),
    "experts in words": ({"num_experts": "eight"}, r"must have num_experts \(int\)"),
    "too few experts": ({"num_experts": 5}, "chose expert 7, outside"),
    "no source": ({"source": None}, r"must have source \(str\)"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_refused(change, reason, tmp_path):
    tensors = {"expert_TK": IDS, "gate_TK": GATES, **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "trace", metadata=about(tensors))
    with pytest.raises(ValueError, match=reason) as caught:
        read_trace(tmp_path / "trace")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "reason"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_metadata_is_refused(change, reason, tmp_path):
    tensors = {"expert_TK": IDS, "gate_TK": GATES}
    save_file(tensors, tmp_path / "trace", metadata=about(tensors))
    read_trace(tmp_path / "trace")
    save_file(tensors, tmp_path / "trace", metadata=about(tensors, **change))
    with pytest.raises(ValueError, match=reason):
        read_trace(tmp_path / "trace")


DAMAGE = {
    "empty": (lambda data: b"", "not a safetensors file"),
    "seven bytes": (lambda data: data[:7], "not a safetensors file"),
    "end cut off": (lambda data: data[:-9], "not a whole safetensors file"),
    "header cut off": (lambda data: data[:60], "its end is missing"),
    "a pickle": (lambda data: b"\x80\x04N.", "not a safetensors file"),
    "not JSON": (lambda data: struct.pack("<Q", 9) + b"nonsense!" + data, "header is not JSON"),
    "not UTF-8": (lambda data: struct.pack("<Q", 2) + b"\xff\xff" + data, "header is not JSON"),
    "nested too deep": (lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000, "header is not JSON"),
    "not an object": (lambda data: struct.pack("<Q", 2) + b"[]" + data, "header is not an object"),
    "no metadata": (lambda data: struct.pack("<Q", 2) + b"{}" + data, "it is not a routing trace"),
    "giant header": (lambda data: struct.pack("<Q", 2 << 20) + b" " * (2 << 20), "header of 2,097,152 bytes"),
    "entry not JSON": (lambda data: data.replace(b'{\\"version', b'[\\"version'), "entry of .* is not JSON"),
    "one id changed": (lambda data: _flip_an_id(data), "the file was changed or damaged"),
}


def _flip_an_id(data: bytes) -> bytes:
    start = 8 + struct.unpack("<Q", data[:8])[0]
    begin = start + json.loads(data[8:start])["expert_TK"]["data_offsets"][0]
    assert data[begin : begin + 8] == struct.pack("<q", 0)
    return data[:begin] + struct.pack("<q", 5) + data[begin + 8 :]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_refused(damage, reason, tmp_path):
    tensors = {"expert_TK": IDS, "gate_TK": GATES}
    save_file(tensors, tmp_path / "trace", metadata=about(tensors))
    data = (tmp_path / "trace").read_bytes()
    (tmp_path / "trace").write_bytes(damage(data))
    with pytest.raises(ValueError, match=reason) as caught:
        read_trace(tmp_path / "trace")
    assert "\n" not in str(caught.value)


def test_a_file_over_the_limit_is_not_read(recorded):
    path, _ = recorded
    with pytest.raises(ValueError, match="max_bytes"):
        read_trace(path, max_bytes=100)


def test_what_is_no_trace_is_not_written(tmp_path):
    good = make_workload("balanced", T=4, E=8, K=2).routing
    other = make_workload("balanced", T=4, E=16, K=2).routing
    ragged = good.masked(torch.tensor([True, True, False, True]))
    for routings, labels, reason in (
        ((), {}, "at least one routing"),
        ((good, other), {}, "write a file for each"),
        ((ragged,), {}, "chose expert -1, outside"),
        ((good,), {"layer_T": torch.zeros(3).long()}, r"layer_T has shape \[3\] for 4 tokens"),
    ):
        with pytest.raises(ValueError, match=reason):
            write_trace(tmp_path / "trace", *routings, source="test", **labels)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """65 tokens of two documents in three layers."""
    path = tmp_path / "a, b=(1).safetensors"
    labels = {
        "layer_T": torch.arange(3).repeat_interleave(65),
        "position_T": torch.cat([torch.arange(40), torch.arange(25)]).repeat(3),
        "document_T": torch.tensor([0] * 40 + [1] * 25).repeat(3),
    }
    routings = [make_workload("zipf(1)", T=65, E=8, K=3, seed=seed).routing for seed in range(3)]
    write_trace(path, *routings, source="a test", documents=["one", "two"], **labels)
    return path


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("layer=7", "layer 7"),
        ("document=2", "document 2"),
        (f"layer={10**30}", "no layer 1000000"),
        ("layer=two", "whole number"),
        ("layer=1,layer=2", "each once"),
    ],
)
def test_parts_that_are_not_there_are_refused(labelled: Path, words: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make_workload(f"trace({labelled},{words})", T=4, E=8, K=3)
    assert "\n" not in str(caught.value)


def test_a_trace_without_labels_has_no_parts(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", make_workload("zipf(1)", T=20, E=8, K=2).routing, source="test")
    with pytest.raises(ValueError, match="which layer"):
        make_workload(f"trace({tmp_path / 't'},layer=0)", T=4, E=8, K=2)
    one = summarise(read_trace(tmp_path / "t"))
    assert len(one) == 1 and one[0].layer is None and one[0].overlap is None


def test_a_file_written_anew_is_read_anew(labelled: Path) -> None:
    name = f"trace({labelled},layer=0)"
    before = make_workload(name, T=65, E=8, K=3)
    write_trace(
        labelled, make_workload("one_expert", T=7, E=8, K=3).routing, source="x", layer_T=torch.zeros(7)
    )
    assert make_workload(name, T=65, E=8, K=3).checksum != before.checksum


@pytest.mark.parametrize("name", ["expert_TK", "gate_TK", "layer_T", "position_T", "document_T"])
def test_one_changed_bit_anywhere_is_noticed(labelled: Path, name: str) -> None:
    header, data = apart(labelled.read_bytes())
    begin, end = header[name]["data_offsets"]
    for place in (begin, (begin + end) // 8 * 4, end - 4):
        changed = bytearray(data)
        changed[place] ^= 1
        labelled.write_bytes(joined(header, bytes(changed)))
        for use in (read_trace, lambda path: make_workload(f"trace({path})", T=4, E=8, K=3)):
            with pytest.raises(ValueError, match=r"damaged|outside|twice") as caught:
                use(labelled)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("source", "another", "written with"),
        ("documents", ["one", "three"], "written with"),
        ("documents", None, "list of"),
        ("documents", [1], "list of"),
        ("documents", ["\ud800"], "half a character"),
        ("content", 5, "checksum"),
        ("content", "", "written with"),
        ("num_experts", 9, "damaged"),
    ],
)
def test_changed_words_are_noticed(labelled: Path, key: str, value: Any, reason: str) -> None:
    header, data = apart(labelled.read_bytes())
    words = json.loads(header["__metadata__"][ENTRY])
    header["__metadata__"][ENTRY] = json.dumps({**words, key: value})
    labelled.write_bytes(joined(header, data))
    with pytest.raises(ValueError, match=reason):
        read_trace(labelled)


def test_words_too_long_to_be_read_are_not_written(tmp_path: Path) -> None:
    routing = make_workload("zipf(1)", T=2, E=8, K=2).routing
    with pytest.raises(ValueError, match="a reader"):
        write_trace(tmp_path / "t", routing, source="x", documents=["y" * 300_000])
    with pytest.raises(ValueError, match="half a character"):
        write_trace(tmp_path / "t", routing, source="\ud800")
    assert not [*tmp_path.iterdir()]


def hostile(draw: random.Random) -> dict[str, Any]:
    """Labels nobody would record: the same file, other numbers."""
    T, E = 12, draw.choice([4, 4097, 1 << 20])
    K = draw.choice([2, 3]) if E == 4 else draw.choice([2, 65])
    odd = [0, -1, 2**63 - 1, -(2**63), 2**40, 7]
    ids = torch.stack([(draw.randrange(E) + torch.arange(K)) % E for _ in range(T)])
    labels = {
        name: torch.tensor([draw.choice(odd) for _ in range(T)])
        for name in ("layer_T", "position_T", "document_T")
        if draw.random() < 0.9
    }
    gates = torch.rand(T, K) * draw.choice([0.0, 1.0, -1.0, 1e30])
    routing = Routing(expert_TK=ids, gate_TK=gates, num_experts=E, ragged=False)
    documents = draw.choice([[], ["\x1b[2J"], ["a"] * 50])
    return {"routing": routing, "documents": documents, **labels}


def test_odd_labels_give_a_summary_or_a_sentence(tmp_path: Path) -> None:
    draw, refused = random.Random(5), 0
    for _ in range(60):
        given = hostile(draw)
        write_trace(tmp_path / "t", given.pop("routing"), source="x", **given)
        trace = read_trace(tmp_path / "t")
        try:
            for one in summarise(trace):
                assert 0 <= one.top_gate <= 1 and sum(one.load_E) == one.tokens * trace.routing.num_choices
                assert one.overlap is None or 0 <= one.overlap.kept <= 1
        except ValueError as error:
            assert "at most" in str(error)
            refused += 1
    assert 20 < refused < 55


def test_too_many_layers_are_not_summarised(tmp_path: Path) -> None:
    routing = make_workload("uniform", T=1100, E=4, K=1).routing
    write_trace(tmp_path / "t", routing, source="x", layer_T=torch.arange(1100))
    with pytest.raises(ValueError, match="1,100 layers"):
        summarise(read_trace(tmp_path / "t"))


def small_trace(**labels: Tensor) -> Trace:
    ids, gate_TK = torch.tensor([[0, 1], [0, 2], [0, 2], [3, 1]]), torch.tensor([[0.75, 0.25]]).repeat(4, 1)
    routing = Routing(expert_TK=ids, gate_TK=gate_TK, num_experts=4, ragged=False)
    return Trace(routing=routing, source="", checksum="", **labels)


def test_the_worked_examples() -> None:
    labels = {
        "layer_T": torch.full((4,), 5),
        "position_T": torch.arange(4),
        "document_T": torch.zeros(4).long(),
    }
    (one,) = summarise(small_trace(**labels))
    assert (one.layer, one.tokens, one.load_E, one.dead_experts) == (5, 4, (3, 2, 2, 1), 0)
    assert one.max_over_mean == 1.5 and one.gini == 0.1875 and one.top_gate == 0.75
    assert one.entropy_bits == pytest.approx(1.9056, abs=1e-4) and one.document_bits is None
    assert one.overlap is not None and one.overlap.neighbours == 3 and one.overlap.kept == 0.5
    assert one.overlap.by_chance == one.overlap.by_document == pytest.approx(10 / 24)


def test_overlap_against_a_loop_over_pairs() -> None:
    draw = torch.Generator().manual_seed(1)
    T, E, K = 60, 7, 3
    ids = torch.stack([torch.randperm(E, generator=draw)[:K] for _ in range(T)])
    document_T = torch.arange(T) % 3 * 10
    position_T = torch.cat([torch.randperm(20, generator=draw) * (2 if d == 1 else 1) for d in range(3)])
    position_T = position_T.view(3, 20).T.flatten()
    routing = Routing(expert_TK=ids, gate_TK=torch.ones(T, K), num_experts=E, ragged=False)
    overlap = Overlap.of(routing, position_T, document_T)
    sets = [set(row) for row in ids.tolist()]
    where = [*zip(document_T.tolist(), position_T.tolist(), strict=True)]
    both = [(a, b) for a in range(T) for b in range(T) if a != b]
    share = {(a, b): len(sets[a] & sets[b]) / K for a, b in both}
    beside = [(a, b) for a, b in both if where[a][0] == where[b][0] and where[b][1] == where[a][1] + 1]
    assert overlap is not None and overlap.neighbours == len(beside) == 38  # document 1 has gaps everywhere
    assert overlap.kept == pytest.approx(sum(share[pair] for pair in beside) / len(beside))
    assert overlap.by_chance == pytest.approx(sum(share.values()) / len(both))
    within = {
        d: [share[a, b] for a, b in both if where[a][0] == where[b][0] == d] for d in {d for d, _ in where}
    }
    wanted = sum(sum(within[where[a][0]]) / len(within[where[a][0]]) for a, _ in beside) / len(beside)
    assert overlap.by_document == pytest.approx(wanted)
    assert Overlap.of(routing, position_T * 5, document_T) is None


def test_lift_is_one_for_independent_pairs_and_counts_the_rest() -> None:
    even = make_workload("uniform", T=20_000, E=6, K=2).routing
    lift = lift_EE(even)
    assert lift.diagonal().isnan().all()
    assert (lift[~torch.eye(6, dtype=torch.bool)] - 1).abs().max() < 0.1
    # pairs 0-1 and 2-3 only: of the 12 ordered pairs 4 are counted, each 3 times as often as by popularity
    twins = replace(even, expert_TK=torch.tensor([[0, 1], [2, 3]]).repeat(10, 1), gate_TK=torch.ones(20, 2))
    lift = lift_EE(replace(twins, num_experts=5))
    assert lift[0, 1] == lift[3, 2] == 3 and lift[0, 2] == 0 and lift[4].isnan().all()
