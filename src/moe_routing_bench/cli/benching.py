"""mrb bench: which implementation is fastest here, for these sizes, under this routing?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.bench.cell import CACHES, Cell, Policy
from moe_routing_bench.bench.executor import LocalExecutor
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import stored_roofs
from moe_routing_bench.bench.spans import SPANS, span_named
from moe_routing_bench.cli.balancing import DEFAULT_STEPS, bench_balance
from moe_routing_bench.cli.blocks import NOT_HERE, bench_blocks, bench_checkpoint
from moe_routing_bench.cli.choosing import (
    MODEL_TOKENS,
    check_device,
    chosen_cases,
    chosen_device,
    made_cells,
)
from moe_routing_bench.cli.finding import IncludePath, include_all
from moe_routing_bench.cli.progress import shown_progress
from moe_routing_bench.cli.tables import outcome_document, show_outcome
from moe_routing_bench.cli.terminal import Json, fail, show, show_json, user_mistakes
from moe_routing_bench.machine import this_machine
from moe_routing_bench.results.sweep import run_sweep

Impl = Annotated[
    list[str] | None,
    typer.Option(
        help="Implementations, first the baseline: a,b or a name with options; `name @ block(64)` fixes its "
        "layout. Repeatable. Without it: all there are."
    ),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", help="Routing: zipf(1.2), uniform, ... (`mrb list workloads`). Repeatable."),
]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        "--layout", help="compact, padded(capacity_factor=1.25), block(64), or case: its own. Repeatable."
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Full size even if it is too big for a laptop.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu; cuda: a GPU, AMD's too; pretend: a GPU's steps on the CPU. cuda for gpu-quick, else cpu.",
        show_default=False,
    ),
]
Threads = Annotated[int, typer.Option(help="Threads, pinned to as many cores.")]
Cache = Annotated[str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in CACHES.items()))]
Processes = Annotated[int, typer.Option(help="Repeat in so many processes; 3 for a published figure.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Rounds at most.")]
MinRounds = Annotated[int, typer.Option(help="Rounds at least.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Seconds of rounds at most, for each case.")]
Target = Annotated[float, typer.Option(help="Stop when every ratio is known to this fraction.")]
Limit = Annotated[float, typer.Option("--limit", help="Seconds until a call counts as hanging.")]
Memory = Annotated[float, typer.Option("--memory", help="GiB a worker may allocate.")]
Checked = Annotated[int, typer.Option(help="Timed results to judge, for each implementation.")]
Seed = Annotated[int, typer.Option(help="Seed of routing and data.")]
Ranks = Annotated[int, typer.Option("--ranks", help="W, ranks the experts are placed on.")]


# what `mrb bench balance` understands: it measures balance, not time
OF_BALANCE = {"span_name", "steps", "seed", "out", "as_json"}


def bench_command(
    context: typer.Context,
    span_name: Annotated[
        str, typer.Argument(metavar="SPAN", help=f"{', '.join(SPANS)}; block; or balance (see below)")
    ],
    model: Annotated[str | None, typer.Option(help="Sizes of a published model (`mrb list models`).")] = None,
    case: Annotated[str | None, typer.Option(help="A named case or suite (`mrb list cases`).")] = None,
    tokens: Annotated[int | None, typer.Option(help="T, tokens in the batch")] = None,
    width: Annotated[int | None, typer.Option(help="D, the model's width")] = None,
    hidden: Annotated[int | None, typer.Option(help="F, an expert's hidden width")] = None,
    experts: Annotated[int | None, typer.Option(help="E, experts of the layer")] = None,
    choices: Annotated[int | None, typer.Option(help="K, experts per token")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16")] = None,
    activation: Annotated[str | None, typer.Option(help="swiglu, gelu, ...")] = None,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Experts with biases.")] = False,
    shared: Annotated[int, typer.Option(help="Hidden width of a shared expert.")] = 0,
    full: Full = False,
    workload: Workloads = None,
    layout: Layouts = None,
    impl: Impl = None,
    stages: Annotated[bool, typer.Option("--stages", help="Also time the stages inside.")] = False,
    device: Device = None,
    threads: Threads = 1,
    cache: Cache = "hot",
    processes: Processes = 1,
    rounds: Rounds = 1000,
    min_rounds: MinRounds = 20,
    seconds: Seconds = 15.0,
    target: Target = 0.01,
    limit: Limit = 120.0,
    memory: Memory = 12.0,
    checked: Checked = 3,
    seed: Seed = 0,
    ranks: Ranks = 1,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Of balance: batches, {DEFAULT_STEPS} unless given.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep records and samples in this folder.")] = None,
    repro: Annotated[bool, typer.Option("--repro", help="Show the command for each row.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="layer: weights and router of a saved model.")
    ] = None,
    layer: Annotated[int, typer.Option(help="With --checkpoint: which layer, from 0.")] = 0,
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """Which implementation is fastest here? Checks each one, then times all in interleaved rounds.

    \b
    Examples:
      mrb bench layer --model olmoe-1b-7b
      mrb bench expert_ffn --tokens 64 --workload "zipf(1.2)" --workload balanced --impl staged,eager_loop
      mrb bench layer --case seed-grid~scaled --layout "compact,block(64)" --stages
      mrb bench pack --case seed-pack/16384x4096-e128-k2 --out results
      mrb bench block --model qwen3-30b-a3b             a whole decoder block, beside Transformers'
      mrb bench layer --checkpoint ./Qwen3-30B-A3B --layer 12
      mrb bench balance --out balance           about a minute

    \b
    The first implementation is the baseline. A ratio below 1 is faster. Only what is right gets a time.
    `balance` times nothing: it follows balance controllers through a stream of tokens whose topics drift and
    jump. It reads --steps, --seed, --out and --json alone.
    """
    if span_name == "balance":
        _refuse_options(context, lambda name: name not in OF_BALANCE, "does not belong to balance")
        bench_balance(steps=DEFAULT_STEPS if steps is None else steps, seed=seed, out=out, as_json=as_json)
        return
    _refuse_options(context, lambda name: name == "steps", "belongs to balance alone")
    include_all(include_path)
    if checkpoint is not None or span_name == "block":
        if (
            out is not None
            or cache != "hot"
            or processes != 1
            or stages
            or include_path
            or device not in (None, "cpu")
        ):
            fail(NOT_HERE)
    with user_mistakes():
        policy = Policy(
            threads=threads, cache=cache, processes=processes, max_rounds=rounds,
            min_rounds=min(min_rounds, rounds), max_seconds=seconds, target=target, step_seconds=limit,
            memory_gib=memory, checked=checked, stages=stages, **chosen_device(device, case or ""),
        )  # fmt: skip
    if checkpoint is not None:
        if span_name not in ("layer", "expert_ffn"):
            fail(f"--checkpoint is for layer: `mrb bench layer --checkpoint {checkpoint}`")
        if model or case or width or hidden or experts or choices or dtype or activation:
            fail("--checkpoint fixes all sizes but --tokens")
        bench_checkpoint(
            checkpoint, layer, tokens=tokens or MODEL_TOKENS, workloads=workload, impls=impl,
            layout=(layout or ["compact"])[0], seed=seed, policy=policy, as_json=as_json,
        )  # fmt: skip
        return
    with user_mistakes():
        if span_name == "block" and not (model or case or tokens or width or hidden or experts or choices):
            case = "seed-decoder"
        try:
            if span_name != "block":
                span_named(span_name)
        except NotImplementedError as reason:
            fail(str(reason))
        found = chosen_cases(
            span_name,
            model_name=model,
            case_name=case,
            sizes={"T": tokens, "D": width, "F": hidden, "E": experts, "K": choices},
            dtype=dtype,
            activation=activation,
            bias=bias,
            shared=shared,
            full=full,
        )
    if span_name == "block":
        bench_blocks(found, workloads=workload, impls=impl, seed=seed, policy=policy, as_json=as_json)
        return
    with user_mistakes():
        cells = made_cells(
            found, workloads=workload, impls=impl, layouts=layout, seed=seed, ranks=ranks, policy=policy,
            include=include_path,
        )  # fmt: skip
        check_device(policy)
    outcomes = _measure(cells, out, suite=(case or model or ""), silent=as_json, repro=repro)
    if as_json:
        show_json([outcome_document(outcome) for outcome in outcomes])


def _refuse_options(context: typer.Context, wrong: Callable[[str], bool], why: str) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        # by name, because newer versions of typer have a copy of click's enumeration
        if source is not None and source.name == "COMMANDLINE" and wrong(parameter.name or ""):
            fail(f"{parameter.opts[0]} {why}; leave it out")


def _measure(
    cells: list[Cell], out: Path | None, *, suite: str, silent: bool, repro: bool
) -> list[CellOutcome]:
    with user_mistakes():
        roofs = stored_roofs(this_machine().name)
    found = []
    executor = LocalExecutor()
    with shown_progress(len(cells)) as progress:
        if out is None:
            source: Any = executor.run(cells, roofs=roofs, tell=progress.tell, watch=lambda: None)
        else:
            source = run_sweep(cells, out, executor, suite=suite, roofs=roofs, tell=progress.tell)
        with user_mistakes():
            for outcome in source:
                progress.cell_done()
                found.append(outcome)
                if not silent:
                    progress.pause(partial(show_outcome, outcome, repro=repro, roofs=roofs))
    if out is not None and not silent:
        show(f"Records and samples are in {out}; `mrb results --folder {out}` reads them.")
    return found
