"""Plain weights in the C++ expert layer: read where they are for few rows, packed for many, written never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from child_process import python
from moe_routing_bench import ExpertWeights, Layout, Routing
from moe_routing_bench.core import cpp
from moe_routing_bench.core.experts import ACTIVATIONS
from tiny_layers import EXPERT_FFN, MAKE_PLAN, Arguments, arguments, assert_right, weights_of

pytestmark = pytest.mark.slow

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
FEW, FEW_TILES, MANY = 24, 128, 256  # of ops/in_place.h
DEEP = 8420  # panels of bfloat16 are half of an L2 cache of 1 MiB
ORDERS = pytest.mark.parametrize("output_first", [False, True])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def lying(weights: ExpertWeights, output_first: bool) -> ExpertWeights:
    def transposed(w: Tensor) -> Tensor:
        return w.transpose(1, 2).contiguous().transpose(1, 2)

    if not output_first:
        return weights
    return replace(weights, w_in_EDG=transposed(weights.w_in_EDG), w_out_EFD=transposed(weights.w_out_EFD))


def with_rows(count_E: list[int], weights: ExpertWeights) -> Arguments:
    """Tokens in any order, one expert each: so many for each expert."""
    expert_TK = torch.arange(len(count_E)).repeat_interleave(torch.tensor(count_E))[:, None]
    expert_TK = expert_TK[torch.randperm(len(expert_TK))]
    gate_TK = torch.rand(len(expert_TK), 1) + 0.5
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=len(count_E), ragged=False)
    x_TD = torch.randn(len(expert_TK), weights.D).to(weights.w_in_EDG.dtype)
    return x_TD, gate_TK, MAKE_PLAN(routing, Layout.compact()), weights


@DTYPES
@ORDERS
@pytest.mark.parametrize("level", cpp.LEVELS)
def test_any_number_of_rows(level: str, output_first: bool, dtype: torch.dtype) -> None:
    spec = f"native(level={level})"
    if (reason := EXPERT_FFN.why_not(spec, *arguments(dtype=dtype))) is not None:
        pytest.skip(reason)
    counts = [0, *range(1, 9), 0, 12, 13, 17, FEW - 1, FEW, FEW + 1, 40, FEW_TILES, FEW_TILES + 1]
    few_or_wide = ((96, 64, "swiglu"), (32, 1100, "swiglu"))
    for D, F, activation in ((72, 50, "swiglu"), (51, 300, "gelu"), (530, 33, "geglu"), *few_or_wide):
        weights = weights_of(len(counts), D, F, dtype=dtype, activation=activation, bias=True)
        args = with_rows(counts, lying(weights, output_first))
        before = [tensor.clone() for tensor in args[3].tensors().values()]
        assert_right(EXPERT_FFN.get(spec)(*args), *args)
        for tensor, was in zip(args[3].tensors().values(), before, strict=True):
            assert torch.equal(tensor, was)


@DTYPES
@ORDERS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_activation_for_one_token(activation: str, output_first: bool, dtype: torch.dtype) -> None:
    for bias in (False, True):
        x_TD, gate_TK, plan, weights = arguments(
            1, 2, 7, 136, 80, dtype=dtype, activation=activation, bias=bias
        )
        args = (x_TD, gate_TK, plan, lying(weights, output_first))
        assert_right(EXPERT_FFN.get("native")(*args), *args)


@DTYPES
@ORDERS
def test_batch_invariant_has_the_bits_of_frozen_weights(output_first: bool, dtype: torch.dtype) -> None:
    weights = weights_of(6, 700, 400, dtype=dtype)
    args = with_rows([FEW + 1, 3, 0, FEW + 40, FEW, 1], lying(weights, output_first))
    native, invariant = EXPERT_FFN.get("native"), EXPERT_FFN.get("native(batch_invariant=True)")
    y_TD, packed_TD = native(*args), invariant(*args)
    assert native.freeze is not None
    assert torch.equal(packed_TD, native(*args[:3], native.freeze(args[3])))
    if (
        output_first and dtype is torch.float32
    ):  # dot products have bits of their own: they show what was packed
        expert_T = args[2].expert_TK()[:, 0]
        same_E = [bool((y_TD == packed_TD)[expert_T == e].all()) for e in range(6)]
        assert same_E == [True, False, True, True, False, False]


@DTYPES
@pytest.mark.parametrize("level", cpp.LEVELS)
def test_deep_weights_are_packed_in_pieces_with_the_bits_of_frozen_ones(
    level: str, dtype: torch.dtype
) -> None:
    """Packing whole panels of 8,192 rows took twice the time of plain torch."""
    native = EXPERT_FFN.get(f"native(level={level})")
    counts = [FEW + 1, MANY, 0, MANY + 1]
    for D, F, activation in ((DEEP, 33, "swiglu"), (50, DEEP, "gelu"), (DEEP, 530, "gelu")):
        weights = weights_of(len(counts), D, F, dtype=dtype, activation=activation, bias=True)
        args = with_rows(counts, weights)
        if (reason := EXPERT_FFN.why_not(native.label, *args)) is not None:
            pytest.skip(reason)
        assert native.freeze is not None
        assert torch.equal(native(*args), native(*args[:3], native.freeze(weights)))
        assert_right(native(*args), *args)


@DTYPES
@ORDERS
@pytest.mark.parametrize("T", [1, 7, 60])
def test_bits_do_not_depend_on_threads(T: int, output_first: bool, dtype: torch.dtype) -> None:
    x_TD, gate_TK, plan, weights = arguments(T, 3, 5, 530, 300, dtype=dtype, bias=True)
    args = (x_TD, gate_TK, plan, lying(weights, output_first))
    before = torch.get_num_threads()
    try:
        y_TD = [(torch.set_num_threads(n), EXPERT_FFN.get("native")(*args))[1] for n in (1, 2, 3)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y_TD[0], y_TD[1]) and torch.equal(y_TD[0], y_TD[2])


def test_nothing_beyond_the_weights_is_read() -> None:
    """Each tensor ends where a page begins that nobody may read: it would end the process, one of its own."""
    code = (
        "import ctypes, mmap, torch\n"
        "from dataclasses import replace\n"
        "from tiny_layers import EXPERT_FFN, arguments\n"
        "torch.set_num_threads(1); torch.set_grad_enabled(False)\n"
        "libc, kept = ctypes.CDLL(None), []\n"
        "def guarded(w):\n"
        "    size = w.numel() * w.element_size(); pages = -(-size // mmap.PAGESIZE) + 1\n"
        "    memory = mmap.mmap(-1, pages * mmap.PAGESIZE); kept.append(memory)\n"
        "    at = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + (pages - 1) * mmap.PAGESIZE\n"
        "    assert libc.mprotect(ctypes.c_void_p(at), mmap.PAGESIZE, 0) == 0\n"
        "    offset = (pages - 1) * mmap.PAGESIZE - size\n"
        "    out = torch.frombuffer(memory, dtype=w.dtype, count=w.numel(), offset=offset).view(w.shape)\n"
        "    return out.copy_(w)\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "  for level in ('', '(level=avx2)', '(level=amx_pretended)'):\n"
        "    sizes = (1, 33, 17), (3, 65, 31), (40, 47, 95), (9, 1, 1), (4, 300, 130), (9, 64, 96)\n"
        "    sizes += ((99, 9000, 17),)\n"
        "    for T, D, F in sizes:\n"
        "      if EXPERT_FFN.why_not('native' + level, *arguments(dtype=dtype)): continue\n"
        "      x, gate, plan, weights = arguments(T, 2, 3, D, F, dtype=dtype)\n"
        "      for first in (False, True):\n"
        "        both = weights.w_in_EDG, weights.w_out_EFD\n"
        "        if first: w_in, w_out = (guarded(w.transpose(1, 2)).transpose(1, 2) for w in both)\n"
        "        else: w_in, w_out = map(guarded, both)\n"
        "        args = x, gate, plan, replace(weights, w_in_EDG=w_in, w_out_EFD=w_out)\n"
        "        y, want = EXPERT_FFN.get('native' + level)(*args), EXPERT_FFN.reference(*args)\n"
        "        torch.testing.assert_close(y, want, rtol=3e-2, atol=3e-2)\n"
        "print('done')\n"
        "import os; os._exit(0)"  # mmap objects that tensors look into cannot be closed
    )
    assert "done" in python(code).stdout
