"""The axes of an experiment, each declared once.

A field of CaseAxes says what is measured, a field of PolicyAxes how. Everything else follows from the field
and its Axis: the option of `mrb bench`, `mrb sweep` and `mrb model profile`, the JSON of a worker, the resume
key, the field of a record and its column, what must agree before two times are compared, and the command that
measures a record again. To add an axis, add a field here, and read it where it has its effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Literal

Compare = Literal["row", "agree", "free"]
# seconds: filling the caches from memory takes 1 to 3 ms, which hardly matter in so long a call
LONG_CALL = 0.05
CACHES = {
    "hot": f"one untimed call of the same implementation just before, unless a call takes {LONG_CALL} s",
    "cold": "all caches overwritten just before",
    "weights-cold": "all caches overwritten, then the activations read: decoding, where weights stream in",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the harness knows about a field.

    flag: its option; "" if there is none. asks: without the option, the case or the command decides.
    compare: "row" names what is compared, "agree" must agree before a comparison, "free" may differ.
    plural: what differs, in a sentence. key: it is part of the resume key. since: the first version of
    records that has it. choices: all its values, each explained.
    """

    help: str
    flag: str = ""
    asks: bool = False
    compare: Compare = "free"
    plural: str = ""
    key: bool = True
    since: int = 1
    choices: Mapping[str, str] | None = None


def axis(default: Any, help: str, **facts: Any) -> Any:
    """A field with an Axis: bias: bool = axis(False, "Give the experts biases.", compare="row")"""
    return field(default=default, metadata={"axis": Axis(help=help, **facts)})


def explained(choices: Mapping[str, str]) -> str:
    return ". ".join(f"{name}: {meaning}" for name, meaning in choices.items()) + "."


@dataclass(frozen=True, kw_only=True)
class CaseAxes:
    """What is measured, beside the sizes."""

    dtype: str = axis(
        "bfloat16", f"{', '.join(list(BYTES)[:-1])} or {list(BYTES)[-1]}.",
        flag="--dtype", asks=True, compare="agree", plural="dtypes",
    )  # fmt: skip
    store: str = axis(
        "", "For expert_ffn: weights in this format, int8 or int4_g32 (`mrb model formats`).",
        flag="--store", asks=True, compare="agree", plural="formats of weights",
    )  # fmt: skip
    activation: str = axis(
        "swiglu", "Of the experts: swiglu, gelu, ...", flag="--activation", asks=True, compare="row"
    )
    bias: bool = axis(False, "Give the experts biases.", flag="--bias/--no-bias", asks=True, compare="row")
    shared_F: int = axis(
        0, "Hidden width of a shared expert; 0: none.", flag="--shared", asks=True, compare="row"
    )
    heads: int = axis(0, "Heads of the attention in a decoder block.", compare="row")
    sequences: int = axis(1, "Sequences in the batch.", compare="row")


@dataclass(frozen=True, kw_only=True)
class PolicyAxes:
    """How it is measured."""

    device: str = axis(
        "cpu",
        "cpu, cuda (AMD's GPUs too), or pretend: a GPU's steps on the CPU. Default: cuda for gpu-quick, else "
        "cpu.",
        flag="--device", asks=True, compare="agree", plural="devices",
    )  # fmt: skip
    threads: int = axis(
        1, "Threads (of a rank), pinned to cores. Default: all physical cores that are idle.",
        flag="--threads", asks=True, compare="agree", plural="numbers of threads",
    )  # fmt: skip
    cache: str = axis(
        "hot", explained(CACHES), flag="--cache", compare="agree", plural="cache policies", choices=CACHES
    )
    view: str = axis("host_wall", "What a time includes.", compare="agree", plural="timer views")
    processes: int = axis(1, "Repeat in this many processes; 3 for a published figure.", flag="--processes")
    max_rounds: int = axis(1000, "Most rounds of a case.", flag="--rounds", since=3)
    min_rounds: int = axis(20, "Fewest rounds of a case.", flag="--min-rounds", since=3)
    max_seconds: float = axis(
        60.0,
        "Seconds for the whole command, in `mrb sweep` for each case; kernels are built before. Default: 60, "
        "or 20 a case.",
        flag="--seconds", asks=True, key=False, since=3,
    )  # fmt: skip
    target: float = axis(0.01, "Stop when every ratio is known this precisely.", flag="--target", since=3)
    step_seconds: float = axis(
        120.0, "Seconds after which a call counts as hanging.", flag="--limit", key=False, since=3
    )
    memory_gib: float = axis(12.0, "GiB that a worker may allocate.", flag="--memory", key=False, since=3)
    checked: int = axis(3, "Timed results to check, for each implementation.", flag="--checked", since=3)
    stages: bool = axis(False, "Also time the stages.", flag="--stages", since=3)
    sandbox: bool = axis(
        False,
        "Run code from outside under bubblewrap: no network, nothing written.",
        flag="--sandbox",
        since=3,
    )
    all: bool = axis(
        False, "All rounds also for what is 5 times slower than the best.", flag="--all", since=3
    )


def axes_of(declared: Any) -> Iterator[tuple[Field[Any], Axis]]:
    """The axes of a dataclass or of its instance."""
    for one in fields(declared):
        if (found := one.metadata.get("axis")) is not None:
            yield one, found


def names_of(declared: Any, *compare: Compare) -> tuple[str, ...]:
    """Names of the axes that are compared in one of these ways."""
    return tuple(one.name for one, facts in axes_of(declared) if facts.compare in compare)


def values_of(made: Any) -> dict[str, Any]:
    """The values of all its axes, by name."""
    return {one.name: getattr(made, one.name) for one, _ in axes_of(made)}


def key_values(made: Any) -> dict[str, Any]:
    """All fields but the axes that are not part of the resume key."""
    left_out = {one.name for one, facts in axes_of(made) if not facts.key}
    return {name: value for name, value in asdict(made).items() if name not in left_out}


def option_words(made: Any, *, beside: Any = None, always: Collection[str] = ()) -> list[str]:
    """The options that give these values: those unlike `beside`, and `always` these. Without `beside`, those
    unlike the defaults, and words that the command would have to ask for."""
    words = []
    for one, facts in axes_of(made):
        value = getattr(made, one.name)
        usual = one.default if beside is None else getattr(beside, one.name)
        asked = beside is None and facts.asks and isinstance(value, str) and value
        if facts.flag and (value != usual or asked or one.name in always):
            on, _, off = facts.flag.partition("/")
            words += [on if value else off] if isinstance(value, bool) else [on, _text(value)]
    return words


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
