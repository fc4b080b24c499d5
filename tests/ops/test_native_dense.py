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


def test_a_packed_matrix_tells_the_width_of_a_token() -> None:
    for name in ("native", "mkl_packed", "inductor_frozen"):
        implementation, x_TD = OPS["linear"].get(name), torch.randn(4, 16)
        if implementation.why_not(x_TD, torch.randn(7, 8), None) is None:
            assert implementation.freeze is not None
            with torch.no_grad(), pytest.raises(ValueError):
                implementation(x_TD, implementation.freeze(torch.randn(7, 8)), None)
