"""The output of `mrb results`: the fastest implementation of each case, or the answer to a query.

The Python API returns the same objects; they print as on the command line, also in a notebook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, Group
from rich.text import Text

from moe_routing_bench.core.names import base_name, did_you_mean, slots_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.ceiling import ceilings
from moe_routing_bench.report.console import columns_here, console, fitted_rows, recorded, show
from moe_routing_bench.results.parquet import COLUMNS, quoted
from moe_routing_bench.results.query import JOINED, run_query
from moe_routing_bench.results.read import LeftOut, RecordCount
from moe_routing_bench.results.winners import BEST, told_apart

Answer: TypeAlias = tuple[list[str], list[tuple[Any, ...]]]  # names of columns, rows
MAX_SHOWN = 1_000
MAX_CASES = 40
MAX_WINNERS = 3
MAX_NAME = 22
MAX_CELL_LETTERS = 300
COUNTS = """
SELECT span, status, count(*) AS records FROM records
WHERE role IN ('baseline', 'candidate') AND {condition} GROUP BY ALL ORDER BY ALL"""  # counting.OWN_ROLES
ROLES = "SELECT role, count(*) FROM records WHERE {condition} GROUP BY role"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]], words: Collection[str] = ()) -> Group:
    """Makes a table from words and numbers; a Text keeps its colour. words: columns that may move to a
    legend, by default the ones without a number."""
    names = [printable(column) for column in columns]
    numeric = {
        name
        for number, name in enumerate(names)
        if any(isinstance(row[number], (int, float, Decimal)) for row in rows)
    }
    cells = [[cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row] for row in rows]
    return fitted_rows(names, cells, words or set(names) - numeric, numeric)


def show_left_out(left_out: LeftOut) -> None:
    for remark in left_out.remarks:
        console(stderr=True).print(Text(printable(remark), "yellow"))
    if not left_out.count:
        return
    lines = "1 line was" if left_out.count == 1 else f"{left_out.count:,} lines were"
    out = console(stderr=True)
    out.print(Text(f"{lines} left out as invalid:", "yellow"))
    for sentence in left_out.first:
        out.print(Text(f"  {printable(sentence)}", "dim"))


def left_out_json(left_out: LeftOut) -> dict[str, Any]:
    return {"lines": left_out.count, "first": left_out.first, "remarks": left_out.remarks}


def _condition(folder: Path, column: str, wanted: str) -> str:
    """Returns the SQL condition that the column is `wanted`, with or without options."""
    value = "if(layer = '', 'moe', layer)" if column == "layer" else column
    known = [name for (name,) in run_query(folder, f"SELECT DISTINCT {value} FROM records ORDER BY 1")[1]]
    names = dict.fromkeys(name for one in known for name in (one, base_name(one)) if name)
    if wanted not in names:
        has = f"has {', '.join(filter(None, known))}" if any(known) else "has none"
        raise ValueError(f"{folder} has no {column} {wanted!r}; {did_you_mean(wanted, names)}it {has}")
    return f"{quoted(wanted)} IN ({value}, split_part({value}, '(', 1))"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, (float, Decimal)):
        return f"{value:.4g}"
    text = str(value)
    more = f"... and {len(text) - MAX_CELL_LETTERS:,} more letters" if len(text) > MAX_CELL_LETTERS else ""
    return printable(text[:MAX_CELL_LETTERS]) + more


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _records(answer: Answer) -> list[dict[str, Any]]:
    names, rows = answer
    return [dict(zip(names, finite(row), strict=True)) for row in rows]


def show_rows(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        show("no rows")
        return
    show(table_of(names, rows[:MAX_SHOWN]))
    if len(rows) > MAX_SHOWN:
        show(f"and {len(rows) - MAX_SHOWN:,} more rows; add LIMIT, or use --json for all")


def counted(folder: Path, condition: str = "true") -> RecordCount:
    return RecordCount.of(dict(run_query(folder, ROLES.format(condition=condition))[1]))


def _show_overview(
    folder: Path,
    count: RecordCount,
    counts: Answer,
    best: Answer,
) -> None:
    if not counts[1]:
        show(printable(f"{folder} holds no records; mrb bench layer --out {folder} writes some"))
        return
    names, rows = best
    if not rows:
        show("Nothing passed, so there are no times; the column reason says why.")
    else:
        answers = [dict(zip(names, row, strict=True)) for row in rows]
        words = [_words(row) for row in answers]
        shared = {name for name in words[0] if len({one[name] for one in words}) == 1}
        show(*_winners(answers, shared), "")
        common = [value for name, value in words[0].items() if name in shared - {"case"} and value]
        share = f" ({', '.join(common)})" if common else ""
        show(printable(f"Best of each case{share}, and how many times faster it is than the next:"))
        shown = answers[:MAX_CASES]
        columns = ["case", "best", "ms", "faster", "99 % interval", "than", "certain"]
        more = told_apart(shown, lambda row: tuple(_words(row).values()))
        cells = [_best(row, shared, one) for row, one in zip(shown, more, strict=True)]
        if any(row["store"] for row in shown):  # with stored weights accuracy matters as much as time
            columns.append("error")
            cells = [(*cell, row["error"]) for cell, row in zip(cells, shown, strict=True)]
        short = max(len(str(best)) for _, best, *_ in cells) <= MAX_NAME  # then it fits into any table
        show(table_of(columns, cells, words=("case", "than") if short else ("case", "best", "than")))
        limits = {row[0]: ceilings(answer["stage_seconds"]) for row, answer in zip(cells, shown, strict=True)}
        show(*(printable(f"{case}: {limit}.") for case, all_of in limits.items() for limit in all_of))
        if len(rows) > MAX_CASES:
            show(f"and {len(rows) - MAX_CASES:,} more cases; mrb results --json shows all")
    show("", f"{count}:", table_of(*counts))
    show(
        "",
        Text(
            f"mrb results report {folder} makes a page with charts, every implementation and the evidence.",
            "dim",
        ),
    )
    show(
        Text(
            'mrb results query "SELECT ..." answers more; mrb results query --columns shows the columns.',
            "dim",
        )
    )


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the words that distinguish cases, and the layout, router and kind of layer."""
    slots = slots_of(row["router"] or "", **{name: row[name] for name in ("T", "E", "K", "sequences")})
    direction = "" if row["direction"] == "forward" else f" {row['direction']}"
    return {
        "case": f"{row['span']}{direction} {row['case']}",
        "dtype": "" if row["case"].endswith(row["dtype"]) else row["dtype"],
        "workload": row["workload"] or "",
        "threads": "1 thread" if row["threads"] == 1 else f"{row['threads']} threads",
        "setting": " | ".join(filter(None, (row["layout"], row["router"], slots, row["layer"]))),
    }


def _winners(answers: Sequence[Mapping[str, Any]], shared: Collection[str]) -> list[str]:
    """Returns sentences such as "native is the fastest in 9 of 12 cases; that is certain in 7."."""
    compared = [(_best(row, shared)[1], row["certain"]) for row in answers if row["next"] is not None]
    lines = []
    for name, count in Counter(name for name, _ in compared).most_common(MAX_WINNERS):
        certain = compared.count((name, "yes"))
        said = (
            f"{name} is the fastest in {count:,} of {len(compared):,} cases; that is certain in {certain:,}."
        )
        lines.append(printable(said))
    return lines or ["No case compares two implementations that passed."]


def _best(row: Mapping[str, Any], shared: Collection[str], more: str = "") -> tuple[object, ...]:
    """Returns a line of the overview, without the words that all lines share."""
    words = _words(row)
    own = (words[name] for name in words if name not in {*shared, "case", "setting"})
    case = " ".join(filter(None, (words["case"], *own))) + more
    best = row["best"] if "setting" in shared else f"{row['best']} | {words['setting']}"
    if row["next"] is None:
        return case, best, row["median_ms"], "", "", "", "nothing to compare"
    than = row["next"] if row["next_layout"] == row["layout"] else f"{row['next']} | {row['next_layout']}"
    interval = f"{row['lead_low']:.2f} to {row['lead_high']:.2f}"
    return case, best, row["median_ms"], f"{row['lead']:.2f}x", interval, than, row["certain"]


def all_columns() -> list[tuple[str, str]]:
    """Returns the name and type of each column that a query can use."""
    return [*((column.name, column.type) for column in COLUMNS), *JOINED]


def show_columns() -> None:
    show("records: one row for each implementation in each cell")
    show("latest: the newest record of each cell and implementation")
    show("left_out: lines that are not valid records (session, lines, sentences)", "")
    show(table_of(("column", "type"), all_columns()))
    show("", Text('case is a keyword of SQL: write "case" with double quotes.', "dim"))


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The content of a folder and the fastest implementation of each case, as answers to queries."""

    folder: Path
    count: RecordCount
    counts: Answer
    best: Answer

    def document(self) -> dict[str, Any]:
        return {**self.count.to_dict(), "counts": _records(self.counts), "best": _records(self.best)}

    def show(self) -> None:
        _show_overview(self.folder, self.count, self.counts, self.best)


def read_overview(folder: Path, wanted: Mapping[str, str], left_out: LeftOut) -> Overview:
    """Reads the overview of a folder. wanted: only records with these values, {"router": "switch"}. It raises
    a ValueError if the folder has none."""
    condition = " AND ".join(_condition(folder, *one) for one in wanted.items()) or "true"
    counts = run_query(folder, COUNTS.format(condition=condition), left_out)
    best = run_query(folder, BEST.format(condition=condition))
    return Overview(folder=folder, count=counted(folder, condition), counts=counts, best=best)


class Displayed:
    """An object that prints as on the command line; a notebook shows it with its colours."""

    def _show(self) -> None:
        raise NotImplementedError

    def _recorded(self) -> Console:
        with recorded(columns_here()) as console:
            self._show()
        return console

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._recorded().export_text().splitlines())

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format="<pre>{code}</pre>")


@dataclass(frozen=True)
class Table(Displayed):
    """The answer to a query: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame. It raises a NotImplementedError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise NotImplementedError("a DataFrame needs pandas; pip install pandas") from None
        return pandas.DataFrame(self.rows, columns=self.columns)

    def _show(self) -> None:
        show(table_of(self.columns, self.rows) if self.rows else "no rows")
