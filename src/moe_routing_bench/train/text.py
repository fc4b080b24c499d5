"""Text as bytes: what a run learns, what is held out, and which bytes a step sees.

A batch depends only on the seed and the step. So all runs of a study see the same bytes in the same order,
and the number of the step is the position in the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 256
MAX_BYTES = 1 << 30
HELD_OUT_SHARE = 0.05
# the last novel of shared/corpora is held out, so no book is on both sides
LAST_NOVEL = b"[ Sense and Sensibility"
# classes of characters, to see whether experts specialise in them
CLASSES = ("letter", "capital", "digit", "space", "line end", "punctuation", "other")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One text in two parts: Source(name="novels", learnt=b"Call me...", held_out=b"The family...")."""

    name: str
    learnt: bytes
    held_out: bytes


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The sources of a study. Losses are compared on the held-out part of the first one.

    corpus.batch(seed=0, step=3, batch=8, sequence=256)   (8, 257): inputs, and targets one place further
    corpus.held_out(0, pieces=16, sequence=256)           (16, 257): always the same pieces
    """

    sources: tuple[Source, ...]
    learnt_T: Tensor  # uint8: the learnt parts, one after another

    @staticmethod
    def of(sources: Sequence[Source]) -> Corpus:
        if not sources:
            raise ValueError("there is no text; name files with --text")
        for source in sources:
            if len(source.learnt) + len(source.held_out) > MAX_BYTES:
                raise ValueError(f"{source.name} has more than {MAX_BYTES:,} bytes; give a shorter text")
        joined = bytearray(b"".join(source.learnt for source in sources))
        if len(joined) < 2:
            raise ValueError("there is no text to learn from")
        return Corpus(sources=tuple(sources), learnt_T=torch.frombuffer(joined, dtype=torch.uint8))

    def only(self, names: Sequence[str]) -> Corpus:
        """Returns a corpus of only these sources; of all if none is named."""
        return Corpus.of([source for source in self.sources if not names or source.name in names])

    @property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for source in self.sources:
            for part in (source.name.encode(), source.learnt, source.held_out):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def batch(self, *, seed: int, step: int, batch: int, sequence: int) -> Tensor:
        places = self.learnt_T.shape[0] - sequence
        if places < 1:
            raise ValueError(f"the text has {places + sequence} bytes, fewer than a sequence of {sequence}")
        draw = np.random.default_rng((seed, step))
        start_B = torch.from_numpy(draw.integers(places, size=batch))
        return self.learnt_T[start_B.unsqueeze(1) + torch.arange(sequence + 1)].long()

    def held_out(self, source: int, *, pieces: int, sequence: int) -> Tensor:
        """Returns up to `pieces` pieces, evenly spread over the held-out part."""
        text = self.sources[source].held_out
        whole = (len(text) - 1) // sequence
        if whole < 1:
            raise ValueError(
                f"the held-out part of {self.sources[source].name} is shorter than {sequence} bytes"
            )
        chosen = np.linspace(0, whole - 1, min(pieces, whole)).round().astype(int)
        token_T = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return token_T[torch.from_numpy(chosen * sequence).unsqueeze(1) + torch.arange(sequence + 1)].long()


def read_corpus(folder: Path) -> Corpus:
    """Reads the texts of shared/corpora (novels, Shakespeare, Wikipedia), or every .txt file of another
    folder."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name files with --text")
    files = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    wiki = {"wikitext2_valid", "wikitext2_test"}
    if "gutenberg_novels" not in files or not wiki <= files.keys():
        return read_texts([*files.values()])
    novels = files["gutenberg_novels"].read_bytes()
    cut = novels.rfind(LAST_NOVEL)
    if cut < len(novels) // 2:
        raise ValueError(f"the last novel was not seen in {files['gutenberg_novels']}")
    sources = [
        Source(name="novels", learnt=novels[:cut], held_out=novels[cut:]),
        Source(
            name="Wikipedia",
            learnt=files["wikitext2_valid"].read_bytes(),
            held_out=files["wikitext2_test"].read_bytes(),
        ),
    ]
    if "tinyshakespeare" in files:
        sources.append(_cut("Shakespeare", files["tinyshakespeare"].read_bytes(), 0.1))
    return Corpus.of(sources)


def read_texts(paths: Sequence[Path]) -> Corpus:
    """Reads each file as a source; the end of each is held out."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes; give a shorter text")
    return Corpus.of([_cut(path.stem, path.read_bytes(), HELD_OUT_SHARE) for path in paths])


def read_dataset(name: str, *, most_bytes: int = 20_000_000) -> Corpus:
    """Downloads the beginning of a dataset of the Hugging Face Hub with a column `text`."""
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise ValueError("--dataset needs the package datasets; pip install datasets") from None
    parts, size = [], 0
    for row in datasets.load_dataset(name, split="train", streaming=True):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"the dataset {name} has no column `text`")
        parts.append(row["text"].encode())
        size += len(parts[-1])
        if size >= most_bytes:
            break
    return Corpus.of([_cut(name, b"\n".join(parts), HELD_OUT_SHARE)])


def synthetic(seed: int = 0, *, size: int = 200_000) -> Corpus:
    """Makes two sources for tests that are quickly learnt.

    Each source is a Markov chain over 40 made-up words; the second is in capitals.
    """
    sources = []
    for number, name in enumerate(("low", "high")):
        draw = np.random.default_rng((seed, number))
        letters = np.arange(26) + (65 if number else 97)
        words = [bytes(draw.choice(letters, size=draw.integers(2, 8)).tolist()) for _ in range(40)]
        follows = draw.integers(40, size=(40, 3))  # three successors each
        at, text = 0, bytearray()
        while len(text) < size:
            text += words[at] + (b".\n" if draw.random() < 0.1 else b" ")
            at = int(follows[at, draw.integers(3)])
        sources.append(_cut(name, bytes(text), 0.1))
    return Corpus.of(sources)


def character_class(token: Tensor) -> Tensor:
    """Returns the index in CLASSES of each byte."""
    known = torch.full((VOCABULARY,), CLASSES.index("other"))
    for byte in range(128):
        letter = chr(byte)
        name = (
            "letter" if letter.islower() else "capital" if letter.isupper() else "digit" if letter.isdigit()
            else "line end" if letter == "\n" else "space" if letter.isspace()
            else "punctuation" if letter.isprintable() else "other"
        )  # fmt: skip
        known[byte] = CLASSES.index(name)
    return known[token]


def _cut(name: str, text: bytes, share: float) -> Source:
    cut = len(text) - int(len(text) * share)
    return Source(name=name, learnt=text[:cut], held_out=text[cut:])
