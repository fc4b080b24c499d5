"""How a command that measures ends: where results are, what has no time, what Ctrl-C leaves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.status import Status
from moe_routing_bench.cli.choosing import split_all
from moe_routing_bench.cli.options import WhatOptions
from moe_routing_bench.cli.terminal import say
from moe_routing_bench.names import short_label
from moe_routing_bench.places import default_results

NOT_TIMED, STOPPED = 1, 130  # exit codes; 2 is a mistake in the command
# of what nobody named: it cannot run here, or its turn did not come
EXCUSED = (Status.UNSUPPORTED, Status.NO_TIME)


def saving_folder(out: Path | None, *, save: bool) -> Path | None:
    """Where results go: `out` if it is given, else the default folder; None if they are not kept."""
    if out is not None:
        if not save:
            raise ValueError(
                "--out names a folder to save in, --no-save saves nothing; leave out one of them"
            )
        return out
    if not save:
        return None
    folder = default_results()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"results are not saved: {folder} cannot be made ({error.strerror}); --out names another folder")
        return None
    if not os.access(folder, os.W_OK):
        say(f"results are not saved: {folder} cannot be written; --out names another folder")
        return None
    return folder


def where_saved(folder: Path) -> str:
    """The last line: where results are and how to read them."""
    named = "" if folder == default_results() else f" --folder {folder}"
    return f"Saved in {folder}; `mrb results{named}` shows what is there."


def end(outcomes: Sequence[CellOutcome], what: WhatOptions) -> None:
    """Exit with NOT_TIMED and a sentence if something that was asked for has no time.

    Whatever --impl names was asked for. What nobody named may be EXCUSED.
    """
    named = [word for word in split_all(what.impl) if word != "all"]
    missing: dict[str, Status] = {}
    for outcome in outcomes:
        for one in outcome.subjects:
            if not one.samples and (named or one.status not in EXCUSED):
                missing.setdefault(f"{short_label(one.label)} @ {one.subject.layout}", one.status)
    nothing = [outcome for outcome in outcomes if not any(one.samples for one in outcome.subjects)]
    if missing:
        names = ", ".join(f"{name} ({status})" for name, status in missing.items())
        say(f"asked for and not timed: {names}")
    elif nothing:
        say(f"nothing was timed in {nothing[0].cell.name}")
    if missing or nothing:
        raise typer.Exit(NOT_TIMED)


def stopped(done: int, cells: int, advice: str) -> NoReturn:
    """After Ctrl-C."""
    say(f"stopped; {done} of {cells} cells {'is' if done == 1 else 'are'} measured. {advice}")
    raise typer.Exit(STOPPED)
