"""What a record measured, as an experiment that can be measured again, and the command for that."""

from __future__ import annotations

from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.results.record import Record, RecordedExperiment
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef


def measurable(recorded: RecordedExperiment) -> Experiment:
    """Returns the experiment of a record. Axes that an old record lacks have their default. It raises a
    ValueError if the routing is missing."""
    known = {one.name: getattr(recorded, one.name) for one, _ in axes_of(Experiment)}
    known = {name: value for name, value in known.items() if value is not None}
    if "workload" not in known:
        raise ValueError("its worker died before it reported how tokens were routed")
    if "weights" not in known:
        from moe_routing_bench.bench.spans.span import span_named  # imports torch, for old records alone

        known["weights"] = span_named(recorded.span).weights
    known["implementations"] = tuple(ImplementationRef(**dict(one)) for one in known["implementations"])
    return Experiment(**known)


def command_of(record: Record) -> str:
    """The command that measures a record again, built from its experiment; "" if there is none. What the
    file says is never shown: anybody may have written it."""
    try:
        experiment = measurable(record.experiment)
    except (ValueError, NotImplementedError):
        return ""
    own = experiment.implementations[-1:]  # after the baseline
    return repro_command(experiment, *own) if own else ""
