"""mrb bench balance: which balance controller keeps up when the data changes?"""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from moe_routing_bench.cli.options import Json, show_json, user_mistakes
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.balance_pictures import draw_balance
from moe_routing_bench.report.console import bar, console, fitted, show
from moe_routing_bench.studies.drift import (
    EVEN_WITHIN,
    BalanceStudy,
    Stream,
    study_balance,
    without_control,
)
from moe_routing_bench.workloads.trace import write_trace


def balance_command(
    steps: Annotated[int, typer.Option(help="Number of batches.")] = Stream.steps,
    seed: Annotated[int, typer.Option(help="Random seed of tokens and routers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write table, numbers and picture here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write the choices of the router without control, for `mrb parallel place`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare balance controllers on data that changes. This takes about a minute and measures no times.

    Every controller gets the same stream of tokens. The topics of the stream drift and jump.
    """
    with user_mistakes():
        stream = Stream(steps=steps, seed=seed)
        if out is not None:
            _make_folder(out)
        if trace is not None:
            write_trace(trace, *without_control(stream), source=f"mrb bench balance: {stream}")
    with bar("following controllers", "steps") as shown:
        study = study_balance(stream, on_progress=shown.update)
    document = study.to_dict(command=shlex.join(["mrb", *sys.argv[1:]]))
    if out is not None:
        # without indentation, which would put every number on its own line
        write_whole(out / "balance.json", json.dumps(document, separators=(",", ":")) + "\n")
        write_whole(out / "balance.txt", _text(study, document))
        draw_balance(study, out / "balance.png")
    if as_json:
        show_json(document)
        return
    show(*_table(study), "", *_notes(study))
    if out is not None:
        show(f"written: {', '.join(str(out / f'balance.{suffix}') for suffix in ('json', 'txt', 'png'))}")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create the folder {out}: {error.strerror}; give another --out") from None


def _table(study: BalanceStudy, room: int | None = None) -> list[RenderableType]:
    rows = [(track.subject, study.summary(track)) for track in study.tracks]
    words = {
        "control": [subject.name for subject, _ in rows],
        "router": [subject.router for subject, _ in rows],
    }
    settled, jump = [one.settled for _, one in rows], [one.after_jump for _, one in rows]
    numbers = {
        "max violation": [f"{one['max_violation']:.2f}" for one in settled],
        "after a jump": [f"{one['max_violation']:.2f}" for one in jump],
        "steps to even": [
            ", ".join("never" if steps is None else str(steps) for steps in one.steps_to_even)
            for _, one in rows
        ],
        "entropy": [f"{one['entropy_bits']:.3f}" for one in settled],
        "dropped": [f"{100 * one['drop_rate']:.1f} %" for one in settled],
        "dropped after a jump": [f"{100 * one['drop_rate']:.1f} %" for one in jump],
        "experts/token": [f"{one['experts_per_token']:.2f}" for one in settled],
        "shared": [f"{100 * one['agreement']:.0f} %" for one in settled],
        "topic": [f"{100 * one['label_share']:.0f} %" for one in settled],
    }
    return fitted(words, numbers, style="bold", room=room)


def _notes(study: BalanceStudy) -> list[str]:
    stream = study.stream
    first, second = stream.jumps
    return [
        f"{stream.steps} steps of T={stream.T} tokens, D={stream.D}, E={stream.E}, K={stream.K}, "
        f"{stream.topics} topics, seed {stream.seed}; jumps at steps {first} and {second}; "
        f"{study.seconds:.0f} s",
        "Numbers are means over the last steps of each third; `after a jump`: over the first steps after it.",
        "steps to even: steps after a jump until the mean max violation of ten steps is at most "
        f"{study.chance + EVEN_WITHIN:.2f}; random experts have {study.chance:.2f}. entropy: bits, "
        f"at most {math.log2(stream.E):g}.",
        "shared: share of experts that the router without control chose too. topic: information about the "
        "topic as a share of its entropy.",
        "No model is trained here, so this says nothing about quality. A pull back to the first weights "
        "works against balance losses.",
    ]


def _text(study: BalanceStudy, document: dict[str, Any]) -> str:
    screen = console()
    screen.width = 1000
    with screen.capture() as captured:
        screen.print(*_table(study, room=1000), sep="\n")
    lines = [line.rstrip() for line in captured.get().splitlines()]
    machine = document["machine"]
    made = f"{document['command']}  ({machine['name']}, torch {machine['torch']})"
    return "\n".join([*lines, "", *_notes(study), made]) + "\n"
