"""Reads the experts of one layer from a GGUF file, Q8_0 or Q4_K, as they are stored.

    experts = read_gguf("model.gguf", 3)   blk.3.ffn_gate_exps.weight, ffn_up_exps, ffn_down_exps

A file is not trusted: every count, length and offset is compared with the file's size before it is used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.formats import ggml
from moe_routing_bench.formats.stored import Stored, joined

# ggml's number of a type -> our class, and the codes and bytes of a block
TYPES: dict[int, tuple[type[ggml.Q8_0] | type[ggml.Q4_K], int, int]] = {
    8: (ggml.Q8_0, ggml.Q8_0_BLOCK, ggml.Q8_0_BYTES),
    12: (ggml.Q4_K, ggml.Q4_K_BLOCK, ggml.Q4_K_BYTES),
}
# bytes of a value in the head, by GGUF's number of its type; 8 is text, 9 an array
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_TENSORS, MAX_VALUES, MAX_TEXT, MAX_ITEMS = 1 << 20, 1 << 16, 1 << 24, 1 << 24
ALIGNMENT = 32  # unless general.alignment says another


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of the file: TensorEntry(size=(2048, 768, 128), type=12, at=4096). The depth comes first in
    `size`; `at` is the byte where the tensor starts."""

    size: tuple[int, ...]
    type: int
    at: int


class _Head:
    """Reads the numbers of the header in order, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def skip(self, n: int) -> int:
        at = self.at
        if n > len(self.data) - at:
            raise ValueError(f"{self.path} ends inside its head; download it again")
        self.at += n
        return at

    def number(self, form: str) -> int:
        at = self.skip(struct.calcsize("<" + form))
        return int(struct.unpack_from("<" + form, self.data, at)[0])

    def count(self, form: str, most: int, what: str) -> int:
        if (n := self.number(form)) > most:
            raise ValueError(f"{self.path} says it has {n:,} {what}; this reads at most {most:,}")
        return n

    def text(self) -> str:
        n = self.count("Q", MAX_TEXT, "letters in a name")
        at = self.skip(n)
        return self.data[at : at + n].decode("utf-8", errors="replace")

    def value(self, kind: int, *, inside: bool = False) -> int | None:
        """Skips a value. Returns it if it is one whole number of 32 bits."""
        if kind == 8:
            self.skip(self.count("Q", MAX_TEXT, "letters in a text"))
        elif kind == 9 and not inside:
            items = self.number("I")
            n = self.count("Q", MAX_ITEMS, "items in an array")
            if items in SIZES:
                self.skip(n * SIZES[items])
            else:
                for _ in range(n):
                    self.value(items, inside=True)
        elif kind == 4:
            return self.number("I")
        elif kind in SIZES:
            self.skip(SIZES[kind])
        else:
            raise ValueError(f"{self.path} holds a value of the unknown type {kind}")
        return None


def entries(path: Path, data: mmap.mmap) -> dict[str, TensorEntry]:
    """Returns all tensors of the file by name."""
    head = _Head(path, data)
    if data[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    head.skip(4)
    if (version := head.number("I")) not in (2, 3):
        raise NotImplementedError(f"{path} has GGUF version {version}; this reads 2 and 3, little-endian")
    tensors, values = head.count("Q", MAX_TENSORS, "tensors"), head.count("Q", MAX_VALUES, "values")
    alignment = ALIGNMENT
    for _ in range(values):
        name, value = head.text(), head.value(head.number("I"))
        alignment = value or 0 if name == "general.alignment" else alignment
    if not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
        raise ValueError(f"{path} has general.alignment {alignment}, which is no power of two up to 65536")
    made: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name = head.text()
        if name in made:
            raise ValueError(f"{path} has two tensors of one name")
        size = tuple(head.number("Q") for _ in range(head.count("I", 4, "dimensions in a tensor")))
        made[name] = size, head.number("I"), head.number("Q")
    first = -(-head.at // alignment) * alignment
    return {
        name: TensorEntry(size=size, type=kind, at=first + offset)
        for name, (size, kind, offset) in made.items()
    }


def read_gguf(path: Path | str, layer: int, *, activation: str = "swiglu") -> QuantisedExperts:
    """Raises ValueError if the file is damaged or has no such experts, and NotImplementedError if we cannot
    read the way they are stored. GGUF does not name the activation of experts."""
    path = Path(path)
    if not path.is_file() or path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        known = entries(path, data)
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"{path} has no tensor {' and no '.join(missing)}")
        gate, up, down = (_read(path, data, name, known[name]) for name in names)
    if gate.name != up.name or gate.size != up.size:
        raise ValueError(f"{path}: gate and up projections have not the same type and size")
    return QuantisedExperts(
        w_in=joined([gate, up], columns=True), w_out=down, activation=activation
    ).validate()


def _read(path: Path, data: mmap.mmap, name: str, entry: TensorEntry) -> Stored:
    if entry.type not in TYPES:
        known = ", ".join(f"{number} ({made.__name__})" for number, (made, _, _) in TYPES.items())
        raise NotImplementedError(f"{name} in {path} has ggml's type {entry.type}; this reads {known}")
    made, codes, size = TYPES[entry.type]
    if len(entry.size) != 3 or min(entry.size) < 1 or entry.size[0] % codes:
        raise ValueError(
            f"{name} in {path} has size {entry.size}; {made.__name__} needs whole blocks of {codes}"
        )
    depth, N, E = entry.size
    n = E * N * (depth // codes) * size
    if entry.at > len(data) or n > len(data) - entry.at:
        raise ValueError(f"{name} in {path} reaches past the end of the file; download it again")
    block = torch.frombuffer(bytearray(data[entry.at : entry.at + n]), dtype=torch.uint8)
    return made(block_ENbB=block.view(E, N, depth // codes, size), depth=depth)
