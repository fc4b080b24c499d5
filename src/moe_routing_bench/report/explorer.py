"""An HTML file by Plotly that shows every timed record as a point. A reader can zoom, filter and hover.

It is for exploring; the report has the verdicts. The file contains Plotly's script (5 MB) and needs no
network. Plotly reads some HTML in names, so every text from a record is made plain and escaped.
"""

from __future__ import annotations

from html import escape
from typing import Any

from moe_routing_bench.report.drawing import COLOURS, label
from moe_routing_bench.report.page import plain
from moe_routing_bench.report.reading import Cell, Material, ratio_of
from moe_routing_bench.report.tables import verdict_of
from moe_routing_bench.results.read import command_of
from moe_routing_bench.results.record import Record


def explorer(material: Material) -> str:
    """Makes the page: for each chapter and group a figure of milliseconds against tokens, with a colour for
    each implementation. A NotImplementedError says what to install."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise NotImplementedError(
            "--plotly needs plotly; pip install 'moe-routing-bench[interactive]' brings it"
        ) from None
    parts: list[str] = []
    for chapter in material.chapters:
        for group in chapter.groups:
            made = go.Figure()
            for place, name in enumerate(group.implementations):
                points = [
                    (cell, record)
                    for cell in group.cells
                    for record in cell.passed
                    if cell.names[record.record_id] == name
                ]
                if points:
                    made.add_trace(_trace(go, name, points, COLOURS[place % len(COLOURS)]))
            made.update_layout(
                title=_text(f"{group.title}; {chapter.title}"), template="plotly_white", height=560
            )
            tokens = sorted({cell.first.experiment.T for cell in group.cells})
            names = [f"{T:,}" for T in tokens]
            made.update_xaxes(title="tokens", type="log", tickvals=tokens, ticktext=names)
            made.update_yaxes(title="milliseconds", type="log", dtick=1)  # powers of ten
            shown = made.to_html(full_html=False, include_plotlyjs=not parts, config={"responsive": True})
            parts.append(shown)
    if not parts:
        raise ValueError("nothing here was timed, so there is nothing to explore")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Explore</title>'
    head += '<meta name="viewport" content="width=device-width"><body>'
    return f"{head}{''.join(parts)}</body></html>"


def _trace(go: Any, name: str, points: list[tuple[Cell, Record]], colour: str) -> Any:
    times = [record.timing.median for _, record in points if record.timing is not None]
    return go.Scatter(
        x=[cell.first.experiment.T for cell, _ in points],
        y=[1e3 * seconds for seconds in times],
        mode="markers",
        name=_text(label(name, 60)),
        marker={"color": colour, "size": 9},
        text=[_hover(cell, record) for cell, record in points],
        hoverinfo="text",
    )


def _hover(cell: Cell, record: Record) -> str:
    assert record.timing is not None  # it passed
    lines = (
        cell.title,
        cell.names[record.record_id],
        f"{1e3 * record.timing.median:.4g} ms, ratio {ratio_of(record):.3f}, {verdict_of(record)}",
        label(command_of(record), 120),
    )
    return "<br>".join(map(_text, lines))


def _text(value: str) -> str:
    return escape(plain(value))
