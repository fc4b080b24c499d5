"""Text: which bytes a step sees, what is held out, and the trigram model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moe_routing_bench.train.ngram import trigram_loss
from moe_routing_bench.train.text import (
    CLASSES,
    OTHER_FORMAT,
    Corpus,
    Source,
    character_class,
    python_library,
    read_corpus,
    read_texts,
    synthetic,
)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    corpus = synthetic(size=4000)
    options = {"batch": 4, "sequence": 32}
    first = corpus.batch(seed=1, step=7, **options)
    corpus.batch(seed=1, step=8, **options)
    assert torch.equal(corpus.batch(seed=1, step=7, **options), first)
    assert not torch.equal(corpus.batch(seed=1, step=8, **options), first)
    assert not torch.equal(corpus.batch(seed=2, step=7, **options), first)
    text = corpus.learnt_T.numpy().tobytes()
    assert all(bytes(row.tolist()) in text for row in first)


def test_what_is_held_out_is_not_learnt() -> None:
    corpus = Corpus.of([Source(name="a", learnt=b"a" * 500, held_out=b"b" * 100)])
    assert set(corpus.batch(seed=0, step=0, batch=8, sequence=20).flatten().tolist()) == {ord("a")}
    pieces = corpus.held_out(0, pieces=3, sequence=20)
    assert pieces.shape == (3, 21) and set(pieces.flatten().tolist()) == {ord("b")}
    assert corpus.held_out(0, pieces=99, sequence=20).shape[0] == 4  # as many as there are


def test_the_parts_of_a_file_are_in_order_and_in_one_format(tmp_path: Path) -> None:
    (tmp_path / "novels.txt").write_bytes(b"x" * 380 + b"y" * 10 + b"z" * 10 + OTHER_FORMAT + b" 1816 ]" * 50)
    source = read_corpus(str(tmp_path)).sources[0]
    assert source.learnt == b"x" * 360
    assert (source.tuning, source.held_out) == (b"x" * 20, b"y" * 10 + b"z" * 10)


def test_a_text_of_many_files_has_three_parts_of_whole_files() -> None:
    source = python_library().sources[0]
    sizes = [len(source.tuning), len(source.held_out), len(source.learnt)]
    assert min(sizes) > 100_000 and sizes[2] > 5 * sizes[1]


def test_pieces_hold_all_bytes_and_depend_on_the_learnt_text_alone() -> None:
    text = synthetic(size=20_000)
    pieces = text.with_vocabulary(300)
    learnt = b"".join(source.learnt for source in text.sources)
    assert int(pieces.bytes_V[pieces.learnt_T].sum()) == len(learnt)
    assert len(pieces.bytes_V) == 300 and len(pieces.learnt_T) < len(learnt) / 1.2
    other = [Source(name=s.name, learnt=s.learnt, held_out=s.held_out[::-1]) for s in text.sources]
    assert torch.equal(Corpus.of(other).with_vocabulary(300).learnt_T, pieces.learnt_T)
    line_end = [n for n in range(256) if CLASSES[int(pieces.character_class(torch.tensor(n)))] == "line end"]
    assert len(line_end) == 1


def test_mistakes_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text file"):
        read_texts([tmp_path / "absent.txt"])
    with pytest.raises(ValueError, match="no folder"):
        read_corpus(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="no text"):
        read_corpus(str(tmp_path))
    with pytest.raises(ValueError, match="more than 256"):
        synthetic(size=4000).with_vocabulary(100)
    short = Corpus.of([Source(name="a", learnt=b"abc", held_out=b"abc")])
    with pytest.raises(ValueError, match="a sequence"):
        short.batch(seed=0, step=0, batch=1, sequence=8)
    with pytest.raises(ValueError, match="shorter than 8"):
        short.held_out(0, pieces=1, sequence=8)


def test_every_byte_has_a_class() -> None:
    known = character_class(torch.tensor(list(b"aZ7 \n,\xc3")))
    assert [CLASSES[place] for place in known] == [
        "letter", "capital", "digit", "space", "line end", "punctuation", "other",
    ]  # fmt: skip


def test_the_trigram_model_by_hand() -> None:
    """One context, "ab" before "c" twice, "d" once, in the formula of the file."""
    corpus = Corpus.of([Source(name="a", learnt=b"abcabcabd", held_out=b"abc")])
    p_c = (2 + 1) / (9 + 256)
    p_bc = (2 + 5 * p_c) / (3 + 5)
    p_abc = (2 + 5 * p_bc) / (3 + 5)
    assert trigram_loss(corpus) == pytest.approx(-math.log(p_abc))


def test_the_trigram_model_learns_the_synthetic_text() -> None:
    assert 0.3 < trigram_loss(synthetic(size=20_000)) < 2.0
