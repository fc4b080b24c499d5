"""A report in a few lines of Markdown, for a pull request: who wins how often, and the cells in one table."""

from __future__ import annotations

import html
import re

from moe_routing_bench.report.page import plain
from moe_routing_bench.report.reading import Cell, Material
from moe_routing_bench.report.tables import findings, milliseconds, verdict_of

MAX_ROWS = 30
HEAD = ("case", "fastest", "ms", "next", "takes", "shown to be slower")


def markdown(material: Material) -> str:
    """Chapters apart, at most MOST_ROWS cells each."""
    parts = []
    for chapter in material.chapters:
        parts += [
            f"**{_text(chapter.title)}**, source {_text(', '.join(chapter.commits) or 'not known')}",
            "",
        ]
        parts += [f"- {_text(line)}" for line in findings(chapter)]
        lines = [_line(cell) for cell in chapter.cells[:MAX_ROWS]]
        parts += ["", _row(HEAD), _row(["---"] * len(HEAD)), *map(_row, lines)]
        if len(chapter.cells) > MAX_ROWS:
            parts += ["", f"and {len(chapter.cells) - MAX_ROWS:,} more cells"]
        parts.append("")
    for study in material.studies:
        if study.pareto is not None:
            best = next((one for one in study.pareto.standings if not one.sees_future), None)
            said = f"{best.title}: {best.loss.said()} nats per byte" if best else "no rule that can write"
            parts.append(f"- Study {_text(study.pareto.study)}: lowest held-out loss {_text(said)}")
    return "\n".join(parts).rstrip() + "\n"


def _line(cell: Cell) -> list[str]:
    contest = cell.contest
    if contest is None:
        why = "; ".join(f"{verdict_of(one)}: {one.correctness.reason}" for one in cell.records[:2])
        return [_text(cell.title), _text(why, 120), "", "", "", ""]
    first = cell.passed[0]
    assert first.timing is not None
    others = sorted((ratio, name) for name, ratio in contest.ratios.items() if name != contest.winner)
    row = [_text(cell.title), _text(contest.winner), milliseconds(first.timing.median)]
    if not others:
        return [*row, "", "", ""]
    ratio, name = others[0]
    verdict = contest.against_winner[name].verdict
    shown = "yes" if verdict == "SLOWER" else f"no ({verdict})"
    return [*row, _text(name), f"{ratio / contest.ratios[contest.winner]:.2f} times", shown]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: str, most: int = 90) -> str:
    """Text that Markdown leaves alone: no markup, no link, no mention of a person."""
    text = plain(value).replace("\n", " ")
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    text = re.sub(r"@(?=\w)", "@ ", html.escape(text, quote=False))
    return re.sub(r"([\\`*_{}\[\]()#!|~$])", r"\\\1", text).replace("://", ":\\//")
