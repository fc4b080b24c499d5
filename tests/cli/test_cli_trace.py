"""mrb model trace record and show: what they print, draw and write, and a sentence for each mistake."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench.cli.trace import read_layers
from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.names import ArgumentError
from moe_routing_bench.workloads.trace import read_trace, write_trace
from moe_routing_bench.workloads.workload import make_workload

pytest.importorskip("transformers")

import tiny_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE after 30 steps on a few lines: enough to leave the initial routing."""
    model = tiny_models.make(
        "qwen3_moe", num_hidden_layers=3, vocab_size=256, max_position_embeddings=128
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    token_BN = torch.tensor([list(b"the cat sat on the mat, the rat on the hat. ")])
    for _ in range(30):
        optimizer.zero_grad()
        model(input_ids=token_BN, labels=token_BN).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    one, two = folder / "one.txt", folder / "two.txt"
    one.write_text("the cat sat on the mat. " * 20)
    two.write_bytes(b"Zw\xc3\xb6lf Boxk\xc3\xa4mpfer, \xff\xfe and bytes that are no text " * 9)
    return one, two


@pytest.fixture(scope="module")
def trace(checkpoint: Path, two_texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trace") / "routing.safetensors"
    ran = mrb(
        "model", "trace", "record", "--model", checkpoint, "--tokenizer", "bytes", "--text", two_texts[0],
        "--text", two_texts[1], "--tokens", 300, "--batch", 2, "--sequence", 32, "--out", out,
    )  # fmt: skip
    assert "300 tokens in 3 layers, 8 experts, 2 per token" in ran.stdout and str(out) in ran.stdout
    return out


def test_record_writes_what_was_asked_for(trace: Path, checkpoint: Path) -> None:
    written = read_trace(trace)
    assert written.routing.num_tokens == 900 and written.documents == ("one.txt", "two.txt")
    assert written.layer_T is not None and written.layer_T.unique().tolist() == [0, 1, 2]
    one = written.part(layer=1, document=1)
    assert one.position_T is not None and one.position_T.tolist() == [*range(150)]
    assert all(word in written.source for word in (str(checkpoint), "bytes", "transformers"))


def test_layers_and_short_texts(checkpoint: Path, two_texts: tuple[Path, Path], tmp_path: Path) -> None:
    mrb(
        "model", "trace", "record", "--model", checkpoint, "--tokenizer", "bytes", "--text", two_texts[0],
        "--layers", "0,2", "--tokens", 100_000, "--dtype", "bfloat16", "--scores", "--out", tmp_path / "t",
    )  # fmt: skip
    written = read_trace(tmp_path / "t")
    assert written.routing.num_tokens == 2 * 480  # all there is
    assert written.layer_T is not None and written.layer_T.unique().tolist() == [0, 2]
    assert written.score_TE is not None and written.score_TE.shape == (960, 8)


def test_show_tells_the_numbers(trace: Path) -> None:
    ran = mrb("model", "trace", "show", trace)
    lines = ran.stdout.splitlines()
    for words in ("routing.safetensors", "300 tokens", "3 layers", "8 experts", "2 per token"):
        assert words in lines[0], words
    assert "one.txt (150 tokens)" in ran.stdout and "two.txt (150 tokens)" in ran.stdout
    top = next(place for place, line in enumerate(lines) if line.startswith("layer"))
    assert lines[top].split()[:3] == ["layer", "max/mean", "entropy"]
    shown = mrb_json("model", "trace", "show", trace)
    assert [layer["layer"] for layer in shown["layers"]] == [0, 1, 2]
    for place, layer in enumerate(shown["layers"]):
        replayed = make_workload(f"trace({trace},layer={place})", T=300, E=8, K=2)
        wanted = LoadStatistics.of(replayed.routing).to_dict()
        assert layer["max_over_mean"] == wanted["max_over_mean"] and layer["gini"] == wanted["gini"]
        assert layer["load_E"] == replayed.routing.load_E().tolist()
        cells = lines[top + 1 + place].split()
        assert cells[:2] == [str(place), f"{wanted['max_over_mean']:.2f}"]
        assert layer["overlap"]["neighbours"] == 298
    alone = mrb_json("model", "trace", "show", trace, "--document", 1)
    assert [layer["tokens"] for layer in alone["layers"]] == [150] * 3
    assert alone["layers"][0]["document_bits"] is None


def test_show_draws(trace: Path, tmp_path: Path) -> None:
    for name, options in (("a.png", ()), ("b.svg", ("--layer", 2))):
        mrb("model", "trace", "show", trace, "--picture", tmp_path / name, *options)
        assert (tmp_path / name).stat().st_size > 10_000
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "b.svg").read_text()
    assert "<svg" in svg and "layer 2" in svg


@pytest.mark.parametrize(("K", "labelled"), [(1, True), (2, False)])
def test_odd_traces_are_drawn_too(K: int, labelled: bool, tmp_path: Path) -> None:
    routing = make_workload("one_expert", T=30, E=9, K=K).routing
    labels = {"position_T": torch.arange(30), "document_T": torch.arange(30)} if labelled else {}
    write_trace(tmp_path / "t", routing, source="\x1b]0;x" + "x" * 2000, documents=["\x1b]0;y"], **labels)
    ran = mrb("model", "trace", "show", tmp_path / "t", "--picture", tmp_path / "t.png")
    assert "\x1b" not in ran.stdout and len(ran.stdout) < 3000 and (tmp_path / "t.png").exists()


def test_mistakes_in_show_are_named(trace: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refused("model", "trace", "show", tmp_path / "absent")
    assert "document 9" in refused("model", "trace", "show", trace, "--document", 9)
    assert "layer 9" in refused(
        "model", "trace", "show", trace, "--layer", 9, "--picture", tmp_path / "x.png"
    )
    assert "x.doc" in refused("model", "trace", "show", trace, "--picture", tmp_path / "x.doc")
    write_trace(tmp_path / "t", make_workload("uniform", T=0, E=4, K=1).routing, source="x")
    assert "no tokens" in refused("model", "trace", "show", tmp_path / "t")
    write_trace(tmp_path / "t", make_workload("uniform", T=9, E=5000, K=1).routing, source="x")
    assert "5,000 experts" in refused("model", "trace", "show", tmp_path / "t")


def test_damaged_files_get_a_sentence_from_show_and_replay(trace: Path, tmp_path: Path) -> None:
    content, draw, path = trace.read_bytes(), random.Random(3), tmp_path / "t"
    head = 8 + int.from_bytes(content[:8], "little")
    for _ in range(25):
        changed = bytearray(content)
        if draw.random() < 0.3:
            del changed[draw.randrange(len(changed)) :]
        else:
            changed[draw.randrange(head, len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        refused("model", "trace", "show", path)
        with pytest.raises(ValueError, match=r".{15,}") as caught:
            make_workload(f"trace({path},layer=0)", T=8, E=8, K=2)
        assert str(caught.value).isprintable()


def record(checkpoint: Any, text: Any, *more: Any) -> tuple[Any, ...]:
    return "model", "trace", "record", "--model", checkpoint, "--text", text, "--tokenizer", "bytes", *more


def test_mistakes_in_record_are_named(
    checkpoint: Path, two_texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, out = two_texts[0], ("--out", tmp_path / "t")
    empty, model = tmp_path / "empty", checkpoint
    empty.touch()
    for words, named in (
        ((model, tmp_path / "absent", *out), "absent"),
        ((model, empty, *out), str(empty)),
        ((tmp_path, one, *out), "config.json"),
        ((model, one, "--out", tmp_path / "no" / "t"), "not a folder"),
        ((model, one, "--out", tmp_path), "is a folder"),
        ((model, one, *out, "--tokens", 0), "--tokens"),
        ((model, one, *out, "--sequence", -1), "--sequence"),
        ((model, one, *out, "--dtype", "float8"), "'float8'"),
        ((model, one, *out, "--layers", "1-3"), "layer 3"),
        ((model, one, *out, "--layers", "1,x"), "'x'"),
        ((model, one, *out, "--text", one, "--tokens", 1), "2 texts"),
    ):
        assert named in refused(*record(*words)), words
    broken = tmp_path / "broken"
    broken.mkdir()
    for words in ('{"model_type": "no_such_model"}', "not json", "[]", '{"model_type": 5}'):
        (broken / "config.json").write_text(words)
        assert "load the model" in refused(*record(broken, one, *out))
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (broken / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert "load the model" in refused(*record(broken, one, *out))
    (broken / "model.safetensors").write_bytes(b"nonsense")
    assert "load the model" in refused(*record(broken, one, *out))
    # the checkpoint has no tokenizer of its own
    assert "no token" in refused("model", "trace", "record", "--model", model, "--text", one, *out)
    words = (
        "model",
        "trace",
        "record",
        "--model",
        model,
        "--text",
        one,
        "--tokenizer",
        tmp_path / "absent",
        *out,
    )
    assert "the tokenizer" in refused(*words)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find_spec(name, *a)
    )
    assert "needs transformers" in refused(*record(model, one, *out))
    assert not (tmp_path / "t").exists()


def test_a_small_vocabulary_is_refused_before_it_fails(two_texts: tuple[Path, Path], tmp_path: Path) -> None:
    tiny_models.make("qwen3_moe", vocab_size=100).save_pretrained(tmp_path / "m")
    sentence = refused(*record(tmp_path / "m", two_texts[0], "--out", tmp_path / "t"))
    assert "token 116" in sentence and "99" in sentence


def test_layers_are_read_as_people_write_them() -> None:
    assert read_layers("0, 4,8-11") == [0, 4, 8, 9, 10, 11]
    for wrong in ("", "1,,2", "3-1", "-1", "1-", "99999999"):
        with pytest.raises(ArgumentError, match="layers"):
            read_layers(wrong)
