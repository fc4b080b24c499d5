"""Traces and roofs that were damaged or made to harm: a value or one sentence each, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from child_process import python
from damaged_files import apart, assert_one_sentence, hurt, hurt_json, joined
from moe_routing_bench.bench.roofs import Roofs, roofs_path, store_roofs, stored_roofs
from moe_routing_bench.workloads.trace import DTYPES, ENTRY, Trace, ids_checksum, read_trace

pytestmark = pytest.mark.slow

HOSTILE = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1.5, 1e308, [], {}, [[]], {"a": []}),
    *("", "I64", "F64", "BOOL", "x" * 9000, "\x1b[2J", "\ud800", "a\nb", "__import__('os')", "[" * 5000),
    *([2**40, 2], [0, 2**40], [2**32, 2**32], [-1, -1], [10, 2.0], [True, 2], ["10", 2], [0] * 9000),
    *([0, 2**62], [2**63, 2**64], [160, 0], [0, 160, 320], [None, None]),
]
NAMES = [*DTYPES, "__metadata__", "evil", "1", "-3"]


def good_trace() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "expert_TK": torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(10)]),
        "gate_TK": torch.rand(10, 2, generator=draw),
        "position_T": torch.arange(10),
    }


def about(tensors: dict[str, torch.Tensor], **change: Any) -> dict[str, Any]:
    checksum = ids_checksum(tensors["expert_TK"].long(), 8)
    return {"version": 1, "num_experts": 8, "checksum": checksum, "source": "a test", **change}


def whole(tensors: dict[str, torch.Tensor], **change: Any) -> bytes:
    return save(tensors, {ENTRY: json.dumps(about(tensors, **change))})


def header_changed(draw: random.Random) -> bytes:
    header, data = apart(whole(good_trace()))
    for _ in range(draw.randint(1, 3)):
        hurt(header, draw, HOSTILE, NAMES)
    return joined(header, data)


def metadata_changed(draw: random.Random) -> bytes:
    tensors = good_trace()
    words = about(tensors)
    for _ in range(draw.randint(1, 2)):
        hurt(words, draw, HOSTILE, NAMES)
    return save(tensors, {ENTRY: json.dumps(words)})


def bytes_changed(draw: random.Random) -> bytes:
    content = bytearray(whole(good_trace()))
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def cut_or_grown(draw: random.Random) -> bytes:
    content = whole(good_trace())
    cut = content[: draw.randrange(len(content))]
    return draw.choice([cut, content + draw.randbytes(draw.randint(1, 99)), cut + content, content[1:]])


def size_claimed(draw: random.Random) -> bytes:
    """Shapes, offsets, lengths and expert counts far beyond what the file holds."""
    header, data = apart(whole(good_trace()))
    big = draw.choice([2**20, 2**31, 2**40, 2**62, 2**63 - 1, 2**64])
    shape = draw.choice([[big, 2], [10, big], [0, big], [big, big], [0, big, 2]])
    names = draw.choice([["expert_TK", "gate_TK"], ["expert_TK"], ["position_T"], list(header)[1:]])
    for name in names:
        header[name]["shape"] = shape if name.endswith("_TK") or draw.random() < 0.5 else shape[:1]
        if draw.random() < 0.5:
            header[name]["data_offsets"] = draw.choice([[0, big], [big, big + 8], [0, 0], [big, 0]])
    if draw.random() < 0.5:
        header["__metadata__"][ENTRY] = json.dumps(about(good_trace(), num_experts=big))
    if 0 in shape and draw.random() < 0.8:  # nothing of everything: consistent, and without data
        for name in names:
            header[name]["data_offsets"] = [0, 0]
        header = {name: header[name] for name in ("__metadata__", *names)}
        data = b""
    content = joined(header, data)
    if draw.random() < 0.2:
        content = struct.pack("<Q", big % 2**64) + content[8:]
    return content


def nothing_of_everything(draw: random.Random) -> bytes:
    """Zero tokens with a great many choices each: whole, and without a byte of data."""
    K = draw.choice([2**20 + 1, 2**31, 2**40, 2**62])
    E = draw.choice([K, K + 1, 8, 2**63 - 1])
    sizes = {"dtype": "I64", "shape": [0, K], "data_offsets": [0, 0]}
    words = {"version": 1, "num_experts": E, "checksum": "0" * 64, "source": "a test"}
    header = {"__metadata__": {ENTRY: json.dumps(words)}, "expert_TK": sizes}
    return joined({**header, "gate_TK": {**sizes, "dtype": "F32"}}, b"")


def wrong_dtype(draw: random.Random) -> bytes:
    tensors = good_trace()
    name = draw.choice(list(tensors))
    dtype = draw.choice(
        [torch.float64, torch.bool, torch.int8, torch.uint8, torch.float16, torch.int32, torch.bfloat16]
    )
    return whole({**tensors, name: tensors[name].to(dtype)})


def wrong_value(draw: random.Random) -> bytes:
    tensors = good_trace()
    t, k = draw.randrange(10), draw.randrange(2)
    if draw.random() < 0.6:
        tensors["expert_TK"][t, k] = draw.choice(
            [-1, 8, 2**31, 2**63 - 1, -(2**63), int(tensors["expert_TK"][t, 1 - k])]
        )
    else:
        tensors["gate_TK"][t, k] = draw.choice([float("nan"), float("inf"), -float("inf")])
    return whole(tensors)


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch /tmp/mrb-fuzz-was-here",)


def other_format(draw: random.Random) -> bytes:
    pickled, archive, saved = pickle.dumps(Bomb()), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("data.pkl", pickled)
        zipped.writestr("zeros", bytes(2**20))
    torch.save(good_trace(), saved)
    content = bytearray(draw.choice([pickled, archive.getvalue(), saved.getvalue()]))
    if content[:2] == b"PK" and draw.random() < 0.5:
        content[22:26] = b"\xff\xff\xff\x7f"  # the size it claims to unpack to
    if draw.random() < 0.5:
        return joined({"__metadata__": {ENTRY: json.dumps(about(good_trace()))}}, bytes(content))
    return bytes(content)


def odd_header(draw: random.Random) -> bytes:
    data = apart(whole(good_trace()))[1]
    text = draw.choice(
        [
            "[" * draw.randint(10, 100_000),
            '{"a":' * draw.randint(10, 100_000),
            json.dumps({"__metadata__": {ENTRY: "[" * draw.randint(10, 100_000)}}),
            json.dumps({"__metadata__": {ENTRY: "1" + "0" * draw.randint(10, 9000)}}),
            "NaN",
            "null",
            "9" * draw.randint(10, 9000),
            '{"expert_TK": 1, "expert_TK": {}}',
            json.dumps([[]] * draw.randint(10, 250_000)),
            " " * draw.randint(0, 2**21),
        ]
    )
    return joined(text, data)


# how many of each; together over 600
TRACES: dict[Callable[[random.Random], bytes], int] = {
    header_changed: 200, metadata_changed: 100, bytes_changed: 80, cut_or_grown: 80, size_claimed: 80,
    nothing_of_everything: 20, wrong_dtype: 30, wrong_value: 40, other_format: 30, odd_header: 40,
}  # fmt: skip


def test_there_are_enough_of_them() -> None:
    assert sum(TRACES.values()) >= 600


def test_a_good_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(whole(good_trace()))
    assert read_trace(path).routing.num_tokens == 10
    path.write_bytes(joined(*apart(whole(good_trace()))))
    assert read_trace(path).routing.num_tokens == 10


@pytest.mark.parametrize("change", [{"source": "\ud800"}, {"checksum": "\udfff"}, {"num_experts": 2**20 + 1}])
def test_words_that_would_harm_later_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(whole(good_trace(), **change))
    with pytest.raises(ValueError, match=r"half a character|1 to 1,048,576") as refused:
        read_trace(path)
    assert_one_sentence(refused.value, path)


@pytest.mark.parametrize("mutation", TRACES, ids=lambda mutation: mutation.__name__)
def test_a_mutated_trace_gives_a_value_or_a_sentence(mutation, tmp_path: Path) -> None:
    path, draw, refused = tmp_path / "trace", random.Random(mutation.__name__), 0
    for _ in range(TRACES[mutation]):
        path.write_bytes(mutation(draw))
        try:
            trace = read_trace(path)
        except ValueError as error:
            assert_one_sentence(error, path)
            refused += 1
        else:
            assert isinstance(trace, Trace)
            trace.routing.validate()
            trace.source.encode()
    assert refused > TRACES[mutation] // 2
    assert not Path("/tmp/mrb-fuzz-was-here").exists()


CHILD = """
import random, resource, sys
from pathlib import Path
import test_fuzz_files as fuzz
path = Path(sys.argv[1])
path.write_bytes(fuzz.whole(fuzz.good_trace()))
fuzz.read_trace(path)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for mutation in (fuzz.size_claimed, fuzz.nothing_of_everything, fuzz.odd_header):
    draw = random.Random(7)
    for _ in range(40):
        path.write_bytes(mutation(draw))
        try:
            fuzz.read_trace(path)
        except ValueError:
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_claimed_sizes_take_no_memory(tmp_path: Path) -> None:
    more = int(python(CHILD, tmp_path / "trace").stdout)
    # the largest header that is parsed has 1 MiB, which json makes into about 25 MiB of lists
    assert more < 64 * 2**10, f"{more:,} KiB more than before"


ROOFS = Roofs(
    machine="toy-1",
    read_bytes={1: 1e10, 2: 2e10},
    copy_bytes={1: 8e9, 2: 9e9},
    gemm_flops={"float32": {1: 1e11, 2: 2e11}, "bfloat16": {1: 1e12, 2: 2e12}},
    ladder={1: {2**14: 1e11, 2**30: 1e10}, 2: {2**15: 2e11, 2**30: 2e10}},
    units={"fma": {1: 1e11, 2: 2e11}},
    seconds=1.0,
    how="C++",
    busy="others used 0.9 cores meanwhile",
)


ODD_ROOFS = [
    b"", b"null", b"[" * 10_000, b'{"a":' * 10_000,
    b"\x80\x04\x95", b"9" * 9000, b"NaN", b"\xff\xfe{\x00}\x00",
    json.dumps({**ROOFS.model_dump(mode="json"), "read_bytes": {str(n): 1.0 for n in range(1, 99)}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "seconds": float("nan")}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "read_bytes": {"1": float("inf"), "2": 1}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "copy_bytes": {"1": 0, "2": 1}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "copy_bytes": {"1": 1}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "copy_bytes": {"1": 1e300, "2": 1}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "ladder": {"1": {"16384": 1e11}}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "ladder": {"1": {}, "2": {}}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "ladder": {"1": {"0": 1e11}, "2": {"1": 1}}}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "busy": "\x1b[2J"}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "machine": "another"}).encode(),
    json.dumps({**ROOFS.model_dump(mode="json"), "\x1b[2J" * 500: 1}).encode(),
]  # fmt: skip


@pytest.fixture
def roofs_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    assert store_roofs(ROOFS) == roofs_path("toy-1") and stored_roofs("toy-1") == ROOFS
    return roofs_path("toy-1")


@pytest.mark.parametrize("content", ODD_ROOFS, ids=range(len(ODD_ROOFS)))
def test_odd_roofs_are_refused(roofs_file: Path, content: bytes) -> None:
    roofs_file.write_bytes(content)
    with pytest.raises(ValueError, match="delete it") as refused:
        stored_roofs("toy-1")
    assert_one_sentence(refused.value, roofs_file)


def test_a_folder_in_the_place_of_roofs_is_refused(roofs_file: Path) -> None:
    roofs_file.unlink()
    roofs_file.mkdir()
    with pytest.raises(ValueError, match="delete it"):
        stored_roofs("toy-1")


def test_250_mutated_roofs_give_a_value_or_a_sentence(roofs_file: Path) -> None:
    draw, refused = random.Random(20261115), 0
    for _ in range(250):
        roofs_file.write_bytes(hurt_json(ROOFS.model_dump(mode="json"), draw, HOSTILE, NAMES))
        try:
            roofs = stored_roofs("toy-1")
        except ValueError as error:
            assert_one_sentence(error, roofs_file)
            refused += 1
        else:
            assert roofs is not None and roofs.machine == "toy-1"
            for threads in roofs.ladder:
                assert all(0 < roofs.bandwidth(10.0**n, threads) <= 1e30 for n in range(20))
    assert refused > 150
