"""Compares the time of a training step with what the layer benchmark predicts.

    predicted(rule) = step(baseline) + layers * (layer(rule) - layer(baseline))

`layer` is the median of `mrb bench layer --direction train` at the sizes of the study, and `step` is the
median of the steps in turns. Attention, head and optimiser are taken from the baseline's step. What a rule
adds there, such as weights for the optimiser, is not in the prediction.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from moe_routing_bench.core.names import base_name, parse_spec
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.trainings import read_trainings
from moe_routing_bench.train.study import STUDY, TIMES

QUERY = """
SELECT router, layer, median_ms, p25_ms, p75_ms FROM latest
WHERE span = 'layer' AND direction = 'train' AND status = 'PASSED' AND role IN ('baseline', 'candidate')
  AND T = {T} AND D = {D} AND F = {F} AND E = {E} ORDER BY created_at
"""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Milliseconds: Predicted(rule="switch", step=118.0, predicted=121.3, between=(119.8, 123.0), layer=8.1).

    between: the prediction with the quartiles of the layer's times instead of their median.
    """

    rule: str
    step: float
    predicted: float
    between: tuple[float, float]
    layer: float

    @property
    def gap(self) -> float:
        """The step over the prediction, minus 1."""
        return self.step / self.predicted - 1


def predicted(folder: Path, records: Path) -> list[Predicted]:
    """Returns every rule of the study in `folder` whose layer is in the records; the baseline first."""
    about = json.loads((folder / STUDY).read_text())
    times = json.loads((folder / TIMES).read_text())
    settings = about["like"]
    size = settings["size"]
    sizes = {"T": settings["batch"] * size["sequence"], "D": size["D"], "F": size["F"], "E": size["E"]}
    _, rows = run_query(records, QUERY.format(**sizes))
    layers = {(parse_spec(router)[0], base_name(layer)): ms for router, layer, *ms in rows}
    rules = {training.rule: training.settings["rule"] for training in read_trainings(folder)}
    by_rule = {}
    for name, rule in rules.items():
        kind = "chain" if rule["kind"] == "chain" else ""
        if rule["kind"] in ("moe", "chain") and (rule["router"], kind) in layers and name in times["seconds"]:
            by_rule[name] = layers[rule["router"], kind]
    baseline = about["baseline"]
    if baseline not in by_rule:
        wanted = ", ".join(f"{letter}={value}" for letter, value in sizes.items())
        raise ValueError(f"{records} has no layer of {baseline} in direction train with {wanted}")
    step = {name: 1e3 * median(times["seconds"][name]) for name in by_rule}
    base = by_rule[baseline][0]
    return [
        Predicted(
            rule=name,
            step=step[name],
            predicted=step[baseline] + size["layers"] * (middle - base),
            between=(
                step[baseline] + size["layers"] * (low - base),
                step[baseline] + size["layers"] * (high - base),
            ),
            layer=middle,
        )
        for name, (middle, low, high) in sorted(by_rule.items(), key=lambda row: (row[0] != baseline, row[1]))
    ]
