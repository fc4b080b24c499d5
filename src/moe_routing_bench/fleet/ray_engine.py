"""The engine `ray` runs each cell as a task of a Ray cluster (pip install 'moe-routing-bench[ray]').

Nodes that were started with `ray start --resources '{"cell": 1}'` measure cells, one at a time, because two
would disturb each other's times. `--engine "ray(gpu=h100)"` uses only nodes that were started with
`--labels gpu=h100`. A cell on a GPU asks Ray for a GPU. A cell of several ranks asks for one CPU for each
thread of each rank, all on one node, because its ranks share a clock.

Ray restarts a task if its machine or process is lost. A kernel that crashes ends only its own process inside
the task; that is a result, so the task is not restarted. Nothing is stored in Ray: if the driver dies, the
same command continues from the stored results.

Folders of --include-path and recorded traces are sent to the nodes (shipping.py). A cell that needs them is
measured in a new process, which has never loaded another version of that code. A checkpoint is not sent: it
must be on every node under the same path.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_routing_bench.bench.identity import cell_key
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.sources import looked_at_once
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.host import measured_here
from moe_routing_bench.fleet.shipping import Parcel, moved, named_by
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment

RESOURCE = "cell"
RETRIES = 3  # of a task whose machine was lost
AHEAD = 1000  # tasks handed to Ray at once
PATIENCE_SECONDS = 120.0  # without any node that measures cells


class RayExecutor:
    """Uses the cluster in RAY_ADDRESS, by default that of this machine. labels: of the nodes to use."""

    name = "ray"

    def __init__(self, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        self.labels = dict(labels)
        try:
            import ray
        except ImportError:
            raise ValueError(
                "the engine ray needs Ray, which is not installed: pip install 'moe-routing-bench[ray]'"
            ) from None
        self.ray: Any = ray
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "auto")
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                sentence = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ValueError(f"there is no Ray cluster at {address}: {sentence}") from None
        # the same options for both, so that a key is computed under the settings a cell is measured with;
        # tasks with parcels get a new process, which takes seconds to start
        options = {"num_cpus": 0, "max_retries": RETRIES, "retry_exceptions": False}
        self._keys, self._measure = (ray.remote(**options)(work) for work in (_keys, measured_here))
        self._keys_sent, self._measure_sent = (
            ray.remote(max_calls=1, **options)(work) for work in (_keys, _measured_with)
        )
        self._sent: dict[str, Any] = {}  # by hash, Ray's reference to a parcel
        if not self._nodes():
            words = ",".join(f"{key}={value}" for key, value in self.labels.items())
            has, start = (f" and has the labels {words}", f" --labels {words}") if words else ("", "")
            raise ValueError(
                f"no node of the Ray cluster measures cells{has}: "
                f"start some with ray start --resources '{{\"{RESOURCE}\": 1}}'{start}"
            )

    def keys(self, experiments: Sequence[Experiment]) -> list[set[str]]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        texts = self.ray.put([experiment.to_json() for experiment in experiments])
        parcels = self._parcels(experiments)
        keys_of = self._keys_sent if parcels else self._keys
        asked = [
            keys_of.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                texts, list(parcels), *parcels.values()
            )
            for node in self._nodes()
        ]
        found: list[set[str]] = [set() for _ in experiments]
        for answer in asked:
            try:
                keys = self.ray.get(answer)
            except self.ray.exceptions.RayTaskError as error:
                raise ValueError(_sentence(error)) from None
            except self.ray.exceptions.RayError:
                continue  # the node is gone, and its cells will be measured elsewhere
            for known, key in zip(found, keys, strict=True):
                known.add(key)
        return found

    def run(
        self, experiments: Sequence[Experiment], *, roofs: Roofs | None, on_progress: Any, watch: Any
    ) -> Iterator[CellOutcome]:
        """Roofs are those of the machine that measures. ValueError at the end if some cells were lost."""
        self._check_ranks(experiments)
        sent = self._parcels(experiments)
        rest = iter(experiments)
        waiting: dict[Any, Experiment] = {}
        lost: list[str] = []
        seen = time.monotonic()
        while True:
            for experiment in islice(rest, AHEAD - len(waiting)):
                parcels = {text: sent[text] for text in named_by(experiment)}
                place = (self._measure_sent if parcels else self._measure).options(
                    resources={RESOURCE: 1},
                    num_cpus=_cpus(experiment),
                    num_gpus=int(experiment.device.startswith("cuda")),
                    label_selector=self.labels,
                )
                more = (list(parcels), *parcels.values()) if parcels else ()
                waiting[place.remote(experiment.to_json(), *more)] = experiment
            if not waiting:
                break
            done, _ = self.ray.wait(list(waiting), num_returns=1, timeout=1.0)
            for answer in done:
                experiment = waiting.pop(answer)
                try:
                    text = self.ray.get(answer)
                except self.ray.exceptions.RayTaskError as error:
                    raise ValueError(f"{experiment.title}: {_sentence(error)}") from None
                except self.ray.exceptions.RayError as error:
                    lost.append(f"{experiment.title} ({type(error).__name__})")
                    continue
                # with the paths of this machine, not of the one that measured it
                yield replace(CellOutcome.from_json(text), experiment=experiment, engine=self.name)
            if done or self._nodes():
                seen = time.monotonic()
            elif time.monotonic() - seen > PATIENCE_SECONDS:
                raise ValueError(
                    "no node of the Ray cluster measures cells any more; the same command goes on"
                )
        if lost:
            raise ValueError(
                f"{len(lost)} cells were lost with their machines {RETRIES + 1} times, the first {lost[0]}; "
                "the same command goes on"
            )

    def _nodes(self) -> dict[str, float]:
        """Returns the nodes that measure cells, and how many CPUs they have."""
        return {
            node["NodeID"]: node["Resources"].get("CPU", 0)
            for node in self.ray.nodes()
            if node["Alive"]
            and node["Resources"].get(RESOURCE, 0) >= 1
            and self.labels.items() <= node.get("Labels", {}).items()
        }

    def _check_ranks(self, experiments: Sequence[Experiment]) -> None:
        largest = max(experiments, key=_cpus, default=None)
        most = max(self._nodes().values(), default=0)
        if largest is not None and _cpus(largest) > most:
            raise ValueError(
                f"{largest.title}: {largest.W} ranks need {_cpus(largest)} CPUs of one node, and the largest "
                f"node of the Ray cluster that measures cells has {most:g}"
            )

    def _parcels(self, experiments: Sequence[Experiment]) -> dict[str, Any]:
        """By the path in a cell, Ray's reference to what lies there; each content is put once."""
        paths = {text: path for experiment in experiments for text, path in named_by(experiment).items()}
        references = {}
        for text, path in paths.items():
            parcel = Parcel.of(path)
            if parcel.sha256 not in self._sent:
                self._sent[parcel.sha256] = self.ray.put(parcel)
            references[text] = self._sent[parcel.sha256]
        return references


def _cpus(experiment: Experiment) -> int:
    """That Ray must have free on a node. A cell of one process has its node for itself anyway."""
    return experiment.W * experiment.threads if experiment.W > 1 else 0


def _here(text: str, places: Mapping[str, Path]) -> Experiment:
    """A cell with the paths of this machine, and what it includes known to this process."""
    experiment = moved(Experiment.from_json(text), places)
    for folder in experiment.include:
        include_folder(folder)
    return experiment


def _unpacked(names: Sequence[str], parcels: Sequence[Parcel]) -> dict[str, Path]:
    return {name: parcel.unpacked() for name, parcel in zip(names, parcels, strict=True)}


# Ray replaces a reference by its content only if it is an argument of its own
def _keys(experiments: list[str], names: list[str], *parcels: Parcel) -> list[str]:
    machine, places = this_machine(), _unpacked(names, parcels)
    with looked_at_once():
        return [cell_key(_here(text, places), machine) for text in experiments]


def _measured_with(experiment: str, names: list[str], *parcels: Parcel) -> str:
    return measured_here(_here(experiment, _unpacked(names, parcels)).to_json())


def _sentence(error: Exception) -> str:
    """Returns the first line of the error in a task, without Ray's report around it."""
    return str(getattr(error, "cause", None) or error).splitlines()[0]
