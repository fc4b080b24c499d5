"""mrb results and mrb export: questions to a results folder, in SQL or as an overview; Parquet for others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.status import Status
from rich.table import Table
from rich.text import Text

from moe_routing_bench.cli.terminal import Json, console, fail, show, show_json
from moe_routing_bench.results.flat import COLUMNS
from moe_routing_bench.results.lines import LeftOut
from moe_routing_bench.results.query import export_parquet, run_query

MOST_SHOWN = 1_000
MOST_CASES = 40
# the newest run of every case under the same conditions, and of its implementations the nearest to the front
SAME = (
    'span, "case", T, D, F, E, K, W, dtype, activation, workload, routing_seed, threads, cache, view, machine'
)
COUNTS = """
SELECT span, status, count(*) AS records FROM records WHERE role IN ('baseline', 'candidate')
GROUP BY ALL ORDER BY ALL"""
BEST = f"""
WITH passed AS (
  SELECT *, max(created_at) OVER (PARTITION BY {SAME}, session, cell_key) AS run_at
  FROM records WHERE status = 'PASSED' AND role IN ('baseline', 'candidate')
), newest AS (
  SELECT * FROM passed
  QUALIFY dense_rank() OVER (PARTITION BY {SAME} ORDER BY run_at DESC, session DESC, cell_key) = 1
)
SELECT span, "case", dtype, workload, threads, impl AS best, layout, median_ms,
  coalesce(ratio, 1) AS ratio, coalesce(baseline, 'itself') AS baseline, coalesce(verdict, '') AS verdict,
  count(*) OVER (PARTITION BY {SAME}) AS contenders
FROM newest
QUALIFY row_number() OVER (PARTITION BY {SAME} ORDER BY coalesce(ratio, 1), impl, layout) = 1
ORDER BY ALL
"""


def results_command(
    sql: Annotated[str | None, typer.Argument(metavar="[SQL]", help="One SELECT over records.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", help="The results folder; default: ./results.")
    ] = None,
    columns: Annotated[bool, typer.Option("--columns", help="Show what a SELECT can ask for.")] = False,
    as_json: Json = False,
) -> None:
    """What was measured: an overview, or any question in SQL. A query may read, and nothing else.

    \b
    Examples:
      mrb results
      mrb results --columns
      mrb results "SELECT impl, median(ratio) FROM records GROUP BY impl ORDER BY 2"
      mrb results "SELECT \\"case\\", impl, reason FROM records WHERE status = 'OOM'" --folder sweeps/monday
      mrb results "SELECT * FROM left_out" --json
    """
    if columns:
        _show_columns(as_json)
        return
    if folder is None:
        folder = Path("results")
        if not folder.is_dir():
            fail("there is no folder ./results; name one with --folder, or make one: mrb bench --out results")
    left_out = LeftOut()
    with reading():
        if sql is not None:
            names, rows = run_query(folder, sql, left_out)
        else:
            counts = run_query(folder, COUNTS, left_out)
            best = run_query(folder, BEST)
    if as_json:
        if sql is not None:
            show_json({"columns": names, "rows": _plain(rows), "left_out": left_out_json(left_out)})
        else:
            tables = {"counts": _records(counts), "best": _records(best)}
            show_json({**tables, "left_out": left_out_json(left_out)})
        return
    if sql is not None:
        _show_rows(names, rows)
    else:
        _show_overview(folder, counts, best)
    tell_left_out(left_out)


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
    parquet: Annotated[Path, typer.Option("--parquet", help="The file to write.")],
    as_json: Json = False,
) -> None:
    """All records of a folder as one Parquet file, for pandas, DuckDB or a spreadsheet.

    \b
    Examples:
      mrb export results --parquet results.parquet
      python -c "import duckdb; print(duckdb.sql(\\"SELECT * FROM 'results.parquet' LIMIT 5\\"))"
    """
    left_out = LeftOut()
    with reading():
        if parquet.is_dir():
            raise ValueError(f"{parquet} is a folder; name a file such as {parquet / 'results.parquet'}")
        run_query(folder, "SELECT 1", left_out)
        try:
            count = export_parquet(folder, parquet)
        except OSError as error:
            raise ValueError(f"cannot write {parquet}: {error.strerror}") from None
    if as_json:
        show_json({"file": str(parquet), "records": count, "left_out": left_out_json(left_out)})
        return
    show(printable(f"{count:,} records in {parquet}"))
    tell_left_out(left_out)


@contextmanager
def reading() -> Iterator[Status]:
    """Around what reads results: a wheel that turns on a terminal, and mistakes as one sentence."""
    try:
        with console(stderr=True).status("reading") as status:
            yield status
    except ValueError as error:
        fail(printable(error))


def printable(text: object) -> str:
    """Records and queries come from anybody: what would steer a terminal or turn text around becomes ?."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Cells are words or numbers; a Text keeps its colour."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        numbers = any(isinstance(row[number], (int, float, Decimal)) for row in rows)
        table.add_column(
            Text(printable(column)), justify="right" if numbers else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    return table


def tell_left_out(left_out: LeftOut) -> None:
    if not left_out.count:
        return
    lines = "1 line was" if left_out.count == 1 else f"{left_out.count:,} lines were"
    out = console(stderr=True)
    out.print(Text(f"{lines} left out because they are no records:", "yellow"))
    for sentence in left_out.first:
        out.print(Text(f"  {printable(sentence)}", "dim"))


def left_out_json(left_out: LeftOut) -> dict[str, Any]:
    return {"lines": left_out.count, "first": left_out.first}


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, (float, Decimal)):
        return f"{value:.4g}"
    return printable(value)


def _plain(value: Any) -> Any:
    """As JSON can hold it: no NaN, no infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _records(answer: tuple[list[str], list[tuple[Any, ...]]]) -> list[dict[str, Any]]:
    names, rows = answer
    return [dict(zip(names, _plain(row), strict=True)) for row in rows]


def _show_rows(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        show("no rows")
        return
    show(table_of(names, rows[:MOST_SHOWN]))
    if len(rows) > MOST_SHOWN:
        show(f"and {len(rows) - MOST_SHOWN:,} more rows; add LIMIT or take all with --json")


def _show_overview(
    folder: Path,
    counts: tuple[list[str], list[tuple[Any, ...]]],
    best: tuple[list[str], list[tuple[Any, ...]]],
) -> None:
    if not counts[1]:
        show(printable(f"{folder} holds no records; mrb bench --out {folder} makes some"))
        return
    show(table_of(*counts), "")
    names, rows = best
    if not rows:
        show("Nothing passed, so there are no times; the column reason says why.")
    else:
        show("Best of each case, by the ratio to the baseline of the same run:")
        shown = [dict(zip(names, row, strict=True)) for row in rows[:MOST_CASES]]
        show(table_of(("case", "best", "ms", "ratio", "baseline", "verdict", "of"), [*map(_best, shown)]))
        if len(rows) > MOST_CASES:
            show(f"and {len(rows) - MOST_CASES:,} more cases; all of them: mrb results --json")
    show("", Text('Ask more with mrb results "SELECT ..."; mrb results --columns shows the columns.', "dim"))


def _best(row: dict[str, Any]) -> tuple[object, ...]:
    threads = "" if row["threads"] == 1 else f" {row['threads']} threads"
    case = f"{row['span']} {row['case']} {row['dtype']} {row['workload']}{threads}"
    times = (row["median_ms"], row["ratio"], row["baseline"], row["verdict"], row["contenders"])
    return (case, f"{row['best']} | {row['layout']}", *times)


def _show_columns(as_json: bool) -> None:
    found = [(column.name, column.type) for column in COLUMNS] + [("machine", "VARCHAR")]
    if as_json:
        show_json([{"name": name, "type": kind} for name, kind in found])
        return
    show("records: one row for each implementation in each cell")
    show("latest: of those the newest of each cell and implementation")
    show("left_out: lines that are no records (session, lines, sentences)", "")
    show(table_of(("column", "type"), found))
    show("", Text('case is a word of SQL: write "case" with double quotes.', "dim"))
