"""The docs site: sphinx-build -W docs build/site

Pages are the Markdown files here; the reference comes from docstrings, that of commands from their help.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from moe_routing_bench.routers.router import NO_RULES

ROOT = Path(__file__).parent.parent
project, author = "moe-routing-bench", "the moe-routing-bench developers"
copyright = f"{author}, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme, html_title = "furo", "moe-routing-bench"
html_static_path, html_css_files = ["style"], ["narrow.css"]
html_extra_path = ["report.html"]
exclude_patterns = ["study/slides.md", "study/summary.md"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages that GitHub shows too may skip a level
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
html_math_renderer = "mathml"
highlight_language = "none"  # literal blocks of docstrings are formulas and tables


def rest(text: str) -> str:
    """Our docstrings are plain text: indented lines stay as they are, the rest are paragraphs and lists."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if lines and all(line.startswith(("- ", "  ")) for line in lines) and lines[0].startswith("- "):
            parts.append("\n".join(_escaped(line) for line in lines))
        elif any(line.startswith(("  ", ">>> ")) for line in lines):
            parts.append("::\n\n" + "\n".join(f"    {line}" for line in lines))
        else:
            parts.append("\n".join(map(_escaped, lines)))
    return "\n\n".join(parts)


def _escaped(line: str) -> str:
    """`code` as code, and nothing else as markup."""
    pieces = re.split(r"`([^`]+)`", line)
    plain = (re.sub(r"([\\*|_`])", r"\\\1", piece) for piece in pieces[::2])
    code = (f"``{piece}``\\ " for piece in pieces[1::2])
    joined = [next(plain)]
    for one, after in zip(code, plain, strict=True):
        joined += [one, after]
    return "".join(joined)


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = rest("\n".join(lines)).splitlines()


def fill_commands(app: Any, docname: str, source: list[str]) -> None:
    """The help of every command stands where reference/commands.md says {{commands}}."""
    if docname == "reference/commands":
        source[0] = source[0].replace("{{commands}}", "\n".join(helps()))


def fill_columns(app: Any, docname: str, source: list[str]) -> None:
    """The columns of records stand where reference/records.md says {{columns}}."""
    if docname == "reference/records":
        from moe_routing_bench.results.parquet import COLUMNS

        rows = (f"| `{one.name}` | {one.type} | `{one.path}` |" for one in COLUMNS)
        head = ("| column | type | place |", "|---|---|---|")
        source[0] = source[0].replace("{{columns}}", "\n".join((*head, *rows)))


def fill_routers(app: Any, docname: str, source: list[str]) -> None:
    """The facts and the files of all routers and controllers stand where reference/routers.md names them."""
    if docname == "reference/routers":
        sys.path.insert(0, str(ROOT / "measurements" / "routers"))
        import router_cost

        head, rows = router_cost.reference()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        source[0] = source[0].replace("{{facts}}", "\n".join(lines))
        for folder, level in (("routers", "##"), ("controllers", "###")):
            places = (ROOT / "src" / "moe_routing_bench" / folder).glob("[!_]*.py")
            names = sorted(path.stem for path in places if path.stem not in NO_RULES)
            modules = "\n".join(
                f"{level} {name}\n\n```{{eval-rst}}\n.. automodule:: moe_routing_bench.{folder}.{name}\n```\n"
                for name in names
            )
            source[0] = source[0].replace(f"{{{{{folder}}}}}", modules)


def fill_study(app: Any, docname: str, source: list[str]) -> None:
    """The study's numbers come from the committed records; study/README links to it."""
    if docname == "study/study":
        sys.path.insert(0, str(Path(__file__).parent / "study"))
        from build import page

        source[0] = f"---\norphan: true\n---\n{page()}"


def helps() -> Iterator[str]:
    from moe_routing_bench.cli import all_names, app

    for words in all_names():
        ran = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "96"}, prog_name="mrb")
        yield f"## mrb {' '.join(words)}\n\n```text\n{ran.stdout.strip()}\n```\n"


def math(writer: Any, node: Any, display: str) -> None:
    import latex2mathml.converter
    from docutils.nodes import SkipNode

    writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise SkipNode


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("source-read", fill_commands)
    app.connect("source-read", fill_columns)
    app.connect("source-read", fill_routers)
    app.connect("source-read", fill_study)
    app.add_html_math_renderer(
        "mathml",
        (lambda writer, node: math(writer, node, "inline"), None),
        (lambda writer, node: math(writer, node, "block"), None),
    )
