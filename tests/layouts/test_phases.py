"""The phase model of a ring of stages: right ones pass, and planted faults show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_routing_bench.layouts.phases import Agent, Ring, faults_of

GEMM = Ring(stages=3, full=129, empty=8, fillers=(Agent(128), Agent(1)), readers=(Agent(4), Agent(4)))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_ring_that_counts_right_never_stands_still(stages, readers):
    ring = Ring(
        stages=stages, full=129, empty=8, fillers=GEMM.fillers, readers=(Agent(8 // readers),) * readers
    )
    assert faults_of(ring) == []


@pytest.mark.parametrize(
    "planted, words",
    [
        ({"full": 130}, "filler 0 in turn 3, filler 1 in turn 3, reader 0"),
        ({"full": 128}, "before it is filled"),
        ({"full": 1}, "`full`"),
        ({"empty": 9}, "everybody waits"),
        ({"empty": 4}, "overwrites"),
        ({"fillers": (Agent(128), Agent(1, first_parity=0))}, "everybody waits"),
        ({"fillers": (Agent(128), Agent(1, skips=True))}, "overwrites"),
        ({"readers": (Agent(4), Agent(4, skips=True))}, "before it is filled"),
        ({"readers": (Agent(4), Agent(4, first_parity=1))}, "before it is filled"),
        ({"readers": (Agent(4),)}, "everybody waits"),
        ({"readers": (Agent(8), Agent(8))}, "overwrites"),
    ],
)
def test_planted_faults_show(planted, words):
    assert words in "; ".join(faults_of(replace(GEMM, **planted)))


def test_a_fault_that_needs_a_second_lap_is_seen_only_then():
    """With one stage the parity of the first lap is right by chance."""
    ring = Ring(stages=1, full=1, empty=1, fillers=(Agent(1),), readers=(Agent(1, skips=True),), turns=1)
    assert faults_of(replace(ring, readers=(Agent(1),))) == []
    late = Ring(stages=2, full=1, empty=2, fillers=(Agent(1),), readers=(Agent(1),), turns=2)
    assert faults_of(late) == [] and "everybody waits" in faults_of(replace(late, turns=3))[0]


def test_a_ring_without_anybody_is_refused():
    with pytest.raises(ValueError, match="one reader"):
        replace(GEMM, readers=())
