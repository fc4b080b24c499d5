"""The plan's numbers and the layouts say the same: where pairs land, where spans begin, what a tile holds."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_routing_bench import Layout, Routing, RoutingPlan, combine, dispatch, grouped_gemm, make_plan
from moe_routing_bench.layouts.layout import Layout as Strided
from moe_routing_bench.layouts.layout import coordinates
from moe_routing_bench.layouts.rows import RowSpan, blocks, padded_rows, pairs, programs, spans, tiles

KINDS = ["compact", "block(1)", "block(4)", "padded(capacity=3)", "padded(capacity_factor=1.25)"]


def routed(T: int, K: int, E: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    score_TE = torch.rand(T, E, generator=generator) - 0.3 * torch.arange(E)
    expert_TK = score_TE.argsort(dim=1, descending=True)[:, :K]
    expert_TK = torch.where(torch.rand(T, K, generator=generator) < 0.1, -1, expert_TK)
    return Routing(expert_TK=expert_TK, gate_TK=torch.rand(T, K, generator=generator), num_experts=E)


def spans_of(plan: RoutingPlan) -> list[RowSpan]:
    return spans(plan.offset_E1.tolist(), plan.layout.block_rows or 1)


def rows_by_layout(routing: Routing, layout: Layout) -> tuple[list[int], dict[int, int]]:
    """Where spans begin and the row of each pair, from the experts' loads and layouts alone."""
    T, K, E = routing.num_tokens, routing.num_choices, routing.num_experts
    pair_of = pairs(T, K)
    of_expert: list[list[int]] = [[] for _ in range(E)]
    for t in range(T):
        for k in range(K):
            if (expert := int(routing.expert_TK[t, k])) >= 0:
                of_expert[expert].append(pair_of((t, k)))
    if layout.kind == "padded":
        C = layout.capacity_for(T, K, E)
        rows = padded_rows(E, C)
        row = {p: rows((e, rank)) for e, mine in enumerate(of_expert) for rank, p in enumerate(mine[:C])}
        return [rows((e, 0)) for e in range(E + 1)], row
    block = layout.block_rows or 1
    offset_E1 = list(accumulate((-(-len(mine) // block) * block for mine in of_expert), initial=0))
    made = spans(offset_E1, block)
    return offset_E1, {p: made[e](rank) for e, mine in enumerate(of_expert) for rank, p in enumerate(mine)}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(1, 6), st.sampled_from(KINDS), st.integers(0, 999), st.data())
def test_pairs_land_where_the_layouts_say(
    T: int, E: int, written: str, seed: int, data: st.DataObject
) -> None:
    routing, layout = routed(T, data.draw(st.integers(1, E)), E, seed), Layout.parse(written)
    plan = make_plan(routing, layout)
    offset_E1, row = rows_by_layout(routing, layout)
    assert plan.offset_E1.tolist() == offset_E1
    assert plan.row_TK.flatten().tolist() == [row.get(p, -1) for p in range(T * routing.num_choices)]
    pair = {at: p for p, at in row.items()}
    assert plan.pair_R.tolist() == [pair.get(at, -1) for at in range(plan.num_rows)]


def test_a_block_has_rows_of_one_expert() -> None:
    plan = make_plan(routed(30, 3, 5, 0), Layout.block(4))
    expert_R = plan.expert_R().tolist()
    in_block, block = blocks(plan.num_rows, 4).modes()
    for b in range(block.size):
        assert len({expert_R[in_block(i) + block(b)] for i in range(4)}) == 1
    with pytest.raises(ValueError):
        blocks(10, 4)


def test_a_span_knows_its_end() -> None:
    assert [(span.first, str(span.rows)) for span in spans([0, 4, 4, 6], 2)] == [
        (0, "(2,2):(1,2)"),
        (4, "None"),
        (4, "(2,1):(1,0)"),
    ]
    for rank in (-1, 4):
        with pytest.raises(ValueError):
            spans([0, 4])[0](rank)


def test_a_program_has_the_tile_that_the_triton_kernels_compute() -> None:
    """As _gather_rows and _weighted_sum write it: r = program // COLUMN_BLOCKS * BLOCK_R + i, and so on."""
    R, D, tall, wide = 14, 24, 4, 8
    cut = tiles(R, D, tall, wide)
    column_blocks = -(-D // wide)
    number = programs(-(-R // tall), column_blocks)
    for (i, j), (m, n) in coordinates(((tall, wide), (-(-R // tall), column_blocks))):  # type: ignore[misc]
        program = number((m, n))
        r, d = program // column_blocks * tall + i, program % column_blocks * wide + j
        assert cut(((i, j), (m, n))) == r * D + d


def inside(rows: int, columns: int, tall: int, wide: int):  # type: ignore[no-untyped-def]
    """Every ((i, j), (m, n)) of a tiling that is not past the edge, with its row and column."""
    for (i, j), (m, n) in coordinates(((tall, wide), (-(-rows // tall), -(-columns // wide)))):  # type: ignore[misc]
        if m * tall + i < rows and n * wide + j < columns:
            yield ((i, j), (m, n)), m * tall + i, n * wide + j


@pytest.mark.parametrize("written", KINDS)
def test_the_stages_done_tile_by_tile_through_layouts_are_the_operations(written: str) -> None:
    T, K, E, D, G = 7, 2, 4, 12, 10
    plan = make_plan(routing := routed(T, K, E, 3), Layout.parse(written))
    R, generator = plan.num_rows, torch.Generator().manual_seed(0)
    x_TD, w_EDG = (
        torch.rand(T, D, generator=generator).double(),
        torch.rand(E, D, G, generator=generator).double(),
    )
    token_R = plan.token_R().tolist()

    packed = torch.zeros(R * D, dtype=torch.float64)  # memory: places alone
    cut = tiles(R, D, 4, 8)
    for at, r, d in inside(R, D, 4, 8):
        if token_R[r] >= 0:
            packed[cut(at)] = x_TD[token_R[r], d]
    x_RD = dispatch(x_TD, plan)
    assert torch.equal(packed.view(R, D), x_RD)

    multiplied = torch.zeros(R * G, dtype=torch.float64)
    for e, span in enumerate(spans_of(plan)):
        if span.rows is None:
            continue
        C = span.rows.size
        x, w, y = tiles(C, D, 4, 8), tiles(D, G, 8, 4), tiles(C, G, 4, 4)
        w_e = w_EDG[e].flatten()
        for ((i, j), (m, n)), _, _ in inside(C, G, 4, 4):
            for (_, k), (_, depth) in (at for at, row, _ in inside(C, D, 4, 8) if row == m * 4 + i):
                place = span.first * D + x(((i, k), (m, depth)))
                multiplied[span.first * G + y(((i, j), (m, n)))] += (
                    packed[place] * w_e[w(((k, j), (depth, n)))]
                )
    y_RG = grouped_gemm(x_RD, w_EDG, plan)
    assert torch.allclose(multiplied.view(R, G)[: span_end(plan)], y_RG[: span_end(plan)], rtol=1e-12)

    summed = torch.zeros(T * G, dtype=torch.float64)
    cut, pair_of, row_P = tiles(T, G, 2, 4), pairs(T, K), plan.row_TK.flatten().tolist()
    rows_RG = Strided((R, G), (G, 1))
    for at, t, g in inside(T, G, 2, 4):
        for k in range(K):
            if (row := row_P[pair_of((t, k))]) >= 0:
                summed[cut(at)] += routing.gate_TK[t, k].double() * multiplied[rows_RG((row, g))]
    assert torch.allclose(summed.view(T, G), combine(y_RG, routing.gate_TK.double(), plan), rtol=1e-12)


def span_end(plan: RoutingPlan) -> int:
    return int(plan.offset_E1[-1])


def test_a_tensor_of_torch_is_the_same_function() -> None:
    strided: Tensor = torch.arange(6 * 10).view(6, 10)[:, :8]
    layout = Strided(tuple(strided.shape), strided.stride())
    assert [int(strided[i, j]) for i, j in coordinates((6, 8))] == layout.places()  # type: ignore[misc]
