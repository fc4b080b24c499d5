"""The tables of docs/which_router.md, from the routers' own facts and from three measurements.

    python measurements/which_router.py

The routing alone is timed in measurements/routers/router_cost.json. Losses are those of the study whose
protocol was written before its runs, measurements/training/which_router; step, memory and load of all trained
rules are those of an older one, training/routers. A test compares the page with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked import rewrite, table

from moe_routing_bench.routers.router import all_routers

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
DOCUMENT = HERE.parent / "docs" / "which_router.md"
COST = HERE / "routers" / "router_cost.json"
STUDY = HERE / "training" / "routers" / "pareto.json"
DECIDED = HERE / "training" / "which_router" / "pareto.json"
E = 64  # experts in the column of routing's cost, in eval mode
HEAD = (
    "rule", "causal", "per token", "routing", "step, older study", "MiB", "max violation",
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
            cells += ["", "", ""]
        else:
            violation = one["max_violation"]
            cells += [
                f"{one['step_ratio']:.2f}",
                f"{one['peak_bytes'] / 2**20:.0f}",
                "" if violation is None else f"{violation:.2f}",
            ]
        lines.append(cells)
    return table(HEAD, lines)


def decided() -> dict[str, Any]:
    return json.loads(DECIDED.read_text())


def losses() -> str:
    """Bits per byte of each rule, and its difference from softmax_topk at equal tokens and equal seconds."""
    found = decided()
    lines = [
        (
            title(one),
            one["seeds"],
            f"{one['loss']['mean'] / math.log(2):.3f}",
            *(said(found["decisions"][end].get(one["rule"])) for end in ("tokens", "1")),
            f"{one['step_ratio']:.2f}",
        )
        for one in found["standings"]
    ]
    head = ("rule", "seeds", "bits per byte", "difference at equal tokens", "at equal seconds", "step")
    return f"{table(head, lines)}\n\n{_power()}"


def _power() -> str:
    """What the comparisons that are open could have shown."""
    decisions = [one for end in ("tokens", "1") for one in decided()["decisions"][end].values()]
    unclear = [one["detectable"] for one in decisions if not one["decided"]]
    if not unclear:
        return "All comparisons are decided."
    return (
        f"*Open*: these seeds do not decide ({len(unclear)} of {len(decisions)} comparisons). All ten seeds "
        f"find differences of {min(unclear):.3f} to {max(unclear):.3f} or more with a probability of 0.8."
    )


def said(decision: dict[str, Any] | None, *, short: bool = False) -> str:
    """-0.031 (-0.050 to -0.012), better; or +0.004 (-0.020 to +0.028), open."""
    if decision is None:
        return ""
    low, high = decision["interval"]
    word = outcome(decision)
    if word != "open":
        word = f"**{word}**"
    return f"{decision['difference']:+.3f}{'' if short else f' ({low:+.3f} to {high:+.3f})'}, {word}"


def in_short() -> str:
    """README's sentences and table: loss, whether it differs from softmax_topk's, and what a step costs."""
    found, lines = decided(), []
    for one in found["standings"]:
        loss, violation = one["loss"]["mean"] / math.log(2), one["max_violation"]
        beside = said(found["decisions"]["tokens"].get(one["rule"]), short=True)
        busiest = "" if violation is None else f"{100 * violation:.0f} %"
        lines.append((title(one), f"{loss:.3f}", beside, f"{one['step_ratio']:.2f}", busiest))
    head = ("router", "bits per byte", "beside `softmax_topk`", "step", "busiest expert, above the mean")
    return f"{table(head, lines)}\n\n{bullets(short=True)}"


def outcome(decision: dict[str, Any]) -> str:
    """ "better", "worse" or "open", beside softmax_topk."""
    if not decision["decided"]:
        return "open"
    return "worse" if decision["difference"] > 0 else "better"


def outcomes(end: str) -> dict[str, str]:
    return {rule: outcome(one) for rule, one in decided()["decisions"][end].items()}


def bullets(*, short: bool = False) -> str:
    """What the decisions say, in sentences."""
    tokens, seconds, ends = outcomes("tokens"), outcomes("1"), decided()["decisions"]
    same = "dense, equal FLOPs"
    dense = {"worse": "worse", "better": "better", "open": "not clearly different"}
    learned = [one["rule"] for one in decided()["standings"] if one["max_violation"] is not None]
    learned = [rule for rule in learned if rule not in ("softmax_topk", "hashed")]
    better = [rule for rule in learned if "better" in (tokens[rule], seconds[rule])]
    lead = {end: -ends[end]["hashed"]["difference"] for end in ("0.25", "1")}
    lines = [
        f"**{names(better) or 'No learned rule'}** is shown to be better than `softmax_topk`. "
        + " ".join(
            f"At equal {end}, {names(worse)} {'is' if len(worse) == 1 else 'are'} worse."
            for end, found in (("tokens", tokens), ("seconds", seconds))
            if (worse := [rule for rule in learned if found[rule] == "worse"])
        ),
        f"**A dense network** of equal FLOPs is {_both(dense[tokens[same]], dense[seconds[same]])}.",
    ]
    if tokens["hashed"] == "better":
        lines.append("**A hash of the token wins** after so little text: nothing has to be learnt first.")
        if not short:
            start, end = f"{lead['0.25']:.2f}", f"{lead['1']:.2f}"
            lines[-1] += (
                f" Its lead shrinks from {start} bits after a quarter of the time to {end} at the end."
            )
    return "\n".join(f"- {line.strip()}" for line in lines)


def _both(tokens: str, seconds: str) -> str:
    if tokens == seconds:
        return f"{tokens} at equal tokens and at equal seconds"
    return f"{tokens} at equal tokens and {seconds} at equal seconds"


def names(rules: Sequence[str]) -> str:
    *first, last = [f"`{rule}`" for rule in rules] or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def title(one: dict[str, Any]) -> str:
    return one["rule"] if one["max_violation"] is None else f"`{one['rule']}`"


def advice() -> str:
    """By situation; the numbers are those of the tables."""
    one, row, ends = trained(), costs(), decided()["decisions"]
    for end in ("tokens", "1"):
        better = [rule for rule, found in outcomes(end).items() if found == "better"]
        assert set(better) <= {"hashed"}, f"the first line of the advice is wrong: {better} at equal {end}"
    step = {name: more(found["step_ratio"]) for name, found in one.items()}
    load = {name: f"{found['max_violation'] or 0:.2f}" for name, found in one.items()}
    pairs = {found["rule"]: f"{found['max_violation'] or 0:.2f}" for found in decided()["standings"]}
    lead = {end: f"{-ends[end]['hashed']['difference']:.2f}" for end in ("0.25", "1")}
    lines = [
        ("a decoder, and no special needs", "`softmax_topk` with a balance loss",
         "no other learned rule was shown to be better"),
        ("a decoder whose experts must be evenly loaded (many ranks, a capacity)",
         "`sigmoid_bias` or `quantile`, after measuring",
         f"no balance loss to tune. Max violation of `sigmoid_bias` and of `softmax_topk`: "
         f"{load['sigmoid_bias']} and {load['softmax_topk']} in the older study, {pairs['sigmoid_bias']} and "
         f"{pairs['softmax_topk']} in this one"),
        ("little text to learn from, or a need to know the choice before the layer runs", "`hashed`",
         f"routing takes {more(row['hashed']['ratio'])}; the loss was {lead['0.25']} bits per byte lower "
         f"after a quarter of the training, {lead['1']} at its end"),
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


def tables() -> dict[str, str]:
    return {"facts": facts(), "advice": advice(), "losses": losses(), "findings": bullets()}


if __name__ == "__main__":
    rewrite(DOCUMENT, tables())
    rewrite(README, {"routers": in_short()})
    print(f"{DOCUMENT} and README agree with the measurements.")
