"""expert_ffn.triton_fused and triton_decode: several tiles in every direction, bounds, options, gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import tiny_layers
from moe_routing_bench import ExpertWeights, MoEShape
from moe_routing_bench.conformance.check import poisoned_memory
from moe_routing_bench.core.experts import ACTIVATIONS
from moe_routing_bench.ops.expert_ffn import triton_decode, triton_fused
from moe_routing_bench.ops.gpu_gemm import grouped_order
from moe_routing_bench.ops.targets import TARGETS, Target
from tiny_layers import EXPERT_FFN, Arguments, assert_right

# several tiles of rows, columns and depth, the last ones cut
FUSED = "triton_fused(block_m=16,block_n=32,block_k=32,group=2{})"
DECODE = "triton_decode(block_n=32,block_k=16,split={})"


def arguments(
    T: int = 21, K: int = 3, E: int = 4, D: int = 40, F: int = 24, *, bias: bool = True, **options: Any
) -> Arguments:
    return tiny_layers.arguments(T, K, E, D, F, bias=bias, absent=0.2, **options)


@pytest.mark.parametrize(
    "layout,dtype",
    [("compact", torch.float32), ("padded(capacity=9)", torch.bfloat16), ("block(4)", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(2)])
def test_many_tiles(spec: str, layout: str, dtype: torch.dtype, watched: object) -> None:
    args = arguments(layout=layout, dtype=dtype)
    with poisoned_memory():
        out_TD = EXPERT_FFN.get(spec)(*args)
    assert_right(out_TD, *args)


@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(3)])
def test_weights_stored_output_first(spec: str, watched: object) -> None:
    x_TD, gate_TK, plan, weights = arguments(T=5, bias=False)
    turned = ExpertWeights(
        w_in_EDG=weights.w_in_EDG.transpose(1, 2).contiguous().transpose(1, 2),
        w_out_EFD=weights.w_out_EFD.transpose(1, 2).contiguous().transpose(1, 2),
    )
    run = EXPERT_FFN.get(spec)
    assert torch.equal(run(x_TD, gate_TK, plan, turned), run(x_TD, gate_TK, plan, weights))


@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(1)])
def test_rows_whose_numbers_are_apart_are_read_in_several_steps(spec: str, watched: object) -> None:
    x_TD, *others = arguments(T=5)
    apart_TD = x_TD.t().contiguous().t()
    assert apart_TD.stride() == (1, 5)
    assert torch.equal(EXPERT_FFN.get(spec)(apart_TD, *others), EXPERT_FFN.get(spec)(x_TD, *others))


@pytest.mark.parametrize("options", [",persistent=1", ",persistent=1,prefetch=1", ",group=1"])
def test_another_order_of_tiles_gives_the_same_bits(options: str, watched: object) -> None:
    args = arguments(T=9, E=3, dtype=torch.bfloat16)
    spec = FUSED.format(options) if "group" not in options else FUSED.format("").replace("group=2", "group=1")
    assert torch.equal(EXPERT_FFN.get(spec)(*args), EXPERT_FFN.get(FUSED.format(""))(*args))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(1)])
def test_every_activation(spec: str, activation: str, watched: object) -> None:
    args = arguments(T=2, K=1, E=2, D=24, F=16, activation=activation)
    assert_right(EXPERT_FFN.get(spec)(*args), *args)


@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(1)])
def test_a_pair_without_a_row_adds_nothing_whatever_its_gate_is(spec: str, watched: object) -> None:
    x_TD, gate_TK, plan, weights = arguments(layout="padded(capacity=4)")
    assert bool((plan.row_TK < 0).any())
    poisoned_TK = gate_TK.masked_fill(plan.row_TK < 0, float("nan"))
    run = EXPERT_FFN.get(spec)
    assert torch.equal(run(x_TD, poisoned_TK, plan, weights), run(x_TD, gate_TK, plan, weights))


@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(1)])
def test_float32_gates_are_not_rounded_to_the_rows_dtype(spec: str, watched: object) -> None:
    """In the kit the rounding of hidden rows hides it. 1 + 2^-9 in bfloat16 is 1."""
    x_TD, gate_TK, plan, weights = arguments(T=5, K=1, dtype=torch.bfloat16)
    one_TK = torch.ones_like(gate_TK)
    run = EXPERT_FFN.get(spec)
    assert not torch.equal(run(x_TD, one_TK + 2**-9, plan, weights), run(x_TD, one_TK, plan, weights))


@pytest.mark.parametrize("split", [1, 64])
def test_slices_of_the_depth_are_summed(split: int, watched: object) -> None:
    args = arguments(T=2)
    assert_right(EXPERT_FFN.get(DECODE.format(split))(*args), *args)


@pytest.mark.parametrize("depth", [1, 16, 17, 100, 7168])
@pytest.mark.parametrize("split", [0, 1, 2, 3, 5, 64])
def test_no_slice_is_empty_and_none_is_missing(depth: int, split: int) -> None:
    pieces = triton_decode._splits(8, 64, 128, depth, 64, 16, split)
    steps = -(-depth // (pieces * 16))  # as the kernel computes them
    assert pieces * steps * 16 >= depth
    assert (pieces - 1) * steps * 16 < depth


@triton.jit
def _places(seen, row_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    row_tile, column_tile = grouped_order(tl.program_id(0), row_tiles, COLUMN_TILES, GROUP)
    tl.store(seen + row_tile * COLUMN_TILES + column_tile, 1)


@pytest.mark.parametrize("row_tiles,column_tiles,group", [(1, 3, 8), (5, 3, 2), (8, 2, 4), (7, 1, 3)])
def test_every_tile_has_one_place(row_tiles: int, column_tiles: int, group: int, watched: object) -> None:
    seen = torch.zeros(row_tiles * column_tiles, dtype=torch.int32)
    _places[(len(seen),)](seen, row_tiles, column_tiles, group)
    assert bool((seen == 1).all())


def test_the_bound_of_row_tiles_holds_and_is_met() -> None:
    E, block = 4, 16
    for pairs in (1, 3, 4, 16, 61, 64, 65):
        bound = triton_fused._most_row_tiles(pairs, E, block)
        spread = torch.multinomial(torch.ones(E), pairs, replacement=True).bincount(minlength=E)
        # one pair each for all experts but the last: as many tiles as can be
        worst = torch.tensor([1] * min(E - 1, pairs - 1) + [pairs - min(E - 1, pairs - 1)])
        tiles = [-(-counts // block) for counts in (spread, worst)]
        assert max(int(t.sum()) for t in tiles) <= bound
        assert int(tiles[1].sum()) == bound


@pytest.mark.parametrize("spec", [FUSED.format(""), DECODE.format(2)])
def test_gradients_are_those_of_the_parts_and_only_inputs_are_kept(spec: str, watched: object) -> None:
    x_TD, gate_TK, plan, weights = arguments(T=2, D=24, F=16, bias=False)

    def gradients(run: object) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x_TD, gate_TK, weights.w_in_EDG, weights.w_out_EFD)]
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y_TD = run(leaves[0], leaves[1], plan, ExpertWeights(w_in_EDG=leaves[2], w_out_EFD=leaves[3]))
        if run is not EXPERT_FFN.reference:
            assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}
        return list(torch.autograd.grad(y_TD.square().sum(), leaves))

    for got, want in zip(gradients(EXPERT_FFN.get(spec)), gradients(EXPERT_FFN.reference), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_gradient_nobody_wants_is_not_made(watched: object) -> None:
    x_TD, gate_TK, plan, weights = arguments(T=3, D=24, F=16)
    x_TD.requires_grad_()
    EXPERT_FFN.get("triton_decode")(x_TD, gate_TK, plan, weights).sum().backward()
    assert x_TD.grad is not None and gate_TK.grad is None and weights.b_in_EG.grad is None


@pytest.mark.parametrize("name", ["triton_fused", "triton_decode"])
def test_compiles_without_graph_breaks(name: str) -> None:
    x_TD, gate_TK, plan, weights = arguments(T=2, D=24, F=16)
    run = EXPERT_FFN.get(name).run

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        return run(x_TD, gate_TK, plan, weights)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x_TD), layer(x_TD))


def test_what_it_cannot_do_it_says() -> None:
    args = arguments(T=22)
    assert "64 pairs" in EXPERT_FFN.why_not("triton_decode", *args)
    assert EXPERT_FFN.why_not("triton_fused", *args) is None
    for name in ("triton_fused", "triton_decode"):
        assert "sm_90" in EXPERT_FFN.why_not(f"{name}(pdl=1)", *arguments(T=2))
        x_TD, gate_TK, plan, weights = arguments(T=2)
        assert "not torch.float64" in EXPERT_FFN.why_not(name, x_TD.double(), gate_TK, plan, weights)
        assert "gates are" in EXPERT_FFN.why_not(name, x_TD, gate_TK.half(), plan, weights)
        assert "on a GPU" in EXPERT_FFN.why_not(
            name, *(t.to("meta") for t in (x_TD, gate_TK)), plan.to("meta"), weights.to("meta")
        )
        with pytest.raises(ValueError, match="plan was made"):
            EXPERT_FFN.get(name)(x_TD, gate_TK[:, :1], plan, weights)
    assert "persistent=1" in EXPERT_FFN.why_not("triton_fused(prefetch=1)", *args)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("file", [triton_fused, triton_decode])
def test_compilations_name_every_argument(file: object, target: str) -> None:
    sizes = MoEShape(T=4096, D=2048, F=768, E=128, K=8)
    found = list(file.compilations(sizes, Target.named(target)))
    assert len({compilation.name for compilation in found}) == len(found) >= 3
    for compilation in found:
        given = [*compilation.signature, *compilation.constexprs]
        assert sorted(given) == sorted(inspect.signature(compilation.kernel.fn).parameters)
        assert compilation.bytes > 0
