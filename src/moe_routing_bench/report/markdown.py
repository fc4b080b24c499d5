"""A short report in Markdown for a pull request: the winners, and the cells in one table."""

from __future__ import annotations

import html
import re

from moe_routing_bench.report.page import plain
from moe_routing_bench.report.reading import Cell, Material
from moe_routing_bench.report.tables import study_answer, verdict_of
from moe_routing_bench.report.winners import answer, decided

MAX_ROWS = 30
HEAD = ("case", "fastest", "ms", "next", "times faster (99 % interval)", "certain")


def markdown(material: Material) -> str:
    """Writes the chapters with at most MAX_ROWS cells each; the machine and the commit come last."""
    parts = []
    for chapter in material.chapters:
        parts += [
            f"- {_text(f'{group.title}: {answer(group)}', 300)}" for group in chapter.groups if decided(group)
        ]
        lines = [_line(cell) for cell in chapter.cells[:MAX_ROWS]]
        parts += ["", _row(HEAD), _row(["---"] * len(HEAD)), *map(_row, lines), ""]
        if len(chapter.cells) > MAX_ROWS:
            parts += [f"and {len(chapter.cells) - MAX_ROWS:,} more cases", ""]
        commits = ", ".join(chapter.commits) or "not known"
        parts += [f"Measured on {_text(chapter.title)}, source {_text(commits)}", ""]
    studies = [study.pareto for study in material.studies if study.pareto is not None]
    parts += [f"- {_text(study_answer(reached), 300)}" for reached in studies]
    return "\n".join(parts).rstrip() + "\n"


def _line(cell: Cell) -> list[str]:
    contest = cell.contest
    if contest is None:
        why = "; ".join(f"{verdict_of(one)}: {one.correctness.reason}" for one in cell.records[:2])
        return [_text(cell.title), _text(why, 120), "", "", "", ""]
    row = [_text(cell.title), _text(contest.winner), cell.winner_ms]
    if contest.second is None:
        return [*row, "", "", ""]
    low, high = contest.lead.interval
    lead = f"{contest.lead.ratio:.2f}x ({low:.2f}x to {high:.2f}x)"
    return [*row, _text(contest.second), lead, contest.certain]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: str, most: int = 90) -> str:
    """Escapes text so that it contains no markup, no link and no mention of a person."""
    text = plain(value).replace("\n", " ")
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    text = re.sub(r"@(?=\w)", "@ ", html.escape(text, quote=False))
    return re.sub(r"([\\`*_{}\[\]()#!|~$])", r"\\\1", text).replace("://", ":\\//")
