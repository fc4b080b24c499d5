"""The tables of docs/which_router.md, from the routers' own facts and from two measurements.

    python measurements/which_router.py

Routing alone: measurements/routers/router_cost.json. Trained models: pareto.json of
measurements/training/routers. A test holds the document to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import quality

from moe_routing_bench.routers.router import all_routers

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "which_router.md"
COST = HERE / "routers" / "router_cost.json"
STUDY = HERE / "training" / "routers" / "pareto.json"
E = 64  # experts in the column of routing's cost, in eval mode
HEAD = (
    "rule", "causal", "alone", "experts a token", "routing, ms", "its ratio", "a step", "peak MiB",
    "max violation", "held-out loss",
)  # fmt: skip


def costs() -> dict[str, dict[str, Any]]:
    rows = json.loads(COST.read_text())["rows"]
    return {row["router"]: row for row in rows if row["E"] == E and row["mode"] == "eval"}


def trained() -> dict[str, dict[str, Any]]:
    return {standing["rule"]: standing for standing in json.loads(STUDY.read_text())["standings"]}


def facts() -> str:
    """One row a router: those that were trained first, by their loss."""
    cost, quality = costs(), trained()
    order = {rule: place for place, rule in enumerate(quality)}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, rule in sorted(all_routers().items(), key=lambda item: (order.get(item[0], 99), item[0])):
        row, standing = cost.get(name), quality.get(name)
        cells = [
            f"`{name}`",
            "yes" if rule.causal else "**no**",
            "no" if rule.batch_dependent else "yes",
            rule.experts_per_token,
            "" if row is None else f"{row['milliseconds']:.1f}",
            "" if row is None else f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
        ]
        if standing is None:
            cells += ["", "", "", "not trained here"]
        else:
            low, high = standing["loss"]["interval"]
            violation = standing["max_violation"]
            cells += [
                f"{standing['step_ratio']:.2f}",
                f"{standing['peak_bytes'] / 2**20:.0f}",
                "" if violation is None else f"{violation:.2f}",
                f"{standing['loss']['mean']:.3f} ± {(high - low) / 2:.3f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def advice() -> str:
    """By situation; the numbers are those of the table."""
    standings, row = trained(), costs()
    clear = [name for name, found in standings.items() if _clearly_lower(found)]
    assert not clear, f"the first line of the advice is wrong: {clear} have a clearly lower loss"
    step = {name: f"{found['step_ratio']:.2f}" for name, found in standings.items()}
    load = {name: f"{found['max_violation'] or 0:.2f}" for name, found in standings.items()}
    alone = {name: f"{found['ratio']:.2f}" for name, found in row.items()}
    lines = [
        ("a decoder, and no reason for anything else", "`softmax_topk` with a balance loss",
         "no rule was clearly better at equal tokens with three seeds"),
        ("a decoder whose experts must be evenly loaded: many ranks, a capacity", "`sigmoid_bias`",
         f"max violation {load['sigmoid_bias']} against {load['softmax_topk']}; a step takes "
         f"{step['sigmoid_bias']} times as long; balance adds nothing to the loss"),
        ("the least time for a step", "`switch`",
         f"one expert a token: {step['switch']} of the step, for a loss that is not clearly higher"),
        ("choices known before the layer runs: prefetching experts, the same in every run", "`hashed`",
         f"no projection: {alone['hashed']} of the routing time. As good as learned rules on bytes; with a "
         "large vocabulary nobody measured it here"),
        ("tokens that need different amounts of work", "`relu`, `top_p`",
         f"rows are ragged, so a step takes {step['relu']} and {step['top_p']} times as long although "
         "ReLU does fewer operations"),
        ("all tokens are known: encoders, images", "`expert_choice`",
         f"equal loads by construction (max violation {load['expert_choice']}); a step takes "
         f"{step['expert_choice']} times as long; it sees the future and cannot write"),
        ("many experts per token wanted, sequences of one length, no decoding", "`soft_moe`",
         f"nothing is dropped or uneven; routing takes {alone['soft_moe']} times as long, a step "
         f"{step['soft_moe']} times; published for images, worse on text here"),
    ]  # fmt: skip
    return "\n".join(
        ["| you have | take | because |", "|---|---|---|", *(f"| {' | '.join(line)} |" for line in lines)]
    )


def _clearly_lower(found: dict[str, Any]) -> bool:
    """Than softmax_topk's, seed by seed: the interval of the difference lies below 0."""
    interval = found["difference"]["interval"]
    return interval is not None and interval[1] < 0


def written(text: str) -> str:
    return quality.written(text, {"facts": facts(), "advice": advice()})


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    print(f"{DOCUMENT} is as the measurements have it.")
