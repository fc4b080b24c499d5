"""The repaired interpreter computes with bfloat16 as torch does, and with TF32 where a kernel asks for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_routing_bench.conformance.interpreting import repaired


@triton.jit
def product(a, b, c, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    found = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j), input_precision=PRECISION)
    tl.store(c + i * N + j, found.to(c.dtype.element_ty))


@triton.jit
def arithmetic(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    y = tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x * y)
    tl.store(out + 2 * N + i, tl.where(x < y, x, y))
    tl.store(out + 3 * N + i, tl.maximum(x, y))
    tl.store(out + 4 * N + i, -x)
    tl.store(out + 5 * N + i, x.to(tl.float32).to(tl.float16).to(tl.bfloat16))
    tl.store(out + 6 * N + i, tl.max(x, 0) + tl.zeros_like(x))
    tl.store(out + 7 * N + i, x * 0.5 + i.to(tl.bfloat16))


@triton.jit
def rounded(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(tl.bfloat16))


def test_products_of_bfloat16() -> None:
    a, b, c = (torch.randn(32, 32).bfloat16() for _ in range(3))
    with repaired():
        product[(1,)](a, b, c, 32, "tf32")
    assert torch.equal(c, (a.float() @ b.float()).bfloat16())


def test_arithmetic_of_bfloat16_equals_torch() -> None:
    a, b = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    out = torch.empty(8, 256).bfloat16()
    with repaired():
        arithmetic[(1,)](a, b, out, 256)
    index = torch.arange(256).bfloat16()
    expected = [a + b, a * b, torch.minimum(a, b), torch.maximum(a, b), -a, a.half().bfloat16()]
    expected += [a.max().expand(256), a * 0.5 + index]
    for row, (got, want) in enumerate(zip(out, expected, strict=True)):
        assert torch.equal(got, want), f"row {row}"


def test_float32_is_rounded_to_bfloat16_not_cut() -> None:
    a = torch.cat((torch.randn(253), torch.tensor([torch.inf, -torch.inf, torch.nan])))
    out = torch.empty(256).bfloat16()
    with repaired():
        rounded[(1,)](a, out, 256)
    assert torch.equal(out.nan_to_num(nan=7.0), a.bfloat16().nan_to_num(nan=7.0))


def test_tf32_shows_unless_a_kernel_declines_it() -> None:
    a, b, exact, rough = (torch.randn(32, 32) for _ in range(4))
    with repaired():
        product[(1,)](a, b, exact, 32, "ieee")
        product[(1,)](a, b, rough, 32, "tf32")
    true = a.double() @ b.double()
    assert (exact - true).abs().max() < 1e-5
    assert 1e-4 < (rough - true).abs().max() < 3e-2


def test_the_stock_interpreter_is_back_afterwards() -> None:
    a, b, c = (torch.randn(32, 32).bfloat16() for _ in range(3))
    with repaired():
        pass
    product[(1,)](a, b, c, 32, "tf32")
    assert not torch.equal(c, (a.float() @ b.float()).bfloat16())
