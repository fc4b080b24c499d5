"""Where the time goes in the worst cells of cpu_grid: float32 of Mixtral's size, at 4096 tokens and at one.

    python measurements/cpu/cpu_worst.py          about 3 minutes; writes cpu_worst.json and cpu_worst.txt

The virtual machine has no hardware counters, so this is by parts: each is timed alone, all of them in turn in
every round, beside what limits it. GEMMs are held to torch.mm of the same sizes (MKL, what Transformers'
experts call) and of 1024 x 1024; reading is held to a plain sum. "packing as it goes": grouped_gemm.native,
which keeps no packed weights; the layer does.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import cpu_subjects as cpu
import torch
from cpu_grid import session

from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

HERE = Path(__file__).parent
D, F, E, K = 2048, 7168, 8, 2  # mixtral-8x7b~scaled
ROUNDS = {4096: 7, 1: 40}
COMPACT = Layout.parse("compact")


def main() -> None:
    torch.set_num_threads(2)
    cpu.touch_memory()
    torch.manual_seed(0)
    weights = ExpertWeights(
        w_in_EDG=torch.randn(E, D, 2 * F) / D**0.5, w_out_EFD=torch.randn(E, F, D) / F**0.5
    )
    cells = [profile(tokens, weights) for tokens in ROUNDS]
    document = {"session": session(torch.get_num_threads()).model_dump(), "cells": cells}
    (HERE / "cpu_worst.json").write_text(json.dumps(document, indent=1) + "\n")
    text = "\n".join(line for cell in cells for line in shown(cell))
    (HERE / "cpu_worst.txt").write_text(text + "\n")
    print(text)


def profile(T: int, weights: ExpertWeights) -> dict[str, object]:
    x_TD = torch.randn(T, D)
    expert_TK = torch.rand(T, E).argsort(1)[:, :K]
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.full((T, K), 1 / K), num_experts=E)
    plan: RoutingPlan = make_plan_op.get("native")(routing, COMPACT)
    x_RD = dispatch_op.get("native")(x_TD, plan)
    gemm = grouped_gemm_op.get("native")
    h_RG = gemm(x_RD, weights.w_in_EDG, plan, None)
    h_RF = activate(h_RG, "swiglu")
    y_RD = gemm(h_RF, weights.w_out_EFD, plan, None)
    ends = plan.offset_E1.tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    active = [e for e in range(E) if ends[e + 1] > ends[e]]
    square = torch.randn(1024, 1024)

    def mm(rows: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
        return lambda: [torch.mm(rows[span], w[e]) for e, span in enumerate(spans) if span.stop > span.start]

    ffn = expert_ffn_op.get("native")
    pairs = T * K
    flops = {"in": 2 * pairs * D * 2 * F, "out": 2 * pairs * F * D}
    read = {"in": len(active) * D * 2 * F * 4, "out": len(active) * F * D * 4}
    parts: dict[str, tuple[Callable[[], object], float, float]] = {
        # what: call, operations, bytes of weights read
        "native, all of it": (
            lambda: ffn(x_TD, routing.gate_TK, plan, weights), sum(flops.values()), sum(read.values()),
        ),
        "plan": (lambda: make_plan_op.get("native")(routing, COMPACT), 0, 0),
        "dispatch": (lambda: dispatch_op.get("native")(x_TD, plan), 0, 0),
        "first GEMM, packing as it goes": (
            lambda: gemm(x_RD, weights.w_in_EDG, plan, None), flops["in"], read["in"],
        ),
        "first GEMM, torch.mm": (mm(x_RD, weights.w_in_EDG), flops["in"], read["in"]),
        "activation": (lambda: activate(h_RG, "swiglu"), 0, 0),
        "second GEMM, packing as it goes": (
            lambda: gemm(h_RF, weights.w_out_EFD, plan, None), flops["out"], read["out"],
        ),
        "second GEMM, torch.mm": (mm(h_RF, weights.w_out_EFD), flops["out"], read["out"]),
        "combine": (lambda: combine_op.get("native")(y_RD, routing.gate_TK, plan), 0, 0),
        "torch.mm of 1024 x 1024, 10 times": (
            lambda: [torch.mm(square, square) for _ in range(10)], 10 * 2 * 1024**3, 0,
        ),
        "reading the same weights, a sum": (
            lambda: [w[e].sum() for e in active for w in (weights.w_in_EDG, weights.w_out_EFD)],
            0, sum(read.values()),
        ),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(ROUNDS[T] + 1):
        for name, (call, _, _) in parts.items():
            start = time.perf_counter()
            call()
            if number:  # the first round packs weights and warms up
                seconds[name].append(time.perf_counter() - start)
    rows = [
        {
            "part": name,
            "ms": 1e3 * statistics.median(seconds[name]),
            "GFLOP/s": flops_ / statistics.median(seconds[name]) / 1e9 if flops_ else None,
            "GB/s": bytes_ / statistics.median(seconds[name]) / 1e9 if bytes_ else None,
            "samples": seconds[name],
        }
        for name, (_, flops_, bytes_) in parts.items()
    ]
    return {"T": T, "D": D, "F": F, "E": E, "K": K, "dtype": "float32", "active": len(active), "rows": rows}


def shown(cell: dict[str, object]) -> list[str]:
    lines = [f"float32, D={D} F={F} E={E} K={K}, T={cell['T']}, {cell['active']} experts active, 2 threads"]
    lines.append(f"{'part':34} {'ms':>9} {'GFLOP/s':>8} {'GB/s of weights':>16}")
    for row in cell["rows"]:  # type: ignore[attr-defined]
        rates = (f"{row[key]:.0f}" if (row[key] or 0) >= 1 else "" for key in ("GFLOP/s", "GB/s"))
        lines.append("{:34} {:9.2f} {:>8} {:>16}".format(row["part"], row["ms"], *rates))
    return [*lines, ""]


if __name__ == "__main__":
    main()
