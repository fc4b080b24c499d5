"""mrb model freeze and kernels: the experts of a checkpoint packed; our kernels as a folder for others."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.options import Json, fail, show_json, user_mistakes
from moe_routing_bench.cli.trace import loaded_model
from moe_routing_bench.core.frozen import freezing
from moe_routing_bench.models.hub_folder import export_folder
from moe_routing_bench.moe.layer import with_format
from moe_routing_bench.report.console import fitted, show, spinner


def freeze_command(
    model: Annotated[
        str, typer.Argument(help="A Transformers checkpoint, a name on the Hub, or a run of mrb train.")
    ],
    form: Annotated[
        str, typer.Argument(metavar="[FORMAT]", help="A format (docs/formats.md), or auto.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the packed weights in this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack the experts of a checkpoint as plugin.freeze(model, FORMAT) does, and show bytes, error and time.

    \b
    Examples:
      mrb model freeze ./Qwen3-30B-A3B                     only packs, rounds nothing
      mrb model freeze ./Qwen3-30B-A3B int8_a8
      mrb model freeze ./Qwen3-30B-A3B int4_g128 --out packed

    error: the expected difference of a layer's results, as a share of their size
    (root mean square). Without --out nothing is written. With it, a program that
    calls plugin.freeze(model, FORMAT, keep_packed=DIR) maps these files instead
    of packing. The checkpoint itself is not changed.
    """
    with user_mistakes():
        with_format(form)  # a wrong name is reported before a model is loaded
        loaded = loaded_model(model, "auto")
        from moe_routing_bench.models.transformers import freeze

        began = time.perf_counter()
        try:
            with spinner("packing"):
                whole = freeze(loaded, form, keep_packed=out or False)
        except NotImplementedError as reason:
            fail(f"{model} cannot be frozen as {form}: {reason}")
    seconds = time.perf_counter() - began
    if whole is None:
        fail(f"{model} has no experts that can be frozen")
    layers = {
        name: one
        for name, module in loaded.named_modules()
        if (one := freezing(module, recurse=False)) is not None
    }
    if as_json:
        rows = {name: asdict(one) for name, one in layers.items()}
        show_json({"model": model, "format": form, "seconds": seconds, "all": asdict(whole), "layers": rows})
        return
    numbers = {
        "MB before": [f"{one.before / 1e6:,.1f}" for one in layers.values()],
        "MB after": ["-" if one.after is None else f"{one.after / 1e6:,.1f}" for one in layers.values()],
        "error": [f"{one.error:.2g}" for one in layers.values()],
    }
    show(*fitted({"experts": list(layers)}, numbers), "", f"{whole}. Packing took {seconds:.1f} s.")
    if out is not None:
        show(f"plugin.freeze(model, {form!r}, keep_packed={str(out)!r}) uses these files.")


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
