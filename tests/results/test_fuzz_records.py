"""Thousands of damaged and hostile record lines: each is a record or one sentence, alone and in a folder."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from damaged_files import assert_one_sentence
from moe_routing_bench.results.folder import iterate, samples_of
from moe_routing_bench.results.parquet import compact
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Record, parse_record
from sample_records import SESSION, document, failed, line

pytestmark = pytest.mark.slow

EACH = 160
TEXTS = (
    "'; DROP VIEW records; --",
    "<script>alert(1)</script>",
    "{{7*7}} ${HOME} $(id) `id`",
    "../../../../etc/passwd",
    "session=../../x/samples.f64",
    "/etc/passwd",
    "a\x00b",
    "\x1b]0;owned\x07",
    "line\nbreak\r",
    "\u202egnirts\u2028\ufeff",
    "\U0001f600" * 50,
    "x" * 70_000,
    "NaN",
    "",
    '"}]},{"',
    "\\\\",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -0.0, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], {"a": {"b": {}}}, ["x"] * 1000),
    *({str(n): n for n in range(200)}, [None] * 70, "1", "1e5", "true", "PASSED", "2026-11-15", 1794711454),
)


def places(part: Any) -> list[tuple[Any, Any]]:
    """(parent, key) of every value in the document."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [pair for key, value in items for pair in [(part, key), *places(value)]]


def base(draw: random.Random) -> dict[str, Any]:
    return document() if draw.random() < 0.7 else failed(draw.choice(["OOM", "CRASHED", "SUSPECT"]))


def flipped(draw: random.Random) -> bytes:
    data = bytearray(line(base(draw)))
    for _ in range(draw.choice((1, 1, 2, 8, 100))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def cut(draw: random.Random) -> bytes:
    data = line(base(draw))
    begin = draw.choice((0, 0, draw.randrange(len(data))))
    return data[begin : draw.randrange(begin, len(data))]


def spliced(draw: random.Random) -> bytes:
    data = line(base(draw))
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:b] + data[a:] if draw.random() < 0.5 else data[:a] + draw.randbytes(b - a) + data[b:]


def swapped(draw: random.Random) -> bytes:
    given = base(draw)
    for _ in range(draw.choice((1, 1, 1, 3))):
        parent, key = draw.choice(places(given))
        parent[key] = copy.deepcopy(draw.choice(VALUES))
    return line(given)


def texts(draw: random.Random) -> bytes:
    given = base(draw)
    strings = [(parent, key) for parent, key in places(given) if isinstance(parent[key], str)]
    for parent, key in draw.sample(strings, draw.choice((1, 1, 5, len(strings)))):
        parent[key] = draw.choice(TEXTS)
    return json.dumps(given, ensure_ascii=draw.random() < 0.5).encode()


def renamed(draw: random.Random) -> bytes:
    given = base(draw)
    parent, key = draw.choice([place for place in places(given) if isinstance(place[0], dict)])
    value = parent.pop(key)
    if draw.random() < 0.7:
        parent[draw.choice((*TEXTS, "__class__", "model_config", "T ", "t"))] = value
    return line(given)


def deep(draw: random.Random) -> bytes:
    depth = draw.choice((5, 100, 250, 5_000, 30_000))
    left, right = draw.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    nest = left * depth + "1" + right * depth
    if draw.random() < 0.3:
        nest = left * depth
    given = base(draw)
    parent, key = draw.choice(places(given))
    parent[key] = "HERE"
    return line(given).replace(b'"HERE"', nest.encode(), 1)


def doubled(draw: random.Random) -> bytes:
    """A key given twice, with another value first."""
    data = line(base(draw)).decode()
    key = draw.choice(("status", "timing", "median", "schema_version", "session", "correctness", "role"))
    other = json.dumps(draw.choice((*VALUES[:14], "PASSED", "OOM", {}, SESSION)))
    once, again = f'"{key}":', f'"{key}": {other},'
    if draw.random() < 0.5:
        return data.replace(once, f"{again} {once}", 1).encode()
    return data.replace('"schema_version"', f'{again} "schema_version"', 1).encode()


def numbers(draw: random.Random) -> bytes:
    given = base(draw)
    numeric = [(parent, key) for parent, key in places(given) if isinstance(parent[key], int | float)]
    for parent, key in draw.sample(numeric, draw.choice((1, 2, 5))):
        parent[key] = "HERE"
    text = line(given).decode()
    odd = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "00", "+1", ".5", "0x10", "1_0")
    big = ("9" * 30, "9" * 5_000, "1." + "0" * 5_000, "-" + "9" * 400, "1E+2", "123456789.5")
    while '"HERE"' in text:
        text = text.replace('"HERE"', draw.choice(odd + big), 1)
    return text.encode()


def encoded(draw: random.Random) -> bytes:
    text = line(base(draw)).decode()
    encoding = draw.choice(("utf-16", "utf-32", "utf-8-sig", "bad", "bad", "surrogate", "control"))
    if encoding == "bad":
        bad = draw.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00"))
        at = draw.randrange(len(text))
        return text.encode()[:at] + bad + text.encode()[at:]
    if encoding in ("surrogate", "control"):
        return text.replace("staged", r"\ud800" if encoding == "surrogate" else r"\u0000\u001b", 1).encode()
    return text.encode(encoding)


def traversing(draw: random.Random) -> bytes:
    given = document()
    names = ("..", ".", "etc", "session=a", "samples.f64", "%2e%2e", "~", "")
    path = draw.choice(("", "/", f"session={SESSION}/", "session=")) + "/".join(draw.choices(names, k=3))
    given["timing"]["samples"]["file"] = path
    given["timing"]["samples"]["offset"] = draw.choice((0, 8, -8, 2**40, 2**63, 3))
    given["timing"]["samples"]["count"] = draw.choice((1, 0, -1, 10**6, 2**62))
    return line(given)


def honest(draw: random.Random) -> bytes:
    """Not all may be refused: the order of keys and spaces do no harm."""
    given = base(draw)
    order = draw.sample(list(given), len(given))
    return json.dumps(
        {key: given[key] for key in order}, separators=draw.choice(((",", ":"), (" , ", " : ")))
    ).encode()


MUTATIONS = (
    *(flipped, cut, spliced, swapped, texts, renamed),
    *(deep, doubled, numbers, encoded, traversing, honest),
)


def mutants(mutate: Callable[[random.Random], bytes]) -> list[bytes]:
    draw = random.Random(f"records {mutate.__name__}")
    return [mutate(draw) for _ in range(EACH)]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_record_or_one_sentence(mutate: Callable[[random.Random], bytes]) -> None:
    good = 0
    for data in mutants(mutate):
        try:
            record = parse_record(data)
        except ValueError as error:
            assert_one_sentence(error)
            continue
        good += 1
        assert isinstance(record, Record) and parse_record(record.line()) == record
        assert (record.timing is not None) == (record.correctness.status == "PASSED")
    assert good == EACH if mutate is honest else good < EACH


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_folder_of_them_can_be_read(mutate: Callable[[random.Random], bytes], tmp_path: Path) -> None:
    path = tmp_path / f"session={SESSION}" / "records.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(document()) + b"".join(data.rstrip(b"\n") + b"\n" for data in mutants(mutate)))
    streamed = LeftOut()
    records = list(iterate(tmp_path, streamed))
    assert records and len(records) + streamed.count == path.read_bytes().count(b"\n")
    for sentence in streamed.first:
        assert_one_sentence(sentence, path)
    for record in records:
        if record.timing:
            with pytest.raises(ValueError, match="no samples file"):
                samples_of(tmp_path, record)
    timed = "SELECT count(*) FROM records WHERE (status = 'PASSED') != (median_ms IS NOT NULL)"
    for _ in range(2):
        asked = LeftOut()
        columns, rows = run_query(tmp_path, "SELECT * FROM records ORDER BY ALL", asked)
        assert len(rows) == len(records)
        assert (asked.count, asked.first) == (streamed.count, streamed.first)
        assert run_query(tmp_path, timed)[1] == [(0,)]
        labels = sorted(row[columns.index("impl")] for row in rows)
        assert labels == sorted(record.implementation.label for record in records)
        keys = run_query(tmp_path, "SELECT DISTINCT cell_key FROM records")[1]
        assert {key for (key,) in keys} == {record.cell_key for record in records}
        compact(tmp_path)


def test_there_are_enough_of_them() -> None:
    assert EACH * len(MUTATIONS) >= 1_500
    assert len({data for mutate in MUTATIONS for data in mutants(mutate)}) >= 1_200
