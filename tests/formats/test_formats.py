"""Formats of 8 and 4 bits: the worked examples of their docstrings, sizes, errors, what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from moe_routing_bench.formats.fp8_block import FP8Block
from moe_routing_bench.formats.ggml import Q4_K, Q8_0
from moe_routing_bench.formats.int4 import Int4
from moe_routing_bench.formats.int8 import Int8
from moe_routing_bench.formats.mxfp4 import MXFP4
from moe_routing_bench.formats.named import NAMES, coding_of, quantise
from moe_routing_bench.formats.stored import E2M1, Coding, Decoded, Stored, bytes_per_weight

BITS = {
    "int8": 8 + 32 / 512, "int8_g128": 8.25, "int4_g32": 4.5, "int4_g128": 4.125, "int4_g32_asym": 4.75,
    "int4_g128_asym": 4 + 24 / 128, "mxfp4": 4.25, "fp8_block": 8 + 32 / 128**2, "q8_0": 8.5, "q4_k": 4.5,
}  # fmt: skip


def column(stored: Stored) -> list[float]:
    return stored.decoded().weights()[0, :, 0].tolist()


def byte(*values: int) -> torch.Tensor:
    return torch.tensor([[values]], dtype=torch.uint8)


def test_the_worked_examples() -> None:
    code_ENK = torch.tensor([[[64, -127, 127, 64]]], dtype=torch.int8)
    int8 = Int8(code_ENK=code_ENK, scale_ENg=torch.tensor([[[2.0, 0.5]]]) / 127, group=2)
    assert column(int8) == pytest.approx([128 / 127, -2, 0.5, 32 / 127])
    int4 = Int4(code_ENH=byte(0xF0, 0x98), scale_ENg=torch.tensor([[[0.5]]]), group=32, depth=4)
    assert column(int4) == [-4, 3.5, 0, 0.5]
    assert column(replace(int4, zero_ENg=byte(1))) == [-0.5, 7, 3.5, 4]
    blocks = byte(0x72, 0x0F, *[0] * 14).unsqueeze(0)
    assert column(MXFP4(block_ENgB=blocks, exponent_ENg=byte(128), depth=32)) == [2, 12, -12, *[0] * 29]
    code_ENK = torch.ones(1, 256, 128).to(torch.float8_e4m3fn)
    code_ENK[0, 130, 3] = 1.5
    fp8 = FP8Block(code_ENK=code_ENK, scale_Enk=torch.tensor([[[2.0], [0.25]]])).decoded().weights()
    assert fp8[0, 3, [0, 127, 128, 130]].tolist() == [2, 2, 0.25, 0.375]
    assert column(Q8_0(block_ENbB=byte(0, 0x38, 1, 0xFF, *[0] * 30).unsqueeze(0), depth=3)) == [0.5, -0.5, 0]
    decoded = Decoded(
        coding=Coding(code="int8", group=2),
        code_ENK=torch.arange(1, 9, dtype=torch.int8).view(1, 2, 4),
        scale_ENg=torch.tensor([[[0.5, 1], [1, 2]]], dtype=torch.float64),
    )
    assert decoded.weights().tolist() == [[[0.5, 5], [1, 6], [3, 14], [4, 16]]]


def by_hand(block: bytes) -> list[float]:
    """Q4_K as llama.cpp's dequantize_row_q4_K reads it, number by number."""
    d, dmin = struct.unpack("<ee", block[:4])
    q, codes, made = block[4:16], block[16:], []
    for group in range(8):
        if group < 4:
            scale, minimum = q[group] & 63, q[group + 4] & 63
        else:
            scale = (q[group + 4] & 15) | ((q[group - 4] >> 6) << 4)
            minimum = (q[group + 4] >> 4) | ((q[group] >> 6) << 4)
        for i in range(32):
            code = codes[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            made.append(d * scale * code - dmin * minimum)
    return made


def test_a_block_of_q4_k_is_read_as_llama_cpp_reads_it() -> None:
    torch.manual_seed(0)
    block = torch.randint(0, 256, (1, 1, 3, 144), dtype=torch.uint8)
    block[..., [1, 3]] = torch.tensor([0x38, 0xA9], dtype=torch.uint8)  # finite d and dmin
    expected = [w for one in block[0, 0] for w in by_hand(bytes(one.tolist()))]
    assert column(Q4_K(block_ENbB=block, depth=768)) == expected
    assert column(Q4_K(block_ENbB=block, depth=700)) == expected[:700]


@pytest.mark.parametrize("name", NAMES)
def test_quantise(name: str) -> None:
    torch.manual_seed(1)
    w_EKN = torch.randn(3, 512, 256)
    w_EKN[0, :, 0] = 0
    stored = quantise(w_EKN, name)
    assert (stored.name, stored.size) == (name, (3, 512, 256))
    assert stored.decoded().coding == coding_of(name)
    assert bytes_per_weight(stored) * 8 == pytest.approx(BITS[name])
    kept = stored.decoded().weights()
    assert bool((kept[0, :, 0] == 0).all())
    error = ((kept - w_EKN.double()).square().mean() / w_EKN.double().square().mean()).sqrt()
    assert error < (0.13 if coding_of(name).bits == 4 else 0.03)
    # every weight goes to a nearest number: doing it again changes nothing, unless the largest one moved
    if name in ("int8", "int8_g128", "fp8_block", "mxfp4"):
        again = quantise(kept.float(), name).decoded().weights()
        assert torch.allclose(again, kept, rtol=1e-6)


def test_published_weights_come_back_from_bfloat16() -> None:
    """Transformers makes bfloat16 of them when it loads a model on a CPU."""
    torch.manual_seed(1)
    w_EKN = torch.randn(2, 512, 256) * torch.logspace(-3, 3, 256)
    for name, scales in (("mxfp4", 0.0), ("fp8_block", 2**-8)):
        published = quantise(w_EKN, name).decoded()
        again = quantise(published.weights(torch.bfloat16), name).decoded()
        if name == "fp8_block":  # the largest of a block is 448 in both
            assert torch.equal(again.code_ENK, published.code_ENK)
        torch.testing.assert_close(again.weights(), published.weights(), rtol=scales, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(2, 37, 19), (1, 1, 1), (2, 300, 130), (0, 32, 32)])
def test_any_size_is_stored(name: str, size: tuple[int, int, int]) -> None:
    w_EKN = torch.randn(size) if size[0] else torch.empty(size)
    if size[0] == 0:
        with pytest.raises(ValueError, match="no experts"):
            quantise(w_EKN, name)
        return
    kept = quantise(w_EKN.transpose(1, 2).contiguous().transpose(1, 2), name).decoded().weights()
    assert kept.shape == w_EKN.shape
    assert (kept - w_EKN).abs().max() < 0.6 * w_EKN.abs().max()


def test_mxfp4_takes_the_nearest_number() -> None:
    """Against a search through all 16 numbers."""
    torch.manual_seed(2)
    w_EKN = torch.randn(1, 32, 64) * torch.logspace(-30, 30, 64)
    stored = quantise(w_EKN, "mxfp4").decoded()
    number = torch.tensor(E2M1, dtype=torch.float64) * stored.scale_ENg[0]  # columns x 16
    errors = (number[:, None, :] - w_EKN[0].t().double()[:, :, None]).abs().amin(dim=-1)
    assert torch.equal((stored.weights()[0].t() - w_EKN[0].t().double()).abs(), errors)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="'int5'"):
        coding_of("int5")
    for name in ("int8_g32_asym", "int4", "int4_g0", "int4_g-32", "int4_g1000000"):
        with pytest.raises(ValueError, match="no format"):
            quantise(torch.randn(1, 32, 32), name)
    w_EKN = torch.randn(2, 64, 32)
    int8, int4, mx, fp8, q8 = (quantise(w_EKN, n) for n in ("int8", "int4_g32", "mxfp4", "fp8_block", "q8_0"))
    assert isinstance(int8, Int8) and isinstance(int4, Int4) and isinstance(mx, MXFP4)
    assert isinstance(fp8, FP8Block) and isinstance(q8, Q8_0)
    no_number = fp8.code_ENK.view(torch.uint8).clone()
    no_number[0, 0, 0] = 0xFF
    blocks = q8.block_ENbB.clone()
    blocks[0, 0, 0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    wrong = {
        "needs scales": replace(int8, scale_ENg=int8.scale_ENg[:1]),
        "int8 codes are int8": replace(int8, code_ENK=int8.code_ENK.float()),
        "needs zero points": replace(int4, zero_ENg=torch.zeros(2, 32, 1, dtype=torch.uint8)),
        "bytes of int4": replace(int4, depth=66),
        "needs blocks": replace(mx, depth=65),
        "scale is 255": replace(mx, exponent_ENg=torch.full_like(mx.exponent_ENg, 255)),
        "float8 weight is not a number": replace(fp8, code_ENK=no_number.view(torch.float8_e4m3fn)),
        "fp8_block of 2 experts": replace(fp8, scale_Enk=fp8.scale_Enk[:, :0]),
        "scale in a GGUF block is not a number": replace(q8, block_ENbB=blocks),
        "q8_0 of depth 65": replace(q8, depth=65),
    }
    for sentence, stored in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            stored.decoded()
