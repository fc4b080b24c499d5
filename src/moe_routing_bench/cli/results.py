"""mrb results and mrb export: an overview of a results folder, SQL queries, Parquet and CSV.

What a function returns for people to look at: it prints as the command line does, also in a notebook.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from moe_routing_bench.cli.terminal import (
    Json,
    columns_here,
    console,
    fail,
    fitted_rows,
    recorded,
    say,
    show,
    show_json,
    spinner,
    user_mistakes,
)
from moe_routing_bench.core.names import base_name, did_you_mean, slots_of
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import FULL
from moe_routing_bench.fleet.objects import url_of
from moe_routing_bench.results.answers import BEST
from moe_routing_bench.results.parquet import COLUMNS, quoted
from moe_routing_bench.results.query import JOINED, export_csv, export_parquet, run_query
from moe_routing_bench.results.read import LeftOut, RecordCount
from moe_routing_bench.results.same_case import told_apart

MAX_SHOWN = 1_000
MAX_CASES = 40
MAX_WINNERS = 3
MAX_NAME = 22
MAX_SENTENCES = 20
MAX_CELL_LETTERS = 300
COUNTS = """
SELECT span, status, count(*) AS records FROM records
WHERE role IN ('baseline', 'candidate') AND {condition} GROUP BY ALL ORDER BY ALL"""  # counting.CONTENDERS
ROLES = "SELECT role, count(*) FROM records WHERE {condition} GROUP BY role"


def results_command(
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="One SELECT over records.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", "-f", help="Results folder or URL. Default: where `mrb bench` saves."),
    ] = None,
    router: Annotated[str | None, typer.Option(help="Only this router, with or without its options.")] = None,
    layer: Annotated[str | None, typer.Option(help="Only this kind of layer: moe, chain, ...")] = None,
    direction: Annotated[str | None, typer.Option(help="Only forward, backward or train.")] = None,
    columns: Annotated[bool, typer.Option("--columns", help="Show the columns a SELECT can use.")] = False,
    as_json: Json = False,
) -> None:
    """What was measured? Shows an overview, or answers a query in SQL, which can only read.

    \b
    Examples:
      mrb results
      mrb results --columns
      mrb results --direction train --router switch
      mrb results "SELECT impl, median(ratio) FROM records GROUP BY impl"
      mrb results "SELECT impl FROM records WHERE status = 'OOM'" --folder monday
      mrb results "SELECT * FROM left_out" --json
      mrb results --folder s3://bucket/runs
    """
    if columns:
        _show_columns(as_json)
        return
    if folder is None:
        folder = default_results()
        if not folder.is_dir():
            fail(f"nothing is saved yet in {folder}, where `mrb bench` saves; --folder names another")
    left_out = LeftOut()
    filters = {"router": router, "layer": layer, "direction": direction}
    wanted = {name: value for name, value in filters.items() if value is not None}
    if sql is not None and wanted:
        fail(f"--{next(iter(wanted))} is for the overview; in a query use WHERE")
    with reading():
        folder = at_hand(folder, rows=True)
        if sql is not None:
            names, rows = run_query(folder, sql, left_out)
        else:
            condition = " AND ".join(_condition(folder, *one) for one in wanted.items()) or "true"
            counts = run_query(folder, COUNTS.format(condition=condition), left_out)
            best = run_query(folder, BEST.format(condition=condition))
            count = _counted(folder, condition)
    if as_json:
        if sql is not None:
            show_json({"columns": names, "rows": _plain(rows), "left_out": left_out_json(left_out)})
        else:
            tables = {"counts": _records(counts), "best": _records(best)}
            show_json({**count.to_dict(), **tables, "left_out": left_out_json(left_out)})
        return
    if sql is not None:
        _show_rows(names, rows)
    else:
        _show_overview(folder, count, counts, best)
    show_left_out(left_out)


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder, or the word `kernels`.")],
    target_folder: Annotated[
        Path | None, typer.Argument(metavar="[TARGET]", help="For `kernels`: the new folder to write.")
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FILE", help="The Parquet file to write."),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="The CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Write all records of a folder into one file, a row each, for pandas, DuckDB or a spreadsheet.

    \b
    Examples:
      mrb export results --parquet results.parquet
      mrb export results --csv results.csv
      python -c "import duckdb; print(duckdb.read_parquet('results.parquet'))"
      mrb export kernels DIR    our kernels as a folder for Hugging Face's `kernels`

    In CSV, lists and maps are JSON. Text that begins with = + - @ ' or a tab
    gets a ' in front, so that no spreadsheet runs it as a formula.
    """
    if target_folder is not None:
        with user_mistakes():
            if str(folder) != "kernels" or parquet or csv:
                raise ValueError("write `mrb export kernels DIR`, or `mrb export DIR --csv FILE`")
            show(f"{target_folder}: {_kernels(target_folder)}")
        return
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
            count = _counted(folder)
        except OSError as error:
            raise ValueError(f"cannot write {target}: {error.strerror}") from None
    if as_json:
        show_json({"file": str(target), **count.to_dict(), "left_out": left_out_json(left_out)})
        return
    show(printable(f"{target}: {count}"))
    show_left_out(left_out)


def _kernels(target: Path) -> str:
    from moe_routing_bench.models.hub_folder import export_folder

    try:
        written = export_folder(target)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}") from None
    return ", ".join(f"{variant} ({count} files)" for variant, count in written.items())


@contextmanager
def reading() -> Iterator[Callable[[str], None]]:
    """Around code that reads results: a spinner on a terminal, and one sentence for a mistake."""
    try:
        with spinner("reading") as doing:
            yield doing
    except ValueError as error:
        fail(printable(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        if error.errno in FULL:
            fail(printable(f"the disk is full, so nothing can be written{where}"))
        fail(printable(f"cannot read the results{where}: {error.strerror or error}"))


def at_hand(folder: Path, *, rows: bool = False) -> Path:
    """The folder, or the copy here of a store on a URL, brought up to date. rows: only what a query needs."""
    if url_of(folder) is None:
        return folder
    from moe_routing_bench.fleet.mirror import mirror, mirror_rows  # most commands read a folder

    copied = mirror_rows(folder) if rows else mirror(folder)
    for sentence in copied.sentences[:MAX_SENTENCES]:
        say(printable(f"{url_of(folder)}: {sentence}"))
    if len(copied.sentences) > MAX_SENTENCES:
        say(f"and {len(copied.sentences) - MAX_SENTENCES:,} more")
    return copied.folder


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


def _plain(value: Any) -> Any:
    """A value that JSON can hold: no NaN, no infinity."""
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
    show(table_of(names, rows[:MAX_SHOWN]))
    if len(rows) > MAX_SHOWN:
        show(f"and {len(rows) - MAX_SHOWN:,} more rows; add LIMIT or take all with --json")


def _counted(folder: Path, condition: str = "true") -> RecordCount:
    return RecordCount.of(dict(run_query(folder, ROLES.format(condition=condition))[1]))


def _show_overview(
    folder: Path,
    count: RecordCount,
    counts: tuple[list[str], list[tuple[Any, ...]]],
    best: tuple[list[str], list[tuple[Any, ...]]],
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
        if any(row["store"] for row in shown):  # how well it computes with stored weights is worth as much
            columns.append("error")
            cells = [(*cell, row["error"]) for cell, row in zip(cells, shown, strict=True)]
        short = max(len(str(best)) for _, best, *_ in cells) <= MAX_NAME  # then it has room in any table
        show(table_of(columns, cells, words=("case", "than") if short else ("case", "best", "than")))
        if len(rows) > MAX_CASES:
            show(f"and {len(rows) - MAX_CASES:,} more cases; all of them: mrb results --json")
    show("", f"{count}:", table_of(*counts))
    show(
        "", Text(f"As a page with charts, every implementation and the evidence: mrb report {folder}", "dim")
    )
    show(Text('Ask more with mrb results "SELECT ..."; mrb results --columns shows the columns.', "dim"))


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    """What tells cases apart, and beside an implementation its setting: layout, router and kind of layer."""
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
    """native is the fastest in 9 of 12 cases; that is certain in 7."""
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
    """A line of the overview, without what all lines share."""
    words = _words(row)
    own = (words[name] for name in words if name not in {*shared, "case", "setting"})
    case = " ".join(filter(None, (words["case"], *own))) + more
    best = row["best"] if "setting" in shared else f"{row['best']} | {words['setting']}"
    if row["next"] is None:
        return case, best, row["median_ms"], "", "", "", "nothing to compare"
    than = row["next"] if row["next_layout"] == row["layout"] else f"{row['next']} | {row['next_layout']}"
    interval = f"{row['lead_low']:.2f} to {row['lead_high']:.2f}"
    return case, best, row["median_ms"], f"{row['lead']:.2f}x", interval, than, row["certain"]


def _show_columns(as_json: bool) -> None:
    columns = [*((column.name, column.type) for column in COLUMNS), *JOINED]
    if as_json:
        show_json([{"name": name, "type": sql_type} for name, sql_type in columns])
        return
    show("records: one row for each implementation in each cell")
    show("latest: the newest record of each cell and implementation")
    show("left_out: lines that are not valid records (session, lines, sentences)", "")
    show(table_of(("column", "type"), columns))
    show("", Text('case is a keyword of SQL: write "case" with double quotes.', "dim"))


def show_overview(folder: Path) -> None:
    """What `mrb results` shows of a folder."""
    counts, best = (run_query(folder, query.format(condition="true")) for query in (COUNTS, BEST))
    _show_overview(folder, _counted(folder), counts, best)


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


def temporary_folder(stack: ExitStack) -> Path:
    """A folder that is gone when the stack is closed."""
    folder = Path(tempfile.mkdtemp(prefix="mrb-results-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
