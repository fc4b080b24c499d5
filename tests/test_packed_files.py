"""Packed weights on disk: packed once, mapped by all, never used damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from child_process import python
from moe_routing_bench import ExpertWeights, MoE
from moe_routing_bench.core import cpp
from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.packed_files import HEADER, LEFT_OVER, PackedFiles
from moe_routing_bench.formats.named import NAMES, quantise
from moe_routing_bench.formats.stored import bytes_per_weight
from moe_routing_bench.ops import coded
from moe_routing_bench.ops.expert_ffn import native
from tiny_layers import EXPERT_FFN

pytestmark = [pytest.mark.slow, pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))]
HAS = set(this_machine().instructions)
LEVELS = [level for level in ("vnni", "avx512", "avx2") if cpp.LEVELS[level][0] <= HAS]
# scales are float32 in panels, and these formats have a bfloat16 or 6 bits for each 32 weights
SCALES_GROW = {"int4_g32", "int4_g32_asym", "int4_g128_asym", "q4_k"}

# words: folder, format. Prints the calls of the packing function, a sum of the result's bits and what smaps
# says of the mapped files.
CHILD = """
import sys
import torch
from test_packed_files import layer, mappings, result
from moe_routing_bench.ops import coded
from moe_routing_bench.core.packed_files import PackedFiles

pack, calls = coded.pack, []
coded.pack = lambda *args: (calls.append(1), pack(*args))[1]
folder, store = sys.argv[1:]
moe = layer(store)
moe.freeze(PackedFiles(folder))
print(len(calls), result(moe).view(torch.int32).sum().item(), *mappings(folder))
"""


def layer(store: str, D: int = 512) -> MoE:
    torch.manual_seed(0)
    return MoE(D, 96, 16, 2, impl=f"native(store={store})").eval()


@torch.no_grad()
def result(moe: MoE) -> Tensor:
    return moe(torch.randn(5, moe.D, generator=torch.Generator().manual_seed(1)))[0]


def mappings(folder: Path | str) -> tuple[int, int, int]:
    """Resident, proportional and private kB of all files in the folder that this process maps."""
    total, inside = dict.fromkeys(("Rss:", "Pss:", "Private_Dirty:"), 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        inside = str(folder) in line if "-" in first else inside
        if inside and first in total:
            total[first] += int(rest[0])
    return total["Rss:"], total["Pss:"], total["Private_Dirty:"]


def weights(*, seed: int = 0, D: int = 64, F: int = 32, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    dice = torch.Generator().manual_seed(seed)
    w_in_EDG, w_out_EFD = torch.randn(2, D, 2 * F, generator=dice), torch.randn(2, F, D, generator=dice)
    return ExpertWeights(w_in_EDG=w_in_EDG.to(dtype), w_out_EFD=w_out_EFD.to(dtype))


def panels(packed: ExpertWeights) -> list[Tensor]:
    assert isinstance(packed.w_in_EDG, Frozen) and isinstance(packed.w_out_EFD, Frozen)
    return [packed.w_in_EDG.panels, packed.w_out_EFD.panels]


def same(packed: ExpertWeights, other: ExpertWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(panels(packed), panels(other), strict=True))


@pytest.mark.parametrize("store", ["int8", "int4_g32_a8"])
def test_the_second_process_maps_what_the_first_packed(store: str, tmp_path: Path) -> None:
    moe = layer(store).freeze()
    right = str(result(moe).view(torch.int32).sum().item())
    first = python(CHILD, tmp_path, store).stdout.split()
    again = python(CHILD, tmp_path, store).stdout.split()
    assert first[:2] == ["2", right] and again[:2] == ["0", right]
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_share_the_memory(tmp_path: Path) -> None:
    kept = PackedFiles(tmp_path)
    moe = layer("int8").freeze(kept)
    size = kept.written // 1024
    assert size > 1000 and mappings(tmp_path)[0] == pytest.approx(size, rel=0.05)
    resident, proportional, private = map(int, python(CHILD, tmp_path, "int8").stdout.split()[2:])
    assert resident == pytest.approx(size, rel=0.05) and private == 0
    assert proportional == pytest.approx(resident / 2, rel=0.05)
    del moe
    assert mappings(tmp_path)[0] == 0


def damaged_byte(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half a header": lambda data: data[:100],
    "no data": lambda data: data[:HEADER],
    "torn": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "zeros in the middle": lambda data: data[:5000] + bytes(512) + data[5512:],
    "length": damaged_byte(0),
    "name": lambda data: data.replace(b'"name": "', b'"name": "0', 1)[: len(data)],
    "first code": damaged_byte(HEADER),
    "last scale": damaged_byte(-2),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_packed_again_with_a_sentence(how: str, tmp_path: Path) -> None:
    right = native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path))
    path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    changed = tmp_path / "changed"
    changed.write_bytes(DAMAGE[how](whole))
    changed.replace(path)  # not in place: `right` has the old one mapped
    with pytest.warns(UserWarning, match="packed again"):
        again = native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path))
    assert same(again, right) and path.read_bytes() == whole


def test_a_file_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    for seed in (0, 1):
        native.freeze(weights(seed=seed), store="int8", kept=PackedFiles(tmp_path / str(seed)))
    large = [max((tmp_path / seed).iterdir(), key=lambda path: path.stat().st_size) for seed in "01"]
    large[1].replace(large[0])
    with pytest.warns(UserWarning, match="under this name"):
        again = native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path / "0"))
    assert same(again, native.freeze(weights(), store="int8"))


def test_other_weights_formats_sizes_and_code_have_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two new files each; the same values in another memory are the same file."""
    one = weights()
    changed = weights()
    changed.w_in_EDG[1, 2, 3] += 1e-3
    changed.w_out_EFD[1, 2, 3] += 1e-3
    cases: list[tuple[ExpertWeights, str | None]] = [
        (one, "int8"), (one, "int8_a8"), (one, "int8_g32"), (one, "int4_g32"), (one, "bfloat16"), (one, None),
        (changed, "int8"), (weights(dtype=torch.bfloat16), "int8"), (weights(D=96), "int8"),
    ]  # fmt: skip
    for count, (given, store) in enumerate(cases, start=1):
        packed = native.freeze(given, store=store, kept=PackedFiles(tmp_path))
        assert len(list(tmp_path.iterdir())) == 2 * count
        assert same(packed, native.freeze(given, store=store))
    native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2 * len(cases)
    monkeypatch.setattr(native, "_packing_code", lambda: "another version")
    native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2 * len(cases) + 2


@pytest.mark.parametrize("store", ["int8", "int4_g32_asym", "mxfp4_a8"])
def test_every_level_packs_alike(store: str) -> None:
    """So the level is not in the name."""
    decoded, rows = quantise(weights().w_in_EDG, coded.format_of(store)).decoded(), coded.rounds_rows(store)
    packed = [coded.pack(decoded, True, native._library(level), rows) for level in (None, *LEVELS)]
    assert all(torch.equal(one, packed[0]) for one in packed)


def test_stored_checkpoints_are_kept_too(tmp_path: Path) -> None:
    given = weights()
    experts = QuantisedExperts(
        w_in=quantise(given.w_in_EDG, "mxfp4"), w_out=quantise(given.w_out_EFD, "mxfp4")
    )
    kept = PackedFiles(tmp_path)
    for _ in range(2):
        packed = native.freeze_stored(experts, torch.bfloat16, kept=kept)
        assert same(packed, native.freeze_stored(experts, torch.bfloat16))
    assert kept.mapped == kept.written > 0


@pytest.mark.parametrize("store", ["int8", "bfloat16", None])
def test_the_file_is_safetensors_and_aligned(store: str | None, tmp_path: Path) -> None:
    packed = native.freeze(weights(), store=store, kept=PackedFiles(tmp_path))
    assert all(one.data_ptr() % 64 == 0 for one in panels(packed))
    read = []
    for path in tmp_path.iterdir():
        with safe_open(path, "pt") as file:
            read.append(file.get_tensor("panels"))
    for one in panels(packed):
        assert any(one.dtype == other.dtype and torch.equal(one, other) for other in read)


KILLED = """
import os, sys
import moe_routing_bench.core.packed_files as packed_files
from test_packed_files import layer

os.fsync = lambda number: os._exit(0)
layer("int8").freeze(packed_files.PackedFiles(sys.argv[1]))
"""


def test_a_kill_while_writing_leaves_a_part_that_is_removed(tmp_path: Path) -> None:
    python(KILLED, tmp_path)
    (part,) = tmp_path.iterdir()
    assert ".safetensors.part-" in part.name and part.stat().st_size > HEADER
    layer("int8").freeze(PackedFiles(tmp_path))
    assert part.exists()  # another process may be writing it
    os.utime(part, (0, part.stat().st_mtime - LEFT_OVER))
    layer("int8_a8").freeze(PackedFiles(tmp_path))
    assert not part.exists() and len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_full_disk_is_said_and_weights_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="not kept in .*: .*the disk is full"):
        packed = native.freeze(weights(), store="int8", kept=PackedFiles(tmp_path))
    assert same(packed, native.freeze(weights(), store="int8")) and not list(tmp_path.iterdir())


def test_who_cannot_keep_says_so(tmp_path: Path) -> None:
    other = replace(EXPERT_FFN.get("native"), freeze=lambda weights: weights)
    with pytest.raises(NotImplementedError, match=r"expert_ffn\.native"):
        other.frozen(weights(), PackedFiles(tmp_path))


def test_the_usual_folder_and_thawing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    torch.manual_seed(0)
    moe = MoE(64, 32, 4, 2, impl="native").eval()
    want = moe.experts.w_in_EDG.detach().clone()
    for _ in range(2):
        moe.freeze(PackedFiles())
        assert len(list((tmp_path / "packed").iterdir())) == 2
        moe.thaw()
        assert torch.equal(moe.experts.w_in_EDG, want)


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_take_the_bytes_of_their_format(name: str) -> None:
    stored = quantise(torch.randn(2, 1024, 512), name)
    packed = coded.pack(stored.decoded(), True, native._library(None)).nbytes
    ratio = packed / (bytes_per_weight(stored) * 2 * 1024 * 512)
    assert (ratio > 1.05) == (name in SCALES_GROW) and ratio < 1.34


HUGE_PAGE = 2048  # kB; of a real model nothing
MEMORY = """
import gc, sys
import torch
from moe_routing_bench import MoE
from moe_routing_bench.core.host_allocator import recycled

def own():  # resident kB that are no file's
    gc.collect()
    recycled.release()
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])

torch.set_num_threads(1)
MoE(256, 256, 2, 2, impl=f"native(store={sys.argv[1]})").freeze()  # what is loaded and kept once
before = own()
moe = MoE(1024, 512, 64, 2, impl=f"native(store={sys.argv[1]})", dtype=torch.bfloat16)
plain = own() - before
moe.freeze()
print(plain, own() - before, 64 * 3 * 1024 * 512)
"""


@pytest.mark.parametrize("store", ["int8", "int4_g128", "mxfp4"])
def test_a_frozen_layer_holds_nothing_but_packed_weights(store: str) -> None:
    plain, frozen, count = map(int, python(MEMORY, store).stdout.split())
    format_kb = bytes_per_weight(quantise(torch.randn(1, 1024, 512), store)) * count / 1024
    assert plain > 1.9 * count / 1024
    assert frozen - HUGE_PAGE < 1.05 * format_kb, (frozen, format_kb)
