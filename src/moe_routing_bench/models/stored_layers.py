"""Reads the experts of one layer as a quantised checkpoint stores them. No weight is rounded or unpacked.

    experts = read_stored("gpt-oss-20b", 3);  experts -> QuantisedExperts;  native.freeze_stored(experts)

It reads, by quant_method in config.json (names come after model.layers.{i}.mlp.experts.):

    mxfp4               gate_up_proj_blocks and _scales, the same of down_proj, both with biases (gpt-oss)
    fp8                 {e}.gate_proj.weight in float8 with weight_scale_inv, blocks of 128 x 128 (DeepSeek)
    compressed-tensors  {e}.gate_proj.weight in int8 with weight_scale (int-quantized), or weight_packed in
                        int32 with weight_scale, perhaps weight_zero_point (pack-quantized), 4 or 8 bits

A checkpoint is not trusted: the bounds of checkpoint.py hold here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.core.text import short
from moe_routing_bench.formats.fp8_block import BLOCK, FP8Block
from moe_routing_bench.formats.int4 import Int4
from moe_routing_bench.formats.int8 import Int8
from moe_routing_bench.formats.mxfp4 import GROUP, MXFP4
from moe_routing_bench.formats.stored import Stored, joined, nibbles, side_by_side
from moe_routing_bench.models.checkpoint import MAX_CONFIG_BYTES, About, Tensors, opened, read_json

# compressed-tensors: format, bits, symmetric
READ = (
    ("int-quantized", 8, True),
    ("pack-quantized", 8, True),
    ("pack-quantized", 4, True),
    ("pack-quantized", 4, False),
)


# what a checkpoint may have beside a matrix's weight, or instead of it
PARTS = ("weight_packed", "weight_scale", "weight_scale_inv")
NARROW = ("F8_E4M3", "I8")


class Matrices(NamedTuple):
    """How a checkpoint stores matrices of N columns and depth K.

    slices(name, N, K)        checks the shapes and types of a matrix's tensors and returns them unread
    stored(N, K, *tensors)    makes one expert of the tensors
    """

    slices: Callable[[str, int, int], tuple[Any, ...]]
    stored: Callable[..., Stored]


def read_stored(folder: Path | str, layer: int) -> QuantisedExperts:
    """Raises ValueError in one sentence if the folder is damaged or not a checkpoint, and NotImplementedError
    with the reason if we cannot read the way it is stored."""
    folder = Path(folder)
    config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    quantisation(folder, config)
    about = About(folder, config, layer)
    with opened(folder) as tensors:
        return layer_of(about, tensors)()


def quantisation(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the quantization_config if we read its quant_method."""
    how = config.get("quantization_config")
    method = how.get("quant_method") if isinstance(how, dict) else None
    if not isinstance(how, dict) or str(method) not in METHODS:
        raise NotImplementedError(
            f"{folder} has quant_method {short(method)}; this reads mxfp4, fp8 and compressed-tensors"
        )
    return how


def layer_of(about: About, tensors: Tensors) -> Callable[[], QuantisedExperts]:
    """Checks names, shapes and types of a layer's experts, and returns a function that reads their numbers
    while the files are open."""
    how = quantisation(about.path.parent, about.config)
    read = METHODS[str(how["quant_method"])](about, tensors, how)
    return lambda: read().validate()


def linear_of(
    path: Path, tensors: Tensors, how: Mapping[str, Any], name: str, shape: tuple[int, int]
) -> Callable[[torch.dtype], Tensor] | None:
    """Returns a function that reads the weight of one linear layer, for example of attention, in a dtype,
    rounded as Transformers rounds it; None if it is not quantised. Checks now, like layer_of."""
    parts = (f"{name}.{part}" in tensors for part in PARTS)
    if not any(parts) and tensors.type_of(f"{name}.weight") not in NARROW:
        return None
    matrices = {"fp8": _fp8_matrices, "compressed-tensors": _compressed_matrices}.get(how["quant_method"])
    if matrices is None:
        raise NotImplementedError(
            f"{path}: {name} is quantised, which {short(how['quant_method'])} is not read for"
        )
    slices, stored = matrices(path, tensors, how)
    its = slices(name, *shape)

    def read(dtype: torch.dtype) -> Tensor:
        tensors_read = [part[:] for part in its]
        decoded = stored(*shape, *tensors_read).decoded()
        # the product is rounded once: fp8 in float32, compressed-tensors in the dtype of its scales; a zero
        # point is subtracted before it, which float64 does not round
        product = torch.float32 if how["quant_method"] == "fp8" else tensors_read[1].dtype
        wide = torch.float32 if decoded.offset_ENg is None else torch.float64
        return decoded.weights(wide)[0].t().to(product).to(dtype).contiguous()

    return read


def _mxfp4(about: About, tensors: Tensors, how: Mapping[str, Any]) -> Callable[[], QuantisedExperts]:
    E, D, F = about.E, about.D, about.F
    if D % GROUP or F % GROUP:
        raise ValueError(f"{about.path}: MXFP4 needs widths that are multiples of {GROUP}, not {D} and {F}")
    home, byte = f"{home_of(about)}.experts", ("U8",)
    sizes = {"gate_up_proj": (2 * F, D), "down_proj": (D, F)}
    slices = {
        part: (
            tensors.slice(f"{home}.{part}_blocks", (E, N, K // GROUP, GROUP // 2), byte),
            tensors.slice(f"{home}.{part}_scales", (E, N, K // GROUP), byte),
            tensors.slice(f"{home}.{part}_bias", (E, N)),
        )
        for part, (N, K) in sizes.items()
    }

    def read() -> QuantisedExperts:
        made, biases = {}, {}
        for part, (block, exponent, bias) in slices.items():
            # gate and up alternate in the file and are halves here
            order = torch.arange(D) if part == "down_proj" else _halves(2 * F)
            made[part] = MXFP4(
                block_ENgB=block[:][:, order], exponent_ENg=exponent[:][:, order], depth=sizes[part][1]
            )
            biases[part] = bias[:][:, order]
        return QuantisedExperts(
            w_in=made["gate_up_proj"], w_out=made["down_proj"], b_in_EG=biases["gate_up_proj"],
            b_out_ED=biases["down_proj"], activation=about.activation,
        )  # fmt: skip

    return read


def _halves(n: int) -> Tensor:
    """0, 2, 4, .. 1, 3, 5, .."""
    return torch.cat((torch.arange(0, n, 2), torch.arange(1, n, 2)))


def _fp8(about: About, tensors: Tensors, how: Mapping[str, Any]) -> Callable[[], QuantisedExperts]:
    matrices = _fp8_matrices(about.path, tensors, how)
    if about.F % BLOCK:
        raise NotImplementedError(
            f"{about.path}: a block of scales would hold gate and up columns; this reads widths of experts "
            f"that are multiples of {BLOCK}, not {about.F}"
        )
    return _of_experts(about, matrices)


def _fp8_matrices(path: Path, tensors: Tensors, how: Mapping[str, Any]) -> Matrices:
    if how.get("weight_block_size") != [BLOCK, BLOCK]:
        raise NotImplementedError(
            f"{path} has weight_block_size {short(how.get('weight_block_size'))}; this reads "
            f"[{BLOCK}, {BLOCK}]"
        )

    def slices(name: str, N: int, K: int) -> tuple[Any, ...]:
        blocks = -(-N // BLOCK), -(-K // BLOCK)
        return (
            tensors.slice(f"{name}.weight", (N, K), ("F8_E4M3",)),
            tensors.slice(f"{name}.weight_scale_inv", blocks, ("F32", "BF16")),
        )

    def stored(N: int, K: int, code_NK: Tensor, scale_nk: Tensor) -> Stored:
        return FP8Block(code_ENK=code_NK[None], scale_Enk=scale_nk[None])

    return Matrices(slices, stored)


def _compressed(about: About, tensors: Tensors, how: Mapping[str, Any]) -> Callable[[], QuantisedExperts]:
    return _of_experts(about, _compressed_matrices(about.path, tensors, how))


def _compressed_matrices(path: Path, tensors: Tensors, how: Mapping[str, Any]) -> Matrices:
    weights = _weights_of(path, how)
    form: Any = how.get("format")
    bits: Any = weights.get("num_bits")
    group: Any = weights.get("group_size")
    strategy, symmetric = weights.get("strategy"), weights.get("symmetric", True)
    channel = strategy == "channel"
    grouped = strategy == "group" and type(group) is int and 0 < group <= 1 << 16
    whole_numbers = (form, bits, symmetric) in READ and weights.get("type", "int") == "int"
    if not whole_numbers or not (channel or grouped):
        raise NotImplementedError(
            f"{path}: {short(form)} with weights {short(dict(weights))} is not read here; int8 and "
            "int4 by channel or group are, int4 also with zero points"
        )
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise NotImplementedError(f"{path}: groups that are not in order (actorder) are not read here")

    def slices(name: str, N: int, K: int) -> tuple[Any, ...]:
        if not channel and K % group:
            raise ValueError(f"{path}: the depth {K} of {name} is not cut into groups of {group}")
        groups = 1 if channel else K // group
        code, packed = ("weight", (N, K)), ("weight_packed", (N, -(-K * bits // 32)))
        last, shape = code if form == "int-quantized" else packed
        parts = (
            tensors.slice(f"{name}.{last}", shape, ("I8",) if last == "weight" else ("I32",)),
            tensors.slice(f"{name}.weight_scale", (N, groups)),
        )
        if last == "weight_packed" and f"{name}.weight_shape" in tensors:
            written = tensors.slice(f"{name}.weight_shape", (2,), ("I64", "I32"))[:].tolist()
            if written != [N, K]:
                raise ValueError(f"{name}.weight_shape says {written}; config.json calls for {[N, K]}")
        if symmetric:
            return parts
        zeros = -(-N * bits // 32), groups
        return *parts, tensors.slice(f"{name}.weight_zero_point", zeros, ("I32",))

    def stored(N: int, K: int, code_NK: Tensor, scale_Ng: Tensor, zero_ng: Tensor | None = None) -> Stored:
        if form == "pack-quantized":
            code_NK = from_words(code_NK, bits)[:, :K]
        if bits == 8:
            code_NK = code_NK if form == "int-quantized" else (code_NK.int() - 128).to(torch.int8)
            return Int8(code_ENK=code_NK[None], scale_ENg=scale_Ng[None], group=None if channel else group)
        zero_ENg = None if zero_ng is None else from_words(zero_ng.t(), bits)[:, :N].t()[None]
        return Int4(
            code_ENH=nibbles(code_NK)[None], scale_ENg=scale_Ng[None], zero_ENg=zero_ENg,
            group=K if channel else group, depth=K,
        )  # fmt: skip

    return Matrices(slices, stored)


def _weights_of(path: Path, how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what compressed-tensors says about the weights; all layers must be stored in one way."""
    groups = how.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise NotImplementedError(f"{path} does not have one config_group with weights, as is read here")
    return weights


def from_words(word_Nw: Tensor, bits: int) -> Tensor:
    """Unpacks words of 32 bits to codes, the first in the lowest bits: 0x21 -> 1, 2, 0, .. for 4 bits."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((word_Nw.unsqueeze(-1) >> shift) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)


def _of_experts(about: About, matrices: Matrices) -> Callable[[], QuantisedExperts]:
    """Reads three matrices for each expert. All shapes and types are checked before a number is read."""
    D, F = about.D, about.F
    sizes = dict(zip(about.family.parts, ((F, D), (F, D), (D, F)), strict=True))
    home = f"{home_of(about)}.experts"
    experts = [
        {part: matrices.slices(f"{home}.{e}.{part}", N, K) for part, (N, K) in sizes.items()}
        for e in range(about.E)
    ]

    def read() -> QuantisedExperts:
        gate, up, down = (
            [matrices.stored(*sizes[part], *(tensor[:] for tensor in expert[part])) for expert in experts]
            for part in sizes
        )
        w_in = side_by_side(list(zip(gate, up, strict=True)))
        return QuantisedExperts(w_in=w_in, w_out=joined(down), activation=about.activation)

    return read


METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "compressed-tensors": _compressed}


def home_of(about: About) -> str:
    """Returns the checkpoint's name of the experts' block: model.layers.3.mlp."""
    return f"model.layers.{about.layer}.{about.family.module}"
