"""attention.triton_flash and rms_norm.triton_rows: against the oracle in every shape of a tile."""

from __future__ import annotations

import pytest
import torch

from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.models.dense_block import angles
from moe_routing_bench.ops.attention.op import op as attention_op
from moe_routing_bench.ops.rms_norm.op import op as rms_norm_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("N", "sees", "options", "rotary"),
    [
        (1, (True, 0), "splits=5", True),
        (1, (True, 21), "splits=3,block_m=16", False),
        (37, (True, 0), "splits=1", True),
        (37, (False, 0), "block_r=16,block_m=16,splits=3", False),
        (37, (False, 9), "splits=5", False),
    ],
)
def test_attention_in_parts(watched, N: int, sees: tuple[bool, int], options: str, rotary: bool) -> None:
    q_BHNA, k_BJMA, v_BJMA = torch.randn(2, 6, N, 20), torch.randn(2, 2, 67, 20), torch.randn(2, 2, 67, 20)
    by = angles(67, 20, q_BHNA) if rotary else None
    y_BHNA = attention_op.get(f"triton_flash({options})").run(q_BHNA, k_BJMA, v_BJMA, *sees, by)
    wide = [one.double() for one in (q_BHNA, k_BJMA, v_BJMA)]
    oracle = attention_op.reference(*wide, *sees, by)
    plain = attention_op.get("plain").run(q_BHNA, k_BJMA, v_BJMA, *sees, by)
    found = judge(y_BHNA, oracle, plain)
    assert found.passed, found


def test_every_part_of_the_keys_is_used_once(watched) -> None:
    """With equal keys the result is the mean of the values, whoever adds them."""
    v_BJMA = torch.arange(130.0).view(1, 1, 130, 1).expand(1, 1, 130, 16)
    zeros = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 130, 16)
    for splits in (1, 2, 3, 8):
        y = attention_op.get(f"triton_flash(splits={splits},block_m=64)").run(*zeros, v_BJMA, True, 0, None)
        assert torch.allclose(y, torch.full_like(y, 64.5))


@pytest.mark.parametrize("options", ["", "block_d=16,block_t=4,num_warps=1"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_in_tiles(watched, dtype: torch.dtype, options: str) -> None:
    x_TD, norm_D = torch.randn(11, 2, 40).to(dtype)[:, 1], torch.randn(80).to(dtype)[::2]
    y_TD = rms_norm_op.get(f"triton_rows({options})").run(x_TD, norm_D, 1e-6)
    oracle = rms_norm_op.reference(x_TD.double(), norm_D.double(), 1e-6)
    found = judge(y_TD, oracle, rms_norm_op.reference(x_TD, norm_D, 1e-6))
    assert found.passed, found
