"""docs/figures.md, README's picture, and table and picture of docs/formats.md, from measurements/records.

    python measurements/figures.py             writes them
    python measurements/figures.py --check     writes nothing; says what differs from the records

A ratio is that of a record: the median over interleaved rounds of an implementation's time over that of the
baseline in the same round. Only PASSED records count, and of a cell that was measured twice the newer one.
claims.py checks the numbers in the text of README and docs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import marked
import typer
from scipy.stats import spearmanr
from sweeps import RECORDS, TOPICS, Topic, unpack

from moe_routing_bench.core.names import slots_of
from moe_routing_bench.results.decisions import decide
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.regrets import CellRegret, read_regrets
from moe_routing_bench.results.winners import Contest
from moe_routing_bench.workloads.cases import cases

ROOT = Path(__file__).parents[1]
DOCUMENT, FORMATS = ROOT / "docs/figures.md", ROOT / "docs/formats.md"
PICTURE, FORMATS_PICTURE = ROOT / "docs/experts.png", ROOT / "docs/formats.png"
PLOTTED = "Plotted"  # the entry of the picture's file that holds the hash of what it shows
DTYPES = ("bfloat16", "float32")
MAX_SHARE_OF_ROOF = 1.05  # a time that is shorter than the roof allows, but for the noise of both
MIN_ROUNDS = 8
REGRET = "regret"  # its cells are compared with one another, not with a baseline of ours
STORES = ("int8", "int4_g128")
SEED = "seed-"  # topics of the layers around the experts, and of uneven load
BUSY = 3.0  # load before a cell, when the cell before it had two threads
# the newest record of each implementation in each cell, around the experts beside each baseline; a baseline's
# own ratio is 1
ROWS = """
SELECT suite, "case", dtype, store, error, workload, direction, impl, layout, router, baseline, verdict,
  T, D, E, K, sequences, rounds,
  coalesce(ratio, 1) AS ratio, coalesce(ratio_low, 1) AS low, coalesce(ratio_high, 1) AS high, median_ms,
  -- the shares of older records are of other roofs
  CASE WHEN roof_ms IS NOT NULL THEN share_of_roof END AS share_of_roof,
  bw_2pass, bw_strict, bytes_per_second, flops_per_second, dropped_pairs, padded_rows, max_over_mean, cv,
  stage_seconds, role,
  load_before, machine, source_commit, source_dirty, threads, created_at, max_seconds, environment
FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate')
QUALIFY row_number() OVER (
  PARTITION BY span, "case", dtype, workload, direction, impl, layout, router, threads,
    CASE WHEN span IN ('attention', 'linear', 'rms_norm', 'decoder') THEN coalesce(baseline, impl) END
  ORDER BY created_at DESC, record_id DESC) = 1
ORDER BY dtype, "case", workload, ratio, impl, layout, router, direction, threads
"""
FAILED = """
SELECT impl, status, count(*) FROM records WHERE status NOT IN ('PASSED', 'UNSUPPORTED')
GROUP BY ALL ORDER BY ALL
"""
Row = dict[str, Any]
LOSSES = Path(__file__).with_name("formats.json")  # of `mrb model formats --json`
TRAINED = Path(__file__).with_name("models") / "trained_formats.json"  # with --text
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
    """One archive: the rows that passed, and (implementation, status, cells) of those that did not."""

    rows: tuple[Row, ...] = ()
    failed: tuple[tuple[str, str, int], ...] = field(default=(), repr=False)

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
        """The fastest implementation of each cell whose name starts so. A cell whose baseline is one of them
        has no time of ours, and is left out."""
        named = (
            [row for row in cell if row["impl"].startswith(starts)]
            for cell in self.cells.values()
            if not any(row["role"] == "baseline" and row["impl"].startswith(starts) for row in cell)
        )
        return [min(rows, key=lambda row: row["ratio"]) for rows in named if rows]


def read(folder: Path = RECORDS) -> dict[str, Records]:
    """Topic -> its records; empty where there is no archive yet."""
    return {topic: read_topic(topic, folder) for topic in TOPICS}


def read_topic(topic: str, folder: Path = RECORDS) -> Records:
    archive = folder / f"{topic}.tar.xz"
    if not archive.is_file():
        return Records()
    with tempfile.TemporaryDirectory() as scratch:
        folder = unpack(archive, Path(scratch))
        names, rows = run_query(folder, ROWS)
        failed = run_query(folder, FAILED)[1]
        environments = {path.stem: json.loads(path.read_text()) for path in folder.glob("environments/*")}
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for row in found:
        roofs = environments.get(row["environment"], {}).get("roofs") or {}
        row["copy_bytes"] = roofs.get("copy_bytes", {}).get(str(row["threads"]))
    return Records(tuple(found), tuple(failed))


# words


def times(ratio: float) -> str:
    """times(2.214) is "2.2x"; below 2 with two decimals."""
    return f"{ratio:.{2 if ratio < 1.995 else 1 if ratio < 9.95 else 0}f}x"


def compared(rows: Sequence[Row]) -> str:
    """2.2x faster (10 cells, 1.82x to 2.7x), for rows of others with ours as the baseline."""
    if not rows:
        return "not measured yet"
    ratios = [row["ratio"] for row in rows]
    mean = geometric_mean(ratios)
    word = "faster" if mean >= 1 else "slower"
    if len(rows) == 1:
        return f"{times(max(mean, 1 / mean))} {word} (1 cell)"
    span = f"{times(min(ratios))} to {times(max(ratios))}"
    return f"{times(max(mean, 1 / mean))} {word} ({len(rows)} cells, {span})"


def decided(rows: Sequence[Row]) -> str:
    """decided(rows) is "10 of 12 cells": in how many the difference is larger than the noise."""
    return f"{sum(row['verdict'] in ('SLOWER', 'FASTER') for row in rows)} of {len(rows)} cells"


def verdicts(rows: Sequence[Row]) -> str:
    """verdicts(rows) is "SLOWER 5, UNDECIDED 1"; a baseline has none."""
    counts = Counter(row["verdict"] for row in rows if row["verdict"])
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def milliseconds(value: float) -> str:
    """Three digits: 4.04, 27.6, 1,950."""
    return f"{float(f'{value:.3g}'):,g}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def bandwidth(rows: Sequence[Row], name: str) -> str:
    rates = [row[name] / 1e9 for row in rows if row[name]]
    ends = dict.fromkeys(f"{rate:.1f}" for rate in (min(rates), max(rates))) if rates else ()
    return f"{' to '.join(ends)} GB/s" if ends else "not measured yet"


def source(all_records: Mapping[str, Records]) -> str:
    """Machines, threads, rounds, commits and days in one sentence. Defects are written in capitals."""
    rows = [row for one in all_records.values() for row in one.rows]
    if not rows:
        return "Nothing was measured yet."
    commits = {row["source_commit"] for row in rows}
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
    facts = (
        f"{_each(rows, 'machine')}, threads: {_each(rows, 'threads')}",
        f"at least {rounds} interleaved rounds, {len(commits)} commits",
        " to ".join(dict.fromkeys((days[0], days[-1]))),
        *warnings,
    )
    return f"{', '.join(facts)}."


def _other_sweep(topic: Topic, row: Row) -> bool:
    if topic.by_case:
        return row["suite"].partition("/")[0] not in topic.suites
    return row["suite"] not in topic.suites or row["threads"] != topic.threads


def _each(rows: Sequence[Row], name: str, letters: int = 100) -> str:
    return ", ".join(sorted({str(row[name])[:letters] for row in rows}))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return marked.table(head, rows).splitlines()


# figures

HF, VLLM = "transformers(", "vllm_cpu"
EXPERTS = {"native": ("ours, as built", "#56B4E9"), "frozen(native)": ("ours, frozen", "#0072B2")}


def comparisons(all_records: Mapping[str, Records]) -> dict[str, list[Row]]:
    """What ours is compared with -> one row of theirs for each cell. README quotes these means."""
    grid = all_records["grid"]
    bfloat16, float32 = (grid.where(dtype=name) for name in ("bfloat16", "float32"))
    peer_rows = [row for _, row in peers(all_records)]
    return {
        "Transformers' best experts in a layer, bfloat16": bfloat16.best(HF),
        "Transformers' best experts in a layer, float32": float32.best(HF),
        "vLLM's CPU kernel, bfloat16": bfloat16.best(VLLM),
        "llama.cpp's experts in 8 and 4 bits": [r for r in peer_rows if r["impl"].startswith("llama_cpp(")],
        "KTransformers' experts in 8 and 4 bits": [r for r in peer_rows if r["impl"].startswith("kt(")],
        "Transformers' `grouped_mm`, forward and backward": all_records["training"].best("hf_"),
        "padded(1.25) with a batched product, uneven routing": _padded(all_records["layouts"]),
    }


def _padded(layouts: Records) -> list[Row]:
    skewed = [row for row in layouts.rows if row["workload"] != "uniform"]
    return [row for row in skewed if "1.25" in row["layout"] and row["impl"].startswith("staged")]


def peers(all_records: Mapping[str, Records]) -> list[tuple[str, Row]]:
    """Experts in 8 and 4 bits that are not ours: the topic, and a row for each cell."""
    return [
        (topic, row)
        for topic in TOPICS
        if topic.startswith("peers_")
        for row in all_records[topic].rows
        if not row["impl"].startswith("native")
    ]


THEIRS = "Transformers' best"


def default_times(all_records: Mapping[str, Records]) -> dict[str, dict[int, tuple[float, float | None]]]:
    """Implementation -> T -> (milliseconds, how many times faster than the other in the same rounds).

    The other is the fastest of Transformers' experts. Beside experts in 8 and 4 bits it is `native`: they
    were timed in rounds of their own, and `native` was up to a third faster or slower in those.
    """
    found: dict[str, dict[int, tuple[float, float | None]]] = {THEIRS: {}, "native": {}, "frozen(native)": {}}
    for row in all_records["default"].best("hf_"):
        found[THEIRS][row["T"]] = row["median_ms"], None
        for name in ("native", "frozen(native)"):
            for mine in all_records["default"].where(T=row["T"], impl=name).rows:
                found[name][row["T"]] = mine["median_ms"], row["ratio"] / mine["ratio"]
    for store in STORES:
        rows = all_records[f"default_{store}"].rows
        stored = [row for row in rows if row["role"] != "baseline"]
        found[f"{store}_a8"] = {row["T"]: (row["median_ms"], 1 / row["ratio"]) for row in stored}
    return {name: dict(sorted(by_T.items())) for name, by_T in found.items()}


def _knows_roof(topic: str, row: Row) -> bool:
    """Whether a row of experts alone, forward, knows its share of the roof."""
    if topic.startswith(SEED) or row["share_of_roof"] is None:
        return False
    return row["direction"] == "forward" and not row["router"]


def roof_shares(all_records: Mapping[str, Records]) -> dict[tuple[str, str], dict[int, list[Row]]]:
    """(model, weights) -> T -> the rows that know their share of the roof, the fastest first."""
    found: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for topic, records in all_records.items():
        for row in records.rows:
            if _knows_roof(topic, row):
                model, _, name = row["case"].partition("/")
                if model == REGRET:
                    if not (experts := re.match(r"expert_ffn-(.+?)-\d+-", name)):
                        continue  # another operation
                    model = experts[1]
                kind = model if model != "own" else f"{row['E']} experts", row["store"] or row["dtype"]
                found.setdefault(kind, {}).setdefault(row["T"], []).append(row)
    for by_T in found.values():
        for rows in by_T.values():
            rows.sort(key=lambda row: row["median_ms"])
    return found


def document(all_records: Mapping[str, Records]) -> str:
    """docs/figures.md: a table for each topic, under a heading that says what was found."""
    parts = [
        "# Figures",
        "",
        "`python measurements/figures.py` writes all tables here from `measurements/records/`. The last line",
        "of a section names the topics of `measurements/sweeps.py` that measure again. `2.2x`: ours is 2.2",
        "times as fast as the other in the same rounds, with the 99 % interval in brackets. `?` marks a",
        "difference that the noise leaves undecided. Ours is `native` unless a table names another one.",
        "",
        *table(
            ("compared with", "ours is", "decided in"),
            [
                (what, compared(rows), decided(rows).removesuffix(" cells"))
                for what, rows in comparisons(all_records).items()
            ],
        ),
        *_default_section(all_records),
        *_roof_section(all_records),
        *_regret_section(),
        *_grid_section(all_records),
        *_layers_section(all_records),
        *_planned_section(all_records),
        *_layouts_section(all_records),
        *_moving_section(all_records),
        *_topk_section(all_records),
        *_soft_section(all_records),
        *_stored_section(all_records),
        *_peers_section(all_records),
        *_attention_section(all_records),
        *_dense_section(all_records),
        *_model_section(all_records),
        *_linear_section(all_records),
        *_balance_section(all_records),
        *_seed_grid_section(all_records),
        *tuned_section(),
        "",
        "## Machines, commits and results without a time",
        "",
        source(all_records),
        "",
        *_failed_table(all_records),
    ]
    return "\n".join(parts) + "\n"


def _section(
    finding: str, caption: str, lines: list[str], *topics: str, cells: Iterable[Row] = ()
) -> list[str]:
    """cells: the rows of topics that were measured one by one; their records know the seconds of each."""
    minutes = sum(TOPICS[topic].minutes for topic in topics if topic in TOPICS)
    names = " ".join(topic for topic in topics if topic in TOPICS)
    measured = f"`sweeps.py run {names}`: at most {minutes:g} minutes."
    if seconds := sorted({row["max_seconds"] for row in cells}):
        given = ", ".join(f"{one:g}" for one in seconds)
        measured = f"In {given} s a cell. {measured}"
    if len(lines) <= 2:  # a head without rows
        lines = ["Not measured yet."]
    return ["", f"## {finding}", "", caption, "", *lines, "", measured]


def _range(ratios: Iterable[float]) -> str:
    ordered = sorted(ratios)
    return f"{times(ordered[0])} to {times(ordered[-1])}" if ordered else "not yet known how much"


def _default_section(all_records: Mapping[str, Records]) -> list[str]:
    lines = default_times(all_records)
    tokens = sorted({T for by_T in lines.values() for T in by_T})

    def cell(name: str, T: int) -> str:
        ms, gain = lines[name].get(T, (None, None))
        if ms is None:
            return "no time"
        return milliseconds(ms) if gain is None else f"{milliseconds(ms)} ({times(gain)})"

    def gains(*names: str) -> str:
        return _range(gain for name in names for _, gain in lines[name].values() if gain is not None)

    stored = [f"{store}_a8" for store in STORES]
    return _section(
        f"As built, experts are {gains('native')} faster than the best of Transformers; frozen, "
        f"{gains('frozen(native)')}",
        "Milliseconds of one call by number of tokens: the sizes of Qwen3-30B-A3B with 64 experts, bfloat16. "
        "In brackets: how many times faster than the fastest of Transformers' three experts functions in the "
        "same rounds. `int8_a8` and `int4_g128_a8` store weights in 8 and 4 bits and round rows to 8 bits; "
        f"they are {gains(*stored)} faster than `native` in their own rounds.",
        table(
            ("", *(f"T = {T:,}" for T in tokens)),
            [
                (f"{name}, beside native" if name in stored else name, *(cell(name, T) for T in tokens))
                for name in lines
                if lines[name]
            ],
        ),
        "default", *(f"default_{store}" for store in STORES),
    )  # fmt: skip


def _roof_section(all_records: Mapping[str, Records]) -> list[str]:
    found = roof_shares(all_records)
    tokens = sorted({T for by_T in found.values() for T in by_T})
    # the heading is about most models, not about the one that has the largest number of tokens
    common = [T for T in tokens if 2 * sum(T in by_T for by_T in found.values()) > len(found)]

    def cell(rows: Sequence[Row]) -> str:
        ours = [row for row in rows if row["impl"].startswith(("native", "frozen("))]
        others = [row for row in rows if row not in ours]
        shares = (f"{100 * group[0]['share_of_roof']:.0f}" if group else "-" for group in (ours, others))
        return "/".join(shares)

    def reach(T: int) -> str:
        shares = sorted(100 * by_T[T][0]["share_of_roof"] for by_T in found.values() if T in by_T)
        return f"{shares[0]:.0f} to {shares[-1]:.0f} %"

    return _section(
        f"The fastest experts reach {reach(common[0])} of the roof at {common[0]} token, and "
        f"{reach(common[-1])} at {common[-1]:,}"
        if common
        else "Shares of the roof",
        "Ours/the fastest other, in % of the roof: the least time that the measured bandwidth and peak "
        "rates of this machine allow for the bytes and operations of the call.",
        table(
            ("model", "weights", *(f"T = {T:,}" for T in tokens)),
            [
                (*kind, *(cell(by_T[T]) if T in by_T else "" for T in tokens))
                for kind, by_T in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
            ],
        ),
        *(topic for topic, records in all_records.items()
          if any(_knows_roof(topic, row) for row in records.rows)),
    )  # fmt: skip


def _regret_section(archive: Path = RECORDS / f"{REGRET}.tar.xz") -> list[str]:
    """As `mrb results regret` shows it: a regret of 1 is the fastest."""
    groups, cells = [], ()
    if archive.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            read = read_regrets(unpack(archive, Path(scratch)))
        groups, cells = list(read.groups), read.cells
    whole = groups[-1] if groups else None
    shown = [one for one in groups if one.worst >= 1.005]
    finding = (
        f'`impl="auto"` is within {100 * (whole.p95 - 1):.0f} % of the fastest in 95 % of {whole.cells} '
        "questions"
        if whole
        else '`impl="auto"` beside the fastest'
    )
    return _section(
        finding,
        "Regret: the time of what `auto` picks over that of the fastest implementation. "
        "Experts as built and frozen are two questions. "
        f"They cover {len({one.record.experiment.case for one in cells})} of {len(cases(REGRET))} cases. "
        f"In {len(groups) - len(shown)} groups that are not listed the regret is always 1.00. "
        f"In float32, {_under(cells, 'unfrozen', 1.3)} as built are less than 1.3x faster than the best of "
        f"Transformers, and {_under(cells, 'frozen', 1.5)} frozen less than 1.5x. "
        "`measurements/cpu/slower_than_transformers.txt` says why Transformers may be faster in some.",
        table(
            ("group", "questions", "median", "95 %", "worst", "Transformers faster in", "perhaps in"),
            [
                (one.group, one.cells, *(f"{value:.2f}" for value in (one.median, one.p95, one.worst)),
                 one.slower_than_transformers - one.slower_undecided, one.slower_undecided)
                for one in shown
            ],
        ),
        REGRET,
    )  # fmt: skip


def _under(cells: Sequence[CellRegret], weights: str, least: float) -> str:
    """_under(cells, "frozen", 1.5) is "23 of 43" questions in float32."""
    those = [one.transformers for one in cells if one.group == f"expert_ffn float32 {weights}"]
    ratios = [ratio for ratio in those if ratio is not None]
    return f"{sum(1 / ratio < least for ratio in ratios)} of {len(ratios)}"


def _gain(row: Row | None) -> str:
    """How many times faster ours is: "2.5x (2.50-2.58)"; "?" if that is not decided."""
    if row is None:
        return "-"
    unsure = "" if row["verdict"] in ("SLOWER", "FASTER") else "?"
    return f"{times(row['ratio'])}{unsure} ({row['low']:.2f}-{row['high']:.2f})"


def _ours(cell: Sequence[Row]) -> str:
    return next((milliseconds(row["median_ms"]) for row in cell if row["role"] == "baseline"), "-")


def _grid_section(all_records: Mapping[str, Records]) -> list[str]:
    grid = all_records["grid"]
    rows = sorted(grid.rows, key=lambda row: (row["D"], row["E"], row["T"]))
    lines: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name = row["case"].partition("/")[2].removesuffix(f"-{row['dtype']}")
        lines.setdefault(name, {}).setdefault(row["dtype"], []).append(row)

    def cells(cell: list[Row]) -> tuple[str, ...]:
        ours = [row for row in cell if row["role"] == "baseline"]
        if not ours or ours[0]["impl"] != "native":
            return "-", "-", "-"
        fastest = [
            min((r for r in cell if r["impl"].startswith(start)), key=lambda r: r["ratio"], default=None)
            for start in (HF, VLLM)
        ]
        return _ours(cell), *map(_gain, fastest)

    means = [comparisons(all_records)[f"Transformers' best experts in a layer, {dtype}"] for dtype in DTYPES]
    finding = " and ".join(
        f"{times(geometric_mean(row['ratio'] for row in rows))} in {dtype}"
        for dtype, rows in zip(DTYPES, means, strict=True) if rows
    )  # fmt: skip
    return _section(
            f"A layer is faster than with Transformers' best experts: {finding or 'not measured'}",
            "One layer of three models under uneven routing, zipf(1.2), hot caches. Milliseconds of ours, "
            "and how many times faster that is. `-`: no time.",
            table(
                ("model and tokens", *(
                    f"{what}, {dtype}" for dtype in DTYPES for what in ("ms", "Transformers", "vLLM")
                )),
                [(name, *(text for dtype in DTYPES for text in cells(by.get(dtype, []))))
                 for name, by in lines.items()],
            ),
            "grid",
        )  # fmt: skip


def _layers_section(all_records: Mapping[str, Records]) -> list[str]:
    """Single questions about a layer, one line for each implementation that is compared with ours."""
    topics = "large_olmoe", "large_qwen3", "decode", "skew", "training"
    steady = "invariant_olmoe", "invariant_qwen3"
    lines = []
    for topic in topics:
        for cell in all_records[topic].cells.values():
            for row in cell:
                if row["role"] != "baseline":
                    name = re.sub(r"staged\(.*\)", "staged", row["impl"])
                    direction = ", training" if row["direction"] == "train" else ""
                    workload = "" if row["workload"] == "zipf(1.2)" else f" {row['workload']}"
                    case = f"{row['case']}{workload}{direction}"
                    lines.append((case, name, _ours(cell), _gain(row)))
    skew = [row["ratio"] for row in all_records["skew"].best(HF)]
    bits = [row["ratio"] for topic in steady for row in all_records[topic].best("native(")]
    finding = (
        f"Skewed routing does not change the gain ({_range(skew)}), and equal bits in every batch cost at "
        f"most {100 * (max(bits) - 1):.0f} %"
        if skew and bits
        else "Skewed routing, training and equal bits"
    )
    return _section(
        finding,
        "Layers in bfloat16, zipf(1.2) unless named. `native(batch_invariant=True)` gives a token the same "
        "bits in every batch.",
        table(("case", "beside ours", "ours, ms", "ours is"), lines),
        *topics,
        *steady,
    )


def layouts_lines(layouts: Records) -> list[tuple[str, ...]]:
    """One line for each routing, layout and kernel: the mean over the cells, padding and drops."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in layouts.rows:
        kernel = "batched" if row["impl"].startswith("staged") else "C++"
        layout = re.sub(r"capacity_factor=|size=|,drop=position", "", row["layout"])
        groups.setdefault((row["workload"], layout, kernel), []).append(row)
    return [
        (*key, f"{geometric_mean(row['ratio'] for row in rows):.2f}", verdicts(rows) or "baseline",
         _padding(rows), _dropped(rows))
        for key, rows in groups.items()
    ]  # fmt: skip


LAYOUTS_HEAD = ("routing", "layout", "kernel", "time", "verdicts", "padding", "dropped")


def _layouts_section(all_records: Mapping[str, Records]) -> list[str]:
    layouts = all_records["layouts"]
    rows = _padded(layouts)
    finding = f"The compact layout is {compared(rows).partition(' (')[0]}" if rows else "Compact"
    return _section(
        f"{finding} than padding with a batched product",
        "Time over that of compact, the mean of 16 and 64 experts. A time below 1 with dropped pairs is less "
        "work, not a better layout. Busiest expert over mean: "
        + ", ".join(
            f"{max(row['max_over_mean'] for row in layouts.where(workload=name).rows):.1f} under {name}"
            for name in dict.fromkeys(row["workload"] for row in layouts.rows)
        )
        + ".",
        table(LAYOUTS_HEAD, layouts_lines(layouts)),
        "layouts",
    )


def _dropped(rows: Sequence[Row]) -> str:
    return percent(sum(row["dropped_pairs"] or 0 for row in rows), sum(row["T"] * row["K"] for row in rows))


def _padding(rows: Sequence[Row]) -> str:
    padding = sum(row["padded_rows"] or 0 for row in rows)
    kept = sum(row["T"] * row["K"] - (row["dropped_pairs"] or 0) for row in rows)
    return percent(padding, padding + kept)


def _moving_section(all_records: Mapping[str, Records]) -> list[str]:
    """Dispatch and combine: bandwidth by width and number of choices, then single cells."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(all_records["pack"].rows, key=lambda row: (row["D"], row["K"])):
        groups.setdefault((row["D"], row["K"]), []).append(row)
    lines = []
    for (D, K), rows in groups.items():
        plain = [row for row in rows if row["impl"] == "native+native"]
        reused = [row for row in rows if row["impl"] != "native+native"]
        gain = f"{100 - 100 * geometric_mean(row['ratio'] for row in reused):.1f} %" if reused else "-"
        lines.append((D, K, len(plain), bandwidth(plain, "bw_2pass"), bandwidth(plain, "bw_strict"), gain))
    ours = [row for row in all_records["pack"].rows if row["impl"] == "native+native"]
    slow = ", ".join(
        f"{times(row['ratio'])}" for row in all_records["plain"].rows if row["role"] != "baseline"
    )
    return _section(
        f"Rows travel to the experts and back at {bandwidth(ours, 'bw_strict')}",
        "Dispatch and combine in float16. By two passes: the bytes of one reading and one writing. Strictly: "
        "each byte once. Buffers that are used again save the last column. Plain torch indexing takes "
        f"{slow or 'not measured'} the time in the one cell where it was timed.",
        table(("D", "K", "cells", "by two passes", "strictly", "reused buffers save"), lines),
        "pack", "plain",
    )  # fmt: skip


def _topk_section(all_records: Mapping[str, Records]) -> list[str]:
    """Over sorting all scores, the mean over the numbers of tokens; then the layer without its experts."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in all_records["topk"].rows:
        if row["role"] != "baseline":
            groups.setdefault((row["E"], row["K"]), []).append(row)

    def gain(rows: Sequence[Row], name: str) -> str:
        mine = [1 / row["ratio"] for row in rows if row["impl"] == name]
        return times(geometric_mean(mine)) if mine else "no time"

    every = [1 / row["ratio"] for rows in groups.values() for row in rows if row["impl"] == "torch_topk"]
    routing = [
        f"with `{row['impl'].partition('+')[0]}` {times(1 / row['ratio'])}"
        for row in all_records["routing"].rows if row["role"] != "baseline"
    ]  # fmt: skip
    return _section(
        f"`torch.topk` chooses experts {_range(every)} faster than a sort",
        "How many times faster than sorting all E scores, the mean over 512, 4,096 and 32,768 tokens. A "
        f"layer without its experts, 16,384 tokens of 128 experts, becomes faster: {', '.join(routing)}.",
        table(
            ("E", "K", "torch_topk", "packed_key"),
            [
                (*key, gain(rows, "torch_topk"), gain(rows, "packed_key"))
                for key, rows in sorted(groups.items())
            ],
        ),
        "topk", "routing",
    )  # fmt: skip


def _soft_section(all_records: Mapping[str, Records]) -> list[str]:
    def line(row: Row) -> tuple[object, ...]:
        stages, total = row["stage_seconds"] or {}, sum((row["stage_seconds"] or {}).values())
        shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in stages.items())
        sizes = {name: row[name] for name in ("T", "E", "K", "sequences")}
        name = ": ".join(filter(None, (row["router"], slots_of(row["router"], **sizes))))
        return row["case"], name, milliseconds(row["median_ms"]), f"{row['ratio']:.2f}", shares

    few = [row["ratio"] for row in all_records["soft"].rows if row["role"] != "baseline"]
    return _section(
        f"Soft-MoE with few slots takes {min(few):.2f} to {max(few):.2f} of the time of top-k"
        if few
        else "Soft-MoE beside top-k",
        "Time over that of `softmax_topk`, and where the time goes.",
        table(("case", "router", "ms", "time", "stages"), map(line, all_records["soft"].rows)),
        "soft",
    )


def _stored_section(all_records: Mapping[str, Records]) -> list[str]:
    """Experts in 8 and 4 bits beside the same experts in bfloat16, and vLLM's in bfloat16."""
    topics = [topic for topic in TOPICS if topic.startswith("stored_")]
    lines: dict[tuple[str, str], dict[int, Row]] = {}
    for topic in topics:
        for row in all_records[topic].rows:
            if row["role"] != "baseline":
                name = row["case"].partition("/")[0], row["impl"].removeprefix("native(store=").rstrip(")")
                lines.setdefault(name, {})[row["T"]] = row
    tokens = sorted({T for by_T in lines.values() for T in by_T})

    def gain(row: Row | None) -> str:
        return "-" if row is None else f"{times(1 / row['ratio'])}{'' if row['verdict'] == 'FASTER' else '?'}"

    best = [
        1 / row["ratio"] for (_, name), by_T in lines.items() if name.endswith("_a8") for row in by_T.values()
    ]
    errors = {key: max(row["error"] or 0 for row in by_T.values()) for key, by_T in lines.items()}
    vllm = all_records["experts"].best(VLLM)
    return _section(
        f"Rows and weights in 8 and 4 bits are {_range(best)} faster than bfloat16",
        "How many times faster than `native` with bfloat16 weights, cold weights. "
        "Error: root mean square, relative, against the exact result with the stored weights. In "
        f"bfloat16 itself ours is {compared(vllm)} than vLLM's kernel.",
        table(
            ("model", "format", "error", *(f"T = {T:,}" for T in tokens)),
            [
                (*key, f"{errors[key]:.2g}", *(gain(by_T.get(T)) for T in tokens))
                for key, by_T in lines.items()
            ],
        ),
        *topics, "experts",
    )  # fmt: skip


def _peers_section(all_records: Mapping[str, Records]) -> list[str]:
    """A line for each kernel that is not ours, a column for each number of tokens."""
    rows = peers(all_records)
    tokens = sorted({row["T"] for _, row in rows})
    lines: dict[tuple[str, str], dict[int, Row]] = {}
    for _, row in rows:
        lines.setdefault((row["case"].partition("/")[0], row["impl"]), {})[row["T"]] = row
    return _section(
        f"Beside kernels of others for the same formats, ours is {compared([row for _, row in rows])}",
        "How many times faster `native(store=...)` is, with the same weights in the same rounds.",
        table(
            ("model", "other kernel", *(f"T = {T:,}" for T in tokens)),
            [(*name, *(_gain(by_T.get(T)) for T in tokens)) for name, by_T in lines.items()],
        ),
        *(topic for topic in TOPICS if topic.startswith("peers_")),
    )  # fmt: skip


# the layers around the experts, beside the figures of the original plan, which are those of other hardware

OUR_BLOCKS = ("ours", "ours(linear=onednn_packed)", "ours(linear=mkl_packed)", "frozen(ours)")
PLANNED_BLOCKS = {"1x64": "0.470/0.268 ms: 1.75x", "8x128": "0.638/0.520 ms: 1.23x"}
PLANNED_ATTENTION = {"founding": "8.5x over plain", "tuned": "1.27x by tuning"}
PLANNED_NORMS = {"plain": 4096, "launches overlap": 4422, "staged": 4596}  # GB/s
PLANNED_PRODUCTS = {"32x256": "1.13x", "128x768": "1.01x", "128x1024": "1.01x"}
Cell = Sequence[Row]  # of one case in one dtype


def by_case(all_records: Mapping[str, Records], topic: str) -> dict[str, dict[str, list[Row]]]:
    """Case without suite and dtype -> dtype -> rows, small cases first."""
    found: dict[str, dict[str, list[Row]]] = {}
    rows = all_records[topic].where(threads=TOPICS[topic].threads).rows
    for row in sorted(rows, key=lambda row: (row["T"], row["D"])):
        case = row["case"].partition("/")[2].removesuffix(f"-{row['dtype']}")
        found.setdefault(case, {}).setdefault(row["dtype"], []).append(row)
    return found


def newest(cell: Cell) -> dict[str, Row]:
    return {row["impl"]: row for row in sorted(cell, key=lambda row: row["created_at"])}


def _fastest(cell: Cell, names: Iterable[str]) -> Row | None:
    found = newest(cell)
    return min((found[one] for one in names if one in found), key=lambda row: row["median_ms"], default=None)


@dataclass(frozen=True)
class Gain:
    """How many times faster ours is, and whether the records decide it: str(Gain(1.6, False)) is "1.60x?"."""

    ratio: float
    sure: bool

    def __str__(self) -> str:
        return f"{times(self.ratio)}{'' if self.sure else '?'}"


def gain_over(cell: Cell, ours: Iterable[str], others: Iterable[str]) -> Gain | None:
    """How many times faster the fastest of ours is than the fastest of others; None unless all others have a
    time. Only ratios to the same baseline are compared, of several the newest."""
    ours, others, gains = list(ours), list(others), dict[str, Gain]()
    groups: dict[str, list[Row]] = {}
    for row in sorted(cell, key=lambda row: row["created_at"]):
        groups.setdefault(row["baseline"] or row["impl"], []).append(row)
    for group in sorted(groups.values(), key=lambda rows: rows[-1]["created_at"]):
        rows = {row["impl"]: row for row in group}
        found = [rows[one] for one in ours if one in rows]
        if found:
            mine = min(found, key=lambda row: row["ratio"])
            gains |= {one: Gain(row["ratio"] / mine["ratio"], _apart(mine, row)) for one, row in rows.items()}
    if not others or not gains.keys() >= {*others}:
        return None
    return min((gains[one] for one in others), key=lambda gain: gain.ratio)


def _apart(mine: Row, theirs: Row) -> bool:
    """By the verdict, and if the other is not the baseline, only if the intervals have no ratio in common."""
    if mine["verdict"] not in ("SLOWER", "FASTER", "SAME"):
        return False
    both = mine["high"] < theirs["low"] or theirs["high"] < mine["low"]
    return both or theirs["impl"] == mine["baseline"]


def _goal(what: str, asked: str, reached: Iterable[object], limit: str) -> list[str]:
    """A line with what was asked, what the records show, and what limits it."""
    shown = " and ".join(text for one in reached if (text := str(one)))
    return [f"- {what}: asked {asked}; reached {shown}. {limit}"] if shown else []


def _reached(gains: Iterable[Gain | None]) -> str:
    found = sorted((gain for gain in gains if gain is not None), key=lambda gain: gain.ratio)
    return " to ".join(dict.fromkeys(str(gain) for gain in (found[0], found[-1]))) if found else ""


def _percents(shares: Iterable[float | None], of: str) -> str:
    found = sorted(100 * share for share in shares if share is not None)
    ends = dict.fromkeys(f"{one:.0f}" for one in (found[0], found[-1])) if found else ()
    return f"{' to '.join(ends)} % of {of}" if ends else ""


def _maybe(gain: Gain | None) -> str:
    return "-" if gain is None else str(gain)


def _below(goals: list[str]) -> list[str]:
    return ["", *goals] if goals else []


def _at(roof: str) -> str:
    return f", at {roof}" if roof else ""


def _ms(row: Row | None) -> str:
    return "-" if row is None else milliseconds(row["median_ms"])


def _attention_section(all_records: Mapping[str, Records]) -> list[str]:
    cases, what = by_case(all_records, "seed-attention"), ("ms", "over plain", "over torch's")
    ours = ["native"]

    def gains(cell: Cell) -> tuple[Gain | None, Gain | None]:
        theirs = {row["impl"] for row in cell} - {"plain", *ours}
        return gain_over(cell, ours, ["plain"]), gain_over(cell, ours, theirs)

    def texts(cell: Cell) -> tuple[str, ...]:
        return _ms(_fastest(cell, ours)), *map(_maybe, gains(cell))

    def some(start: str, dtype: str) -> list[Cell]:
        return [by[dtype] for case, by in cases.items() if case.startswith(start) and dtype in by]

    def shares(cells: Iterable[Cell]) -> list[float | None]:
        return [row["share_of_roof"] for cell in cells if (row := _fastest(cell, ours)) is not None]

    def roof(cells: Iterable[Cell]) -> str:
        return _percents(shares(cells), "the roof")

    decoding, founding = some("decode", "bfloat16"), some("founding", "float32")
    goals = [
        *_goal(
            "decoding in bfloat16",
            "1.7x `sdpa_folded` and 80 % of a read of the same bytes",
            (
                _reached(gain_over(cell, ours, ["sdpa_folded"]) for cell in decoding),
                _percents(shares(decoding), "the read"),
            ),
            "Limit: its own work in the caches takes as long as the read.",
        ),
        *_goal(
            "founding shape in float32",
            "8.5x plain",
            (_reached(gains(cell)[0] for cell in founding),),
            f"Limit: heads of 16 numbers{_at(roof(founding))}.",
        ),
        *_goal(
            "BERT in float32 and bfloat16",
            "1.25x and 1.55x `sdpa`",
            (_reached(gain_over(cell, ours, ["sdpa"]) for cell in some("bert", one)) for one in DTYPES[::-1]),
            f"Limit in float32: the exponents between the products{_at(roof(some('bert', 'float32')))}. In "
            "bfloat16 torch uses AMX, which ours does not; `auto` takes torch's there.",
        ),
    ]
    best = [gain.ratio for by in cases.values() for cell in by.values() if (gain := gains(cell)[1])]
    return _section(
        f"Attention has {_range(best)} the speed of the best of torch's" if best else "Attention",
        "`native` on one thread, and its speed over plain torch and over the fastest of torch's own that has "
        "a time; keys and values of decoding are cold. The original plan ran on a GPU that it does not name.",
        [*table(
            ("case", *(f"{dtype}: {one}" for dtype in DTYPES for one in what), "original plan"),
            [
                (case, *(text for dtype in DTYPES for text in texts(by.get(dtype, ()))),
                 PLANNED_ATTENTION.get(case, "-"))
                for case, by in cases.items()
            ],
        ), *_below(goals)],
        "seed-attention",
        cells=all_records["seed-attention"].rows,
    )  # fmt: skip


def _dense_section(all_records: Mapping[str, Records]) -> list[str]:
    cases = by_case(all_records, "seed-dense").items()
    cells = [(case, dtype, cell) for case, by in cases for dtype, cell in by.items()]
    others = ("torch", "compiled", "transformers")

    def line(case: str, dtype: str, cell: Cell) -> tuple[str, ...]:
        mine, rates = _fastest(cell, OUR_BLOCKS), ("-", "-")
        if mine is not None:
            tokens, flops = 1e3 * mine["T"] / mine["median_ms"], mine["flops_per_second"] / 1e12
            rates = f"{tokens:,.0f}", f"{flops:.2f}"
        gain = _maybe(gain_over(cell, OUR_BLOCKS, others[:2]))
        theirs = (_ms(_fastest(cell, [name])) for name in others)
        return case, dtype, *theirs, _ms(mine), *rates, gain, PLANNED_BLOCKS.get(case, "-")

    gains = [(dtype, gain_over(cell, OUR_BLOCKS, others[:2])) for _, dtype, cell in cells]
    known = [gain.ratio for _, gain in gains if gain]
    finding = f" has {_range(known)} the speed of the best of torch and `torch.compile`" if known else ""
    goals = _goal(
        "bfloat16 and float32",
        "1.3x and never slower",
        (_reached(gain for one, gain in gains if one == dtype) for dtype in DTYPES),
        "Limit: the four products.",
    )
    return _section(
        f"A dense decoder block{finding}",
        "Milliseconds of batch x tokens: width 2048, 32 heads, 33,572,864 parameters, all in the same dtype. "
        "The original plan, on an H100, compared 16 "
        "bits with fp8: 1.23x to 1.85x.",
        [*table(
            ("case", "dtype", *others, "ours", "tokens/s", "TFLOP/s", "gain", "original plan"),
            [line(*one) for one in cells],
        ), *_below(goals)],
        "seed-dense",
        cells=all_records["seed-dense"].rows,
    )  # fmt: skip


def _our_models(store: str) -> tuple[tuple[str, ...], ...]:
    """Our models as built, with frozen or stored experts, and with all that is ours."""
    if not store:
        return ("ours",), ("frozen(ours)",), ("frozen(ours(attention=ours,linears=True))",)
    stored = [f"impl=native(store={store}{rows})" for rows in ("", "_a8")]
    return (), tuple(f"ours({one})" for one in stored), (f"ours(attention=ours,linears=True,{stored[1]})",)


def model_gains(all_records: Mapping[str, Records]) -> dict[str, list[Gain | None]]:
    """Case -> how many times faster ours are than the best of Transformers: `_our_models`."""
    return {
        case: [gain_over(cell, ours, _transformers(cell)) for ours in _our_models(cell[0]["store"])]
        for case, cell in _models(all_records).items()
    }


# the kernel of the original plan over plain torch, on an AMD GPU
PLANNED_EXPERTS = {"1x7168x256": 17, "32x7168x256": 2.2, "32x8192x6144": 0.29, "128x8192x6144": 0.075}
HF_EXPERTS = ("hf_eager", "hf_grouped_mm", "hf_batched_mm")


def _planned_section(all_records: Mapping[str, Records]) -> list[str]:
    """Empty before it was measured."""
    cells = [
        (case, dtype, cell)
        for topic in ("seed-fused", "seed-qwen")
        for case, by in by_case(all_records, topic).items()
        for dtype, cell in by.items()
    ]
    if not cells:
        return []

    def gains(cell: Cell, *others: str) -> list[Gain | None]:
        return [gain_over(cell, [ours], others) for ours in ("native", "frozen(native)")]

    def line(case: str, dtype: str, cell: Cell) -> tuple[str, ...]:
        theirs = [name for name in HF_EXPERTS if name in newest(cell)]
        shown = map(_maybe, gains(cell, "eager_loop") + gains(cell, *theirs))
        plan = times(PLANNED_EXPERTS[case]) if case in PLANNED_EXPERTS else "-"
        name = case if dtype == "float32" else f"{case} {dtype}"
        return name, _ms(_fastest(cell, ["frozen(native)"])), *shown, plan

    frozen = [gain.ratio for *_, cell in cells if (gain := gains(cell, "eager_loop")[1])]
    return _section(
        f"At the sizes of the original plan, frozen experts are {_range(frozen)} faster than plain torch",
        "Experts (tokens x D x F; 256 of width 256, else 8) and layers of 128 tokens, in float32 unless "
        "named. The plan's kernel ran on an AMD GPU. F = 16,384 needs more than 24 GB.",
        table(
            ("case", "frozen ms", "built over plain", "frozen", "built over Transformers",
             "frozen", "plan's kernel over plain"),
            [line(*one) for one in cells],
        ),
        "seed-fused", "seed-qwen",
    )  # fmt: skip


def _models(all_records: Mapping[str, Records]) -> dict[str, list[Row]]:
    return {case: by[BFLOAT16] for case, by in by_case(all_records, "whole-model").items()}


def _transformers(cell: Cell) -> list[str]:
    return [name for name in newest(cell) if name.startswith("transformers")]


def _share_of_experts(row: Row | None) -> str:
    if row is None or not row["stage_seconds"]:
        return "-"
    return percent(1e3 * row["stage_seconds"]["experts"], row["median_ms"])


def _model_section(all_records: Mapping[str, Records]) -> list[str]:
    gains = model_gains(all_records)

    def line(case: str, cell: Cell) -> tuple[str, ...]:
        everything = _our_models(cell[0]["store"])[2]
        theirs, mine = _fastest(cell, _transformers(cell)), _fastest(cell, everything)
        shares = (_share_of_experts(row) for row in (theirs, mine))
        return case, _ms(theirs), _ms(mine), *shares, *map(_maybe, gains[case])

    known = [gain.ratio for row in gains.values() for gain in row[1:] if gain]
    finding = f" is {_range(known)} faster than with Transformers' experts" if known else ""
    return _section(
        f"A whole model{finding}",
        "Four layers of OLMoE's sizes and lm_head. Transformers: their best experts, in bfloat16, and SDPA. "
        "All ours: our attention and dense matrices too.",
        table(
            ("case", "Transformers ms", "all ours ms", "experts' share: Transformers",
             "experts' share: all ours", "gain as built", "gain frozen or stored", "gain all ours"),
            [line(*one) for one in _models(all_records).items()],
        ),
        "whole-model",
        cells=all_records["whole-model"].rows,
    )  # fmt: skip


def _linear_section(all_records: Mapping[str, Records]) -> list[str]:
    """Bandwidth of RMSNorm, and of each linear its gain over torch, the mean over the four products."""
    norms = by_case(all_records, "seed-rmsnorm").values()
    rows = [row for by in norms for cell in by.values() for row in newest(cell).values()]
    ours = [row for row in rows if row["impl"].startswith("native")]
    gains: dict[tuple[str, str], dict[str, list[Gain]]] = {}
    for case, by in by_case(all_records, "seed-linear").items():
        for dtype, cell in by.items():
            for name in {row["impl"] for row in cell} - {"torch"}:
                if (gain := gain_over(cell, [name], ["torch"])) is not None:
                    gains.setdefault((dtype, name), {}).setdefault(case.partition("-")[0], []).append(gain)

    def mean(gains: Sequence[Gain]) -> Gain | None:
        if not gains:
            return None
        return Gain(geometric_mean(one.ratio for one in gains), all(one.sure for one in gains))

    def means(sizes: Mapping[str, Sequence[Gain]]) -> list[Gain | None]:
        return [mean(sizes.get(one, ())) for one in PLANNED_PRODUCTS]

    reused = [row for row in rows if row["impl"] == "native_reused"]
    copied = [(row["dtype"], row["bytes_per_second"], row["copy_bytes"]) for row in reused]
    goals = [
        *_goal(
            "RMSNorm into reused memory",
            "90 % of a copy",
            (f"{100 * rate / copy:.0f} % in {dtype}" for dtype, rate, copy in copied if copy),
            "Limit: in bfloat16 the conversion.",
        ),
        *_goal(
            "linear in bfloat16, frozen",
            "4x torch's",
            (_reached(means(gains.get(("bfloat16", "frozen(native)"), {}))),),
            "Limit: the arithmetic is in float32.",
        ),
    ]

    norm_table = table(
        ("RMSNorm, 65,536 x 512", "ms", "GB/s"),
        [
            *((f"{row['impl']}, {row['dtype']}", _ms(row), f"{row['bytes_per_second'] / 1e9:.1f}")
              for row in sorted(rows, key=lambda row: (row["dtype"], row["median_ms"]))),
            *((f"H100, fp8, {mode}", "-", f"{rate:,}") for mode, rate in PLANNED_NORMS.items()),
        ],
    )  # fmt: skip
    linear_table = table(
        ("linear, tokens x width", *PLANNED_PRODUCTS),
        [
            *(
                (f"{name}, {dtype}", *map(_maybe, means(sizes)))
                for (dtype, name), sizes in sorted(gains.items())
            ),
            ("H100, by tuning", *PLANNED_PRODUCTS.values()),
        ],
    )
    finding = f"moves {bandwidth(ours, 'bytes_per_second')} on one thread" if ours else "and linear"
    return _section(
        f"RMSNorm {finding}",
        "Linear: the speed over torch's, cold weights, the mean of four products. A kernel for norm and "
        "product together is not built: a trial of ours measured 1.00x to 1.03x. Lines with H100 are "
        "the original plan's.",
        [*norm_table, "", *linear_table, *_below(goals)] if rows or gains else [],
        "seed-rmsnorm", "seed-linear",
        cells=(row for topic in ("seed-rmsnorm", "seed-linear") for row in all_records[topic].rows),
    )  # fmt: skip


def balance_lines(records: Records) -> list[tuple[object, ...]]:
    """For each layout, over all routings, rank correlations: of uneven load with time, of the order of
    measuring with time, of the load with the time over that of compact in the same rounds, and with the time
    of a kept pair."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in sorted(records.rows, key=lambda row: row["cv"]):
        layout = re.sub(r"capacity_factor=|,drop=position", "", row["layout"])
        groups.setdefault((row["E"], layout), []).append(row)

    def line(layout: str, rows: list[Row]) -> tuple[str, ...]:
        ms = [row["median_ms"] for row in rows]
        pairs = [row["T"] * row["K"] - (row["dropped_pairs"] or 0) for row in rows]
        each = [1e6 * time / kept for time, kept in zip(ms, pairs, strict=True)]
        cv, turns = ([row[name] for row in rows] for name in ("cv", "created_at"))
        order = [sorted(turns).index(turn) for turn in turns]
        over = [row["ratio"] for row in rows]
        shown = [
            f"{spearmanr(*two).statistic:.2f}" if len(set(two[1])) > 1 else "-"
            for two in ((cv, ms), (order, ms), (cv, over), (cv, each))
        ]
        return _dropped(rows), *shown, f"{each[0]:,.0f}", f"{each[-1]:,.0f}"

    return [(*key, *line(key[1], rows)) for key, rows in sorted(groups.items()) if len(rows) > 2]


def _balance_section(all_records: Mapping[str, Records]) -> list[str]:
    records = all_records["seed-balance"]
    lines = balance_lines(records)
    drifts = sum(abs(float(order)) >= 0.5 for _, _, _, _, order, *_ in lines if order != "-")
    halves = []
    for E in sorted({row["E"] for row in records.rows}):
        rows = sorted(records.where(E=E, layout="compact").rows, key=lambda row: row["created_at"])
        if len(rows) > 2:
            ms, half = [row["median_ms"] for row in rows], len(rows) // 2
            both = " and ".join(milliseconds(geometric_mean(some)) for some in (ms[:half], ms[half:]))
            halves.append(f"{both} ms with {E} experts")
    drift = (
        f" Compact took {' and '.join(halves)} in the first and second half: the machine may have drifted. "
        f"In {drifts} of {len(lines)} lines time follows the order. Only over compact is free "
        "of drift."
        if halves
        else ""
    )
    per_pair = [float(one) for *_, one, _, _ in lines if one != "-"]
    return _section(
        "Time per pair does not always grow with uneven load"
        if min(per_pair, default=1) < 0
        else "Time per pair and uneven load",
        "Ten routings from even to collapsed. Rank correlations of the load's variation with time, with time "
        "over compact in the same rounds, and with time per kept pair. *Order*: correlation of time with the "
        "order of measuring. *Even, uneven*: ns of a pair at the most even and uneven load." + drift,
        table(
            ("E", "layout", "dropped", "time", "order", "over compact", "per pair", "even", "uneven"), lines
        ),
        "seed-balance",
        cells=records.rows,
    )


def _seed_grid_section(all_records: Mapping[str, Records]) -> list[str]:
    """A line for each cell, three columns for each layout; nothing before it was measured."""
    grid = all_records["seed-grid"]
    if not grid.rows:
        return []
    layouts = ("compact", "padded", "block")

    def texts(row: Row | None) -> tuple[str, ...]:
        if row is None:
            return "-", "-", "-"
        rates = row["bytes_per_second"] / 1e9, row["flops_per_second"] / 1e12
        return milliseconds(row["median_ms"]), *(f"{rate:.2f}" for rate in rates)

    lines = []
    for cell in grid.cells.values():
        by = {row["layout"].partition("(")[0]: row for row in cell}
        name = cell[0]["case"].partition("/")[2]
        lines.append((name, *(text for one in layouts for text in texts(by.get(one)))))
    return _section(
        "Padded layers of the original plan, in three layouts",
        "32 x 128 tokens; padding has the capacity of the case.",
        table(("case", *(f"{one}: {what}" for one in layouts for what in ("ms", "GB/s", "TFLOP/s"))), lines),
        "seed-grid",
        cells=grid.rows,
    )


# of each case the newest default that was ranked beside the best settings
TUNED = """
SELECT "case", T, dtype, workload, threads, impl LIKE 'frozen(%' AS frozen,
  median_ms, source_commit, source_dirty, load_before
FROM records WHERE suite = 'tune-ranked' AND role = 'baseline' AND status = 'PASSED'
QUALIFY row_number() OVER (
  PARTITION BY "case", T, dtype, workload, threads, frozen ORDER BY created_at DESC) = 1
"""


def tuned_section(folder: Path = RECORDS) -> list[str]:
    """What `mrb tune layer` found, as `mrb tune decide` decides it; empty without an archive."""
    rows: list[tuple[object, ...]] = []
    made = []
    for archive in sorted(folder.glob("tuned-*.tar.xz")):
        with tempfile.TemporaryDirectory() as scratch:
            results = unpack(archive, Path(scratch))
            decided, found = decide(results), run_query(results, TUNED)[1]
        milliseconds_of = {row[:6]: milliseconds(row[6]) for row in found}
        made.append(f"`{archive.name}`: {decided.machine}, torch {decided.torch}, {_measured(found)}")
        for answer in decided.answers:
            asked, facts = answer.question, answer.question.facts
            for contest in answer.contests:
                model = contest.case.partition("/")[0] + " frozen" * facts.frozen
                place = (contest.case, contest.T, facts.dtype, asked.workload, asked.threads, facts.frozen)
                words = (milliseconds_of.get(place, "-"), contest.chosen, *_tuned(contest))
                rows.append((model, facts.dtype, asked.workload, asked.threads, contest.T, *words))
    if not rows:
        return []
    gains = sum(row[-2] != "no gain" for row in rows)
    return [
        "",
        f"## `mrb tune layer` gains in {gains} of {len(rows)} cases, and keeps the default in the others",
        "",
        "The chosen setting beside the default in the same rounds, ranked again after the search. If no "
        "setting is shown to be faster, the default stays, and the verdicts are those on the best others.",
        "",
        *table(
            ("model", "dtype", "routing", "threads", "T", "default, ms", "chosen", "gain", "verdict"), rows
        ),
        "",
        f"Measured by `mrb tune layer`. {'; '.join(made)}.",
    ]


def _tuned(contest: Contest) -> tuple[str, str]:
    """("1.250x (1.200-1.300)", "FASTER"), or ("no gain", "SLOWER 2, UNDECIDED")."""
    others = contest.against_baseline
    if (won := others.get(contest.chosen)) is not None:
        low, high = (1 / end for end in reversed(won.interval))
        return f"{1 / won.ratio:.3f}x ({low:.3f}-{high:.3f})", won.verdict
    counts = sorted(Counter(one.verdict for one in others.values()).items())
    verdicts = ", ".join(f"{word} {n}" if n > 1 else word for word, n in counts)
    return "no gain", verdicts or "not ranked again"


def _measured(found: Sequence[Sequence[Any]]) -> str:
    """The commit, and defects in capitals."""
    load = max((row[9] for row in found), default=0.0)
    facts = ["commit " + " and ".join(sorted({str(row[7])[:10] for row in found}))] if found else []
    facts += ["CHANGED SINCE THAT COMMIT"] * any(row[8] is not False for row in found)
    return ", ".join([*facts, *[f"THE MACHINE WAS BUSY (load {load:.1f})"] * (load > BUSY)])


def _failed_table(all_records: Mapping[str, Records]) -> list[str]:
    """How many times of implementations are missing, by status. The records hold each reason."""
    counts: Counter[str] = Counter()
    for records in all_records.values():
        for _, status, cells in records.failed:
            counts[status] += cells
    return table(("status", "cells"), sorted(counts.items())) if counts else ["Not measured yet."]


# the picture


def plotted(all_records: Mapping[str, Records]) -> list[tuple[int, str, float, float, float]]:
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


def draw(all_records: Mapping[str, Records], path: Path) -> None:
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

    Times and errors of kernels are those of the records. What storing itself loses is the column `layer` of
    formats.json. The two are independent, so their squares are added.
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
    finding = "Ours (filled) takes less time than other kernels of the same format (hollow)"
    for handles, place, title in (
        (colours, "outside upper center", finding),
        (markers, "outside lower center", None),
    ):
        figure.legend(
            handles=handles, fontsize=8.5, frameon=False, ncols=len(handles), loc=place, title=title
        )
    figure.savefig(path, metadata={PLOTTED: hash_of(points), "Software": ""})


def losses_table() -> str:
    """What each format loses: errors of weights, a layer and our kernel, and the loss of a trained model."""
    trained = {one["name"]: one for one in json.loads(TRAINED.read_text())["trained"]}

    def number(value: float | None, style: str = ".4f") -> str:
        return "-" if value is None else f"{value:{style}}"

    return marked.table(
        ("format", "bits", "weights", "layer", "kernel", "kernel, `_a8`", "loss", "loss, `_a8`"),
        [
            (
                row["name"], f"{row['bits']:.2f}",
                *(number(row[key]) for key in ("weights", "layer", "kernel", "int8_rows")),
                *(number(trained[row["name"]][key], "+.4f") for key in ("more", "int8_rows")),
            )
            for row in json.loads(LOSSES.read_text())["layer"]
        ],
    )  # fmt: skip


def differences(all_records: dict[str, Records]) -> list[str]:
    """The documents and pictures that the records contradict, in sentences."""
    from PIL import Image

    found = []
    if not DOCUMENT.is_file() or DOCUMENT.read_text() != document(all_records):
        found.append("docs/figures.md has other figures")
    text = FORMATS.read_text()
    if marked.filled(text, {"losses": losses_table()}) != text:
        found.append("docs/formats.md has other figures")
    for path, points in ((PICTURE, plotted(all_records)), (FORMATS_PICTURE, stored_points(all_records))):
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
        DOCUMENT.write_text(document(all_records))
        marked.rewrite(FORMATS, {"losses": losses_table()})
        draw(all_records, PICTURE)
        draw_stored(all_records, FORMATS_PICTURE)
    found = differences(all_records)
    print("\n".join(found) or "docs/figures.md, docs/formats.md and the pictures agree with the records.")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
