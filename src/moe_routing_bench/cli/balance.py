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
from moe_routing_bench.report.console import bar, console, fitted, show
from moe_routing_bench.report.drawing import figure
from moe_routing_bench.studies.drift import (
    EVEN_WITHIN,
    SERIES,
    BalanceStudy,
    Stream,
    study_balance,
    without_control,
)
from moe_routing_bench.workloads.trace import write_trace

# a colour for each subject, related ones in similar colours; a dashed line lies on top of another line
STYLES = {
    "no control": ("#222222", "-"),
    "switch loss, weight 0.1": ("#f0a35e", "-"),
    "switch loss, weight 1": ("#c2410c", "-"),
    "sign_bias": ("#1f5fa8", "-"),
    "centred_bias": ("#7fd0ff", "--"),
    "sign_bias, rate 0.01": ("#16b3c4", "-"),
    "quantile": ("#7a3fb8", "-"),
    "l1_strength": ("#2e8b3d", "-"),
    "p_threshold": ("#9a8f1d", "-"),
    "threshold_ema": ("#d6418c", "-"),
}
# a panel for each series: title, factor, unit of the axis
PANELS = {
    "max_violation": ("Max violation", 1, "largest load / mean load - 1"),
    "drop_rate": ("Dropped with a capacity factor of 1.25", 100, "% of chosen pairs"),
    "entropy_bits": ("Entropy of the load", 1, "bits"),
    "experts_per_token": ("Experts per token", 1, "mean"),
    "agreement": ("Choices shared with no control", 100, "% of the experts of either"),
    "label_share": ("Information of the experts about the topic", 100, "% of the topic's entropy"),
}
STARTS_FAR_OFF = ("drop_rate", "experts_per_token")  # the ReLU router, until its regulariser has grown
SMOOTH = 9  # steps whose mean is a point of a line


def balance_command(
    steps: Annotated[int, typer.Option(help="Number of batches.")] = Stream.steps,
    seed: Annotated[int, typer.Option(help="Random seed of tokens and routers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write table, numbers and picture here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write what the router without control chose, for `mrb parallel place`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which balance controller keeps up when the data changes? Measures no times; takes about a minute.

    Runs every controller on the same stream of tokens, whose topics drift and jump.
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
        # compact, because indentation would put every number on a line of its own
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
        "Means over the last steps of each third; `after a jump`: over the first steps after each jump.",
        "steps to even: after each jump, until the mean max violation of ten steps is at most "
        f"{study.chance + EVEN_WITHIN:.2f}; experts drawn at random have {study.chance:.2f}. entropy: bits, "
        f"at most {math.log2(stream.E):g}.",
        "shared: experts in common with the router without control, of the experts of either. topic: "
        "information about the topic, of its entropy.",
        "There is no model behind the router, so this says nothing about quality. Losses work against "
        "a pull back to the first weights.",
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


def draw_balance(study: BalanceStudy, path: Path) -> None:
    """A panel for each series, a line for each subject, the jumps marked."""
    made = figure(14, 13, dpi=90)
    stream = study.stream
    panels = made.subplots(3, 2, sharex=True)
    for axes, name in zip(panels.flat, PANELS, strict=True):
        title, factor, unit = PANELS[name]
        for track in study.tracks:
            colour, line = STYLES.get(track.subject.name, ("#888888", "-"))
            at, values = _smoothed([factor * value for value in track.series[name]])
            axes.plot(at, values, color=colour, linestyle=line, linewidth=1.8, label=track.subject.name)
        for jump in stream.jumps:
            axes.axvline(jump, color="#999999", linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.set_ylabel(unit, fontsize=11)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, stream.steps - 1)
    for name in STARTS_FAR_OFF:
        _look_past_the_start(study, panels.flat[list(PANELS).index(name)], name)
    levels = {
        "max_violation": (study.chance, "chance"),
        "entropy_bits": (math.log2(stream.E), "even"),
        "experts_per_token": (stream.K, f"K = {stream.K}"),
    }
    for name, (level, word) in levels.items():
        axes = panels.flat[list(PANELS).index(name)]
        axes.axhline(level, color="#999999", linewidth=1.2, linestyle="--")
        axes.annotate(
            word, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), va="center",
            textcoords="offset points", color="#666666", fontsize=10, annotation_clip=False,
        )  # fmt: skip
    for axes in panels[-1]:
        axes.set_xlabel("step (one batch)", fontsize=11)
    for jump in stream.jumps:
        panels[0][0].annotate(
            "topics jump", (jump, 1), xycoords=("data", "axes fraction"), xytext=(4, -2),
            textcoords="offset points", va="top", color="#666666", fontsize=10,
        )  # fmt: skip
    handles, labels = panels[0][0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=11, frameon=False)
    made.suptitle(
        f"Balance controllers on a stream whose topics drift and jump: T={stream.T}, D={stream.D}, "
        f"E={stream.E}, K={stream.K}, seed {stream.seed}; lines are means of {SMOOTH} steps",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    made.savefig(path)


def _look_past_the_start(study: BalanceStudy, axes: Any, name: str) -> None:
    """Show the range of the last two thirds; a note says which lines start above it, and where."""
    _, factor, _ = PANELS[name]
    first = study.stream.jumps[0]
    lines = {track.subject.name: _smoothed(track.series[name]) for track in study.tracks}
    later = [factor * y for at, ys in lines.values() for x, y in zip(at, ys, strict=True) if x >= first]
    margin = 0.08 * (max(later) - min(later)) or 0.5
    low, high = min(later) - margin, max(later) + margin
    axes.set_ylim(low, high)
    above = {subject: factor * max(ys) for subject, (_, ys) in lines.items() if factor * max(ys) > high}
    words = "\n".join(f"{subject} starts at {value:.3g}" for subject, value in above.items())
    axes.annotate(
        words, (0, 1), xycoords="axes fraction", xytext=(6, -2), textcoords="offset points", va="top",
        fontsize=10, color=STYLES.get(next(iter(above), ""), ("#444444", ""))[0],
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _smoothed(values: list[float]) -> tuple[list[float], list[float]]:
    """Means of SMOOTH steps, three points per window: more would only make the files larger."""
    width = min(SMOOTH, len(values))
    places = range(0, len(values) - width + 1, max(1, width // 3))
    return [place + (width - 1) / 2 for place in places], [
        sum(values[place : place + width]) / width for place in places
    ]


assert set(PANELS) == set(SERIES)
