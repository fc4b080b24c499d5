"""Tables in a Markdown page that a script writes, between `<!-- table NAME: begin -->` and `: end -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with every table replaced. ValueError if it lacks the place for one."""
    for name, fresh in tables.items():
        begin, end = (f"<!-- table {name}: {word} -->" for word in ("begin", "end"))
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed) or begin in after:
            raise ValueError(f"the page needs one place for table {name}")
        text = f"{before}{begin}\n{fresh}\n{end}{after}"
    return text


def rewrite(path: Path, tables: Mapping[str, str]) -> None:
    path.write_text(filled(path.read_text(), tables))
