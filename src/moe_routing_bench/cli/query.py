"""mrb results show, query and export: the winners in a results folder, SQL queries, Parquet and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, fail, reading, show_json
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.text import printable
from moe_routing_bench.report.console import show
from moe_routing_bench.report.finding import at_hand
from moe_routing_bench.report.overview import (
    all_columns,
    counted,
    finite,
    left_out_json,
    read_overview,
    show_columns,
    show_left_out,
    show_rows,
)
from moe_routing_bench.results.query import export_csv, export_parquet, run_query
from moe_routing_bench.results.read import LeftOut

Folder = Annotated[
    Path | None,
    typer.Option("--folder", "-f", help="Results folder or URL. Default: where `mrb bench` saves."),
]


def show_command(
    folder: Folder = None,
    router: Annotated[str | None, typer.Option(help="Only this router, with or without its options.")] = None,
    layer: Annotated[str | None, typer.Option(help="Only this kind of layer: moe, chain, ...")] = None,
    direction: Annotated[str | None, typer.Option(help="Only forward, backward or train.")] = None,
    as_json: Json = False,
) -> None:
    """Show the fastest implementation of each case, by how much, and how sure that is.

    \b
    Examples:
      mrb results
      mrb results --direction train --router switch
      mrb results --folder s3://bucket/runs
    """
    left_out = LeftOut()
    filters = {"router": router, "layer": layer, "direction": direction}
    wanted = {name: value for name, value in filters.items() if value is not None}
    with reading():
        overview = read_overview(at_hand(_saved(folder), rows=True), wanted, left_out)
    if as_json:
        show_json({**overview.document(), "left_out": left_out_json(left_out)})
        return
    overview.show()
    show_left_out(left_out)


def query_command(
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="One SELECT over records.")] = None,
    folder: Folder = None,
    columns: Annotated[bool, typer.Option("--columns", help="Show the columns a SELECT can use.")] = False,
    as_json: Json = False,
) -> None:
    """Run a SQL query. A query can only read.

    \b
    Examples:
      mrb results query --columns
      mrb results query "SELECT impl, median(ratio) FROM records GROUP BY impl"
      mrb results query "SELECT impl FROM records WHERE status = 'OOM'" --folder monday
      mrb results query "SELECT * FROM left_out" --json
    """
    if columns:
        if as_json:
            show_json([{"name": name, "type": sql_type} for name, sql_type in all_columns()])
        else:
            show_columns()
        return
    if sql is None:
        fail('name one SELECT, such as "SELECT * FROM latest"; --columns shows the columns')
    left_out = LeftOut()
    with reading():
        names, rows = run_query(at_hand(_saved(folder), rows=True), sql, left_out)
    if as_json:
        show_json({"columns": names, "rows": finite(rows), "left_out": left_out_json(left_out)})
        return
    show_rows(names, rows)
    show_left_out(left_out)


def _saved(folder: Path | None) -> Path:
    """Returns the folder, or the folder in which `mrb bench` saves."""
    if folder is None and not default_results().is_dir():
        raise ValueError(
            f"`mrb bench` has saved nothing yet in {default_results()}; --folder names another folder"
        )
    return default_results() if folder is None else folder


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder, or a URL.")],
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FILE", help="The Parquet file to write."),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="The CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Write all records of a folder into one file with a row for each, for pandas, DuckDB or a spreadsheet.

    \b
    Examples:
      mrb results export results --parquet results.parquet
      mrb results export results --csv results.csv
      python -c "import duckdb; print(duckdb.read_parquet('results.parquet'))"

    In CSV, lists and maps are JSON. Text that begins with = + - @ ' or a tab
    gets a ' in front, so that no spreadsheet runs it as a formula.
    """
    left_out = LeftOut()
    with reading():
        if (parquet is None) == (csv is None):
            raise ValueError("name one file to write, with --parquet or with --csv")
        form, target, export = ("csv", csv, export_csv) if csv else ("parquet", parquet, export_parquet)
        assert target is not None
        if target.is_dir():
            raise ValueError(f"{target} is a folder; name a file such as {target / f'results.{form}'}")
        folder = at_hand(folder, rows=True)
        run_query(folder, "SELECT 1", left_out)
        try:
            export(folder, target)
            count = counted(folder)
        except OSError as error:
            raise ValueError(f"cannot write {target}: {error.strerror}") from None
    if as_json:
        show_json({"file": str(target), **count.to_dict(), "left_out": left_out_json(left_out)})
        return
    show(printable(f"{target}: {count}"))
    show_left_out(left_out)
