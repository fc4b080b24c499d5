"""What the harness knows about a field of an experiment: an Axis, declared with the field.

Everything else follows from the field and its Axis: the option of `mrb bench`, `mrb sweep` and
`mrb model profile`, the JSON of a worker, the resume key, the field of a record and its column, what must
agree before two times are compared, and the command that measures a record again. To add an axis, add a field
to Experiment, and read it where it has its effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

Compare = Literal["row", "agree", "free"]
Group = Literal["what", "how", ""]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the harness knows about a field.

    group: the options it is among, those for what is measured or for how; "": its option is written by hand.
    flag: its option; "" if there is none. asks: without the option, the case or the command decides.
    compare: "row" names what is compared, "agree" must agree before a comparison, "free" may differ.
    plural: what differs, in a sentence. key: it is part of the resume key. since: the first version of
    records that has it. choices: all its values, each explained. column: its name in SQL, if another.
    """

    help: str
    group: Group = ""
    flag: str = ""
    asks: bool = False
    compare: Compare = "free"
    plural: str = ""
    key: bool = True
    since: int = 1
    choices: Mapping[str, str] | None = None
    column: str = ""


def axis(default: Any, help: str, **facts: Any) -> Any:
    """A field with an Axis: bias: bool = axis(False, "Give the experts biases.", compare="row")"""
    return field(default=default, metadata={"axis": Axis(help=help, **facts)})


def explained(choices: Mapping[str, str]) -> str:
    return ". ".join(f"{name}: {meaning}" for name, meaning in choices.items()) + "."


def axes_of(declared: Any, group: Group | None = None) -> Iterator[tuple[Field[Any], Axis]]:
    """The axes of a dataclass or of its instance; of one group, if it is named."""
    for one in fields(declared):
        found = one.metadata["axis"]
        if group is None or found.group == group:
            yield one, found


def names_of(declared: Any, group: Group | None, *compare: Compare) -> tuple[str, ...]:
    """Names of the axes that are compared in one of these ways."""
    return tuple(one.name for one, facts in axes_of(declared, group) if facts.compare in compare)


def values_of(made: Any, group: Group | None = None) -> dict[str, Any]:
    """The values of its axes, by name."""
    return {one.name: getattr(made, one.name) for one, _ in axes_of(made, group)}


def defaults_of(declared: Any, group: Group) -> dict[str, Any]:
    return {one.name: one.default for one, _ in axes_of(declared, group)}


def key_values(made: Any) -> dict[str, Any]:
    """The values of the axes that are part of the resume key."""
    return {one.name: getattr(made, one.name) for one, facts in axes_of(made) if facts.key}


def option_words(
    made: Any, group: Group, *, beside: Mapping[str, Any] | None = None, always: Collection[str] = ()
) -> list[str]:
    """The options that give these values: those unlike `beside`, and `always` these. Without `beside`, those
    unlike the defaults, and words that the command would have to ask for."""
    words = []
    for one, facts in axes_of(made, group):
        value = getattr(made, one.name)
        usual = one.default if beside is None else beside[one.name]
        asked = beside is None and facts.asks and isinstance(value, str) and value
        if facts.flag and (value != usual or asked or one.name in always):
            on, _, off = facts.flag.partition("/")
            words += [on if value else off] if isinstance(value, bool) else [on, _text(value)]
    return words


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
