"""Cell and Policy: what is measured together, and how. Pure data, sent to workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from moe_routing_bench.bench.device import check_place
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.span import Span, span_named
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.core.text import first_problem
from moe_routing_bench.workloads.axes import CACHES, PolicyAxes
from moe_routing_bench.workloads.cases import BenchCase


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyAxes):
    """How a cell is measured; its fields are those of PolicyAxes.

    Policy() measures on one pinned thread with hot caches, 20 to 1000 rounds, until the ratio to the baseline
    is known to 1 % or 60 s are over; Policy(processes=3) does so in three processes for a published figure.
    """

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ValueError(f"there is no cache policy {self.cache!r}; there are {', '.join(CACHES)}")
        check_place(self.device, self.view, self.cache)
        if not (self.threads >= 1 and self.processes >= 1 and 1 <= self.checked <= 100):
            raise ValueError("threads, processes and checked outputs must be at least 1")
        if not 8 <= self.min_rounds <= self.max_rounds <= 10_000:
            raise ValueError(
                f"{self.min_rounds} to {self.max_rounds} rounds; at least 8 are needed to decide anything, "
                "and at most 10000 are taken"
            )
        if not (0 < self.target < 1 and self.max_seconds > 0 and self.step_seconds > 0):
            raise ValueError("target is a fraction such as 0.01, and limits of time are positive seconds")
        if not 0.1 <= self.memory_gib <= 4096:
            raise ValueError(f"a memory cap of {self.memory_gib} GiB; give between 0.1 and 4096")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case under one routing workload. Its subjects are timed together, in interleaved rounds; the first
    is the baseline the others are compared with.

    Cell(case=cases("seed-pack/8192x2048-e32-k1~scaled")[0], workload="zipf(1.2)", subjects=(Subject(...),))
    """

    case: BenchCase
    workload: str
    subjects: tuple[Subject, ...]
    seed: int = 0
    W: int = 1
    policy: Policy = field(default_factory=Policy)
    include: tuple[str, ...] = ()  # folders of implementations from outside

    def __post_init__(self) -> None:
        if not self.subjects:
            raise ValueError("a cell needs at least one implementation to measure")
        if len(set(self.subjects)) < len(self.subjects):
            raise ValueError("the same implementation in the same layout is named twice")
        if any(s.router or s.layer for s in self.subjects) and not self.span.routed:
            raise ValueError(f"{self.case.span} has no router and no layer to choose; measure layer")

    @cached_property
    def span(self) -> Span:
        return span_named(self.case.span)

    def inputs(self, put: str = "cpu") -> Inputs:
        return Inputs(self.case, self.workload, seed=self.seed, W=self.W, put=put)

    @property
    def name(self) -> str:
        more = [] if self.case.direction == "forward" else [self.case.direction]
        more += [f"{self.W} ranks"] if self.W > 1 else []
        return " ".join((self.case.name, self.workload or "own router", *more))

    @property
    def ranked(self) -> bool:
        """Is each of its ranks a process (hosts/ranks.py)?"""
        return self.span.grouped and self.W > 1

    @property
    def all_threads(self) -> int:
        """Those of all ranks together; the policy says how many each has."""
        return self.policy.threads * (self.W if self.span.grouped else 1)

    def only(self, subjects: tuple[Subject, ...]) -> Cell:
        return replace(self, subjects=subjects)

    def to_json(self) -> str:
        return _CELL.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> Cell:
        try:
            return _CELL.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"this is not a cell: {first_problem(error)}") from None


_CELL = TypeAdapter(Cell)
