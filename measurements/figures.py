"""Every figure of README and docs/figures.md, derived from the records in measurements/records.

    python measurements/figures.py             writes README's table, docs/figures.md and the two pictures
    python measurements/figures.py --check     writes nothing; says what is not as the records have it

A ratio is that of a record: the median over interleaved rounds of a subject's time over the baseline's in the
same round. Only PASSED records count, and of a cell that was measured twice the newer one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import typer
from sweeps import RECORDS, THREADS, TOPICS, Topic, unpack

from moe_routing_bench.core.names import slots_of
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.regrets import read_regrets

ROOT = Path(__file__).parents[1]
README, DOCUMENT, PICTURE = ROOT / "README.md", ROOT / "docs/figures.md", ROOT / "docs/experts.png"
STORED_PICTURE = ROOT / "docs/formats.png"
BEGIN = "<!-- written by `python measurements/figures.py`: begin -->"
END = "<!-- written by `python measurements/figures.py`: end -->"
PLOTTED = "Plotted"  # the entry of the picture's file that holds the hash of what it shows
MIN_ROUNDS = 8
REGRET = "regret"  # its cells are compared with one another, not with a baseline of ours
STORES = ("int8", "int4_g128")
BUSY = 3.0  # load before a cell, when the cell before it had two threads
# in each cell of each contender the newest; a baseline's own ratio is 1
ROWS = """
SELECT suite, "case", dtype, store, error, workload, direction, impl, layout, router, baseline, verdict,
  T, D, E, K, sequences, rounds,
  coalesce(ratio, 1) AS ratio, coalesce(ratio_low, 1) AS low, coalesce(ratio_high, 1) AS high, median_ms,
  -- records from before there were ladders left out what the caches could hold
  CASE WHEN roof_ms IS NOT NULL OR cache <> 'hot' THEN share_of_roof END AS share_of_roof,
  bw_2pass, bw_strict, dropped_pairs, padded_rows, max_over_mean, stage_seconds, role,
  load_before, machine, source_commit, source_dirty, threads, created_at
FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate')
QUALIFY row_number() OVER (
  PARTITION BY span, "case", dtype, workload, direction, impl, layout, router, threads
  ORDER BY created_at DESC, record_id DESC) = 1
ORDER BY dtype, "case", workload, ratio, impl, layout, router, direction, threads
"""
FAILED = """
SELECT DISTINCT impl, status, reason FROM records WHERE status NOT IN ('PASSED', 'UNSUPPORTED') ORDER BY ALL
"""
Row = dict[str, Any]
LOSSES = Path(__file__).with_name("formats.json")
STORED_TOKENS = (1, 64, 1024)
# all of Qwen3-30B-A3B's experts
STORED_TOPICS = (
    "experts", "stored_int8", "stored_int4_g128", "peers_int8", "peers_int4_g32", "peers_q8_0", "peers_q4_k",
    "peers_mxfp4", "peers_fp8_block",
)  # fmt: skip
BFLOAT16 = "bfloat16"
COLOURS = {  # Okabe and Ito 2008, and grey
    BFLOAT16: "#000000",
    "int8": "#0072B2",
    "q8_0": "#56B4E9",
    "fp8_block": "#999999",
    "int4_g128": "#D55E00",
    "int4_g32": "#E69F00",
    "q4_k": "#009E73",
    "mxfp4": "#CC79A7",
}
OURS, OURS_INT8 = "ours", "ours, rows of 8 bits"
MARKERS = {OURS: "o", OURS_INT8: "s", "llama.cpp": "^", "KTransformers": "v", "vLLM": "D"}
PEERS = {"llama_cpp": "llama.cpp", "kt": "KTransformers", "vllm_cpu": "vLLM"}
Point = tuple[int, str, str, float, float]


@dataclass(frozen=True)
class Records:
    """What one archive holds: rows that passed, and what did not."""

    rows: tuple[Row, ...] = ()
    failed: tuple[tuple[str, str, str], ...] = field(default=(), repr=False)

    @cached_property
    def cells(self) -> dict[tuple[str, ...], list[Row]]:
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            key = tuple(str(row[name]) for name in ("case", "dtype", "workload", "direction"))
            found.setdefault(key, []).append(row)
        return found

    def where(self, **wanted: object) -> Records:
        rows = (row for row in self.rows if all(row[name] == value for name, value in wanted.items()))
        return Records(tuple(rows))

    def best(self, *starts: str) -> list[Row]:
        """Of every cell that has one: the fastest whose name begins so, by its ratio to the baseline. A cell
        whose baseline is one of them, because ours was not timed, compares nothing with ours."""
        named = (
            [row for row in cell if row["impl"].startswith(starts)]
            for cell in self.cells.values()
            if not any(row["role"] == "baseline" and row["impl"].startswith(starts) for row in cell)
        )
        return [min(rows, key=lambda row: row["ratio"]) for rows in named if rows]


def read(folder: Path = RECORDS) -> dict[str, Records]:
    """Topic -> its records; empty where there is no archive yet."""
    return {topic: _read(folder / f"{topic}.tar.xz") for topic in TOPICS if topic != REGRET}


def _read(archive: Path) -> Records:
    if not archive.is_file():
        return Records()
    with tempfile.TemporaryDirectory() as scratch:
        folder = unpack(archive, Path(scratch))
        names, rows = run_query(folder, ROWS)
        failed = run_query(folder, FAILED)[1]
    return Records(tuple(dict(zip(names, row, strict=True)) for row in rows), tuple(failed))


# words


def times(rows: Sequence[Row]) -> str:
    """1.98 times as long (geometric mean of 16 cells, 1.30 to 2.76)"""
    if not rows:
        return "not measured yet"
    ratios = [row["ratio"] for row in rows]
    cells = "1 cell" if len(ratios) == 1 else f"{len(ratios)} cells"
    span = "" if len(ratios) == 1 else f", {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{geometric_mean(ratios):.2f} times as long (geometric mean of {cells}{span})"


def decided(rows: Sequence[Row]) -> str:
    """SLOWER in 15 of 16 cells, UNDECIDED in 1"""
    counts = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
    said = [f"{name} in {count}" for name, count in counts.items() if count]
    return f"{', '.join(said)} of {len(rows)}" if said else ""


VERDICTS = ("SLOWER", "SAME", "FASTER", "UNDECIDED")


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def bandwidth(rows: Sequence[Row], name: str) -> str:
    rates = [row[name] / 1e9 for row in rows if row[name]]
    ends = dict.fromkeys(f"{rate:.1f}" for rate in (min(rates), max(rates))) if rates else ()
    return f"{' to '.join(ends)} GB/s" if ends else "not measured yet"


def source(all_records: dict[str, Records]) -> str:
    """Where, with what and how: a sentence; what a published figure must not have is said in capitals."""
    rows = [row for one in all_records.values() for row in one.rows]
    if not rows:
        return "Nothing was measured yet."
    commits = _each(rows, "source_commit", 10)
    days = sorted({f"{row['created_at']:%Y-%m-%d}" for row in rows})
    rounds, busy = min(row["rounds"] for row in rows), max(row["load_before"] for row in rows)
    warnings = []
    if any(_other_sweep(TOPICS[topic], row) for topic, one in all_records.items() for row in one.rows):
        warnings.append("A SAMPLE, NOT THE SWEEPS AS LISTED")
    if any(row["source_dirty"] is not False for row in rows):
        warnings.append("CHANGED SINCE THAT COMMIT")
    if rounds < MIN_ROUNDS:
        few = sum(row["rounds"] < MIN_ROUNDS for row in rows)
        warnings.append(f"FEWER THAN {MIN_ROUNDS} ROUNDS in {few} of {len(rows)} rows")
    if busy > BUSY:
        warnings.append(f"THE MACHINE WAS BUSY (load {busy:.1f})")
    said = (
        f"{_each(rows, 'machine')}, threads: {_each(rows, 'threads')}",
        f"at least {rounds} interleaved rounds, commit {commits}",
        " to ".join(dict.fromkeys((days[0], days[-1]))),
        *warnings,
    )
    return f"{', '.join(said)}."


def _other_sweep(topic: Topic, row: Row) -> bool:
    return row["suite"] != topic.suite or row["threads"] != THREADS


def _each(rows: Sequence[Row], name: str, letters: int = 100) -> str:
    return " and ".join(sorted({str(row[name])[:letters] for row in rows}))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


# figures

HF, VLLM = "transformers(", "vllm_cpu"
EXPERTS = {"native": ("ours, as built", "#56B4E9"), "frozen(native)": ("ours, frozen", "#0072B2")}


def readme_table(all_records: dict[str, Records]) -> list[str]:
    """Of README: what others take, in words, and the command that measures it."""
    grid, layouts = all_records["grid"], all_records["layouts"]
    bfloat16, float32 = (grid.where(dtype=name) for name in ("bfloat16", "float32"))
    skewed = [row for row in layouts.rows if row["workload"] != "uniform"]
    padded = [row for row in skewed if "1.25" in row["layout"] and row["impl"].startswith("staged")]
    dropping = f", dropping {_dropped(padded)} of the pairs" if padded else ""
    moved = [row for row in all_records["pack"].rows if row["impl"] == "native+native"]
    lines = [
        ("grid", "Transformers' best experts, bfloat16, take", _judged(bfloat16.best(HF))),
        ("grid", "Transformers' best experts, float32, take", _judged(float32.best(HF))),
        ("grid", "vLLM's CPU kernel, bfloat16, takes", _judged(bfloat16.best(VLLM))),
        *(
            (
                " ".join(
                    topic for topic in TOPICS if topic.startswith("peers_") and peer in TOPICS[topic].sweep
                ),
                f"{name} experts in 8 and 4 bits, beside `native(store=...)`, take",
                _judged([row for _, row in peers(all_records) if row["impl"].startswith(peer)]),
            )
            for name, peer in (("llama.cpp's", "llama_cpp("), ("KTransformers'", "kt("))
        ),
        (
            "training",
            "Transformers' grouped_mm, forward and backward, takes",
            _judged(_training(all_records)),
        ),
        ("layouts", f"padded(1.25) with bmm, uneven routing{dropping}, takes", _judged(padded)),
        ("pack", "rows go to experts and back, each byte counted once, at", bandwidth(moved, "bw_strict")),
    ]
    return table(
        ('compared with `impl="auto"` on this CPU', "", "command"),
        [(what, said, f"`python measurements/sweeps.py run {topic}`") for topic, what, said in lines],
    )


def _judged(rows: Sequence[Row]) -> str:
    return f"{times(rows)}; {decided(rows)}" if rows else times(rows)


def peers(all_records: dict[str, Records]) -> list[tuple[str, Row]]:
    """Experts in 8 and 4 bits that are not ours: the topic, and a row for each cell."""
    return [
        (topic, row)
        for topic in TOPICS
        if topic.startswith("peers_")
        for row in all_records[topic].rows
        if not row["impl"].startswith("native")
    ]


def _training(all_records: dict[str, Records]) -> list[Row]:
    return all_records["training"].best("hf_")


def _dropped(rows: Sequence[Row]) -> str:
    return percent(sum(row["dropped_pairs"] or 0 for row in rows), sum(row["T"] * row["K"] for row in rows))


def readme_part(all_records: dict[str, Records]) -> str:
    picture = f"![{experts_title(plotted(all_records))}](docs/{PICTURE.name})"
    caption = source(all_records)
    return "\n".join((BEGIN, picture, "", *readme_table(all_records), "", caption, END))


def compact_or_padded(layouts: Records) -> list[str]:
    """In words: where compact beats padded, by how much, and why."""
    words = []
    for workload in dict.fromkeys(row["workload"] for row in layouts.rows):
        rows = layouts.where(workload=workload).rows
        bmm = [row for row in rows if row["impl"].startswith("staged")]
        same = [row for row in rows if row["impl"] == "native" and "1.25" in row["layout"]]
        load = max(row["max_over_mean"] for row in rows)
        for how, group in (("a padded matmul (bmm)", bmm), ("the same kernel", same)):
            if group:
                words.append(
                    f"- `{workload}`, busiest expert {load:.1f} times the mean: padded(1.25) with {how} "
                    f"takes {times(group)}; {decided(group)}. Of its rows {_padding(group)} are padding, and "
                    f"{_dropped(group)} of the pairs are dropped."
                )
    why = (
        "Compact computes every pair and nothing else. Padded gives each expert the same number of rows: "
        "where routing is even it computes the spare rows of the capacity factor, where routing is uneven it "
        "computes zeros for idle experts and drops what does not fit. A kernel that skips padding does less "
        "work the more it drops: a shorter time then means fewer pairs computed, not a better layout."
    )
    return [*words, "", why] if words else ["Not measured yet."]


def _padding(rows: Sequence[Row]) -> str:
    padding = sum(row["padded_rows"] or 0 for row in rows)
    kept = sum(row["T"] * row["K"] - (row["dropped_pairs"] or 0) for row in rows)
    return percent(padding, padding + kept)


def document(all_records: dict[str, Records]) -> str:
    grid, pack = all_records["grid"], all_records["pack"]
    parts = [
        "# Figures",
        "Written by `python measurements/figures.py` from the records in `measurements/records/`; a test",
        "holds it to them. " + source(all_records),
        "",
        "A ratio is the time over the baseline's in the same round, with a 99 % interval. Of roof: the least",
        "time that this machine's measured bandwidth and peaks allow, over the time; `-` with hot caches in",
        "records from before bandwidth was measured by working set.",
        "",
        '## How much slower is `impl="auto"` than the fastest that can run?',
        f"A regret of 1 is the fastest. `{shlex.join(TOPICS[REGRET].command('results'))}`, then",
        "`mrb regret results`.",
        "",
        *regret_table(),
        *_section("default", all_records, _default_table(all_records)),
        *(
            line
            for store in STORES
            for line in _section(
                f"default_{store}", all_records, _stored_table(all_records[f"default_{store}"])
            )
        ),
        *_section("grid", all_records, _cells_table(grid)),
        *(f"- {dtype}: {_roof(grid.where(dtype=dtype))}" for dtype in ("bfloat16", "float32")),
        *_section("large_olmoe", all_records, _cells_table(all_records["large_olmoe"])),
        *_section("large_qwen3", all_records, _cells_table(all_records["large_qwen3"])),
        *_section("decode", all_records, _cells_table(all_records["decode"])),
        *_section("skew", all_records, _cells_table(all_records["skew"])),
        *_section("training", all_records, _cells_table(all_records["training"])),
        *_section("invariant_olmoe", all_records, _cells_table(all_records["invariant_olmoe"])),
        *_section("invariant_qwen3", all_records, _cells_table(all_records["invariant_qwen3"])),
        *_section("layouts", all_records, _layouts_table(all_records["layouts"])),
        "",
        "### Where compact beats padded",
        *compact_or_padded(all_records["layouts"]),
        *_section("pack", all_records, _pack_table(pack)),
        *_section("plain", all_records, _cells_table(all_records["plain"])),
        *_section("topk", all_records, _cells_table(all_records["topk"])),
        *_section("routing", all_records, _cells_table(all_records["routing"])),
        *_section("soft", all_records, _soft_table(all_records["soft"])),
        *_section("experts", all_records, _cells_table(all_records["experts"])),
        "",
        "## Experts in 8 and 4 bits that are not ours",
        "Times as long as `native(store=...)` with the same weights in the same rounds.",
        "",
        *_peers_table(all_records),
        *(
            line
            for topic in TOPICS
            if topic.startswith(("stored_", "peers_"))
            for line in _section(topic, all_records, _stored_table(all_records[topic]))
        ),
    ]
    return "\n".join(parts) + "\n"


def _section(topic: str, all_records: dict[str, Records], lines: list[str]) -> list[str]:
    one, records = TOPICS[topic], all_records[topic]
    said = [f"Not PASSED: {impl} {status}: {reason}" for impl, status, reason in records.failed]
    command = shlex.join(one.command("results"))
    title = f"## {one.shows[0].upper()}{one.shows[1:]}"
    if not records.rows:
        lines = ["Not measured yet."]
    return ["", title, f"At most {one.minutes:g} minutes: `{command}`", "", *lines, *said, ""]


def _cells_table(records: Records) -> list[str]:
    def line(row: Row) -> tuple[object, ...]:
        dtype = "" if row["case"].endswith(row["dtype"]) else f" {row['dtype']}"
        case = f"{row['case']}{dtype} {row['workload']}"
        roof = "-" if row["share_of_roof"] is None else f"{100 * row['share_of_roof']:.0f} %"
        return case, row["impl"], f"{row['median_ms']:.3g}", _ratio(row), _verdict(row), roof

    return table(("case", "implementation", "ms", "ratio", "verdict", "of roof"), map(line, records.rows))


def regret_table(archive: Path = RECORDS / f"{REGRET}.tar.xz") -> list[str]:
    """As `mrb regret` shows it: a regret of 1 is the fastest."""
    if not archive.is_file():
        return []
    with tempfile.TemporaryDirectory() as scratch:
        groups = read_regrets(unpack(archive, Path(scratch))).groups
    return table(
        ("group", "cells", "median", "95 %", "worst", "Transformers faster in"),
        [
            (one.group, one.cells, *(f"{value:.2f}" for value in (one.median, one.p95, one.worst)),
             one.slower_than_transformers)
            for one in groups
        ],
    )  # fmt: skip


def _default_table(all_records: dict[str, Records]) -> list[str]:
    """Milliseconds by number of tokens, and how many times faster than Transformers' best."""
    rows = all_records["default"].rows
    tokens = sorted({row["T"] for row in rows})
    theirs = {row["T"]: row for row in all_records["default"].best("hf_")}
    lines = {"Transformers' best": theirs}
    for name in ("native", "frozen(native)"):
        lines[name] = {row["T"]: row for row in rows if row["impl"] == name}
    for store in STORES:
        stored = all_records[f"default_{store}"].rows
        lines[f"{store}_a8"] = {row["T"]: row for row in stored if row["role"] != "baseline"}

    def cell(T: int, name: str) -> str:
        row, beside = lines[name].get(T), theirs.get(T)
        if row is None:
            return "no time"
        ms = f"{row['median_ms']:.3g} ms"
        if beside is None or row is beside:
            return ms
        return f"{ms}, {beside['ratio'] / (row['ratio'] or 1):.2f}x"

    shown = [(name, *(cell(T, name) for T in tokens)) for name in lines]
    return table(("", *(f"T = {T:,}" for T in tokens)), shown) if rows else []


def _stored_table(records: Records) -> list[str]:
    """Of roof: in records from before there were ladders, of the rate at which memory is read."""

    def line(row: Row) -> tuple[object, ...]:
        error = "-" if row["error"] is None else f"{row['error']:.2g}"
        roof = "-" if row["share_of_roof"] is None else f"{100 * row['share_of_roof']:.0f} %"
        return row["T"], row["impl"], f"{row['median_ms']:.3g}", error, _ratio(row), _verdict(row), roof

    rows = sorted(records.rows, key=lambda row: (row["T"], row["ratio"]))
    return table(("T", "implementation", "ms", "error", "ratio", "verdict", "of roof"), map(line, rows))


def _peers_table(all_records: dict[str, Records]) -> list[str]:
    """A line for each kernel that is not ours, a column for each number of tokens; then the means."""
    rows = peers(all_records)
    tokens = sorted({row["T"] for _, row in rows})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for _, row in rows:
        name = row["case"].partition("/")[0], row["store"], row["impl"]
        lines.setdefault(name, {})[row["T"]] = f"{row['ratio']:.2f} {row['verdict']}"
    head = ("model", "format", "implementation", *(f"T = {T:,}" for T in tokens))
    said = [f"Together: {_judged([row for _, row in rows])}."] if rows else []
    return [
        *table(head, [(*name, *(by.get(T, "-") for T in tokens)) for name, by in lines.items()]),
        "",
        *said,
    ]


def _verdict(row: Row) -> str:
    return row["verdict"] or "baseline"


def _ratio(row: Row) -> str:
    if row["role"] == "baseline":
        return "1"
    return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _roof(records: Records) -> str:
    shares = [row["share_of_roof"] for row in records.rows if row["role"] == "baseline"]
    known = [share for share in shares if share is not None]
    if not known:
        return "these records are from before roofs were measured by working set"
    return f"ours is at {median(known):.0%} of the roof at the median, {min(known):.0%} at least"


def _layouts_table(records: Records) -> list[str]:
    def line(row: Row) -> tuple[object, ...]:
        name, case = f"{row['impl']} @ {row['layout']}", f"{row['case']} {row['workload']}"
        return (
            case,
            name,
            f"{row['median_ms']:.3g}",
            _ratio(row),
            _verdict(row),
            _dropped([row]),
        )

    head = ("case", "implementation", "ms", "ratio", "verdict", "dropped")
    return table(head, map(line, records.rows))


def _pack_table(records: Records) -> list[str]:
    """One line for each width, number of choices and implementation: ranges over tokens and experts."""
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for row in sorted(records.rows, key=lambda row: (row["D"], row["K"], row["impl"])):
        groups.setdefault((row["D"], row["K"], row["impl"]), []).append(row)
    lines = (
        (
            D, K, impl, len(rows), f"{geometric_mean(row['ratio'] for row in rows):.3f}",
            bandwidth(rows, "bw_2pass"), bandwidth(rows, "bw_strict"), decided(rows) or "baseline",
        )
        for (D, K, impl), rows in groups.items()
    )  # fmt: skip
    head = ("D", "K", "implementation", "cells", "ratio", "by two passes", "strictly", "verdicts")
    return table(head, lines)


def _soft_table(records: Records) -> list[str]:
    def line(row: Row) -> tuple[object, ...]:
        stages, total = row["stage_seconds"] or {}, sum((row["stage_seconds"] or {}).values())
        shares = ", ".join(f"{name} {percent(seconds, total)}" for name, seconds in stages.items())
        sizes = {name: row[name] for name in ("T", "E", "K", "sequences")}
        return (
            row["case"],
            ": ".join(filter(None, (row["router"], slots_of(row["router"], **sizes)))),
            f"{row['median_ms']:.3g}",
            _ratio(row),
            _verdict(row),
            shares,
        )

    head = ("case", "router", "ms", "ratio", "verdict", "share of stages")
    return table(head, map(line, records.rows))


# the picture


def plotted(all_records: dict[str, Records]) -> list[tuple[int, str, float, float, float]]:
    """(tokens, name, times faster than Transformers' best, low, high) of the experts, as drawn. The interval
    of what is not the baseline is made of two, so it is wider than it had to be."""
    default = all_records["default"]
    best = {row["T"]: row for row in default.best("hf_")}
    rows = [(row, best[row["T"]]) for row in default.rows if row["impl"] in EXPERTS and row["T"] in best]
    return [
        (
            row["T"],
            row["impl"],
            float(f"{theirs['ratio'] / row['ratio']:.4g}"),
            float(f"{theirs['low'] / row['high']:.4g}"),
            float(f"{theirs['high'] / row['low']:.4g}"),
        )
        for row, theirs in sorted(rows, key=lambda pair: (pair[0]["T"], pair[0]["ratio"]), reverse=True)
    ]


def experts_title(points: Sequence[tuple[int, str, float, float, float]]) -> str:
    if not points:
        return "The experts of Qwen3-30B-A3B beside Transformers"
    ends = [f"{end(point[2] for point in points):.1f}x" for end in (min, max)]
    return f"The experts of Qwen3-30B-A3B run {ends[0]} to {ends[1]} faster than in Transformers"


def hash_of(points: object) -> str:
    return hashlib.sha256(json.dumps(points).encode()).hexdigest()


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(all_records: dict[str, Records], path: Path) -> None:
    """README's picture: our experts as built and frozen beside Transformers' best."""
    points = plotted(all_records)
    tokens = sorted({point[0] for point in points})
    figure = new_figure(7.6, 4.0)
    axes = figure.add_subplot()
    for number, (name, (title, colour)) in enumerate(EXPERTS.items()):
        mine = [point for point in points if point[1] == name]
        place = [tokens.index(point[0]) + 0.38 * (number - 0.5) for point in mine]
        reach = [[p[2] - p[3] for p in mine], [p[4] - p[2] for p in mine]]
        axes.bar(place, [p[2] for p in mine], 0.36, color=colour, label=title)
        axes.errorbar(place, [p[2] for p in mine], reach, fmt="none", ecolor="#222222", lw=1.2, capsize=2.5)
        for x, point in zip(place, mine, strict=True):
            axes.annotate(
                f"{point[2]:.1f}x", (x, point[4]), xytext=(0, 2), textcoords="offset points", ha="center"
            )
    axes.axhline(1, color="#222222", lw=1.2, ls="--", label="Transformers' best of three = 1")
    axes.set_xticks(range(len(tokens)), [f"{T:,}" for T in tokens])
    axes.set_xlabel("tokens in a call")
    axes.set_ylabel("times faster; higher is better")
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    figure.suptitle(experts_title(points), x=0.01, ha="left", fontsize=12, fontweight="bold")
    sizes = "64 of its 128 experts, 8 for each token, bfloat16, 2 CPU threads; lines: 99 % intervals"
    axes.set_title(sizes, loc="left", fontsize=9.5, color="#444444")
    figure.legend(fontsize=9.5, frameon=False, loc="outside lower center", ncols=3)
    hashed = {PLOTTED: hash_of(points), "Software": ""}
    figure.savefig(path, dpi=200, facecolor="white", metadata=hashed)


def stored_points(all_records: Mapping[str, Records]) -> list[Point]:
    """(tokens, format, kernel, ms, error against float32 weights) of experts in 16, 8 and 4 bits, as drawn.

    Times and errors of kernels are those of the records; what storing itself loses is the column `layer` of
    `mrb formats --json > measurements/formats.json`. The two are independent, so their squares are added.
    """
    losses = {row["name"]: row["layer"] for row in json.loads(LOSSES.read_text())["layer"]}
    rows = [row for topic in STORED_TOPICS for row in all_records[topic].rows]
    return [
        (
            row["T"],
            format_,
            kernel,
            float(f"{row['median_ms']:.4g}"),
            float(f"{math.hypot(row['error'], losses.get(format_, 0.0)):.3g}"),
        )
        for row in rows
        if row["T"] in STORED_TOKENS and row["error"] is not None
        for format_, kernel in [_kind(row)]
        if format_ != BFLOAT16 or not row["store"]
    ]


def _kind(row: Mapping[str, Any]) -> tuple[str, str]:
    """Format and kernel: native(store=int8_a8) is ("int8", "ours, rows of 8 bits")."""
    name, _, option = row["impl"].removesuffix(")").partition("(store=")
    format_ = option.removesuffix("_a8") or BFLOAT16
    return format_, PEERS.get(name) or (OURS_INT8 if option.endswith("_a8") else OURS)


def draw_stored(all_records: dict[str, Records], path: Path) -> None:
    from matplotlib.lines import Line2D

    points, figure = stored_points(all_records), new_figure(9.6, 4.2)
    panels = figure.subplots(1, len(STORED_TOKENS), sharey=True, squeeze=False)[0]
    for axes, T in zip(panels, STORED_TOKENS, strict=True):
        mine = [point for point in points if point[0] == T]
        for _, format_, kernel, ms, error in mine:
            axes.plot(
                ms, error, MARKERS[kernel], color=COLOURS[format_], ms=7, mew=1.6,
                mfc="white" if kernel != OURS and kernel != OURS_INT8 else COLOURS[format_],
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=f"{T:,} token{'s' * (T > 1)}", xlabel="ms")
        if mine:
            low, high = (end(point[3] for point in mine) for end in (min, max))
            axes.set_xlim(low / 1.3, high * 1.3)
            ticks = [low, math.sqrt(low * high), high]
            axes.set_xticks(ticks, [f"{float(f'{tick:.3g}'):,g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error against float32 weights")
    colours = [Line2D([], [], color=colour, lw=5, label=name) for name, colour in COLOURS.items()]
    markers = [
        Line2D([], [], color="#444444", marker=marker, lw=0, label=name, mew=1.6,
               mfc="white" if not name.startswith(OURS) else "#444444")
        for name, marker in MARKERS.items()
    ]  # fmt: skip
    for handles, place in ((colours, "outside upper center"), (markers, "outside lower center")):
        figure.legend(handles=handles, fontsize=8.5, frameon=False, ncols=len(handles), loc=place)
    figure.savefig(path, metadata={PLOTTED: hash_of(points), "Software": ""})


def differences(all_records: dict[str, Records]) -> list[str]:
    """What is not as the records have it, in sentences."""
    from PIL import Image

    found = []
    if readme_part(all_records) not in README.read_text():
        found.append("README.md has other figures")
    if not DOCUMENT.is_file() or DOCUMENT.read_text() != document(all_records):
        found.append("docs/figures.md has other figures")
    for path, points in ((PICTURE, plotted(all_records)), (STORED_PICTURE, stored_points(all_records))):
        shown = None
        if path.is_file():
            with Image.open(path) as picture:
                shown = picture.info.get(PLOTTED)
        if shown != hash_of(points):
            found.append(f"docs/{path.name} shows other figures")
    return found


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False) -> None:
    all_records = read()
    if not check:
        text = README.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        README.write_text(before + readme_part(all_records) + after)
        DOCUMENT.write_text(document(all_records))
        draw(all_records, PICTURE)
        draw_stored(all_records, STORED_PICTURE)
    found = differences(all_records)
    print("\n".join(found) or "README.md, docs/figures.md and both pictures are as the records have them.")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
