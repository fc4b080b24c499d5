"""Decides what counts as correct; tests and benchmark use the same judge.

The error of a result against a float64 oracle may be at most twice that of plain torch in the same dtype,
plus a floor. This bounds the largest error, which shows a single wrong element, and the root mean square,
which shows a loss of precision in all elements. Integers and copies must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FACTOR = 2.0
# The floor, in units of the dtype's eps times the oracle's size. A correctly rounded result has an error of
# up to 0.5 eps per element and 0.29 eps in root mean square, even where plain torch happens to be exact. Sums
# in another order have a little more: a floor of 1.0 sometimes rejected a matmul in place of a sum.
FLOOR_MAX = 2.0
FLOOR_RMS = 0.5
# with 2 elements, 2 % of correct results exceed the bound of the mean square; with 32, fewer than 1 in 10^9
RMS_ELEMENTS = 32
LARGE = 1 << 18  # a result with this many elements is first checked piece by piece
PIECE = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a result passed, and the numbers behind that. `sentence` says what is wrong, or is empty.

    A float32 result that is wrong by 0.5 in one of four elements, where plain torch is exact:
      Verdict(passed=False, fault="value", max_error=0.5, max_bound=4.8e-07, rms_error=0.25, rms_bound=6e-08,
              sentence="largest error 0.5 at [3] (got 2.5, oracle 2), allowed 4.8e-07; wrong in 1 of 4 ...")
    """

    passed: bool
    fault: str = ""  # structure, shape, dtype, value or nonfinite
    sentence: str = ""
    max_error: float = 0.0
    max_bound: float = 0.0
    rms_error: float = 0.0
    rms_bound: float = 0.0
    rms_true: float = 0.0  # root mean square of the oracle

    @property
    def relative_error(self) -> float | None:
        return self.rms_error / self.rms_true if self.rms_true else None

    def of(self, what: str) -> Verdict:
        """The same verdict; its sentence names the part of the result that it is about."""
        return self if self.passed else replace(self, sentence=f"{what}: {self.sentence}")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a result is compared with: the reference in float64 (oracle) and in the dtype itself (baseline).

    more(n)   (oracle, baseline) of the same call on other data, if a result of n elements needs them
    ties      what the implementation promises about equal scores (topk)
    """

    oracle: Any
    baseline: Any
    more: Callable[[int], Sequence[tuple[Any, Any]]] = lambda n: ()
    ties: str = "lower id first"
    few_rows: bool = False  # so few that their mean square error is chance: only the largest error is judged


def judge_result(out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
    """Judges an operation whose result is one tensor in which every element matters."""
    more = expected.more(out.numel()) if isinstance(out, Tensor) else ()
    return [judge(out, expected.oracle, expected.baseline, more, few_rows=expected.few_rows)]


@dataclass(frozen=True, kw_only=True)
class GradientOf:
    """Which argument of a call a gradient belongs to, and what is known about the call.

    GradientOf(name="y_RD", args={"y_RD": ..., "plan": ...}, out=y_TD, d_out=dy_TD)
    """

    name: str
    args: Mapping[str, Any]
    out: Any  # what the call returned, judged before
    d_out: Tensor  # the upstream gradient of `out`, in float64


def judge_gradient(of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
    """Judges a gradient in which every element matters."""
    more = expected.more(gradient.numel())
    return [judge(gradient, expected.oracle, expected.baseline, more, few_rows=expected.few_rows)]


def wrong_structure(sentence: str) -> Verdict:
    return Verdict(passed=False, fault="structure", sentence=sentence)


def judge(
    out: Tensor, oracle: Tensor, baseline: Tensor, more: Sequence[tuple[Tensor, Tensor]] = (), *,
    few_rows: bool = False,
) -> Verdict:  # fmt: skip
    """Judges `out` by the oracle, the same in float64, and the baseline, plain torch in the dtype of `out`.

    more: (oracle, baseline) of the same computation on other data. A result with few elements needs it,
    because plain torch's error on few elements may be small by chance.

    >>> oracle = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    >>> verdict = mrb.judge(oracle.float() + 0.5, oracle, oracle.float())
    >>> verdict.passed, verdict.max_error
    (False, 0.5)
    """
    if (mismatch := _type_mismatch(out, baseline)) is not None:
        return mismatch
    if out.numel() == 0:
        return Verdict(passed=True)
    if out.numel() >= LARGE and not more and (clear := _clearly_right(out, oracle, baseline)) is not None:
        return clear
    got, true, plain = (x.detach().to("cpu", torch.float64) for x in (out, oracle, baseline))
    finite = true.isfinite() & plain.isfinite()
    broken = finite & ~got.isfinite()
    if bool(broken.any()):
        place = _first(broken)
        return Verdict(
            passed=False,
            fault="nonfinite",
            max_error=float("inf"),
            sentence=f"{got[tuple(place)].item()} at {place} in {_share(broken)} where the oracle is finite: "
            "memory that was never written, or padding that should not have been read",
        )
    # where the true result overflows the dtype, infinities and NaN must be the same as in plain torch
    if not torch.equal(got[~finite].nan_to_num(0.5), plain[~finite].nan_to_num(0.5)):
        return Verdict(
            passed=False, fault=_fault(out), sentence="not the same infinities or NaN as plain torch"
        )
    got, true, plain = got[finite], true[finite], plain[finite]
    if got.numel() == 0:
        return Verdict(passed=True)
    error, plain_error = (got - true).abs(), (plain - true).abs()
    for other_true, other_plain in more:
        other_true, other_plain = (x.detach().to("cpu", torch.float64) for x in (other_true, other_plain))
        other_error = (other_plain - other_true).abs()
        # exact zeros are padding and would lower the mean
        telling = other_error.isfinite() & ((other_true != 0) | (other_plain != 0))
        plain_error = torch.cat((plain_error, other_error[telling]))
    max_bound, rms_bound = _bounds(
        out.dtype, plain_error.max(), _rms(plain_error), true.abs().max(), _rms(true)
    )
    numbers: dict[str, Any] = {
        "max_error": error.max().item(),
        "max_bound": max_bound.item(),
        "rms_error": _rms(error).item(),
        "rms_bound": rms_bound.item(),
        "rms_true": _rms(true).item(),
    }
    if numbers["max_error"] > numbers["max_bound"]:
        full = torch.zeros(finite.shape, dtype=torch.float64)
        full[finite] = error
        place = [int(i) for i in torch.unravel_index(full.argmax(), full.shape)]
        at = error.argmax()
        sentence = (
            f"largest error {error[at].item():.3g} at {place} (got {got[at].item():.4g}, oracle "
            f"{true[at].item():.4g}), allowed {max_bound.item():.3g}; wrong in {_share(error > max_bound)}"
            f"{_common_ratio(got, true)}"
        )
        return Verdict(passed=False, fault="value", sentence=sentence, **numbers)
    if numbers["rms_error"] > numbers["rms_bound"] and error.numel() >= RMS_ELEMENTS and not few_rows:
        # narrow dtypes must be summed in float32; in float32 itself one long chain loses as much precision
        how = f"in {out.dtype}" if torch.finfo(out.dtype).bits < 32 else "one after another in one long chain"
        sentence = (
            f"precision is lost everywhere: root mean square error {numbers['rms_error']:.3g}, allowed "
            f"{numbers['rms_bound']:.3g}; is something summed {how}?"
        )
        return Verdict(passed=False, fault="value", sentence=sentence, **numbers)
    return Verdict(passed=True, **numbers)


def _bounds(
    dtype: torch.dtype, plain_error: Tensor, plain_rms: Tensor, size: Tensor, size_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """The largest error and the root mean square that are allowed: twice plain torch's, plus the floor."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    return (
        FACTOR * plain_error + FLOOR_MAX * info.eps * size + smallest,
        FACTOR * plain_rms + FLOOR_RMS * info.eps * size_rms + smallest,
    )


def _clearly_right(out: Tensor, oracle: Tensor, baseline: Tensor) -> Verdict | None:
    """The verdict on a large result that is finite and within all bounds; None if it needs a closer look.

    It works piece by piece, so that temporary values stay in the cache: 10x faster.
    """
    parts = (x.detach().to("cpu").reshape(-1).split(PIECE) for x in (out, oracle, baseline))
    highest, squares = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for got, true, plain in zip(*parts, strict=True):
        true = true.double()
        values = (got.double().sub_(true), plain.double().sub_(true), true)  # error, plain error, size
        highest = torch.maximum(highest, torch.stack([value.abs().max() for value in values]))
        squares += torch.stack([value.dot(value) for value in values])
    # a NaN or an infinity anywhere is one here too
    if not bool(highest.isfinite().all() & squares.isfinite().all()):
        return None
    (error, plain_error, size), (rms, plain_rms, size_rms) = highest, (squares / out.numel()).sqrt()
    max_bound, rms_bound = _bounds(out.dtype, plain_error, plain_rms, size, size_rms)
    if error > max_bound or rms > rms_bound:
        return None
    return Verdict(
        passed=True, max_error=error.item(), max_bound=max_bound.item(), rms_error=rms.item(),
        rms_bound=rms_bound.item(), rms_true=size_rms.item(),
    )  # fmt: skip


def judge_exact(out: Tensor, expected: Tensor) -> Verdict:
    """Judges structure and copies: all elements must be equal. The sentence shows the first wrong one."""
    if (mismatch := _type_mismatch(out, expected)) is not None:
        return mismatch
    same = (out == expected) | ((out != out) & (expected != expected))
    if bool(same.all()):
        return Verdict(passed=True)
    place = _first(~same)
    got, want = out[tuple(place)].item(), expected[tuple(place)].item()
    return Verdict(
        passed=False,
        fault=_fault(out),
        max_error=float("inf"),
        sentence=f"must be exact, but is {got:g} instead of {want:g} at {place}; wrong in {_share(~same)}",
    )


def _type_mismatch(out: Tensor, expected: Tensor) -> Verdict | None:
    if not isinstance(out, Tensor):
        return wrong_structure(f"returned {type(out).__name__} instead of a tensor")
    if out.shape != expected.shape:
        sentence = f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
        return Verdict(passed=False, fault="shape", sentence=sentence)
    if out.dtype != expected.dtype:
        return Verdict(passed=False, fault="dtype", sentence=f"dtype {out.dtype}, expected {expected.dtype}")
    return None


def _fault(out: Tensor) -> str:
    return "value" if bool(out.isfinite().all()) else "nonfinite"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _first(wrong: Tensor) -> list[int]:
    return wrong.nonzero()[0].tolist()


def _share(wrong: Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} elements"


def _common_ratio(got: Tensor, true: Tensor) -> str:
    """A factor that most elements share is a hint: 0.5 if one of two pairs is missing, 2 if it is doubled."""
    large = true.abs() > 0.1 * true.abs().max()
    ratio = got[large] / true[large]
    middle = ratio.median()
    alike = ((ratio - middle).abs() < 0.02 * middle.abs()).double().mean()
    if bool(alike > 0.8) and abs(middle.item() - 1) > 0.05 and ratio.numel() > 2:
        return f"; about {middle.item():.3g} times the oracle in most places"
    return ""
