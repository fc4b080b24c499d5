"""The command line: `mrb`, `moe-routing-bench` and `python -m moe_routing_bench`. Each command has a file.

The file of a command is imported when the command is called, so that `mrb --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

TRANSFORMERS = "transformers.models.qwen3_moe.modeling_qwen3_moe"  # what the implementations hf_* import


class Place(NamedTuple):
    """The file of a command and its line of help. The line has at most 66 letters, so that it is not cut
    off."""

    file: str  # it has `list_command` for the command `list`, or `trace_app` with subcommands
    summary: str


class Group(NamedTuple):
    """Commands on one subject. default: the command that runs if none is named."""

    summary: str
    commands: Mapping[str, Place]
    examples: str
    default: str = ""


DAILY = {
    "bench": Place("bench", "Check implementations, then time them: which is fastest?"),
    "sweep": Place("sweep", "Measure many cases into one folder; you can stop and resume."),
    "check": Place("check", "Check results, gradients and memory on hard cases."),
    "doctor": Place("doctor", "Show this machine and its peak speed."),
    "list": Place("list", "List operations, routers, workloads, models and cases."),
    "explain": Place("explain", "Say what would run for these sizes, and why not the others."),
}
GROUPS = {
    "results": Group(
        "Read what was measured: answers, queries, reports, comparisons.",
        {
            "show": Place("query", "Show the winner of each case; the same as `mrb results`."),
            "query": Place("query", "Run a SQL query; it can only read."),
            "report": Place("report", "Make one page of figures and tables from results folders."),
            "compare": Place("compare", "Show what became faster or slower between two runs."),
            "gate": Place("compare", "Fail with exit code 1 if anything became slower, for CI."),
            "history": Place("compare", "Show at which commit something became faster or slower."),
            "regret": Place("decide", 'Show how much slower impl="auto" is than the fastest.'),
            "export": Place("query", "Write all records of a folder as Parquet or CSV."),
            "status": Place("status", "Show how far a sweep is: done, failed, to do, time left."),
            "merge": Place("merge", "Merge the results folders of several machines into one."),
            "compact": Place(
                "merge", "Fold results in a store on a URL into tables, so that reading is fast."
            ),
        },
        """
  mrb results
  mrb results query "SELECT impl, median(ratio) FROM records GROUP BY impl"
  mrb results report results -o report.html
  mrb results compare results/monday results/tuesday
""",
        default="show",
    ),
    "bundle": Group(
        "Put results into one file that others can check.",
        {
            "make": Place("bundle", "Put records, samples and hashes of the code into one file."),
            "verify": Place("bundle", "Check a bundle, then measure some of its cells again."),
        },
        """
  mrb bundle make results -o mine.zip
  mrb bundle verify mine.zip
""",
    ),
    "model": Group(
        "Study a real model: its choice of experts, its time, its weights.",
        {
            "trace": Place("trace", "Record, show, check and compare which experts a model chooses."),
            "profile": Place("profile", "Show where the time of a MoE block goes."),
            "freeze": Place("freeze", "Pack the experts of a checkpoint, and show bytes and error."),
            "formats": Place("formats", "Show how much accuracy weights of 8 and 4 bits lose."),
            "kernels": Place("freeze", "Write our kernels as a folder for Hugging Face's `kernels`."),
        },
        """
  mrb model trace record --model ./Qwen3-30B-A3B --text a.txt --out t.safetensors
  mrb model profile olmoe-1b-7b --tokens 512
  mrb model freeze ./Qwen3-30B-A3B int8_a8
  mrb model formats --width 2880 --hidden 2880
""",
    ),
    "train": Group(
        "Train small models on your text: which router learns best?",
        {
            "run": Place("train", "Train one small language model with one router."),
            "study": Place("train", "Train models that differ in one thing, and compare them."),
            "pareto": Place("train", "Show what each router of a study reached and what it cost."),
            "predict": Place("train", "Compare the time of a step with a prediction from layer times."),
            "show": Place("train", "List the finished runs of a folder."),
        },
        """
  mrb train run switch --steps 20 --out first
  mrb train study routers --quick --out look
  mrb train study routers --seeds 3 --out routers
  mrb train pareto routers
""",
    ),
    "parallel": Group(
        "Plan experts on many GPUs: what would a step cost?",
        {
            "plan": Place("parallel", "Estimate the cost of a step for a model on N GPUs."),
            "serve": Place("serve", "Find the deployment of a model with most tokens per second."),
            "fabrics": Place("parallel", "List the networks of GPUs that `plan` and `serve` know."),
            "place": Place("parallel", "Say whether another placement of experts would save time."),
            "cache": Place("parallel", "Say which experts to keep in memory if not all fit."),
        },
        """
  mrb parallel plan --model deepseek-v3 --gpus 64 --weight-bits 8 --send-bits 8
  mrb parallel serve --model gpt-oss-120b --gpus 1 --format mxfp4
  mrb parallel place t.safetensors --ranks 8 --replicas 0,8,16
  mrb parallel cache t.safetensors --slots 32
""",
    ),
    "gpu": Group(
        "Compile GPU kernels and rehearse a run, without a GPU.",
        {
            "compile": Place("compile", "Compile GPU kernels and show what their machine code needs."),
            "rehearse": Place("rehearse", "Take every step of the first hour on a GPU, on the CPU."),
        },
        """
  mrb gpu compile --arch sm_90a --model qwen3-30b-a3b
  mrb gpu compile --warm
  mrb gpu rehearse h100
""",
    ),
    "tune": Group(
        'Make impl="auto" follow your measurements.',
        {
            "layer": Place("tune", "Search settings of the experts' kernel that are faster here."),
            "op": Place("tune", "Search settings of one operation."),
            "decide": Place("decide", "Write a file with the fastest implementation of each size."),
            "check": Place("tuned", "Can tuned files of vLLM and SGLang do what they say?"),
            "import": Place("tuned", "Read a tuned file of vLLM or SGLang, to measure its tiles."),
            "export": Place("tuned", "Write a tuned file for vLLM or SGLang, with its proof."),
        },
        """
  mrb tune layer --model olmoe-1b-7b --minutes 10 --out tuned
  mrb tune decide results -o decisions.json
  mrb tune check /path/to/vllm/model_executor/layers/fused_moe/configs
""",
    ),
}

# Names before version 0.2. They work for one release and print the new name.
RENAMED = {
    "export kernels": "model kernels",
    "profile block": "model profile",
    **{name: f"results {name}" for name in "export merge compact compare gate history report regret".split()},
    **{name: f"model {name}" for name in ("trace", "profile", "formats")},
    **{name: f"parallel {name}" for name in ("place", "cache")},
    "verify": "bundle verify",
    "compile": "gpu compile",
    "decide": "tune decide",
    # these were commands with other options; now they are groups
    "bundle": "bundle make",
    "results SQL": "results query",
    "results --columns": "results query",
    "train --study": "train study",
    "train --router": "train run",
}
SQL = re.compile(r"\s*(select|with|from|describe|summarize|pivot|values)\s", re.IGNORECASE)


def today(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the old name at the beginning of these words, or "", and the words with the new name."""
    first, *rest = words or [""]
    if first not in GROUPS:
        for old, new in RENAMED.items():
            if old.split() == [*words[: len(old.split())]]:
                return old, [*new.split(), *words[len(old.split()) :]]
    elif rest and rest[0] not in (*GROUPS[first].commands, "-h", "--help"):  # this group was a command
        for at, word in enumerate(rest):
            option, _, value = word.partition("=")
            old = f"{first} SQL" if SQL.match(word) else f"{first} {option}"
            if old in RENAMED:
                if first == "train":  # the option's value is an argument now
                    rest[at : at + 1] = [value] if value else []
                return old, [*RENAMED[old].split(), *rest]
        if first in RENAMED:
            return first, [*RENAMED[first].split(), *rest]
    return "", [*words]


class LazyGroup(TyperGroup):
    """Knows the line of help of every command, and imports only the command that is called."""

    def __init__(self, places: Mapping[str, Place | Group], default: str = "", **more: Any):
        super().__init__(**more)
        self.places, self.default = places, default
        self.commands = {name: _named(name, place) for name, place in places.items()}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option = args[0] if args and args[0].startswith("-") else ""
        if self.default and not ctx.resilient_parsing and (not args or option):
            args = args if option in ctx.help_option_names else [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        place = self.places.get(name or "")
        return name, _imported(str(name), place) if isinstance(place, Place) else command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", [])
            panel.append((name, command.get_short_help_str(width)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class AllCommands(LazyGroup):
    """Every command of `mrb`. Old names work too."""

    def __init__(self, **more: Any):
        super().__init__({**DAILY, **GROUPS}, **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        old, args = today(args)
        if old and not ctx.resilient_parsing:
            typer.echo(
                f"mrb: `mrb {old}` is now `mrb {RENAMED[old]}`; version 0.3 removes the old name", err=True
            )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command. After Ctrl-C a command that saves results says what it saved; the others only
        end."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("mrb: stopped", err=True)
            raise typer.Exit(130) from None


def _named(name: str, place: Place | Group) -> TyperCommand | TyperGroup:
    """Makes a command with its line of help, or a group with its commands."""
    if isinstance(place, Place):
        panel = "Every day" if name in DAILY and DAILY[name] is place else None
        return TyperCommand(name, help=place.summary, short_help=place.summary, rich_help_panel=panel)
    return LazyGroup(
        place.commands,
        place.default,
        name=name,
        help=f"{place.summary}\n\n\b\nExamples:{place.examples}",
        short_help=place.summary,
        no_args_is_help=not place.default,
        rich_help_panel="Groups of commands",
        rich_markup_mode=_markup(),
    )


def _imported(name: str, place: Place) -> Any:
    module = importlib.import_module(f"moe_routing_bench.cli.{place.file}")
    app = _typer()
    if (inner := getattr(module, f"{name}_app", None)) is not None:
        app.add_typer(inner, name=name)
        return typer.main.get_group(app).commands[name]
    app.command(name)(getattr(module, f"{name}_command"))
    return typer.main.get_command(app)


def command_of(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Imports the command at the beginning of these words, and returns it with the words after its name."""
    found: Any = typer.main.get_command(app)
    while words and isinstance(found, TyperGroup) and not words[0].startswith("-"):
        context = typer.Context(found)
        if found.get_command(context, words[0]) is None:
            break
        _, found, words = found.resolve_command(context, [*words])
    return found, words


def all_names() -> Iterator[tuple[str, ...]]:
    """Yields ("bench",), ("results",), ("results", "show"), ...: a group comes before its commands."""
    for name, place in {**DAILY, **GROUPS}.items():
        yield (name,)
        inner = place.commands if isinstance(place, Group) else _inner(name)
        for one in inner:
            yield name, one
            yield from ((name, one, deep) for deep in _inner(name, one))


def _inner(*words: str) -> Sequence[str]:
    """Returns the commands of a group. For `bench` these are `layer` and the ones that are no span."""
    found, _ = command_of(words)
    more = ("layer",) if words == ("bench",) else ()
    return (*more, *getattr(found, "commands", ()))


def _markup() -> Any:
    """Chooses frames around help and errors on a terminal, and plain text in a pipe."""
    return "rich" if sys.stdout.isatty() else None


def _typer(**more: Any) -> typer.Typer:
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=_markup(),
        context_settings={"help_option_names": ["-h", "--help"]},
        **{"add_completion": False, **more},
    )


app = _typer(
    cls=AllCommands, no_args_is_help=True, add_completion=True,
    epilog="`mrb --install-completion` makes your shell complete commands and options.",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    versions = []
    for name in ("moe-routing-bench", "torch"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} (not installed; running from source)")
    typer.echo(", ".join(versions))
    raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Find the Mixture-of-Experts router, layout and kernel that are correct and fastest for your sizes.

    \b
    Examples:
      mrb list                              what can I measure?
      mrb check --op combine                is it correct?
      mrb bench layer --model olmoe-1b-7b   which is fastest?
      mrb results                           what was measured so far?
      mrb explain expert_ffn --tokens 16    what would run, and why?
    """


def main() -> None:
    if takes_transformers(sys.argv[1:]):
        from moe_routing_bench.core.fork_server import start_server

        start_server(TRANSFORMERS)
    app()


def takes_transformers(words: Sequence[str]) -> bool:
    """Will this command measure Transformers' experts? Then workers import it while this process imports
    torch and plans, which takes about as long."""
    if [*words[:2]] not in (["bench", "layer"], ["bench", "expert_ffn"]) or "--help" in words:
        return False
    return "--impl" not in words or any("hf_" in word for word in words)
