"""QuACK's GEMMs as expert_ffn.quack_gated calls them, and our CuTe kernels, compiled without a GPU.

    python measurements/gpu/quack_compile.py    6 minutes; writes quack_compile.txt and .json

Compiled as by `mrb gpu compile --impl "cute*"` and `"quack*"` (studies/cute_code.py), beside Triton's kernels
of the same products. Bytes per operation are those of a tile. `check` compares with the committed table
instead of writing it.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import sys
from pathlib import Path
from typing import Any

from moe_routing_bench.studies.cute_code import ARCHITECTURES, compile_all, faults

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRITON_TILE = {"triton_fused": [128, 128], "triton_ragged": [128, 128]}
MAX_SHARED = 227 * 1024
MODELS = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")


def intensity(tile: list[int]) -> float:
    """Bytes a CTA fetches per operation: (m + n) * 2 bytes of each step in depth for 2 m n operations."""
    m, n = tile
    return (m + n) * 2 / (2 * m * n)


def table(quack: list[dict[str, Any]], ours: list[dict[str, Any]], versions: dict[str, str]) -> list[str]:
    lines = [
        "python measurements/gpu/quack_compile.py",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "Our CuTe kernels, bfloat16, constants of the model",
        f"{'kernel':14} {'model':15} {'arch':8} registers spills  shared  accesses, must hold",
    ]
    for row in ours:
        loads, stores = (row["seen"].get(name, 0) for name in ("LDG.E.128", "STG.E.128"))
        lines.append(
            f"{row['kernel']:14} {row['model']:15} {row['arch']:8} {row['registers']:9} {row['spills']:6} "
            f"{row['static_shared']:7}  {loads} loads, {stores} stores of 128 bits  "
            f"{'; '.join(faults(row)) or 'holds'}"
        )
    lines += [
        "",
        "QuACK's GEMMs as quack_gated and quack_varlen call them, bfloat16, untuned tiles; any model's sizes",
        f"{'kernel':22} {'arch':8}      tile cluster instruction  registers spills  shared  B/FLOP  "
        "seen, must hold",
    ]
    for row in quack:
        start = f"{row['kernel']:22} {row['arch']:8} {'x'.join(map(str, row['tile'])):>9} "
        start += f"{'x'.join(map(str, row['cluster'][:2])):>7}"
        if "error" in row:
            lines.append(f"{start} {row['error']}")
            continue
        seen = " ".join(f"{count} {name}" for name, count in row["seen"].items())
        lines.append(
            f"{start} {row['instruction']:12} {row['registers']:9} {row['spills']:6} {row['shared']:7} "
            f"{intensity(row['tile']):7.4f}  {seen}  {'; '.join(faults(row)) or 'holds'}"
        )
    return [*lines, *versus(quack)]


# QuACK's kernel, and the Triton kernel of the same product: op, implementation, kernel
SAME = {
    "fc1: gather, SwiGLU": ("expert_ffn", "triton_fused", "hidden"),
    "fc2: router score": ("expert_ffn", "triton_fused", "weighted"),
    "grouped GEMM": ("grouped_gemm", "triton_ragged", "forward"),
    "dx": ("grouped_gemm", "triton_ragged", "input_gradient"),
    "dw_in": ("grouped_gemm", "triton_ragged", "weight_gradient"),
}


def versus(quack: list[dict[str, Any]]) -> list[str]:
    """Triton against QuACK, product by product. Triton's numbers are those of `mrb gpu compile`."""
    kernels = json.loads((ROOT / "tests" / "data" / "compile.json").read_text())["kernels"]
    lines = [
        "",
        "Triton against QuACK, one row a product; Triton with the constants of qwen3-30b-a3b, default tiles",
        "bytes per FLOP: fetched for one tile, by its sides; programs: at most, on one multiprocessor",
        f"{'product':22} {'arch':8} {'kernel':29} tile        registers  shared  B/FLOP  programs",
    ]
    for name, (op, impl, kernel) in SAME.items():
        for row in quack:
            if row["kernel"] != name or "error" in row:
                continue
            wanted = {"op": op, "impl": impl, "kernel": kernel, "model": "qwen3-30b-a3b", "arch": row["arch"]}
            (other,) = [k for k in kernels if wanted.items() <= k.items()]
            per_unit = other["programs_per_unit"]
            for label, tile, registers, shared, programs in (
                (f"{impl}.{kernel}", TRITON_TILE[impl], other["registers"], other["shared_bytes"], per_unit),
                ("quack", row["tile"], row["registers"], row["shared"], MAX_SHARED // row["shared"]),
            ):
                lines.append(
                    f"{name:22} {row['arch']:8} {label:29} {'x'.join(map(str, tile)):11} {registers:9} "
                    f"{shared:7} {intensity(tile):7.4f}  {programs:8}"
                )
    return lines


def compared(quack: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """What differs from the committed table in registers, spills, shared memory or errors."""
    before = json.loads((HERE / "quack_compile.json").read_text())
    kept = ("registers", "spills", "stack", "shared", "static_shared", "error")
    wrong = []
    for name, rows in (("quack", quack), ("ours", ours)):
        for old, new in zip(before[name], rows, strict=True):
            was, now = ({key: row.get(key) for key in kept} for row in (old, new))
            if was != now:
                wrong.append(f"{new['kernel']}, {new.get('model', '')} {new['arch']}: {was}, now {now}")
    return wrong


def main() -> None:
    if sys.argv[1:] == ["table"]:  # the text again, from the numbers
        document = json.loads((HERE / "quack_compile.json").read_text())
        (HERE / "quack_compile.txt").write_text("\n".join(table(**document)) + "\n")
        return
    versions = {name: metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl", "torch")}
    quack = [row for arch in ARCHITECTURES["quack"] for row in compile_all("quack", arch)]
    ours = [row for arch in ARCHITECTURES["cute"] for row in compile_all("cute", arch, MODELS)]
    lines = table(quack, ours, versions)
    print("\n".join(lines))
    if sys.argv[1:] == ["check"]:
        wrong = compared(quack, ours)
        sys.exit("\n".join(["other than quack_compile.json:", *wrong]) if wrong else 0)
    document = {"versions": versions, "quack": quack, "ours": ours}
    (HERE / "quack_compile.json").write_text(json.dumps(document, indent=1) + "\n")
    (HERE / "quack_compile.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
