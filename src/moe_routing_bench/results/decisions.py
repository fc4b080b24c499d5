"""Makes decisions from a results folder: the winner of every size, its ties, and the cost of one choice for
all.

All implementations of a cell were timed in the same rounds, so the winner has the smallest ratio to the
baseline of the cell. An implementation ties with the winner if its paired samples do not show that it is
slower.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import Regret
from moe_routing_bench.core.names import base_name, by_numbers
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import written_whole
from moe_routing_bench.ops import decisions
from moe_routing_bench.ops.decisions import Facts, read_decisions
from moe_routing_bench.ops.registry import BUILT_IN, get_op
from moe_routing_bench.results.folder import CellRun, Run, read_run
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import DEFAULT_ROUTER, TUNING, Record
from moe_routing_bench.results.winners import Contest, Contested, contested, contests, regrets
from moe_routing_bench.workloads.experiment import ImplementationRef


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that an entry of the file answers:
    Question(op="expert_ffn", facts=Facts(D=2048, ...), threads=1, workload="zipf(1.2)")."""

    op: str
    facts: Facts  # without tokens
    threads: int
    workload: str

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.op} {self.facts}, {threads}, {self.workload}"


@dataclass(frozen=True, kw_only=True)
class SizeDecision:
    """An entry of the file: the contests of one question by tokens, and the best single choice for all."""

    question: Question
    contests: tuple[Contest, ...]
    overall: Regret


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The decisions of a folder. regrets: for each operation, the cost of each implementation as the only
    choice for all cases."""

    machine: str
    torch: str
    answers: tuple[SizeDecision, ...]
    regrets: dict[str, list[Regret]]
    notes: tuple[str, ...]
    left_out: LeftOut


def decide(folder: Path | str, *, cache: str | None = None) -> Decided:
    """Finds the winners in a folder. cache: the cache policy to use, if the folder holds several.

    It raises a ValueError if the folder mixes machines, versions of torch or ways of timing, because their
    winners differ.
    """
    left_out, notes = LeftOut(), _Notes()
    run = read_run(folder, left_out)
    cells = _cells(run, cache, notes)
    machine, torch = _one_of_each(run, cells)
    contested = [_contested(run, *one, notes) for one in _chosen(cells, notes)]
    asked = [one for one in contested if one is not None]
    by_question: dict[Question, list[Contest]] = {}
    for (question, _), contest in zip(asked, contests([one for _, one in asked]), strict=True):
        by_question.setdefault(question, []).append(contest)
    answers = []
    for question, its in sorted(by_question.items(), key=lambda item: by_numbers(str(item[0]))):
        its.sort(key=lambda contest: contest.T)
        ranked = regrets({f"T={contest.T}": contest for contest in its})
        answers.append(SizeDecision(question=question, contests=tuple(its), overall=ranked[0]))
    if not answers:
        why = "; ".join(notes.sentences()) or "it has no record with status PASSED"
        raise ValueError(f"{folder} decides nothing: {why}")
    return Decided(
        machine=machine,
        torch=torch,
        answers=tuple(answers),
        regrets={op: regrets(its) for op, its in _by_op(answers).items()},
        notes=tuple(notes.sentences()),
        left_out=left_out,
    )


def write_decisions(decided: Decided, source: Path | str, target: Path | str) -> dict[str, Any]:
    """Writes the file that impl="auto" reads and returns its content. The file gets its final name after it
    has been read back."""
    target = Path(target)
    document = {
        "schema": decisions.SCHEMA,
        "version": decisions.VERSION,
        "machine": decided.machine,
        "torch": decided.torch,
        "made_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "from": printable(source),
        "entries": [_entry(answer) for answer in decided.answers],
    }
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} into")
    with written_whole(target) as part:
        part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        read_decisions(part)
    return document


class _Notes:
    """Counts the reasons why records were not used."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, reason: str, count: int = 1) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + count

    def sentences(self) -> list[str]:
        return [f"{reason} ({count})" if count > 1 else reason for reason, count in self._counts.items()]


def _cells(run: Run, cache: str | None, notes: _Notes) -> list[tuple[CellRun, list[Record]]]:
    """Returns the cells with at least one passed record, and these records."""
    cells = []
    for cell in run.cells:
        passed = [r for r in cell.records if r.correctness.status is Status.PASSED]
        passed = [r for r in passed if r.implementation.role not in ("twin", "beside")]
        if passed := [r for r in passed if _is_asked(r, notes)]:
            cells.append((cell, passed))
    if not cells:
        why = "; ".join(notes.sentences()) or "it has no record with status PASSED"
        raise ValueError(f"{run.folder} decides nothing: {why}")
    policies = sorted({r.experiment.cache for _, records in cells for r in records})
    if cache is None and len(policies) > 1:
        raise ValueError(
            f"{run.folder} mixes the cache policies {', '.join(policies)}; choose one with --cache"
        )
    if cache is not None and cache not in policies:
        raise ValueError(
            f"{run.folder} has nothing with the cache policy {cache!r}; it has {', '.join(policies)}"
        )
    kept = [(cell, records) for cell, records in cells if cache in (None, records[0].experiment.cache)]
    if len(kept) < len(cells):
        notes.add(f"cells not used: measured with another cache policy than {cache}", len(cells) - len(kept))
    return kept


def _is_asked(record: Record, notes: _Notes) -> bool:
    """Returns whether a record may decide. impl="auto" chooses for a forward operation. Another router, layer
    or weight format changes the operation's inputs, and decisions do not name them. So only the plain layer
    with the default router counts."""
    experiment, store = record.experiment, record.experiment.store
    _, router, layer = record.implementation.setting
    unlike = {
        f"measured {experiment.direction}, not forward": experiment.direction != "forward",
        f"measured with the router {printable(router)}": router != DEFAULT_ROUTER,
        f"measured in the layer {printable(layer)}": layer != "",
        f"measured on weights stored as {printable(store)}": store != "",
    }
    for words, differs in unlike.items():
        if differs:
            notes.add(f"records not used: {words}")
    return not any(unlike.values())


def _one_of_each(run: Run, cells: list[tuple[CellRun, list[Record]]]) -> tuple[str, str]:
    records = [record for _, passed in cells for record in passed]
    environments = {record.environment: run.environment(record) for record in records}
    for record in records:
        if not environments[record.environment].known:
            raise ValueError(
                f"{run.folder} does not say on which machine {record.record_id} was measured: its "
                f"environments folder lacks {record.environment[:12]}; decisions hold for one machine"
            )
    mixed = {
        "machines": {one.machine for one in environments.values()},
        "versions of torch": {one.torch for one in environments.values()},
        "timer views": {record.experiment.view for record in records},
    }
    for what, values in mixed.items():
        if len(values) > 1:
            raise ValueError(
                f"{run.folder} mixes {what}: {', '.join(sorted(values))}; "
                "decisions hold for one, so keep each in a folder of its own"
            )
    return mixed["machines"].pop(), mixed["versions of torch"].pop()


def _chosen(
    cells: list[tuple[CellRun, list[Record]]], notes: _Notes
) -> Iterable[tuple[Question, CellRun, list[Record]]]:
    """Chooses one cell for each question and number of tokens. A cell of the operation alone comes before a
    cell of a layer, then any other before a race of a search, then a newer one before an older one."""
    best: dict[tuple[Question, int], tuple[tuple[object, ...], CellRun, list[Record]]] = {}
    for cell, records in cells:
        by_question: dict[Question, list[Record]] = {}
        for record in records:
            if (question := _question(record, notes)) is not None:
                by_question.setdefault(question, []).append(record)
        for question, asked in by_question.items():
            key = (question, asked[0].experiment.T)
            first, newest = asked[0], max(record.created_at for record in asked)
            rank = (first.experiment.span == question.op, first.suite != TUNING, newest, cell.session)
            if key in best:
                notes.add("cells not used: a newer or closer measurement has the same sizes")
            if key not in best or best[key][0] < rank:
                best[key] = (rank, cell, asked)
    return [(question, cell, asked) for (question, _), (_, cell, asked) in best.items()]


def _question(record: Record, notes: _Notes) -> Question | None:
    w, span = record.experiment, record.experiment.span
    measured = span_named(span) if span in span_names() else None
    if measured is None or not (op := measured.decides):
        notes.add(f"records not used: the span {span} has several operations, so it decides none of them")
        return None
    if not measured.named(record.implementation.spec):
        notes.add("records not used: a layer of another library does not implement one operation")
        return None
    sizes = (w.T, w.D, w.F, w.E, w.K, w.threads)
    words = (w.dtype, w.activation, w.device, record.implementation.spec)
    if min(sizes) < 1 or not all(map(_is_text, (*words, w.workload))):
        notes.add(f"records not used: the sizes or words of a case of {span} cannot be in a decision")
        return None
    try:
        layout = str(Layout.parse(record.implementation.layout))
    except ValueError:
        notes.add(f"records not used: {printable(record.implementation.layout)} is no layout")
        return None
    facts = Facts(
        D=w.D, F=w.F, E=w.E, K=w.K, dtype=w.dtype, layout=layout, activation=w.activation,
        device=w.device, frozen=record.implementation.frozen,
    )  # fmt: skip
    return Question(op=op, facts=facts, threads=w.threads, workload=w.workload)


def _contested(
    run: Run, question: Question, cell: CellRun, records: list[Record], notes: _Notes
) -> tuple[Question, Contested] | None:
    """Returns None if samples cannot be read or paired, because then an implementation is missing."""
    by_name: dict[str, Record] = {}
    for record in records:
        one = record.implementation
        # "auto" is not a choice; the implementation that it picked is
        spec = ImplementationRef.read(one.spec).name
        by_name.setdefault(one.label if spec == "auto" else spec, record)
        if one.origin != BUILT_IN:
            notes.add(f"{question.op}.{one.spec} is not built in: users of the decisions need it too")
    if question.facts.frozen and (len(by_name) < 2 or len({base_name(name) for name in by_name}) > 1):
        notes.add(
            "records not used: measured on frozen weights, where the choice is already made", len(records)
        )
        return None
    if records[0].suite == TUNING:
        # of many settings in short races the best is partly luck
        by_name = {name: one for name, one in by_name.items() if one.implementation.role == "baseline"}
        T = records[0].experiment.T
        notes.add(f"the default stays at T={T}: its best settings were not ranked again")
        if not by_name:
            return None
    try:
        return question, contested(run, cell, by_name)
    except ValueError as error:
        notes.add(str(error))
        return None


def _by_op(answers: list[SizeDecision]) -> dict[str, dict[str, Contest]]:
    by_op: dict[str, dict[str, Contest]] = {}
    for answer in answers:
        for contest in answer.contests:
            asked, cells = answer.question, by_op.setdefault(answer.question.op, {})
            facts = f"{asked.facts.dtype} {asked.facts.layout} {asked.workload}, threads={asked.threads}"
            place = f"{contest.case} T={contest.T} {facts}"
            cells[place if place not in cells else f"{place}, {asked.facts}"] = contest
    return by_op


def _entry(answer: SizeDecision) -> dict[str, Any]:
    facts, overall = answer.question.facts, answer.overall
    complete = not overall.missing
    return {
        "op": answer.question.op,
        **{letter: getattr(facts, letter) for letter in "DFEK"},
        **{name: getattr(facts, name) for name in ("dtype", "layout", "activation", "device", "frozen")},
        "load": answer.contests[-1].load,  # of few tokens every load looks even
        "threads": answer.question.threads,
        "workload": answer.question.workload,
        "overall": overall.implementation,
        "regret_median": overall.median_loss if complete else None,
        "regret_worst": overall.worst_loss if complete else None,
        "by_tokens": [
            {
                "T": contest.T,
                "impl": contest.chosen,
                "ties": [name for name in contest.ties if name != contest.chosen][: decisions.MAX_TIES],
                "ratio": contest.ratios[contest.chosen],
                **_interval(contest),
                "source": get_op(answer.question.op).source_hash(contest.chosen),
            }
            for contest in answer.contests
        ],
    }


def _interval(contest: Contest) -> dict[str, float | None]:
    one = contest.against_baseline.get(contest.chosen)
    low, high = (None, None) if one is None else one.interval
    return {"low": low, "high": high}


def _is_text(text: str) -> bool:
    return bool(text) and text.isprintable()
