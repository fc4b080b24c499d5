"""The tables of docs/which_router.md, from the routers' own facts and from two measurements.

    python measurements/which_router.py

The routing alone is timed in measurements/routers/router_cost.json. Trained models are in pareto.json of
measurements/training/routers. A test compares the page with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked import rewrite, table

from moe_routing_bench.routers.router import all_routers

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "which_router.md"
COST = HERE / "routers" / "router_cost.json"
STUDY = HERE / "training" / "routers" / "pareto.json"
E = 64  # experts in the column of routing's cost, in eval mode
HEAD = (
    "rule", "causal", "alone", "routing", "step", "MiB", "max violation", "held-out loss",
)  # fmt: skip


def costs() -> dict[str, dict[str, Any]]:
    rows = json.loads(COST.read_text())["rows"]
    return {row["router"]: row for row in rows if row["E"] == E and row["mode"] == "eval"}


def trained() -> dict[str, dict[str, Any]]:
    return {one["rule"]: one for one in json.loads(STUDY.read_text())["standings"]}


def facts() -> str:
    """One row for each router. Those that were trained come first, by their loss."""
    cost, quality = costs(), trained()
    order = {rule: place for place, rule in enumerate(quality)}
    lines = []
    for name, rule in sorted(all_routers().items(), key=lambda item: (order.get(item[0], 99), item[0])):
        row, one = cost.get(name), quality.get(name)
        cells = [
            f"`{name}`",
            "yes" if rule.causal else "**no**",
            "no" if rule.batch_dependent else "yes",
            "" if row is None else f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})",
        ]
        if one is None:
            cells += ["", "", "", ""]
        else:
            low, high = one["loss"]["interval"]
            violation = one["max_violation"]
            cells += [
                f"{one['step_ratio']:.2f}",
                f"{one['peak_bytes'] / 2**20:.0f}",
                "" if violation is None else f"{violation:.2f}",
                f"{one['loss']['mean']:.3f}±{(high - low) / 2:.3f}",
            ]
        lines.append(cells)
    return table(HEAD, lines)


def advice() -> str:
    """By situation; the numbers are those of the table."""
    one, row = trained(), costs()
    clear = [name for name, found in one.items() if _clearly_lower(found)]
    assert not clear, f"the first line of the advice is wrong: {clear} have a clearly lower loss"
    step = {name: more(found["step_ratio"]) for name, found in one.items()}
    load = {name: f"{found['max_violation'] or 0:.2f}" for name, found in one.items()}
    alone = {name: more(found["ratio"]) for name, found in row.items()}
    lines = [
        ("a decoder, and no special needs", "`softmax_topk` with a balance loss",
         "with three seeds no rule was clearly better at equal tokens"),
        ("a decoder whose experts must be evenly loaded (many ranks, a capacity)", "`sigmoid_bias`",
         f"max violation {load['sigmoid_bias']} instead of {load['softmax_topk']}, and no balance loss; a "
         f"step takes {step['sigmoid_bias']}"),
        ("little time for a step", "`switch`",
         f"one expert a token: a step takes {step['switch']}, and the loss is not clearly higher"),
        ("a need to know the choice before the layer runs, to fetch experts early", "`hashed`",
         f"routing takes {alone['hashed']}. As good as learned rules on bytes; not measured with a large "
         "vocabulary"),
        ("tokens that need different amounts of work", "`relu`, `top_p`",
         f"ragged rows: a step of ReLU takes {step['relu']}, of top-p {step['top_p']}, although ReLU does "
         "fewer operations"),
        ("all tokens at once (encoders, images)", "`expert_choice`",
         f"equal loads by construction; a step takes {step['expert_choice']}; it sees later tokens, so it "
         "cannot write text"),
        ("sequences of one length, no decoding, many experts per token", "`soft_moe`",
         f"nothing is dropped or uneven; a step takes {step['soft_moe']}; made for images, worse on text "
         "here"),
    ]  # fmt: skip
    return table(("you have", "use", "because"), lines)


def more(ratio: float) -> str:
    """more(1.21) is "21 % more time", more(0.98) is "2 % less time", of softmax_topk's."""
    return f"{100 * abs(ratio - 1):.0f} % {'more' if ratio >= 1 else 'less'} time"


def _clearly_lower(found: dict[str, Any]) -> bool:
    """Is the loss below that of softmax_topk, seed by seed? The interval of the difference lies below 0."""
    interval = found["difference"]["interval"]
    return interval is not None and interval[1] < 0


def tables() -> dict[str, str]:
    return {"facts": facts(), "advice": advice()}


if __name__ == "__main__":
    rewrite(DOCUMENT, tables())
    print(f"{DOCUMENT} agrees with the measurements.")
