"""topk in C++: the choices of a stable sort, for all dtypes, ties and not-a-number, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_routing_bench import all_ops
from moe_routing_bench.conformance.check import cells_of, check
from moe_routing_bench.core import cpp
from moe_routing_bench.ops.topk import native as launcher

pytestmark = pytest.mark.slow

TOPK = all_ops()["topk"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = ("", "avx2")
HARD = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40])

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)


def scores_of(T: int, E: int, dtype: torch.dtype) -> Tensor:
    """Many are equal, and a tenth is hard."""
    score_TE = torch.randn(T, E).mul(2).round().div(2)
    hard_TE = HARD[torch.randint(len(HARD), (T, E))]
    return torch.where(torch.rand(T, E) < 0.1, hard_TE, score_TE).to(dtype)


def assert_same(score_TE: Tensor, K: int, level: str = "") -> None:
    value_TK, expert_TK = TOPK.get(f"native(level={level})" if level else "native")(score_TE, K)
    best_TK, best_expert_TK = TOPK.reference(score_TE, K)
    assert torch.equal(expert_TK, best_expert_TK)
    bits = torch.int32 if score_TE.dtype == torch.float32 else torch.int16
    assert torch.equal(value_TK.view(bits), best_TK.contiguous().view(bits))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_are_those_of_a_stable_sort(dtype: torch.dtype, level: str) -> None:
    """Whole and broken vectors of tokens and of experts, and more experts than are compared at once."""
    torch.manual_seed(0)
    for T in (0, 1, 3, 4, 16, 17, 37):
        for E in (1, 7, 8, 16, 40, 64, 65, 200):
            for K in (1, 2, 7, 8, 16):
                if K <= E:
                    assert_same(scores_of(T, E, dtype), K, level)


def test_any_strides() -> None:
    score_TE = scores_of(40, 48, torch.float32)
    for other in (
        score_TE.t(),
        score_TE[:, :20],
        score_TE[::2, 3:],
        score_TE[:, ::2],
        score_TE[:1].expand(9, -1),
    ):
        assert_same(other, 8)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "STEPS_FOR_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for T in (1, 64, 1000, 4099):
        assert_same(scores_of(T, 24, torch.bfloat16), 4)


def test_gradients_reach_the_chosen_scores_twice() -> None:
    score_TE = torch.randn(9, 12, requires_grad=True)
    (value_TK, _), (best_TK, _) = (TOPK.get(name)(score_TE, 3) for name in ("native", "sort"))
    got, want = (
        torch.autograd.grad(out.square().sum(), score_TE, create_graph=True)[0] for out in (value_TK, best_TK)
    )
    assert torch.equal(got, want)
    (again,) = torch.autograd.grad(got.square().sum(), score_TE)
    assert torch.equal(again != 0, want != 0)


@pytest.mark.parametrize(
    "score_TE,K", [(torch.rand(2, 40), 17), (torch.rand(2, 4), 5), (torch.rand(2, 4).double(), 1)]
)
def test_what_it_refuses(score_TE: Tensor, K: int) -> None:
    assert TOPK.get("native").why_not(score_TE, K) is not None
    with pytest.raises(NotImplementedError):
        TOPK.get("native")(score_TE, K)


def test_avx2_passes_the_kit() -> None:
    cells = [cell for cell in cells_of("topk", "native(level=avx2)") if not cell.case.beyond_int32]
    failed = [outcome for outcome in map(check, cells) if outcome.status == "failed"]
    assert cells and not failed, failed[:3]
