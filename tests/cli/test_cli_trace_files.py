"""mrb model trace import, check and diff: what they print and write, and a sentence for each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import mrb, mrb_json, refused
from engine_routes import routes, saved, sglang, text, vllm
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.workloads.trace import read_trace, write_trace

WORDS = text(200)
IDS = routes(WORDS[:-1])


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    other = text(90, seed=4)
    file = saved(tmp_path / "vllm.json", [vllm(IDS, WORDS, 50), vllm(routes(other[:-1]), other, 9)])
    ran = mrb("model", "trace", "import", file, "--experts", 16, "--out", tmp_path / "t.safetensors")
    assert ran.stdout.startswith("288 tokens of 2 requests in 3 layers: ")
    return tmp_path / "t.safetensors"


def test_import_writes_what_was_chosen(imported: Path) -> None:
    trace = read_trace(imported)
    assert trace.documents == ("response 0, choice 0", "response 1, choice 0")
    assert "vllm.json" in trace.source and "no gates" in trace.source
    assert bool((trace.routing.gate_TK == 0.5).all()) and trace.routing.num_experts == 16
    for layer in range(3):
        part = trace.part(layer=layer, document=0)
        assert np.array_equal(part.routing.expert_TK.numpy(), IDS[:, layer])
        assert part.position_T is not None and part.position_T.tolist() == [*range(199)]
    assert "288 tokens" in mrb("model", "trace", "show", imported).stdout
    mrb("model", "trace", "check", imported)
    assert mrb_json("model", "trace", "check", imported)["faults"] == []


def test_dense_layers_are_left_out_by_name(tmp_path: Path) -> None:
    ids = np.concatenate([IDS[:, :1] * 0, IDS], axis=1)
    file, out = saved(tmp_path / "sglang.json", sglang(ids, WORDS, 50)), tmp_path / "t"
    sizes = ("--experts", 16, "--num-layers", 4, "--choices", 2)
    sentence = refused("model", "trace", "import", file, *sizes, "--out", out)
    assert "layer 0" in sentence and "zeros" in sentence and not out.exists()
    mrb("model", "trace", "import", file, *sizes, "--layers", "1-3", "--out", out)
    trace = read_trace(out)
    assert trace.layer_T is not None and trace.layer_T.unique().tolist() == [1, 2, 3]
    assert np.array_equal(trace.part(layer=2).routing.expert_TK.numpy(), IDS[:, 1])


def test_check_names_faults(tmp_path: Path) -> None:
    ids = IDS.copy()
    ids[:32], ids[70, 1] = 0, 5
    file = saved(tmp_path / "vllm.json", vllm(ids, WORDS, 50))
    head, zeros, repeated = mrb("model", "trace", "check", file, "--experts", 16, code=1).stdout.splitlines()
    assert "2 faults" in head and "vllm.json" in head
    assert zeros.startswith("  zero start: response 0, choice 0: positions 0 to 31 ")
    assert repeated.startswith("  repeated: response 0, choice 0, layer 1, position 70: expert 5 ")
    found = mrb_json("model", "trace", "check", file, "--experts", 16, code=1)["faults"]
    assert [fault["kind"] for fault in found] == ["zero start", "repeated"]
    refusal = refused("model", "trace", "import", file, "--experts", 16, "--out", tmp_path / "t")
    assert "1 more" in refusal and "mrb model trace check" in refusal


def written(path: Path, ids: np.ndarray, *, E: int = 16, **labels: torch.Tensor | None) -> Path:
    """A trace of tokens x layers x choices; labels replace its own."""
    T, L, K = ids.shape
    routings = [
        Routing(expert_TK=torch.from_numpy(ids[:, at]).long(), gate_TK=torch.full((T, K), 0.5), num_experts=E)
        for at in range(L)
    ]
    own = {
        "layer_T": torch.arange(L).repeat_interleave(T),
        "position_T": torch.arange(T).repeat(L),
        "document_T": torch.zeros(T * L).long(),
    }
    write_trace(path, *routings, source="test", **{**own, **labels})  # type: ignore[arg-type]
    return path


def test_check_looks_at_labels_too(tmp_path: Path) -> None:
    position_T, layer_T = torch.arange(199).repeat(3), torch.arange(3).repeat_interleave(199)
    path = tmp_path / "t"
    for labels, named in (
        (
            {"position_T": torch.where(position_T > 60, position_T + 1, position_T)},
            "position 60 .* 62",
        ),
        ({"position_T": torch.where(position_T > 60, position_T - 1, position_T)}, "position 60 .*twice"),
        (
            {"position_T": position_T + (layer_T == 1)},
            "row 0 of layer 1 .*position 1",
        ),
        ({"layer_T": torch.where(torch.arange(597) == 3, 1, layer_T)}, "layer 1 .*200.* layer 0 198"),
        ({"position_T": None, "document_T": None}, ""),
    ):
        written(path, IDS, **labels)
        found = mrb_json("model", "trace", "check", path, code=1 if named else 0)["faults"]
        assert not named or (found[0]["kind"] == "labels" and re.search(named, found[0]["sentence"])), found
    written(path, np.roll(IDS, 1, axis=0) * np.array([[[0], [1], [0]]]) + IDS * np.array([[[1], [0], [1]]]))
    found = mrb_json("model", "trace", "check", path, code=1)["faults"]
    assert found[0]["kind"] == "shifted" and "layer 1" in found[0]["sentence"]
    write_trace(
        path, Routing(expert_TK=torch.tensor([[0], [1]]), gate_TK=torch.ones(2, 1), num_experts=2), source="x"
    )
    assert mrb_json("model", "trace", "check", path)["faults"] == []


def test_diff_counts_by_layer_and_position(tmp_path: Path) -> None:
    other = IDS.copy()
    other[:, 1] = other[:, 1, ::-1]  # the order does not matter
    a, b = written(tmp_path / "a", IDS), tmp_path / "b"
    other[100:110, 2] = np.stack([(IDS[100:110, 2, 0] + 1) % 16, IDS[100:110, 2, 0]], axis=1)
    flipped = (other[:, 2, 0] != IDS[:, 2, 1]) & (np.arange(199) >= 100) & (np.arange(199) < 110)
    differs = flipped.sum() / 199 / 2
    written(b, other[:150], document_T=None)
    found = mrb_json("model", "trace", "diff", a, b)
    assert [layer["choices"] for layer in found["layers"][:2]] == [0, 0]
    assert found["layers"][2]["choices"] == pytest.approx(differs * 199 / 150)
    assert found["layers"][2]["flipped"] == pytest.approx(2 * differs * 199 / 150)
    assert found["whole"]["choices"] == pytest.approx(differs * 199 / 150 / 3)
    assert (found["only_a"], found["only_b"], found["scores_of"]) == (49, 0, None)
    spans = {(one["first"], one["last"]): one["tokens"] for one in found["positions"]}
    assert spans == {(0, 0): 1, (1, 7): 7, (8, 63): 56, (64, 511): 86}
    assert [one["choices"] > 0 for one in found["positions"]] == [False, False, False, True]
    ran = mrb("model", "trace", "diff", a, b)
    assert "49 tokens" in ran.stdout
    assert mrb_json("model", "trace", "diff", a, a)["whole"] == {
        "tokens": 199, "choices": 0, "flipped": 0, "margin": None, "usual": None
    }  # fmt: skip


def test_margins_are_of_the_scores_that_flipped(tmp_path: Path) -> None:
    score_TE = torch.tensor([[3.0, 2.0, 1.75, -1.0], [5.0, 4.0, 1.0, 0.0], [5.0, 4.0, -torch.inf, 0.5]])
    a, b = np.array([[[0, 1]], [[0, 1]], [[0, 1]]]), np.array([[[2, 0]], [[0, 1]], [[0, 2]]])
    written(tmp_path / "a", a, E=4, score_TE=score_TE)
    written(tmp_path / "b", b, E=4)
    for one, other in (("a", "b"), ("b", "a")):
        found = mrb_json("model", "trace", "diff", tmp_path / one, tmp_path / other)
        assert found["scores_of"] == ("A" if one == "a" else "B")
        # 2 less 1.75; the expert that A had ruled out has no margin
        assert found["whole"]["margin"] == pytest.approx(0.25)
        assert found["whole"]["usual"] == pytest.approx(3.0)  # of 0.25, 3 and 3.5
        assert found["whole"]["choices"] == pytest.approx(2 / 6)
    assert "usual margin" in mrb("model", "trace", "diff", tmp_path / "a", tmp_path / "b").stdout


def test_mistakes_are_named(imported: Path, tmp_path: Path) -> None:
    file, out, absent = tmp_path / "vllm.json", ("--out", tmp_path / "x"), tmp_path / "absent"
    (tmp_path / "half").write_bytes(imported.read_bytes()[:-50])
    one = written(tmp_path / "one", IDS[:, :1])
    eight = written(tmp_path / "eight", IDS % 16, E=17)
    far = written(tmp_path / "far", IDS, document_T=torch.full((597,), 9))
    twice = written(tmp_path / "twice", IDS, position_T=torch.zeros(597).long())
    for words, named in (
        (("import", file, *out), "--experts"),
        (("check", file, "--experts", 0), "--experts is 0"),
        (("import", file, "--experts", 8, *out), "0 to 7"),
        (("check", file, "--experts", 16, "--layers", "1-3"), "3 layers"),
        (("import", file, "--experts", 16, "--out", tmp_path / "no" / "t"), "not a folder"),
        (("check", absent), str(absent)),
        (("diff", absent, imported), str(absent)),
        (("check", tmp_path / "half"), "safetensors"),
        (("diff", one, imported), "0, 1, 2"),
        (("diff", eight, imported), "E=17 and K=2"),
        (("diff", far, imported), "in common"),
        (("diff", twice, imported), "twice"),
    ):
        assert named in refused("model", "trace", *words), words
