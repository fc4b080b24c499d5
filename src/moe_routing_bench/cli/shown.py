"""What a function returns for people to look at: it prints as the command line does, also in a notebook."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_routing_bench.cli.fitting import columns_here
from moe_routing_bench.cli.results import table_of
from moe_routing_bench.cli.terminal import recorded, show


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
