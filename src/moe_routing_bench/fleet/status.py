"""How far a sweep is, from what its results folder or store holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_routing_bench.bench.status import Status
from moe_routing_bench.fleet.sweep import FINE, latest_states, plan_sweep
from moe_routing_bench.results.query import views
from moe_routing_bench.workloads.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """SweepStatus(done=57, failed=1, machines=2, to_do=3, seconds_left=240.0): 57 cells have been measured,
    one of them did not pass. to_do, seconds_left: None if nobody said which cells there are."""

    done: int
    failed: int
    machines: int
    to_do: int | None = None
    seconds_left: float | None = None

    @property
    def sentence(self) -> str:
        where = f"{self.machines} machine{'s' * (self.machines != 1)}"
        line = f"{self.done:,} done, {self.failed:,} failed, {where}"
        if self.to_do is None or self.seconds_left is None:
            return line
        left = f", about {self.seconds_left / 60:,.0f} minutes left on one machine" if self.to_do else ""
        return f"{line}, {self.to_do:,} to do{left}"


def sweep_status(folder: Path, experiments: Sequence[Experiment] | None = None) -> SweepStatus:
    """Looks into a results folder, or a copy of a store. With experiments, it counts these cells alone, as
    they would be measured on a machine like this one."""
    with views(folder) as connection:
        found = connection.execute("SELECT count(DISTINCT machine) FROM records").fetchone()
    assert found is not None
    if experiments is not None:
        plan = plan_sweep(experiments, folder)
        return SweepStatus(
            done=plan.done, failed=plan.failed, machines=found[0], to_do=len(plan.todo),
            seconds_left=plan.seconds,
        )  # fmt: skip
    states = [one for one in latest_states(folder).values() if Status.NO_TIME not in one]
    failed = sum(not one <= FINE for one in states)
    return SweepStatus(done=len(states), failed=failed, machines=found[0])
