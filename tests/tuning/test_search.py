"""Searches on made spaces whose times are known, and a tuner whose races are made."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.tuning.search import FEW, SEARCHES, Race, Search, exhaustive, greedy, halving, rungs

VALUES = {"a": (1, 2, 3), "b": (1, 2, 3, 4), "c": (1, 2)}


def spec(config: Mapping[str, int]) -> str:
    inside = ",".join(f"{name}={value}" for name, value in sorted(config.items()) if value)
    return f"kernel({inside})" if inside else "kernel"


@dataclass(frozen=True)
class Made:
    """Three knobs in stages of their own."""

    starts: Sequence[str] = ("kernel",)

    def stages(self, setting: str) -> list[list[str]]:
        return [[name] for name in VALUES]

    def settings(self, setting: str, names: Sequence[str]) -> list[str]:
        others = {name: value for name, value in parse_spec(setting)[1].items() if name not in names}
        choices = product(*((0, *VALUES[name]) for name in names))
        return [spec({**others, **dict(zip(names, chosen, strict=True))}) for chosen in choices]


def seconds(setting: str, gains: Mapping[str, float], joint: float = 0.0) -> float:
    """Every knob that is right gains its share; a and b together also gain `joint`."""
    config = parse_spec(setting)[1]
    right = {name for name, best in {"a": 2, "b": 3, "c": 1}.items() if config.get(name) == best}
    ratio = math.prod(
        1 - gains[name] if name in right else 1.001 if config.get(name) else 1 for name in gains
    )
    return ratio * (1 - joint if {"a", "b"} <= right else 1)


def drive(search: Search, time: Any) -> tuple[dict[str, float], list[Race]]:
    seen, races = {}, []
    race = next(search)
    while True:
        races.append(race)
        answer = {one: time(one) for one in race.settings}
        seen |= answer
        try:
            race = search.send(answer)
        except StopIteration:
            return seen, races


def test_greedy_finds_the_best_of_knobs_that_do_not_interact_with_few_evaluations() -> None:
    gains = {"a": 0.05, "b": 0.1, "c": 0.02}
    seen, races = drive(greedy(Made()), lambda one: seconds(one, gains))
    every, all_races = drive(exhaustive(Made()), lambda one: seconds(one, gains))
    assert min(seen, key=seen.__getitem__) == min(every, key=every.__getitem__) == "kernel(a=2,b=3,c=1)"
    assert len(every) == 4 * 5 * 3 - 1 and len(seen) < len(every)
    assert sum(len(one.settings) for one in races) < sum(len(one.settings) for one in all_races)


def test_pairs_that_interact_are_tried_again() -> None:
    # b alone is best at 4; with a it is best at 3
    def time(one: str) -> float:
        config = parse_spec(one)[1]
        alone = 0.97 if config.get("b") == 4 else 1.0
        return (0.9 if config.get("a") == 2 else 1.0) * (0.8 if config == {"a": 3, "b": 3} else alone)

    seen, _ = drive(greedy(Made()), time)
    assert min(seen, key=seen.__getitem__) == "kernel(a=3,b=3)"


def test_where_nothing_gains_the_default_stays_the_best() -> None:
    seen, races = drive(greedy(Made()), lambda one: 1.01)
    assert min(seen.values()) > 1 and len(seen) == 3 + 4 + 2 and len(races) == 3


def test_what_failed_is_never_the_best() -> None:
    time = {"kernel(a=1)": math.inf, "kernel(a=2)": 0.9}
    seen, _ = drive(greedy(Made()), lambda one: time.get(one, math.inf if "b=" in one else 1.0))
    assert min(seen, key=seen.__getitem__) == "kernel(a=2)"


@pytest.mark.parametrize("number", [0, 1, 3, FEW, FEW + 1, 25, 400])
def test_halving_takes_as_many_races_as_it_says_and_keeps_the_best(number: int) -> None:
    asked = [f"kernel(a={value})" for value in range(number)]
    times = {one: 1 + (7 * place) % max(number, 1) for place, one in enumerate(asked)}
    seen: dict[str, float] = {}
    if not number:
        assert list(halving(asked, seen, 1)) == []
        return
    _, races = drive(halving(asked, seen, rungs(number)), times.__getitem__)
    assert len(races) == rungs(number) and len(seen) == number
    assert min(times, key=times.__getitem__) in races[-1].settings and len(races[-1].settings) <= FEW
    assert races[-1].share == 1  # all of the time that is left


def test_implementations_are_settings_too() -> None:
    class Plain(Made):
        def stages(self, setting: str) -> list[list[str]]:
            return []

    seen, _ = drive(
        greedy(Plain(starts=("plain", "other", "third"))), {"other": 0.5, "third": 2.0}.__getitem__
    )
    assert set(seen) == {"other", "third"}


def test_tpe_is_for_large_spaces_and_says_what_it_needs() -> None:
    absent = importlib.util.find_spec("optuna") is None
    with pytest.raises(NotImplementedError if absent else ValueError):
        next(SEARCHES["tpe"](Made()))


def test_tpe_gets_near_the_best_of_a_large_space(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setitem(VALUES, "a", tuple(range(1, 30)))
    gains = {"a": 0.05, "b": 0.1, "c": 0.02}
    seen, races = drive(SEARCHES["tpe"](Made()), lambda one: seconds(one, gains))
    assert min(seen.values()) < 0.91 and len(races) <= 8 and len(seen) <= 64
