"""The command line: `mrb`, `moe-routing-bench` and `python -m moe_routing_bench`. One file a command.

A command's file is imported when the command is called: `mrb --help` must not wait for torch.
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


class Place(NamedTuple):
    """Where a command is, and what help says of it, in at most 66 letters: no line is cut off."""

    file: str  # it has `list_command` for the command `list`, or `trace_app` with commands of its own
    summary: str


class Group(NamedTuple):
    """Commands on one subject. default: the one that runs if no command is named."""

    summary: str
    commands: Mapping[str, Place]
    examples: str
    default: str = ""


DAILY = {
    "bench": Place("bench", "Which implementation is fastest here? Checked, then timed."),
    "sweep": Place("sweep", "Measure many cases into one folder; stop and go on at will."),
    "check": Place("check", "Is it correct? Results, gradients and memory, on hard cases."),
    "doctor": Place("doctor", "What is this machine, and how fast can it be at most?"),
    "list": Place("list", "What there is: operations, routers, workloads, models, cases."),
    "explain": Place("explain", "What would run for these sizes, and why not the others."),
}
GROUPS = {
    "results": Group(
        "What was measured? The answer, queries, reports, comparisons.",
        {
            "show": Place("query", "The answer; `mrb results` alone does the same."),
            "query": Place("query", "Ask in SQL, which can only read."),
            "report": Place("report", "One page of figures and tables from results folders."),
            "compare": Place("compare", "What became faster or slower between two runs?"),
            "gate": Place("compare", "Is anything slower than before? Exit code 1 if so, for CI."),
            "history": Place("history", "At which commit did it become faster or slower?"),
            "regret": Place("decide", 'How much slower is impl="auto" than the fastest?'),
            "export": Place("query", "Write all records of a folder as Parquet or CSV."),
            "merge": Place("merge", "One results folder from those of several machines."),
            "compact": Place("merge", "Make a store on a URL quick to read: few big objects."),
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
        "Results in one file that others can check.",
        {
            "make": Place("bundle", "Put records, samples and hashes of the code into one file."),
            "verify": Place("bundle", "Is a bundle what it says? Checked, then measured again."),
        },
        """
  mrb bundle make results -o mine.zip
  mrb bundle verify mine.zip
""",
    ),
    "model": Group(
        "A real model: which experts it chooses, where its time goes.",
        {
            "trace": Place("trace", "Which experts a model chooses: record, look, check, compare."),
            "profile": Place("profile", "Where does the time of a MoE block go?"),
            "formats": Place("formats", "What do weights of 8 and 4 bits lose against float32?"),
            "kernels": Place("kernels", "Our kernels as a folder for Hugging Face's `kernels`."),
        },
        """
  mrb model trace record --model ./Qwen3-30B-A3B --text a.txt --out t.safetensors
  mrb model profile olmoe-1b-7b --tokens 512
  mrb model formats --width 2880 --hidden 2880
""",
    ),
    "train": Group(
        "Which router learns best, and what does it cost? On your text.",
        {
            "run": Place("train", "Train one small language model with one router."),
            "study": Place("train", "Train models that differ in one thing, and compare them."),
            "pareto": Place("train", "What each router of a study reached, and what it cost."),
            "predict": Place("train", "The time of a step beside what a layer's time predicts."),
            "show": Place("train", "The finished runs of a folder, one a line."),
        },
        """
  mrb train run switch --steps 20 --out first
  mrb train study routers --quick --out look
  mrb train study routers --seeds 3 --out routers
  mrb train pareto routers
""",
    ),
    "parallel": Group(
        "Experts on many GPUs: what would a step cost?",
        {
            "plan": Place("parallel", "I have N GPUs and this model: what would a step cost?"),
            "fabrics": Place("parallel", "The networks of GPUs that `plan` knows."),
            "place": Place("parallel", "Would another placement of experts on ranks pay?"),
            "cache": Place("parallel", "Which experts to keep in memory if not all fit?"),
        },
        """
  mrb parallel plan --model deepseek-v3 --gpus 64 --weight-bits 8 --send-bits 8
  mrb parallel place t.safetensors --ranks 8 --replicas 0,8,16
  mrb parallel cache t.safetensors --slots 32
""",
    ),
    "gpu": Group(
        "GPU kernels without a GPU.",
        {"compile": Place("compile", "Compile them, and show what their machine code needs.")},
        """
  mrb gpu compile --arch sm_90a --model qwen3-30b-a3b
""",
    ),
    "tune": Group(
        'Make impl="auto" follow your measurements.',
        {
            "layer": Place("tune", "Search settings of the experts' kernel that are faster here."),
            "op": Place("tune", "Search settings of one operation."),
            "decide": Place("decide", "Which implementation wins for which size? Writes a file."),
        },
        """
  mrb tune layer --model olmoe-1b-7b --minutes 10 --out tuned
  mrb tune decide results -o decisions.json
""",
    ),
}

# Names until version 0.2. They work for one release, and print the new name.
RENAMED = {
    "export kernels": "model kernels",
    "profile block": "model profile",
    **{name: f"results {name}" for name in "export merge compact compare gate history report regret".split()},
    **{name: f"model {name}" for name in ("trace", "profile", "formats")},
    **{name: f"parallel {name}" for name in ("place", "cache")},
    "verify": "bundle verify",
    "compile": "gpu compile",
    "decide": "tune decide",
    # these were commands with other options and are groups now
    "bundle": "bundle make",
    "results SQL": "results query",
    "results --columns": "results query",
    "train --study": "train study",
    "train --router": "train run",
}
SQL = re.compile(r"\s*(select|with|from|describe|summarize|pivot|values)\s", re.IGNORECASE)


def today(words: Sequence[str]) -> tuple[str, list[str]]:
    """The old name that these words begin with, or "", and the words with today's name."""
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
    """Knows every command by its line, and imports the one that is called."""

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
    """Every command of `mrb`; a name that it had before works too."""

    def __init__(self, **more: Any):
        super().__init__({**DAILY, **GROUPS}, **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        old, args = today(args)
        if old and not ctx.resilient_parsing:
            typer.echo(f"mrb: `mrb {old}` is now `mrb {RENAMED[old]}`; the old name leaves in 0.3", err=True)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Commands that keep something say themselves what Ctrl-C leaves; the others only end."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("mrb: stopped", err=True)
            raise typer.Exit(130) from None


def _named(name: str, place: Place | Group) -> TyperCommand | TyperGroup:
    """A command with its line of help; a group with its commands."""
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
    """The command that these words begin with, imported, and the words after its name."""
    found: Any = typer.main.get_command(app)
    while words and isinstance(found, TyperGroup) and not words[0].startswith("-"):
        context = typer.Context(found)
        if found.get_command(context, words[0]) is None:
            break
        _, found, words = found.resolve_command(context, [*words])
    return found, words


def all_names() -> Iterator[tuple[str, ...]]:
    """("bench",), ("results",), ("results", "show"), ...; a group stands before its commands."""
    for name, place in {**DAILY, **GROUPS}.items():
        yield (name,)
        inner = place.commands if isinstance(place, Group) else _inner(name)
        for one in inner:
            yield name, one
            yield from ((name, one, deep) for deep in _inner(name, one))


def _inner(*words: str) -> Sequence[str]:
    """The commands of a group; of `bench` those that are not the name of a span, and `layer`."""
    found, _ = command_of(words)
    more = ("layer",) if words == ("bench",) else ()
    return (*more, *getattr(found, "commands", ()))


def _markup() -> Any:
    """Frames around help and errors for people, plain text for pipes."""
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
      mrb list                              what there is
      mrb check --op combine                is it correct?
      mrb bench layer --model olmoe-1b-7b   which is fastest?
      mrb results                           what was measured so far
      mrb explain expert_ffn --tokens 16    what would run, and why
    """


def main() -> None:
    app()
