"""What `mrb results` shows of a folder: the best of each case, or the answer to a query.

What a function returns for people to look at: it prints as the command line does, also in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, Group
from rich.text import Text

from moe_routing_bench.core.names import base_name, did_you_mean, slots_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.console import columns_here, console, fitted_rows, recorded, show
from moe_routing_bench.results.parquet import COLUMNS, quoted
from moe_routing_bench.results.query import JOINED, run_query
from moe_routing_bench.results.read import LeftOut, RecordCount
from moe_routing_bench.results.same_case import in_sql, told_apart

Answer: TypeAlias = tuple[list[str], list[tuple[Any, ...]]]  # names of columns, rows
MAX_SHOWN = 1_000
MAX_CASES = 40
MAX_CELL_LETTERS = 300
# the newest run of every case under the same conditions, and the best implementation in it
SAME = f"router, layer, {in_sql()}"
COUNTS = """
SELECT span, status, count(*) AS records FROM records
WHERE role IN ('baseline', 'candidate') AND {condition} GROUP BY ALL ORDER BY ALL"""  # counting.CONTENDERS
ROLES = "SELECT role, count(*) FROM records WHERE {condition} GROUP BY role"
BEST = f"""
WITH passed AS (
  SELECT *, max(created_at) OVER (PARTITION BY {SAME}, session, cell_key) AS run_at
  FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate') AND {{condition}}
), newest AS (
  SELECT * FROM passed
  QUALIFY dense_rank() OVER (PARTITION BY {SAME} ORDER BY run_at DESC, session DESC, cell_key) = 1
)
SELECT {SAME}, impl AS best, layout,
  median_ms, error, tokens_per_second, coalesce(ratio, 1) AS ratio, coalesce(baseline, 'itself') AS baseline,
  coalesce(verdict, '') AS verdict,
  count(*) OVER (PARTITION BY {SAME}) AS contenders
FROM newest
QUALIFY row_number() OVER (PARTITION BY {SAME} ORDER BY coalesce(ratio, 1), impl, layout) = 1
ORDER BY span, direction, split_part("case", '/', 1), E, D, F, K, T, "case", dtype, store, workload, threads
"""


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]], words: Collection[str] = ()) -> Group:
    """Cells are words or numbers; a Text keeps its colour. words: columns that may move to a legend, by
    default those without a number."""
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
    """In SQL: the column is `wanted`, with or without options."""
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
    """A value that JSON can hold: no NaN, no infinity."""
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
        show(f"and {len(rows) - MAX_SHOWN:,} more rows; add LIMIT or take all with --json")


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
    show(table_of(*counts), "", f"{count}.", "")
    names, rows = best
    if not rows:
        show("Nothing passed, so there are no times; the column reason says why.")
    else:
        show("Best of each case, by the ratio to the baseline of the same run:")
        shown = [dict(zip(names, row, strict=True)) for row in rows[:MAX_CASES]]
        columns = ["case", "best", "ms", "ratio", "baseline", "verdict", "of"]
        cells = [_best(row, more) for row, more in zip(shown, told_apart(shown, _label), strict=True)]
        if any(row["store"] for row in shown):  # how well it computes with stored weights is worth as much
            columns.append("error")
            cells = [(*cell, row["error"]) for cell, row in zip(cells, shown, strict=True)]
        show(table_of(columns, cells, words=("case", "best", "baseline")))
        if len(rows) > MAX_CASES:
            show(f"and {len(rows) - MAX_CASES:,} more cases; all of them: mrb results --json")
    show(
        "",
        Text(
            'Ask more with mrb results query "SELECT ..."; mrb results query --columns shows the columns.',
            "dim",
        ),
    )


def _label(row: Mapping[str, Any]) -> tuple[str, str, str]:
    threads = "" if row["threads"] == 1 else f" {row['threads']} threads"
    span = row["span"] if row["direction"] == "forward" else f"{row['span']} {row['direction']}"
    case = f"{span} {row['case']} {row['dtype']} {row['workload']}{threads}"
    return case, row["router"], row["layer"]


def _best(row: Mapping[str, Any], more: str) -> tuple[object, ...]:
    case = _label(row)[0] + more
    slots = slots_of(row["router"] or "", **{name: row[name] for name in ("T", "E", "K", "sequences")})
    best = " | ".join(filter(None, (row["best"], row["layout"], row["router"], slots, row["layer"])))
    times = (row["median_ms"], row["ratio"], row["baseline"], row["verdict"], row["contenders"])
    return (case, best, *times)


def all_columns() -> list[tuple[str, str]]:
    """Name and type of what a query can use."""
    return [*((column.name, column.type) for column in COLUMNS), *JOINED]


def show_columns() -> None:
    show("records: one row for each implementation in each cell")
    show("latest: the newest record of each cell and implementation")
    show("left_out: lines that are not valid records (session, lines, sentences)", "")
    show(table_of(("column", "type"), all_columns()))
    show("", Text('case is a keyword of SQL: write "case" with double quotes.', "dim"))


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What a folder holds, and the best of each case, as answers to queries."""

    folder: Path
    count: RecordCount
    counts: Answer
    best: Answer

    def document(self) -> dict[str, Any]:
        return {**self.count.to_dict(), "counts": _records(self.counts), "best": _records(self.best)}

    def show(self) -> None:
        _show_overview(self.folder, self.count, self.counts, self.best)


def read_overview(folder: Path, wanted: Mapping[str, str], left_out: LeftOut) -> Overview:
    """wanted: only records with these values, {"router": "switch"}. ValueError if the folder has none."""
    condition = " AND ".join(_condition(folder, *one) for one in wanted.items()) or "true"
    counts = run_query(folder, COUNTS.format(condition=condition), left_out)
    best = run_query(folder, BEST.format(condition=condition))
    return Overview(folder=folder, count=counted(folder, condition), counts=counts, best=best)


class Displayed:
    """Something that prints as the command line prints it; a notebook shows the same with its colours."""

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
        """As a pandas.DataFrame. NotImplementedError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise NotImplementedError("a DataFrame needs pandas; pip install pandas") from None
        return pandas.DataFrame(self.rows, columns=self.columns)

    def _show(self) -> None:
        show(table_of(self.columns, self.rows) if self.rows else "no rows")
