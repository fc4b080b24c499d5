"""One style for every figure: sizes, colours, and figures as SVG inside a page or as files.

Text and lines have the colour INK, grids GRID, and the gaps between bars PAPER. In a page these three become
CSS variables, so that a figure changes with the page's dark mode. Names in a figure come from records:
`label` makes them short and plain, and nothing in them is read as mathematics. matplotlib is imported only to
draw.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from moe_routing_bench.core.text import printable

# colours that colour-blind people can tell apart (Okabe and Ito 2008, then Tol's muted ones)
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8878D8", "#999933", "#AA4466",
    "#44AA99", "#B5A642", "#7F7F7F", "#882E72", "#8D6E63",
)  # fmt: skip
BLUE, RED, GREY = "#1f5fa8", "#b3261e", "#666666"
INK, GRID, PAPER = "#0b0b0c", "#d9d9de", "#fefefe"
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", PAPER: "var(--paper)"}
FORMATS = (".png", ".svg", ".pdf")
MAX_LABEL = 44
TIMES = (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1_000, 10_000)
MAX_MARKS = 1_500  # more points become pixels, because a page would take seconds to open
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10, "axes.titlesize": 10.5,
    "axes.titlelocation": "left", "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "moe-routing-bench", "text.parse_math": False,
    "hatch.linewidth": 1.1, "hatch.color": PAPER, "lines.linewidth": 1.6, "savefig.dpi": 160,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: Table(head=("rule", "ms"), rows=(("switch", "1.2"),), words=1). The first `words` columns are
    words, the others numbers. links: for each row the id of the part of the page with details."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    title: str = ""
    note: str = ""
    links: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure and its file name. The title states its finding, the caption says how to read it, and the
    table has its numbers for readers who cannot see it.

    Picture(name="winners-layer-bfloat16", title="native wins 9 of 12 cases", caption="...", figure=...)
    """

    name: str
    caption: str
    figure: Any
    title: str = ""
    table: Table | None = None


@contextmanager
def style() -> Iterator[None]:
    """Sets the style. Use it around drawing and around saving, because both read it."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def figure(width: float, height: float, dpi: int = 100) -> Any:
    """Makes an empty figure without a screen; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(made)
    return made


def colours(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each name. Figures with the same names in the same order have the same colours."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def label(text: object, most: int = MAX_LABEL) -> str:
    """Makes any text printable, and cuts it in the middle if it is long."""
    plain = printable(text, bad="\N{REPLACEMENT CHARACTER}")
    half = (most - 1) // 2
    return plain if len(plain) <= most else f"{plain[:half]}…{plain[-half:]}"


def contrast(colour: str) -> str:
    """Returns black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "#ffffff"


def rate(value: float) -> str:
    """Writes a number with three digits: 26.4, 0.081, 1,204."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def patches(colour: dict[str, str]) -> list[Any]:
    """Makes legend entries: a box in the colour of each name."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=value, label=label(name, 60)) for name, value in colour.items()]


def legend(made: Any, handles: Any, columns: int = 4, *, least: int = 2) -> None:
    """Adds a legend below the figure if there are at least `least` entries."""
    if len(handles) >= least:
        longest = max(len(one.get_label()) for one in handles)
        room = int(11.5 * made.get_figwidth() / (longest + 6))  # letters of this size in an inch
        columns = max(1, min(columns, len(handles), room))
        made.set_figheight(made.get_figheight() + 0.2 * (math.ceil(len(handles) / columns) - 1))
        made.legend(handles=handles, loc="outside lower center", ncols=columns)


def logarithmic(axis: Any) -> None:
    """Makes an axis logarithmic with plain numbers: 1, 10, 1,000."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(NullFormatter())


def times_axis(axis: Any, low: float, high: float) -> None:
    """Makes an axis of ratios from low to high, logarithmic if the range is wide: 1x, 1.5x, 2x, 5x."""
    limits = low - 0.03, high + 0.05 * (high - low)
    if high / low > 4:
        logarithmic(axis)
        few = () if high / low < 15 else (1.5, 3)
        ticks = [tick for tick in TIMES if low / 1.1 <= tick <= 1.15 * high and tick not in few]
        axis.set_ticks(ticks, [f"{tick:g}x" for tick in ticks])
        axis.set_ticks([], minor=True)
        limits = low / 1.1, high * 1.15
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def inline(picture: Picture) -> str:
    """Returns the figure as an <svg> element that uses the colours of its page."""
    target = io.StringIO()
    with style():
        picture.figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, count=2, flags=re.S)  # page.css has the style
    # ids repeat in every figure of a page; the ids that are used are hashes of their content
    text = re.sub(r' id="[A-Za-z0-9]+_[0-9]+"', "", text)
    # a page shows a figure a third larger; on a phone its letters stay readable, and a wide figure scrolls
    width = 72 * picture.figure.get_figwidth()
    size = f"width:{1.35 * width:.0f}px;min-width:{0.8 * width:.0f}px"
    role = "group" if "<a " in text else "img"  # what is inside an image cannot be reached by keyboard
    head = rf'<svg viewBox="\1" role="{role}" style="{size}">'
    text = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', head, text, flags=re.S)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return _smaller(text)


def _smaller(svg: str) -> str:
    """Returns the same drawing in about two thirds of the bytes: places have fewer digits, and what a browser
    ignores is removed."""

    def number(found: re.Match[str]) -> str:
        value = float(found[0])
        return f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")

    def place(found: re.Match[str]) -> str:
        return re.sub(r"\s+(?=[zMLCQ\"])", "", re.sub(r"-?\d+\.\d+", number, found[0]))

    svg = re.sub(r'(?<= )(?:d|x|y)="[^"]*"', place, svg)
    svg = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg)
    svg = svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "")  # page.css says it for all
    return re.sub(r">\s+<", "><", svg).replace("<g/>", "").replace("<defs></defs>", "")


def save(picture: Picture, folder: Path, endings: Sequence[str] = (".svg", ".pdf", ".png")) -> list[Path]:
    """Writes files with the title above the figure, and returns their paths."""
    paths = [folder / f"{picture.name}{ending}" for ending in endings]
    nothing: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with style():
        letters = int(10.5 * picture.figure.get_figwidth())
        title = fill(label(picture.title, 4 * letters), letters)
        picture.figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        for path in paths:
            picture.figure.savefig(path, facecolor="white", metadata=nothing.get(path.suffix))
    return paths


def file_name(*words: str) -> str:
    """Joins words to a safe file name in lower case: winners-layer-train."""
    plain = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return plain[:80] or "figure"
