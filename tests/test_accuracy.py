"""The judge: what it lets pass, what it does not, and what it says."""

from __future__ import annotations

import pytest
import torch

from moe_routing_bench.core import accuracy
from moe_routing_bench.core.accuracy import judge, judge_exact

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def triple(dtype: torch.dtype, n: int = 2000):
    torch.manual_seed(1)
    x, w = torch.randn(20, n).to(dtype), torch.randn(n, 30).to(dtype)
    return x, w, x.double() @ w.double(), x @ w


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_passes(dtype: torch.dtype) -> None:
    _, _, oracle, baseline = triple(dtype)
    assert judge(baseline, oracle, baseline).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_summation_passes(dtype: torch.dtype) -> None:
    x, w, oracle, baseline = triple(dtype)
    order = torch.randperm(x.shape[1])
    assert judge(x[:, order] @ w[order], oracle, baseline).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulation_does_not(dtype: torch.dtype) -> None:
    x, w, oracle, baseline = triple(dtype, n=200)
    out = torch.zeros_like(baseline)
    for d in range(x.shape[1]):
        out = out + x[:, d, None] * w[d]
    verdict = judge(out, oracle, baseline)
    assert not verdict.passed and verdict.rms_error > verdict.rms_bound


def test_precision_lost_everywhere_is_told_even_if_no_element_stands_out() -> None:
    torch.manual_seed(1)
    oracle = torch.cat((torch.randn(5000, dtype=torch.float64), torch.tensor([1e4], dtype=torch.float64)))
    baseline = oracle.float()
    out = baseline * (1 + 4e-6 * torch.randn(5001).sign())
    verdict = judge(out[:5000], oracle[:5000], baseline[:5000])
    assert not verdict.passed
    out = baseline + 5e-4 * torch.randn(5001).sign()
    verdict = judge(out, oracle, baseline)
    assert not verdict.passed and "everywhere" in verdict.sentence


def test_a_single_wrong_element_is_found_and_placed() -> None:
    _, _, oracle, baseline = triple(torch.float32)
    out = baseline.clone()
    out[3, 7] += 0.5
    verdict = judge(out, oracle, baseline)
    assert not verdict.passed and "at [3, 7]" in verdict.sentence and "1 of 600 elements" in verdict.sentence


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_common_factor_is_told(factor: float) -> None:
    _, _, oracle, baseline = triple(torch.float32)
    assert f"about {factor:.3g} times the oracle" in judge(baseline * factor, oracle, baseline).sentence


def test_nan_is_told() -> None:
    _, _, oracle, baseline = triple(torch.float32)
    out = baseline.clone()
    out[0, 1] = float("nan")
    assert "nan at [0, 1] in 1 of 600" in judge(out, oracle, baseline).sentence


def test_overflow_must_be_that_of_plain_torch() -> None:
    oracle = torch.tensor([1e6, 1.0], dtype=torch.float64)
    baseline = oracle.half()
    assert judge(baseline, oracle, baseline).passed
    assert not judge(torch.tensor([6e4, 1.0]).half(), oracle, baseline).passed


def test_shape_dtype_and_kind_are_told() -> None:
    _, _, oracle, baseline = triple(torch.float32)
    assert "shape (19, 30), expected (20, 30)" in judge(baseline[1:], oracle, baseline).sentence
    assert "dtype torch.float64" in judge(baseline.double(), oracle, baseline).sentence
    assert "NoneType" in judge(None, oracle, baseline).sentence  # type: ignore[arg-type]


def test_nothing_to_compare_passes() -> None:
    empty = torch.zeros(0, 3)
    assert judge(empty, empty.double(), empty).passed
    zero = torch.zeros(4)
    assert judge(zero, zero.double(), zero).passed
    assert not judge(zero + 1e-30, zero.double(), zero).passed


def test_few_elements_are_judged_by_more_data() -> None:
    # plain torch happens to be exact here, which says nothing about its error
    oracle, baseline = torch.tensor([0.01], dtype=torch.float64), torch.tensor([0.01])
    out = baseline + 2e-7
    assert not judge(out, oracle, baseline).passed
    others = torch.randn(100, dtype=torch.float64)
    assert judge(out, oracle, baseline, more=[(others, (others + 2e-7).float())]).passed


def test_exact_means_exact() -> None:
    a = torch.arange(6).view(2, 3)
    assert judge_exact(a, a.clone()).passed
    b = a.clone()
    b[1, 2] = 9
    assert "is 9 instead of 5 at [1, 2]" in judge_exact(b, a).sentence
    assert judge_exact(torch.tensor([float("nan")]), torch.tensor([float("nan")])).passed
    assert not judge_exact(a.int(), a).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["none", "one element", "everywhere", "nan", "infinite oracle"])
def test_large_results_are_judged_as_small_ones(
    dtype: torch.dtype, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick look and the close one say the same, numbers too."""
    torch.manual_seed(0)
    oracle = torch.randn(600, 500, dtype=torch.float64)
    baseline, out = oracle.to(dtype), oracle.to(dtype).clone()
    if fault == "one element":
        out[400, 7] += 0.5
    elif fault == "everywhere":
        out = (oracle * (1 + 3 * torch.finfo(dtype).eps)).to(dtype)
    elif fault == "nan":
        out[3, 3] = float("nan")
    elif fault == "infinite oracle":
        oracle[5, 5] = float("inf")
        baseline[5, 5] = out[5, 5] = float("inf")
    quick = judge(out, oracle, baseline)
    monkeypatch.setattr(accuracy, "LARGE", 1 << 40)
    close = judge(out, oracle, baseline)
    assert quick.passed == close.passed == (fault in ("none", "infinite oracle"))
    assert quick.sentence == close.sentence
    for name in ("max_error", "max_bound", "rms_error", "rms_bound"):
        assert getattr(quick, name) == pytest.approx(getattr(close, name), rel=1e-12)
