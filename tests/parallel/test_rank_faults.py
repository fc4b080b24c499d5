"""Faults of ranks, a few of tests/fault_schedules.py: everyone ends in time, and the right one is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fault_schedules import BAD, DIFFER, GO_ON, KINDS, Schedule, run, schedule
from moe_routing_bench.parallel.faults import _judge, differing, split_sentence
from timing import in_time

pytestmark = pytest.mark.slow


def planted(kind: str, **more: object) -> Schedule:
    """Three ranks, the fault on rank 1 (on rank 0, if the store is to go too) at the third exchange."""
    plain = Schedule(
        number=7, kind=kind, world=3, victim=0 if kind == "killed, with the store" else 1, at=2, inside=False,
        transport="all_to_all", send="compact", chunks=1, placement="strided", tokens=(3, 2, 4),
    )  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


EVERY_DAY = ("killed", "frozen", "other dtype", "NaN, checked")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERY_DAY else pytest.mark.nightly) for kind in KINDS]
)
@pytest.mark.timing
def test_each_kind(kind: str) -> None:
    plan = planted(kind, tokens=(3, 0, 4)) if kind == "rank without tokens" else planted(kind)
    found = run(plan)
    in_time(found["verdict"] != "NOT IN TIME", f"{found}")
    said = "all right" if kind in GO_ON else "the right rank blamed"
    assert found["verdict"] == said, found
    sentences = [end[2] for rank, end in found["ends"].items() if end[0] == "error" and rank != plan.victim]
    if kind in GO_ON:
        return
    assert len(sentences) == 2
    for sentence in sentences:
        assert "rank" in sentence and str(plan.victim) in sentence
        if kind != "other placement":  # noticed before a layer exists
            assert "were [[" in sentence, sentence
        if kind not in DIFFER:
            assert "torchrun --max-restarts" in sentence


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(1000, 1040))
def test_random_schedules(number: int) -> None:
    found = run(schedule(number))
    assert found["verdict"] not in BAD, found


def test_who_is_blamed() -> None:
    assert _judge((2,), [], 10.0)[0] == (2,)
    assert _judge((), [10.0, 9.5, 0.1], 10.0)[0] == (2,)
    assert _judge((), [0.2, 0.1, 0.3], 10.0)[0] == ()
    assert differing("the width", [4, 4, 4], "no") is None
    three, two = differing("the width", [4, 8, 4], "mend it"), differing("the width", [4, 8], "mend it")
    assert three is not None and three.blamed == (1,) and "4, 8, 4" in str(three)
    assert two is not None and two.blamed == (0, 1)
    assert "[[1, 2], [3, 4]]" in split_sentence(torch.tensor([[1, 2], [3, 4]]))
    assert split_sentence(torch.zeros(40, 40)).count("[") == 17
