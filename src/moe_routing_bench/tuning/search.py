"""Searches over the settings of a kernel. They say what to time next and know nothing of clocks.

A search is a generator. It yields a Race, settings to time together in paired rounds, and gets their ratios
to the default, infinite for one that failed. It may be ended at any time. A setting is a name with options,
such as `native(rows=8,strip=2)`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Protocol, TypeAlias

from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.ops.knobs import settings, stages
from moe_routing_bench.ops.registry import Op

FEW = 4  # settings that one race can rank
MANY = 300  # with at least so many settings a model of the space (TPE) can help
BATCH = 8  # settings that TPE asks for at once, and times together
BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Race:
    """Race(settings=("native(rows=4)", "native(rows=8)"), share=0.25): with a quarter of the time left."""

    settings: tuple[str, ...]
    share: float


Ratios: TypeAlias = Mapping[str, float]
Search: TypeAlias = Generator[Race, Ratios, None]


class Space(Protocol):
    """What a search must know of a kernel's settings."""

    @property
    def starts(self) -> Sequence[str]:
        """Returns the implementations, the default first."""
        ...

    def stages(self, setting: str) -> list[list[str]]:
        """Returns names of knobs that are tried together."""
        ...

    def settings(self, setting: str, names: Sequence[str]) -> list[str]:
        """Returns every choice of values of these knobs, with the others as in `setting`."""
        ...


@dataclass(frozen=True, kw_only=True)
class KnobSpace:
    """The knobs of implementations of an op, for calls with these arguments."""

    op: Op
    starts: Sequence[str]
    args: tuple[Any, ...]

    def stages(self, setting: str) -> list[list[str]]:
        knobs = self.op.get(setting).knobs
        return [] if knobs is None else list(stages(knobs).values())

    def settings(self, setting: str, names: Sequence[str]) -> list[str]:
        name, config = parse_spec(setting)
        knobs = self.op.get(setting).knobs
        assert knobs is not None
        known = {one.name for one in fields(knobs)}
        fixed = {option: value for option, value in config.items() if option not in known}
        given = tuple((option, value) for option, value in config.items() if option in known)
        return [_spec(name, {**fixed, **dict(one)}) for one in settings(knobs, self.args, names, given)]


def _spec(name: str, config: Mapping[str, Any]) -> str:
    inside = ",".join(f"{option}={value}" for option, value in sorted(config.items()))
    return f"{name}({inside})" if inside else name


def halving(asked: Sequence[str], seen: dict[str, float], races_left: int) -> Search:
    """Races all settings for a while, then the better half for as long, until few are left (successive
    halving).
    Ratios go into `seen`; what is there already is not asked for again."""
    left = [one for one in dict.fromkeys(asked) if one not in seen]
    while left:
        seen |= yield Race(settings=tuple(left), share=1 / max(races_left, 1))
        races_left -= 1
        if len(left) <= FEW:
            return
        left = sorted(left, key=seen.__getitem__)[: math.ceil(len(left) / 2)]


def rungs(number: int) -> int:
    """Returns how many races `halving` takes."""
    races = 1 if number else 0
    while number > FEW:
        number, races = math.ceil(number / 2), races + 1
    return races


def greedy(space: Space, *, pairs: bool = True) -> Search:
    """Searches one stage after the other, each with the best of the others; then the pairs of knobs that were
    turned in different stages, because they may interact."""
    default = space.starts[0]
    seen = {default: 1.0}
    yield from halving(space.starts, seen, races_left=2 * rungs(len(space.starts)))
    best = min(seen, key=seen.__getitem__)
    plan = space.stages(best)
    for place, names in enumerate(plan):
        later = sum(rungs(len(space.settings(best, others)) - 1) for others in plan[place:])
        yield from halving(space.settings(best, names), seen, races_left=later + 2)
        best = min(seen, key=seen.__getitem__)
    turned = [name for name in parse_spec(best)[1] if any(name in names for names in plan)]
    apart = [pair for pair in combinations(turned, 2) if not any(set(pair) <= set(names) for names in plan)]
    for place, pair in enumerate(apart if pairs else ()):
        asked = space.settings(best, pair)
        yield from halving(asked, seen, races_left=(len(apart) - place) * rungs(len(asked)))


def exhaustive(space: Space) -> Search:
    """Races every setting, by halving."""
    names = [name for stage in space.stages(space.starts[0]) for name in stage]
    asked = [*space.starts, *(space.settings(space.starts[0], names) if names else ())]
    yield from halving(asked, {space.starts[0]: 1.0}, races_left=rungs(len(asked) - 1))


def tpe(space: Space) -> Search:
    """Asks Optuna's tree-structured Parzen estimator, in batches, for spaces that are too large to see
    whole."""
    if importlib.util.find_spec("optuna") is None:
        raise NotImplementedError('the search tpe needs optuna; pip install "moe-routing-bench[tune]"')
    import optuna

    default = space.starts[0]
    names = [name for stage in space.stages(default) for name in stage]
    known = {one: parse_spec(one)[1] for one in space.settings(default, names)} if names else {}
    if len(known) < MANY:
        raise ValueError(f"the space has {len(known)} settings, and tpe is for {MANY} or more; use greedy")
    values = {name: sorted({config.get(name, 0) for config in known.values()}) for name in names}
    by_values = {tuple(config.get(name, 0) for name in names): one for one, config in known.items()}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
    seen = {default: 1.0}
    for place in range(BATCHES):
        trials: dict[str, Any] = {}
        for _ in range(4 * BATCH):
            trial = study.ask()
            chosen = tuple(trial.suggest_categorical(name, values[name]) for name in names)
            setting = by_values.get(chosen)
            if setting is None or setting in trials:  # pointless, or asked for already
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif setting in seen:
                study.tell(trial, seen[setting])
            else:
                trials[setting] = trial
            if len(trials) == BATCH:
                break
        if not trials:
            return
        seen |= yield Race(settings=tuple(trials), share=1 / (BATCHES - place))
        for setting, trial in trials.items():
            failed = not math.isfinite(seen[setting])
            study.tell(
                trial, None if failed else seen[setting], optuna.trial.TrialState.FAIL if failed else None
            )


SEARCHES: dict[str, Callable[[Space], Search]] = {"greedy": greedy, "exhaustive": exhaustive, "tpe": tpe}
