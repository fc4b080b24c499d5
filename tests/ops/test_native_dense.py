"""attention, linear and rms_norm in C++ at sizes where they go other ways than in the kit: keys split among
threads, results streamed past the caches, a matrix read where it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_routing_bench import all_ops
from moe_routing_bench.core import cpp
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.formats.named import NAMES
from moe_routing_bench.ops.linear import native as linear
from moe_routing_bench.ops.linear.op import linear as apply_linear

pytestmark = pytest.mark.slow

OPS = all_ops()
FLOATS = (torch.float32, torch.bfloat16)

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.manual_seed(0)
    with torch_threads(2):
        yield


def hold(op: str, y: Tensor, *args: object) -> None:
    wide = [one.double() if isinstance(one, Tensor) else one for one in args]
    found = judge(y, OPS[op].reference(*wide), OPS[op].reference(*args))
    assert found.passed, found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("H", "J", "N", "M", "sees"),
    [
        (4, 2, 1, 1500, (True, 0)),  # few queries: parts of the keys, merged
        (2, 1, 3, 1500, (True, 700)),
        (1, 1, 1, 1500, (False, 0)),
        (1, 1, 100, 300, (True, 0)),  # many queries of one head: parts of the queries
        (3, 1, 100, 300, (False, 40)),
    ],
)
def test_attention_in_parts(
    H: int, J: int, N: int, M: int, sees: tuple[bool, int], dtype: torch.dtype
) -> None:
    q, k, v = (3 * torch.randn(1, heads, n, 40) for heads, n in ((H, N), (J, M), (J, M)))
    args = q.to(dtype), k.to(dtype), v.to(dtype), *sees, None
    hold("attention", OPS["attention"].get("native")(*args), *args)


@pytest.mark.parametrize("name", ["native", "native_reused", "native_fresh"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm_that_is_streamed(name: str, dtype: torch.dtype) -> None:
    x_TD, norm_D = torch.randn(4500, 1056).to(dtype)[:, :1024], torch.randn(1024).to(dtype)
    args = x_TD, norm_D, 1e-6
    assert x_TD.shape.numel() * dtype.itemsize >= 2**23
    with torch.no_grad():
        hold("rms_norm", OPS["rms_norm"].get(name)(*args), *args)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_in_panels(T: int, packed: bool, dtype: torch.dtype) -> None:
    native = OPS["linear"].get("native")
    x_TD, w_FD, b_F = (torch.randn(*shape).to(dtype) for shape in ((T, 96), (333, 64), (333,)))
    x_TD = x_TD[:, :64]
    assert native.freeze is not None
    with torch.no_grad():
        y_TF = native(x_TD, native.freeze(w_FD) if packed else w_FD, b_F)
    hold("linear", y_TF, x_TD, w_FD, b_F)


@pytest.mark.parametrize("T", [1, 4])
def test_a_packed_matrix_is_nearly_as_precise_as_torch(T: int) -> None:
    """The case with most error: one long running sum where torch has sixteen short ones."""
    native = OPS["linear"].get("native")
    x_TD, w_FD = torch.randn(T, 256), torch.randn(4100, 256)
    assert native.freeze is not None

    def error(y_TF: Tensor) -> float:
        return float((y_TF.double() - x_TD.double() @ w_FD.double().T).square().mean().sqrt())

    with torch.no_grad():
        assert error(native(x_TD, native.freeze(w_FD), None)) < 2 * error(
            torch.nn.functional.linear(x_TD, w_FD)
        )


STORES = ["bfloat16", *NAMES, *(f"{name}_a8" for name in NAMES if name != "fp8_block")]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_with_a_stored_matrix(T: int, store: str, dtype: torch.dtype) -> None:
    if (store, dtype) == ("bfloat16", torch.bfloat16):
        return
    native = OPS["linear"].get(f"native(store={store})")
    x_TD, w_FD, b_F = (torch.randn(*shape).to(dtype) for shape in ((T, 130), (333, 100), (333,)))
    x_TD = x_TD[:, :100]
    assert native.freeze and native.stored and native.plain
    packed, kept_FD = native.freeze(w_FD), native.stored(w_FD)
    y_TF = native(x_TD, packed, b_F)
    oracle, baseline = (native.plain(x_TD.to(to), kept_FD.to(to), b_F.to(to)) for to in (torch.double, dtype))
    verdict = judge(y_TF, oracle, baseline)
    assert verdict.passed, verdict
    assert torch.equal(native.run(x_TD, w_FD, b_F), y_TF)
    assert (kept_FD - w_FD).abs().max() > 0


@pytest.mark.parametrize("store", ["int8_a8", "int4_g32_asym", "fp8_block"])
def test_a_large_matrix_is_rounded_in_strips(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w_FD = torch.randn(300, 100)
    whole, kept_FD = linear.freeze(w_FD, store=store), linear.stored(w_FD, store=store)
    monkeypatch.setattr(linear, "AT_ONCE", 128)
    assert torch.equal(linear.freeze(w_FD, store=store).panels, whole.panels)
    assert torch.equal(linear.stored(w_FD, store=store), kept_FD)


def test_a_packed_matrix_refuses_what_it_cannot_do() -> None:
    native, rounded = (OPS["linear"].get(name) for name in ("native", "native(store=int8)"))
    x_TD, w_FD, b_F = torch.randn(4, 16), torch.randn(7, 16), torch.randn(7)
    assert native.freeze and rounded.freeze
    packed = native.freeze(w_FD)
    for leaf in (x_TD, b_F):
        leaf.requires_grad_()
        with pytest.raises(NotImplementedError, match="no gradients"):
            native(x_TD, packed, b_F)
        with torch.no_grad():
            assert native(x_TD, packed, b_F).shape == (4, 7)
        leaf.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"packed for linear.native\(store=int8\)"):
        native(x_TD, rounded.freeze(w_FD), b_F)
    with pytest.raises(NotImplementedError, match="freeze"):
        rounded(x_TD, w_FD, b_F)
    with pytest.raises(NotImplementedError, match="float16"):
        rounded.freeze(w_FD.half())
    torch.testing.assert_close(apply_linear(x_TD, rounded.freeze(w_FD)), x_TD @ w_FD.t(), rtol=0.1, atol=0.1)


def test_a_packed_matrix_tells_the_width_of_a_token() -> None:
    for name in ("native", "mkl_packed", "inductor_frozen"):
        implementation, x_TD = OPS["linear"].get(name), torch.randn(4, 16)
        if implementation.why_not(x_TD, torch.randn(7, 8), None) is None:
            assert implementation.freeze is not None
            with torch.no_grad(), pytest.raises(ValueError):
                implementation(x_TD, implementation.freeze(torch.randn(7, 8)), None)
