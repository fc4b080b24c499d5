"""Text as tokens: what a run learns, what is held out, and which tokens a step sees.

A source has three parts: runs learn the first, learning rates are chosen on the second, losses are reported
on the third. A token is a byte, or a pair of bytes and longer pieces (`with_vocabulary`); losses are always
per byte, so that runs with different tokens can be compared. A batch depends only on the seed and the step.
So all runs of a study see the same tokens in the same order.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.core.paths import home

BYTES = 256  # the vocabulary whose tokens are bytes
MAX_BYTES = 1 << 30
HELD_OUT_SHARE = 0.05
# of a text in many files, by the first byte of the hash of a file's path
TUNING_FILES, HELD_OUT_FILES = 13, 39  # of 256: 5 % choose learning rates, 10 % are reported
# a text that everybody can download: the English documentation of Django
DJANGO = "Django==4.2.16"
DJANGO_SHA256 = "6f1616c2786c408ce86ab7e10f792b8f15742f7b7b7460243929cb371e7f1dad"
# from here on the novels of shared/corpora have spaces before their commas: three books in another format
OTHER_FORMAT = b"[ Emma by Jane Austen"
# classes of characters, to see whether experts specialise in them
CLASSES = ("letter", "capital", "digit", "space", "line end", "punctuation", "other")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One text: Source(name="novels", learnt=b"Call me...", held_out=b"The family...", tuning=b"It is...").

    Without a part of its own for tuning, rates are chosen on the held-out part.
    """

    name: str
    learnt: bytes
    held_out: bytes
    tuning: bytes = b""

    def part(self, name: str) -> bytes:
        """Returns the text on which a run is evaluated: `held_out` or `tuning`."""
        return (self.tuning or self.held_out) if name == "tuning" else self.held_out


class Vocabulary:
    """Byte pairs learnt from a text, by the library tokenizers: the same text gives the same pairs."""

    def __init__(self, text: bytes, size: int):
        try:
            from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        except ImportError:
            raise ValueError("a vocabulary of byte pairs needs tokenizers; pip install tokenizers") from None
        if size <= BYTES:
            raise ValueError(f"a vocabulary has more than {BYTES} tokens, the bytes; not {size}")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = level
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=sorted(level.alphabet()), show_progress=False
        )
        lines = text.decode("utf-8", "replace").splitlines(keepends=True)
        self._tokenizer.train_from_iterator(lines, trainer)
        pieces = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        if len(pieces) != size:
            raise ValueError(f"the text has only {len(pieces)} pieces for a vocabulary of {size}; take fewer")
        # the library writes a byte as one character; bytes 0 to 32 are the characters from 256 on
        self.bytes_V = torch.tensor([len(piece) for piece, _ in pieces])
        first = (ord(piece[0]) for piece, _ in pieces)
        self.first_V = torch.tensor([c if c < 256 else c - 256 if c <= 288 else 127 for c in first])

    def tokens(self, text: bytes) -> Tensor:
        lines = text.decode("utf-8", "replace").splitlines(keepends=True)
        ids = [piece for line in self._tokenizer.encode_batch(lines) for piece in line.ids]
        return torch.tensor(ids, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The sources of a study. Losses are compared on the held-out part of the first one.

    corpus.batch(seed=0, step=3, batch=8, sequence=256)   (8, 257): inputs, and targets one place further
    corpus.held_out(0, pieces=16, sequence=256)           (16, 257): always the same pieces
    """

    sources: tuple[Source, ...]
    vocabulary: Vocabulary | None = None  # None: bytes

    @staticmethod
    def of(sources: Sequence[Source]) -> Corpus:
        if not sources:
            raise ValueError("there is no text; name files with --text")
        for source in sources:
            if len(source.learnt) + len(source.held_out) + len(source.tuning) > MAX_BYTES:
                raise ValueError(f"{source.name} has more than {MAX_BYTES:,} bytes; give a shorter text")
        if sum(len(source.learnt) for source in sources) < 2:
            raise ValueError("there is no text to learn from")
        return Corpus(sources=tuple(sources))

    def with_vocabulary(self, size: int) -> Corpus:
        """Returns the same text in `size` tokens, learnt from its learnt parts alone; 256: bytes."""
        pairs = None if size == BYTES else Vocabulary(b"".join(s.learnt for s in self.sources), size)
        return Corpus(sources=self.sources, vocabulary=pairs)

    def only(self, names: Sequence[str]) -> Corpus:
        """Returns a corpus of only these sources; of all if none is named."""
        kept = tuple(source for source in self.sources if not names or source.name in names)
        return self if kept == self.sources else Corpus(sources=kept, vocabulary=self.vocabulary)

    @property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for source in self.sources:
            for part in (source.name.encode(), source.learnt, source.held_out, source.tuning):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @property
    def bytes_V(self) -> Tensor:
        """The length of each token in bytes."""
        return torch.ones(BYTES, dtype=torch.long) if self.vocabulary is None else self.vocabulary.bytes_V

    @cached_property
    def learnt_T(self) -> Tensor:
        """The learnt parts, one after another."""
        return torch.cat([self._tokens(source.learnt) for source in self.sources])

    def _tokens(self, text: bytes) -> Tensor:
        if self.vocabulary is not None:
            return self.vocabulary.tokens(text)
        return (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8)
        )

    def batch(self, *, seed: int, step: int, batch: int, sequence: int) -> Tensor:
        places = self.learnt_T.shape[0] - sequence
        if places < 1:
            raise ValueError(f"the text has {places + sequence} tokens, fewer than a sequence of {sequence}")
        draw = np.random.default_rng((seed, step))
        start_B = torch.from_numpy(draw.integers(places, size=batch))
        return self.learnt_T[start_B.unsqueeze(1) + torch.arange(sequence + 1)].long()

    def held_out(self, source: int, *, pieces: int, sequence: int, part: str = "held_out") -> Tensor:
        """Returns up to `pieces` pieces, evenly spread over the held-out part, or over that for tuning."""
        token_T = self._tokens(self.sources[source].part(part))
        whole = (len(token_T) - 1) // sequence
        if whole < 1:
            raise ValueError(
                f"the held-out part of {self.sources[source].name} is shorter than {sequence} tokens"
            )
        chosen = np.linspace(0, whole - 1, min(pieces, whole)).round().astype(int)
        return token_T[torch.from_numpy(chosen * sequence).unsqueeze(1) + torch.arange(sequence + 1)].long()

    def character_class(self, token: Tensor) -> Tensor:
        """Returns the index in CLASSES of the first byte of each token."""
        return character_class(token if self.vocabulary is None else self.vocabulary.first_V[token])


def django() -> Corpus:
    """Returns the English documentation of Django, 5.8 MB. Downloads its source archive once, with pip."""
    folder = home() / "texts"
    archive = folder / "Django-4.2.16.tar.gz"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*pip, "--dest", str(folder), DJANGO], capture_output=True, text=True)
        if not archive.exists():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"pip cannot download {DJANGO} ({reason}); put its source archive at {archive}")
    if (digest := hashlib.sha256(archive.read_bytes()).hexdigest()) != DJANGO_SHA256:
        raise ValueError(f"{archive} has the sha256 {digest}, not {DJANGO_SHA256}; delete it")
    with tarfile.open(archive) as files:
        pages = [entry for entry in files if "/docs/" in entry.name and entry.name.endswith(".txt")]
        texts = {page.name: file.read() for page in pages if (file := files.extractfile(page))}
    return Corpus.of([_by_file("Django", texts.items())])


def python_library() -> Corpus:
    """Returns the interpreter's own standard library without its tests: another text on every machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(folder) for path in folder.rglob("*.py")]
    left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    kept = [path for path in files if not left_out & set(path.parts)]
    return Corpus.of([_by_file("Python", ((path.as_posix(), (folder / path).read_bytes()) for path in kept))])


def _by_file(name: str, files: Iterable[tuple[str, bytes]]) -> Source:
    """Gives each file to one of the three parts by the hash of its path."""
    parts: dict[str, list[bytes]] = {"learnt": [], "tuning": [], "held_out": []}
    for path, text in sorted(files):
        draw = hashlib.sha256(path.encode()).digest()[0]
        part = "tuning" if draw < TUNING_FILES else "held_out" if draw < HELD_OUT_FILES else "learnt"
        parts[part].append(text)
    return Source(name=name, **{part: b"\n".join(texts) for part, texts in parts.items()})


def read_corpus(name: str) -> Corpus:
    """Reads a text by name (see TEXTS), or every .txt file of a folder, each a source."""
    if name in TEXTS:
        return TEXTS[name]()
    if not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}, and no text of that name; there are {', '.join(TEXTS)}")
    return read_texts(sorted(Path(name).glob("*.txt")))


def read_texts(paths: Sequence[Path]) -> Corpus:
    """Reads each file as a source; the end of each is held out."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes; give a shorter text")
    texts = {path.stem: path.read_bytes().partition(OTHER_FORMAT)[0] for path in paths}
    return Corpus.of([_cut(name, text, HELD_OUT_SHARE) for name, text in texts.items()])


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


TEXTS = {"synthetic": synthetic, "django": django, "python": python_library}


def character_class(token: Tensor) -> Tensor:
    """Returns the index in CLASSES of each byte."""
    known = torch.full((BYTES,), CLASSES.index("other"))
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
    """Holds out the end, and the part of the same length before it for tuning."""
    cut = len(text) - int(len(text) * share)
    tuning = cut - int(len(text) * share)
    return Source(name=name, learnt=text[:tuning], held_out=text[cut:], tuning=text[tuning:cut])
