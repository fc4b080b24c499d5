"""mrb tune layer, mrb tune op: finds the settings of a kernel that are faster here, and says if none is."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.api import collected, roofs_here
from moe_routing_bench.bench.budget import command_start
from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    check_device,
    chosen_cases,
    made_experiments,
)
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.cli.bench import stopped
from moe_routing_bench.cli.decide import decided_document
from moe_routing_bench.cli.options import Json, fail, include_all, show_json, user_mistakes, with_options
from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.ops.auto import VARIABLE
from moe_routing_bench.report.console import say, show
from moe_routing_bench.results.decisions import decide, write_decisions
from moe_routing_bench.results.record import TUNING
from moe_routing_bench.results.winners import Contest
from moe_routing_bench.tuning.search import SEARCHES
from moe_routing_bench.tuning.tune import TOKENS, Tuned, Tuner, known_races, space_of

Minutes = Annotated[float, typer.Option(help="For all cases together; kernels are built before.")]
Out = Annotated[Path, typer.Option(help="The results folder; the same command goes on with what it holds.")]
How = Annotated[
    str, typer.Option("--search", help=f"{', '.join(SEARCHES)}; tpe needs optuna and a large space.")
]
DECIDING = 3.0  # seconds to make decisions of the records and write them


@with_options
def layer_command(
    sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Out, minutes: Minutes = 10.0,
    search: How = "greedy", as_json: Json = False,
) -> None:  # fmt: skip
    """Search the settings of the experts' kernel for one that is faster than its own rules.

    \b
    Examples:
      mrb tune layer --model qwen3-30b-a3b --minutes 10 --out tuned
      mrb tune layer --model olmoe-1b-7b --impl "frozen(native)" --out tuned
      mrb tune layer --model mixtral-8x7b --tokens 1,64 --dtype float32 --out tuned

    The default is always one of them, the ten best are timed again with it, and a tie keeps it. Writes
    decisions.json, which impl="auto" follows if MRB_DECISIONS names it. Stop it at any time; the same
    command goes on.
    """
    _tune("layer", sizes, what, measure, out, minutes, search, as_json)


@with_options
def op_command(
    op: Annotated[str, typer.Argument(help="An operation (`mrb list ops`).")],
    sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Out, minutes: Minutes = 10.0,
    search: How = "greedy", as_json: Json = False,
) -> None:  # fmt: skip
    """Search the settings of one operation, as `mrb tune layer` does.

    \b
    Examples:
      mrb tune op expert_ffn --tokens 64 --out tuned
      mrb tune op combine --impl "native,gather_sum" --model olmoe-1b-7b --out tuned

    An operation without knobs needs --impl: then the implementations are the settings.
    """
    _tune(op, sizes, what, measure, out, minutes, search, as_json)


def _tune(
    span: str, sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, out: Path, minutes: float,
    search: str, as_json: bool,
) -> None:  # fmt: skip
    include_all(what.include_path)
    with user_mistakes():
        one_of("search", search, SEARCHES)
        if sizes.model and sizes.tokens is None:
            sizes = replace(sizes, tokens=TOKENS)  # what is asked for by number has its full size
        what = replace(what, impl=what.impl or ["auto"])
        how = measure.settled(sizes.case or "")
        experiments = made_experiments(chosen_cases(span_named(span), sizes, what), what, how)
        check_device(how["device"])
        for experiment in experiments:
            space_of(experiment)
        try:
            seconds = 60 * minutes - DECIDING
            tuner = Tuner(seconds, search=search, known=known_races(out), began=command_start())
        except NotImplementedError as reason:
            fail(str(reason))
        roofs = roofs_here(experiments, progress=True)
    done: list[CellOutcome] = []
    try:
        with user_mistakes():
            source = partial(run_sweep, experiments, out, tuner, suite=TUNING, roofs=roofs)
            collected(source, len(experiments), progress=True, on_outcome=done.append)
    except KeyboardInterrupt:
        stopped(len(done), len(done), "The same command goes on from here.")
    with user_mistakes():
        decided = decide(out)
        write_decisions(decided, out, target := out / "decisions.json")
    if as_json:
        show_json({"tuned": [_document(one) for one in tuner.tuned], **decided_document(decided)})
        return
    for answer in decided.answers:
        show(Text(printable(answer.question), "bold cyan"))
        for contest in answer.contests:
            show(Text(printable(f"  T={contest.T}: {_sentence(contest)}")))
    for one in tuner.tuned:
        if not one.ranked:
            say(f"{one.experiment.title}: no time to rank the best settings again; --minutes gives more")
    timed = sum(len(one.seen) for one in tuner.tuned)
    races = sum(one.races for one in tuner.tuned)
    show(f"{timed} settings in {races} races. Written to {target}; use it with {VARIABLE}={target}.")
    show(f"`mrb results report {out}` draws it.")


def _sentence(contest: Contest) -> str:
    if (gain := contest.against_baseline.get(contest.chosen)) is None:
        return (
            f"no gain: none of {len(contest.ratios) - 1} settings is shown to be faster than {contest.chosen}"
        )
    low, high = (1 / end for end in reversed(gain.interval))
    return f"{contest.chosen} is {1 / gain.ratio:.3f}x faster (99 % interval {low:.3f}x to {high:.3f}x)"


def _document(one: Tuned) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(one).items() if name not in ("experiment", "seen")}
    ten = sorted(one.seen, key=one.seen.__getitem__)[:10]
    return {
        "case": one.experiment.case, "T": one.experiment.T, "dtype": one.experiment.dtype,
        "workload": one.experiment.workload, **facts, "settings": len(one.seen),
        "best": {name: one.seen[name] for name in ten},
    }  # fmt: skip
