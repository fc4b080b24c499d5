"""The CPU grid: `auto` against Transformers, bare oneDNN and the roofline.

    python measurements/cpu/cpu_grid.py                  210 cells, about 38 minutes; writes cpu_grid.jsonl
    python measurements/cpu/cpu_grid.py --resume         leaves out the cells that are in the file
    python measurements/cpu/cpu_grid.py --only "qwen3*/bfloat16/16/*"
    python measurements/cpu/cpu_grid.py --summary        reads cpu_grid.jsonl, writes cpu_grid.txt
    python measurements/cpu/cpu_grid.py --quick          a tiny layer, to see that it works

In a cell every subject is judged first. Then come rounds: one sample of each subject, in a new order, all
with the same x and routing; four routings take turns. Where the weights of a call would fit the last cache,
half a gibibyte is read before each sample, so that weights come from memory as in a model of many layers.
A ratio is the median over rounds of the subject's time over auto's in the same round, with a bootstrap
interval of 95 %. A subject five times slower than the fastest sits out after three rounds.
"""

from __future__ import annotations

import fnmatch
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import cpu_subjects as cpu
import numpy as np
import torch
import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_routing_bench.bench.roofs import DTYPES
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.machine import this_machine

HERE = Path(__file__).parent
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
DTYPE_NAMES = ("bfloat16", "float32")
WORKLOADS = ("uniform", "zipf(1.2)", "one_expert")
MOST_LINE = 2**20
# of the issue: against the best of Transformers, against bare, against the roofline
SPEEDUP_TARGETS = {"bfloat16": 1.8, "float32": 1.25}
NEVER_SLOWER, BARE_MEAN, BARE_WORST, ROOFLINE_MEAN = 1.02, 1.0, 1.15, 1.4


class Session(BaseModel):
    """Where, when and how the cells after it were measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["session"] = "session"
    machine: dict[str, Any]
    commit: str
    load_average: list[float]
    threads: int
    date: str
    command: str
    decisions: str | None


class Measured(BaseModel):
    """One subject of a cell: median and samples in ms, ratio = its time over auto's (middle, low, high)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    label: str
    status: str
    ms: float | None = None
    samples_ms: list[float] = Field(default_factory=list, max_length=1000)
    ratio: tuple[float, float, float] | None = None


class Cell(BaseModel):
    """One line of the file: Cell(model="seed-qwen", dtype="bfloat16", T=16, workload="zipf(1.2)", ...)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["cell"] = "cell"
    model: str
    sizes: dict[str, int]
    dtype: str
    T: int
    workload: str
    subjects: dict[str, Measured]
    skipped: dict[str, str]
    roofline_ms: float
    limits: cpu.Limits
    flops: float
    bytes: float
    evicted: bool
    seconds: float
    load_average: list[float]

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.model, self.dtype, self.T, self.workload

    def ms(self, name: str) -> float | None:
        found = self.subjects.get(name)
        return None if found is None else found.ms

    def ratio(self, name: str) -> float | None:
        found = self.subjects.get(name)
        return None if found is None or found.ratio is None else found.ratio[0]

    @property
    def best_hf(self) -> str | None:
        """The fastest of Transformers by its median, whether or not its result passed the judge."""
        timed = {name: ms for name in cpu.HF if (ms := self.ms(name)) is not None}
        return min(timed, key=timed.__getitem__) if timed else None


def session(threads: int) -> Session:
    head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=HERE, capture_output=True, text=True)
    changed = subprocess.run(("git", "status", "--porcelain"), cwd=HERE, capture_output=True, text=True)
    commit = head.stdout.strip() or "no git"
    return Session(
        machine=this_machine().to_dict(),
        commit=f"{commit} with changes" if changed.stdout.strip() else commit,
        load_average=list(os.getloadavg()),
        threads=threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join(("python", *sys.argv)),
        decisions=os.environ.get("MRB_DECISIONS"),
    )


def measured(
    subjects: Sequence[cpu.Subject],
    statuses: dict[str, str],
    seconds: dict[str, list[float | None]],
    base: str,
) -> dict[str, Measured]:
    found = {}
    for subject in subjects:
        ms = [s * 1e3 for s in seconds.get(subject.name, ()) if s is not None]
        found[subject.name] = Measured(
            label=subject.label,
            status=statuses[subject.name],
            ms=median(ms) if ms else None,
            samples_ms=[float(f"{sample:.5g}") for sample in ms],
            ratio=cpu.paired(seconds, subject.name, base) if ms else None,
        )
    return found


def run_cell(
    model_name: str,
    dtype_name: str,
    T: int,
    workload: str,
    *,
    weights: ExpertWeights,
    bare: cpu.Bare | None,
    limits: cpu.Limits,
    names: Sequence[str],
    budget: float,
    evict: torch.Tensor | None,
) -> Cell:
    started = time.perf_counter()
    model = (cpu.MODELS | cpu.TINY)[model_name]
    inputs = cpu.make_inputs(model, DTYPES[dtype_name], T, workload)
    subjects, skipped = cpu.subjects_for(names, inputs, weights, bare)
    if "auto" in skipped:
        raise ValueError(f"auto cannot run at T={T}, and without it there is no ratio: {skipped['auto']}")
    statuses = cpu.judge_subjects(subjects, inputs, weights)
    alive = [subject for subject in subjects if not statuses[subject.name].startswith("CRASHED")]
    costs = [cpu.layer_cost(x_TD, routing, weights) for x_TD, routing in inputs]
    small = evict is not None and max(cost.weight_bytes for cost in costs) < cpu.SMALL_BYTES
    seconds = cpu.run_rounds(
        alive,
        inputs,
        until=started + budget,
        before=evict.sum if evict is not None and small else None,
    )
    return Cell(
        model=model_name,
        sizes={"D": model.D, "F": model.F, "E": model.E, "K": model.K},
        dtype=dtype_name,
        T=T,
        workload=workload,
        subjects=measured(subjects, statuses, seconds, "auto"),
        skipped=skipped,
        roofline_ms=median(limits.floor_seconds(cost) for cost in costs) * 1e3,
        limits=limits,
        flops=median(cost.useful_flops for cost in costs),
        bytes=median(cost.bytes for cost in costs),
        evicted=small,
        seconds=time.perf_counter() - started,
        load_average=list(os.getloadavg()),
    )


def read_lines(path: Path) -> Iterator[Session | Cell]:
    """What the file holds. Of two lines with the same cell the older one counts."""
    seen = set()
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if len(line) > MOST_LINE:
                raise ValueError(f"{path} line {number} is too long to be one of ours; delete it")
            kind = Session if '"kind":"session"' in line[:40] else Cell
            try:
                found = kind.model_validate_json(line)
            except ValidationError as error:
                where = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))[:80]
                raise ValueError(f"{path} line {number} is not ours (at {where!r}); delete it") from None
            if isinstance(found, Cell):
                if found.key in seen:
                    continue
                seen.add(found.key)
            yield found


def summary(path: Path) -> str:
    lines = list(read_lines(path))
    sessions, cells = [s for s in lines if isinstance(s, Session)], [c for c in lines if isinstance(c, Cell)]
    cells = _with_best_limits(cells)
    out = []
    for one in sessions:
        out += [
            f"{one.machine.get('name')}, torch {one.machine.get('torch')}, {one.threads} threads, {one.date},"
            f" load {one.load_average[0]:.2f}, decisions {one.decisions or 'off'}",
            f"commit {one.commit}: {one.command}",
        ]
    out += ["", "Milliseconds, medians. * did not pass the judge. HF/auto: best of Transformers over auto."]
    out += ["The roofline takes the best bandwidth of all groups, and the best peak of those of its dtype."]
    head = f"{'T':>5} {'workload':11}" + "".join(f"{name:>11}" for name in _COLUMNS)
    for (model, dtype), group in groupby(cells, key=lambda cell: (cell.model, cell.dtype)):
        ours = list(group)
        limit = ours[0].limits
        rates = f"{limit.bytes_per_second / 1e9:.1f} GB/s, {limit.flops_per_second / 1e12:.3f} TFLOP/s"
        sizes = " ".join(f"{letter}={size}" for letter, size in ours[0].sizes.items())
        out += ["", f"{model} {dtype}   {sizes}   {rates}", head]
        out += [_row(cell) for cell in ours]
    out += ["", *_notes(cells), "", "Targets", *_targets(cells)]
    return "\n".join(out) + "\n"


def _with_best_limits(cells: Sequence[Cell]) -> list[Cell]:
    """Rooflines from the best rates seen before any of the groups: a busy moment must not lower the limit."""
    if not cells:
        raise ValueError("the file holds no cell yet; run without --summary")
    memory = max(cell.limits.bytes_per_second for cell in cells)
    found = []
    for cell in cells:
        peak = max(one.limits.flops_per_second for one in cells if one.dtype == cell.dtype)
        floor_ms = 1e3 * max(cell.bytes / memory, cell.flops / peak)
        found.append(cell.model_copy(update={"roofline_ms": floor_ms}))
    return found


_COLUMNS = ("auto", "eager", "grouped", "batched", "bare", "roofline", "HF/auto", "auto/bare", "auto/roof")


def _row(cell: Cell) -> str:
    def shown(name: str) -> str:
        ms = cell.ms(name)
        failed = name in cell.subjects and cell.subjects[name].status not in ("PASSED", "NOT JUDGED")
        return ("-" if ms is None else f"{ms:.2f}") + ("*" if failed else "")

    hf, bare, roof = _ratios(cell)
    words = [shown(name) for name in ("auto", *cpu.HF, "bare")] + [f"{cell.roofline_ms:.2f}"]
    words += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in (hf, bare, roof)]
    words += [f"   {name} {shown(name)}" for name in cpu.MORE_SUBJECTS if name in cell.subjects]
    return f"{cell.T:>5} {cell.workload:11}" + "".join(f"{word:>11}" for word in words)


def _ratios(cell: Cell) -> tuple[float | None, float | None, float | None]:
    """Best of Transformers over auto, auto over bare, auto over the roofline; None unless auto passed."""
    auto = cell.subjects.get("auto")
    if auto is None or auto.ms is None or auto.status != "PASSED":
        return None, None, None
    bare = cell.ratio("bare")
    hf = cell.ratio(cell.best_hf) if cell.best_hf else None
    return hf, 1 / bare if bare else None, auto.ms / cell.roofline_ms


def _notes(cells: Sequence[Cell]) -> list[str]:
    labels: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for cell in cells:
        for name, one in cell.subjects.items():
            if name in ("auto", "bare"):
                labels[f"{name} is {one.label}"] = labels.get(f"{name} is {one.label}", 0) + 1
            if one.status not in ("PASSED", "NOT JUDGED"):
                words = f"{name} {cell.dtype}: not passed, for example: {one.status[:150]}"
                found = next((r for r in reasons if r.startswith(words.partition(", for")[0])), words)
                reasons[found] = reasons.get(found, 0) + 1
        for name, why in cell.skipped.items():
            words = f"{name} skipped: {re.sub(r'[0-9]+', 'N', why)}"
            reasons[words] = reasons.get(words, 0) + 1
    return [f"{words}   ({count} cells)" for words, count in (labels | reasons).items()]


def _targets(cells: Sequence[Cell]) -> list[str]:
    out = []

    def say(what: str, value: float, met: bool) -> None:
        out.append(f"  {'met   ' if met else 'MISSED'} {what}: {value:.3f}")

    for dtype, target in SPEEDUP_TARGETS.items():
        found = [(hf, cell) for cell in cells if cell.dtype == dtype and (hf := _ratios(cell)[0]) is not None]
        if found:
            mean = _geometric([hf for hf, _ in found])
            say(
                f"{dtype}: best HF / auto, geometric mean of {len(found)}, at least {target}",
                mean,
                mean >= target,
            )
    rows = {
        "auto / best HF": (0, None, NEVER_SLOWER, True),
        "auto / bare": (1, BARE_MEAN, BARE_WORST, False),
        "auto / roofline": (2, ROOFLINE_MEAN, None, False),
    }
    for what, (place, mean_target, worst_target, inverted) in rows.items():
        found = [
            (1 / ratio if inverted else ratio, cell)
            for cell in cells
            if (ratio := _ratios(cell)[place]) is not None
        ]
        if not found:
            continue
        found.sort(key=lambda pair: -pair[0])
        if mean_target is not None:
            mean = _geometric([ratio for ratio, _ in found])
            say(f"{what}, geometric mean of {len(found)}, at most {mean_target}", mean, mean <= mean_target)
        for dtype in DTYPE_NAMES:
            if of_dtype := [ratio for ratio, cell in found if cell.dtype == dtype]:
                out.append(f"         {what}, {dtype}, geometric mean: {_geometric(of_dtype):.3f}")
        if worst_target is not None:
            over = sum(ratio > worst_target for ratio, _ in found)
            say(f"{what}, worst ({over} cells over), at most {worst_target}", found[0][0], not over)
        for ratio, cell in found[:8]:
            out.append(f"           {ratio:.2f}x  {'/'.join(map(str, cell.key))}")
    below = sum(roof < 1 for cell in cells if (roof := _ratios(cell)[2]) is not None)
    out.append(f"  cells faster than the roofline (its rates were measured too low there): {below}")
    missing = sum(_ratios(cell)[0] is None for cell in cells)
    out.append(f"  cells: {len(cells)} of {len(list(all_keys(cpu.MODELS)))}; without a comparison: {missing}")
    return out


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def all_keys(models: Sequence[str] | dict[str, Any]) -> Iterator[tuple[str, str, int, str]]:
    return product(models, DTYPE_NAMES, TOKENS, WORKLOADS)


def main(
    only: Annotated[list[str], typer.Option(help="model/dtype/T/workload with *; may be repeated")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option(help="leave out cells that are in the file")] = False,
    quick: Annotated[bool, typer.Option(help="a tiny layer, into cpu_grid_quick.jsonl of /tmp")] = False,
    summary_only: Annotated[bool, typer.Option("--summary", help="only write cpu_grid.txt")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"also {', '.join(cpu.MORE_SUBJECTS)}")] = False,
    evict: Annotated[bool, typer.Option(help="empty the caches before samples of small cells")] = True,
    threads: int = 2,
    budget: Annotated[float, typer.Option(help="seconds of a cell; above 256 tokens twice that")] = 6.0,
    out: Annotated[Path | None, typer.Option(help="the file of results")] = None,
) -> None:
    """Measure the CPU grid, or sum it up."""
    path = out or (Path("/tmp/cpu_grid_quick.jsonl") if quick else HERE / "cpu_grid.jsonl")
    try:
        if not summary_only:
            names = (*cpu.DEFAULT_SUBJECTS, *(cpu.MORE_SUBJECTS if everything else ()))
            patterns = [_pattern(text) for text in only]
            keys = all_keys(cpu.TINY if quick else cpu.MODELS)
            wanted = [key for key in keys if not patterns or any(_matches(key, one) for one in patterns)]
            measure(path, wanted, names, resume, threads, 0.3 if quick else budget, evict and not quick)
        text = summary(path)
    except ValueError as error:
        raise SystemExit(f"cpu_grid: {error}") from None
    path.with_suffix(".txt").write_text(text)
    print(text)


def _pattern(text: str) -> list[str]:
    words = text.split("/")
    if len(words) > 4:
        raise ValueError(f"cannot read --only {text!r}; write model/dtype/T/workload, * for any")
    return [*words, *["*"] * (4 - len(words))]


def _matches(key: tuple[str, str, int, str], pattern: list[str]) -> bool:
    return all(fnmatch.fnmatchcase(str(word), part or "*") for word, part in zip(key, pattern, strict=True))


def measure(
    path: Path,
    wanted: Sequence[tuple[str, str, int, str]],
    names: Sequence[str],
    resume: bool,
    threads: int,
    budget: float,
    evict: bool,
) -> None:
    torch.set_num_threads(threads)
    if evict:
        cpu.touch_memory()
    done = set()
    if path.exists() and resume:
        done = {line.key for line in read_lines(path) if isinstance(line, Cell)}
    elif path.exists():
        kept = path.with_name(f"{path.stem}.until-{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl")
        path.rename(kept)
        print(f"the results so far are now {kept}")
    todo = [key for key in wanted if key not in done]
    if not todo:
        print("every cell asked for is there")
        return
    budgets = {key: budget * (1 if key[2] <= 256 else 2) for key in todo}
    buffer = torch.ones(cpu.EVICT_BYTES // 8, dtype=torch.int64) if evict else None
    left, started, spent = sum(budgets.values()), time.perf_counter(), 0.0
    with path.open("a") as file, torch.no_grad():
        _append(file, session(threads))
        for (model_name, dtype_name), group in groupby(todo, key=lambda key: key[:2]):
            gc.collect()
            dtype = DTYPES[dtype_name]
            limits = cpu.measure_limits(dtype, small=model_name in cpu.TINY)
            weights = cpu.make_weights((cpu.MODELS | cpu.TINY)[model_name], dtype)
            bare = cpu.Bare(weights) if "bare" in names else None
            for key in group:
                cell = run_cell(
                    *key,
                    weights=weights,
                    bare=bare,
                    limits=limits,
                    names=names,
                    budget=budgets[key],
                    evict=buffer,
                )
                _append(file, cell)
                spent += budgets[key]
                left -= budgets[key]
                minutes = (time.perf_counter() - started) / spent * left / 60
                print(f"{'/'.join(map(str, key)):45} {_row(cell)[18:]}  {minutes:4.0f} min left", flush=True)
            del weights, bare


def _append(file: Any, line: BaseModel) -> None:
    file.write(line.model_dump_json() + "\n")
    file.flush()
    os.fsync(file.fileno())


if __name__ == "__main__":
    typer.run(main)
