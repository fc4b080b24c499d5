"""mrb model kernels: our kernels as a folder for Hugging Face's `kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import user_mistakes
from moe_routing_bench.models.hub_folder import export_folder
from moe_routing_bench.report.console import show


def kernels_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder to write.")],
) -> None:
    """Write our kernels as a folder for Hugging Face's `kernels`.

    \b
    Example:
      mrb model kernels DIR
    """
    with user_mistakes():
        try:
            written = export_folder(folder)
        except OSError as error:
            raise ValueError(f"cannot write {folder}: {error.strerror}") from None
    show(f"{folder}: {', '.join(f'{variant} ({count} files)' for variant, count in written.items())}")
