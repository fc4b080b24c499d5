"""Checks whether a token's result depends on its batch: alone, among others, moved, under another load.

This tests what `BATCH_INVARIANT = True` promises (DESIGN.md, "The same bits in every batch").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.conformance.arguments import fresh_arguments
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.implementation import Implementation, tensors_in
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.ops.registry import get_op

SEEDS = (0, 1)
# sizes near the widths of vectors and tiles
SIZES = (2, 3, 5, 8, 9, 16, 17, 33, 65)


def batch_dependence(implementation: Implementation, cell: KitCell) -> str | None:
    """Returns a sentence that says how a token's bits depend on its batch; None if no tried batch shows
    it."""
    for threads in (1, 2):
        for seed in SEEDS[:1] if threads == 2 else SEEDS:
            with torch_threads(threads):
                for way in _ways(implementation, cell):
                    if (difference := _first_difference(implementation, cell, way, seed)) is not None:
                        return f"{difference} ({way}, {threads} thread{'s' * (threads > 1)}, seed {seed})"
    return None


def _ways(implementation: Implementation, cell: KitCell) -> list[str]:
    """Lists the ways to run: an implementation may take another path with gradients or frozen weights."""
    ways = ["without gradients"]
    if get_op(cell.op).differentiable and not implementation.forward_only:
        ways.append("with gradients")
    return [*ways, "frozen weights"] if implementation.freeze is not None else ways


def _first_difference(implementation: Implementation, cell: KitCell, way: str, seed: int) -> str | None:
    op, with_grad = get_op(cell.op), way == "with gradients"
    whole = fresh_arguments(cell.op, cell.case, cell.layout, cell.dtype, seed=seed, device=cell.device)
    fixed = dict(whole)
    if way == "frozen weights":
        assert implementation.freeze is not None
        fixed[op.weights] = implementation.freeze(whole[op.weights])

    def by_token(args: Mapping[str, Any]) -> list[Tensor]:
        assert op.by_token is not None
        leaves = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
        for tensor in leaves if with_grad else ():
            tensor.requires_grad_()
        with torch.set_grad_enabled(with_grad):
            out = implementation.run(*args.values())
        return [tensor.detach().cpu().clone() for tensor in tensors_in(op.by_token(out, args))]

    T = cell.case.T
    right = by_token(batch(fixed, torch.arange(T)))
    for what, token_t, crowded in _batches(T):
        args = batch(fixed, token_t, crowded)
        if (reason := implementation.why_not(*args.values())) is not None:
            return f"it takes a batch of {T} and refuses {what}: {reason}"
        kept_t = slice(0, len(token_t), 3 if crowded else 1)
        for all_T, got_t in zip(right, by_token(args), strict=True):
            if wrong := _other_bits(all_T[token_t][kept_t], got_t[kept_t]):
                tokens = "a token has" if wrong == 1 else f"{wrong} tokens have"
                return f"{tokens} other bits in {what} than in a batch of {T}"
    return None


def _batches(T: int) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields other batches of the same tokens: a name, the tokens, and whether most of them change
    experts."""
    everyone = torch.arange(T)
    for token in (0, T // 2, T - 1):
        yield "a batch of 1", torch.tensor([token]), False
    for size in SIZES:
        if size < T:
            yield f"a batch of {size}", everyone[T - size :], False
    yield "the same batch backwards", everyone.flip(0), False
    yield "the same batch moved by one", everyone.roll(1), False
    yield f"a batch of {2 * T}", torch.cat([everyone, everyone]), False
    yield "a batch with another load", everyone, True


def batch(args: Mapping[str, Any], token_t: Tensor, crowded: bool = False) -> dict[str, Any]:
    """Returns the arguments for these tokens of a batch, by the letters of their names. crowded: two of three
    tokens take the experts of the first token, so that few experts get nearly all rows."""
    made = dict(args)
    plan: RoutingPlan | None = args.get("plan")
    row_tK = None
    if plan is not None:
        expert_tK = plan.expert_TK()[token_t.to(plan.row_TK.device)]
        row_tK = plan.row_TK[token_t]
        if crowded:
            moved_t = torch.arange(len(token_t)) % 3 != 0
            expert_tK[moved_t] = expert_tK[0].clone()
        gate_tK = torch.zeros_like(expert_tK, dtype=torch.float32)
        routing = Routing(expert_TK=expert_tK, gate_TK=gate_tK, num_experts=plan.num_experts, ragged=False)
        made["plan"] = make_plan(routing, plan.layout)
    for name, value in args.items():
        letters = name.rpartition("_")[2]
        if not isinstance(value, Tensor):
            continue
        if letters.startswith("T"):
            made[name] = value.detach()[token_t].clone()
        elif letters.startswith("R"):
            assert row_tK is not None
            made[name] = rows_R = value.new_zeros(made["plan"].num_rows, *value.shape[1:])
            rows_R[made["plan"].row_TK] = value.detach()[row_tK]
    return made


def _other_bits(a: Tensor, b: Tensor) -> int:
    """Returns how many tokens differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return len(a)
    a_Tb, b_Tb = (t.contiguous().view(torch.uint8).reshape(len(t), -1) for t in (a, b))
    return int((a_Tb != b_Tb).any(dim=1).sum())
