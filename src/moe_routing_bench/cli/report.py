"""mrb results report: makes a page from results folders, its figures as files, or a table for a pull
request."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import fail, reading
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.console import say, show
from moe_routing_bench.report.drawing import save
from moe_routing_bench.report.explorer import explorer
from moe_routing_bench.report.finding import at_hand, results_folders
from moe_routing_bench.report.markdown import markdown
from moe_routing_bench.report.overview import show_left_out
from moe_routing_bench.report.page import Page, make_page
from moe_routing_bench.report.reading import read


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Results folders, packed ones, or folders of such folders."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page. Default: report.html.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help="Also write each figure as SVG, PDF and PNG."),
    ] = None,
    plotly: Annotated[
        Path | None,
        typer.Option("--plotly", metavar="FILE", help="Also write every time as points to explore."),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a short table for a pull request; no page without -o.")
    ] = False,
) -> None:
    """Make one page from results that needs no network: what wins, by how much, and how sure that is.

    \b
    Examples:
      mrb results report results
      mrb results report results training -o report.html --figures figures
      mrb results report measurements/records measurements/training -o report.html
      mrb results report results --markdown
      mrb results report results --plotly explore.html

    You can mix timing and training records. Results of different machines are in
    separate chapters and are never compared.
    """
    with reading() as doing, results_folders([at_hand(folder) for folder in folders]) as contents:
        doing(f"reading {len(contents)} folders")
        material = read(contents)
        if as_markdown:
            typer.echo(markdown(material), nl=False)
        if plotly is not None:
            try:
                write_whole(plotly, explorer(material))
            except NotImplementedError as error:
                fail(str(error))
            say(printable(f"{plotly}: every time as a point"))
        if out is not None or figures is not None or not as_markdown:
            doing("drawing")
            tell = say if as_markdown else show
            page = make_page(material, f"mrb results report {shlex.join(map(str, folders))}")
            if out is not None or not as_markdown:
                target = write_page(page, out or Path("report.html"))
                size = target.stat().st_size / 1e6
                tell(printable(f"{target}: {size:.1f} MB, {material.records}"))
            if figures is not None:
                written = write_figures(page, figures)
                tell(printable(f"{figures}: {written} figures, each as SVG, PDF and PNG"))
    show_left_out(material.left_out)


def write_page(page: Page, target: Path) -> Path:
    """Writes the page and returns its path."""
    try:
        return page.write(target)
    except NotImplementedError as error:
        fail(str(error))


def write_figures(page: Page, folder: Path) -> int:
    """Writes the figures and returns their number. Figures with the same name get a number."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    for picture in page.pictures:
        taken[picture.name] = number = taken.get(picture.name, 0) + 1
        save(picture if number == 1 else replace(picture, name=f"{picture.name}-{number}"), folder)
    return len(page.pictures)
