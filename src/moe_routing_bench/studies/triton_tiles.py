"""Compiles the tiles of tuned files without a GPU: with vLLM's kernel if it is installed, else with ours.

From vLLM's source only the kernel and the function it calls are taken, so that nothing of vLLM is imported.
This file needs triton.
"""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import triton
import triton.language as tl

from moe_routing_bench.ops.gpu import Compilation
from moe_routing_bench.ops.grouped_gemm import triton_blocks
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies.compiled import Compiled
from moe_routing_bench.studies.triton_code import compile_kernel
from moe_routing_bench.studies.tuned_audit import is_doubtful, stages_of
from moe_routing_bench.studies.tuned_files import Row, TunedName

Which: TypeAlias = Literal["doubtful", "all"]
VLLM_FILE = "model_executor/layers/fused_moe/fused_moe.py"
VLLM_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "gfx942")
TILE = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "SPLIT_K", "USE_TMA"}
# what a loader's dtype means for x and for the weights; int4 has a kernel of its own
POINTERS = {
    "": ("bf16", "bf16"), "fp8_w8a8": ("fp8", "fp8"), "int8_w8a8": ("i8", "i8"), "int8_w8a16": ("bf16", "i8"),
}  # fmt: skip
SCALE_STRIDES = tuple(f"stride_{end}" for end in ("asm", "ask", "bse", "bsk", "bsn", "bbe", "bbn"))
FP8 = {"cuda": "fp8e4nv", "hip": "fp8e4b8"}
DEPTH, WIDTH, EXPERTS = 4096, 2048, 8  # of the layer; our kernel has them as constants


class TileCompiler:
    """Compiles each tile once, or only those that the formulas leave in doubt.

    compiler(name, row, target) answers what is wrong; `kernel` says whose kernel it is.
    """

    def __init__(self, which: Which = "all", doing: Callable[[str], None] = lambda _: None) -> None:
        vllm = _vllm_kernels()
        self.kernel = "our grouped_gemm.triton_blocks" if vllm is None else "vLLM's fused_moe_kernel"
        self.triton: str = triton.__version__
        self.compiled: dict[tuple[Any, ...], tuple[str, str] | None] = {}
        self.not_compiled: set[tuple[Any, ...]] = set()
        self.not_doubtful: set[tuple[Any, ...]] = set()
        self._vllm, self._which, self._doing = vllm, which, doing

    def __call__(self, name: TunedName, row: Row, target: Target) -> tuple[str, str] | None:
        # GROUP_SIZE_M changes the order of tiles, not what a tile needs
        fields = row.model_dump(exclude={"GROUP_SIZE_M", "SPLIT_K"})
        key = target.name, name.dtype, name.block_shape, name.per_channel, *fields.values()
        if key in self.compiled or key in self.not_compiled:
            return self.compiled.get(key)
        if self._which == "doubtful" and not is_doubtful(row, name, target):
            self.not_doubtful.add(key)
            return None
        make = _of_ours if self._vllm is None else _of_vllm
        # SGLang's kernel takes other paths with TMA
        is_possible = target.name in ARCHITECTURES and not row.USE_TMA
        compilation = make(self._vllm, name, row, target) if is_possible else None
        if compilation is None:
            self.not_compiled.add(key)
            return None
        self._doing(f"compiling tile {len(self.compiled) + 1}: {row.tile} for {target.name}")
        self.compiled[key] = _whats_wrong(compile_kernel(compilation, target), row, target)
        return self.compiled[key]


def _whats_wrong(code: Compiled, row: Row, target: Target) -> tuple[str, str] | None:
    where = f"{row.tile}, {row.num_warps} warps, {stages_of(row, target)} stages on {target.name}"
    if refused := [sentence for sentence in code.wrong if sentence.startswith("does not compile")]:
        return "does not compile", f"{where}: {refused[0]}"
    if code.shared_bytes > target.shared_per_program:
        have = target.shared_per_program // 1024
        return "too large", f"{where}: compiled, it needs {code.shared_bytes // 1024} KiB of {have}"
    if code.spill_bytes:
        return "spills", f"{where}: compiled, it spills {code.spill_bytes} bytes of registers"
    return None


def _vllm_kernels() -> ModuleType | None:
    found = importlib.util.find_spec("vllm")
    places = [] if found is None else [Path(p) / VLLM_FILE for p in found.submodule_search_locations or ()]
    for path in places:
        if path.is_file():
            return _cut_out(path.read_text())
    return None


def _cut_out(source: str) -> ModuleType:
    lines = source.splitlines()
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") in VLLM_FUNCTIONS]
    spans = [(node.decorator_list[0].lineno - 1, node.end_lineno) for node in wanted]  # type: ignore[attr-defined]
    text = ["import triton", "import triton.language as tl", *(line for a, b in spans for line in lines[a:b])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm_kernels.py"
        path.write_text("\n".join(text) + "\n")
        spec = importlib.util.spec_from_file_location("vllm_kernels", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if not all(hasattr(module, name) for name in VLLM_FUNCTIONS):
        raise ValueError(f"this vLLM has no {' or '.join(VLLM_FUNCTIONS)} in {VLLM_FILE}")
    return module


def _launch(row: Row, target: Target) -> dict[str, Any]:
    options = row.model_dump(
        exclude_none=True, exclude_unset=True, exclude=TILE | {"num_warps", "num_stages"}
    )
    return {"num_warps": row.num_warps, "num_stages": stages_of(row, target), "options": options}


def _of_vllm(vllm: Any, name: TunedName, row: Row, target: Target) -> Compilation | None:
    if (kinds := _kinds(name, target)) is None:
        return None
    x, w = kinds
    is_quantised = name.dtype != ""
    a_scale = {} if name.dtype == "int8_w8a16" or not is_quantised else {"a_scale_ptr": "*fp32"}
    scales = {**a_scale, "b_scale_ptr": "*fp32"} if is_quantised else {}
    group_n, group_k = name.block_shape if name.block_shape and name.dtype.endswith("w8a8") else (0, 0)
    swap = name.dtype == "fp8_w8a8" and target.name == "sm_90a"
    return Compilation(
        name="fused_moe_kernel",
        kernel=vllm.fused_moe_kernel,
        signature={
            "a_ptr": f"*{x}", "b_ptr": f"*{w}", "c_ptr": "*bf16", **scales, "sorted_token_ids_ptr": "*i32",
            "expert_ids_ptr": "*i32", "num_tokens_post_padded_ptr": "*i32", "N": "i32:16", "K": "i32:16",
            "EM": "i32", "num_valid_tokens": "i32", "stride_am": "i32:16", "stride_ak": "i32:1",
            "stride_be": "i32:16", "stride_bk": "i32:1", "stride_bn": "i32:16", "stride_cm": "i32:16",
            "stride_cn": "i32:1",
            **dict.fromkeys(SCALE_STRIDES, "i32"),
        },
        constexprs={
            "b_bias_ptr": None, "topk_weights_ptr": None,
            **{n: None for n in ("a_scale_ptr", "b_scale_ptr") if n not in scales},
            "group_n": group_n, "group_k": group_k, "naive_block_assignment": False,
            **{n: getattr(row, n) for n in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")},
            "SPLIT_K": 1, "MUL_ROUTED_WEIGHT": False, "top_k": 8, "compute_type": tl.bfloat16,
            "use_fp8_w8a8": name.dtype == "fp8_w8a8", "use_int8_w8a8": name.dtype == "int8_w8a8",
            "use_int8_w8a16": name.dtype == "int8_w8a16", "per_channel_quant": name.per_channel,
            "HAS_BIAS": False, "SWAP_AB": swap and row.BLOCK_SIZE_M < 64 <= row.BLOCK_SIZE_N, "USE_TD": False,
        },
        **_launch(row, target),
    )  # fmt: skip


def _of_ours(_: Any, name: TunedName, row: Row, target: Target) -> Compilation | None:
    if name.dtype == "int8_w8a8" or (kinds := _kinds(name, target)) is None:
        return None  # our kernel sums in floats
    x, w = kinds
    return Compilation(
        name="forward",
        kernel=triton_blocks._blocks,
        signature={
            "x": f"*{x}", "w": f"*{w}", "y": "*bf16", "offset_E1": "*i64", "count_E": "*i64",
            "num_blocks": "i32", "stride_xr": "i32:16", "stride_we": "i32:16", "stride_wd": "i32:1",
            "stride_wf": "i32:16", "stride_be": "i32:16",
        },
        constexprs={
            "b": None, "D": DEPTH, "F": WIDTH, "E": EXPERTS, "E_PADDED": EXPERTS,
            "BLOCK_ROWS": row.BLOCK_SIZE_M, "BLOCK_M": row.BLOCK_SIZE_M, "BLOCK_N": row.BLOCK_SIZE_N,
            "BLOCK_K": row.BLOCK_SIZE_K, "GROUP_M": row.GROUP_SIZE_M,
        },
        **_launch(row, target),
    )  # fmt: skip


def _kinds(name: TunedName, target: Target) -> tuple[str, str] | None:
    if name.dtype not in POINTERS or (name.dtype == "fp8_w8a8" and not target.e4m3):
        return None
    x, w = (FP8[target.backend] if kind == "fp8" else kind for kind in POINTERS[name.dtype])
    return x, w
