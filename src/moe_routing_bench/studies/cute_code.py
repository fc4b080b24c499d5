"""Compiles CuTe kernels, ours and QuACK's, without a GPU, and reads their machine code.

    python -m moe_routing_bench.studies.cute_code quack sm_90a        rows as JSON; a minute for each GEMM

CuTe DSL compiles for one architecture in a process, so `compile_all` starts a process. Our kernels are
compiled with the constants of a model. The seven GEMMs of QuACK are those of a layer and its gradients with
its default tiles; sizes are not compiled in, so one row is valid for every model. A cubin does not contain
the size of shared memory, so the allocations are counted while the kernel is traced. Needs
nvidia-cutlass-dsl, quack-kernels, and triton for its cuobjdump and nvdisasm.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_routing_bench.core.published import model
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies.compiled import Compiled, programs_per_unit

ARCHITECTURES = {"cute": ("sm_80", "sm_90a", "sm_100a"), "quack": ("sm_90a", "sm_100a")}
NEEDS = {"cute": "cutlass", "quack": "quack"}
ANY_MODEL = "any model"
UNITS = {"sm_90a": 132, "sm_100a": 148}  # multiprocessors, for which QuACK asks the driver
INSTRUCTIONS = r"\b(HMMA|HGMMA|UTC[A-Z]*MMA|LDGSTS|UTMALDG|UTMASTG|LDG\.E[.\w]*128|STG\.E[.\w]*128|STL|LDL)\b"
MULTIPLIES = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
# QuACK's kernels -> the implementation that calls them
CALLED_BY = {
    "fc1: gather, SwiGLU": "expert_ffn.quack_gated",
    "fc2: router score": "expert_ffn.quack_gated",
    "dh: dSwiGLU, dscore": "expert_ffn.quack_gated",
    "dx": "grouped_gemm.quack_varlen",
    "dw_in": "expert_ffn.quack_gated",
    "dw_out: gather": "expert_ffn.quack_gated",
    "grouped GEMM": "grouped_gemm.quack_varlen",
}
OURS = {
    "gather": "dispatch.cute_gather",
    "sum_rows": "dispatch.cute_gather",
    "weighted_sum": "combine.cute_gather_sum",
    "spread": "combine.cute_gather_sum",
    "count": "make_plan.cute_counting",
    "place": "make_plan.cute_counting",
}
NARROW = ("count", "place")  # all threads of a warp read the same number


def implementations(family: str) -> list[str]:
    """Returns the implementations whose kernels are compiled: "dispatch.cute_gather", ..."""
    return sorted(set({"cute": OURS, "quack": CALLED_BY}[family].values()))


def why_not(family: str, arch: str) -> str | None:
    """Returns why the family cannot be compiled for an architecture here; None if it can."""
    if arch not in ARCHITECTURES[family]:
        return f"only for {', '.join(ARCHITECTURES[family])}"
    absent = [name for name in (NEEDS[family], "triton") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)}; pip install 'moe-routing-bench[cutedsl]'" if absent else None


def compile_all(family: str, arch: str, models: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Compiles the family "cute" or "quack" in a new process and returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "CUTE_DSL_ARCH": arch,
            "QUACK_ARCH": re.sub(r"\D", "", arch),
            "QUACK_CACHE_ENABLED": "0",
            "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_DUMP_DIR": folder,
        }
        command = [sys.executable, "-m", __name__, family, arch, *models]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return rows


def as_compiled(row: dict[str, Any]) -> Compiled:
    """Returns a row as `Compiled`, as Triton's kernels have it."""
    op, _, impl = {**OURS, **CALLED_BY}[row["kernel"]].partition(".")
    about: dict[str, Any] = {"op": op, "impl": impl, "kernel": row["kernel"], "arch": row["arch"]}
    about["model"] = row.get("model", ANY_MODEL)
    wrong = tuple(faults(row))
    if "error" in row:
        return Compiled(**about, wrong=(*wrong, row["error"]))
    seen, target = row["seen"], Target.named(row["arch"])
    shared = row.get("shared", row["static_shared"])
    fits = programs_per_unit(target, row["registers"], shared, row["warps"])
    return Compiled(
        **about,
        registers=row["registers"],
        spill_bytes=row["stack"],
        shared_bytes=shared,
        warps=row["warps"],
        programs_per_unit=fits,
        occupancy=fits * row["warps"] / target.warps_per_unit,
        tensor_core=seen.get(MULTIPLIES.get(row["arch"], ""), 0),
        wide_loads=sum(n for name, n in seen.items() if name.startswith(("LDG.E", "LDGSTS", "UTMALDG"))),
        descriptor_loads=seen.get("UTMALDG", 0),
        code_bytes=row["cubin_bytes"],
        wrong=wrong,
    )


def faults(row: dict[str, Any]) -> list[str]:
    """Returns what is wrong with compiled code, in words."""
    if "error" in row:
        return ["does not compile"]
    wrong = [f"spills: {row['spills']} loads and stores"] if row["spills"] or row["stack"] else []
    if "tile" in row:
        promised = (MULTIPLIES[row["arch"]], "UTMALDG")
        wrong += [f"no {name}" for name in promised if not row["seen"].get(name)]
        most = Target.named(row["arch"]).shared_per_program
        wrong += [f"{row['shared']} bytes of shared memory"] if row["shared"] > most else []
    elif row["kernel"] not in NARROW and not (row["seen"].get("LDG.E.128") and row["seen"].get("STG.E.128")):
        wrong += ["no accesses of 128 bits"]
    return wrong


def ours(arch: str, *models: str) -> list[dict[str, Any]]:
    """Compiles our own kernels with the constants of the models. Needs a process for one architecture."""
    import torch

    from moe_routing_bench.ops.combine import cute_gather_sum
    from moe_routing_bench.ops.dispatch import cute_gather
    from moe_routing_bench.ops.make_plan import cute_counting

    bf16, rows = (torch.bfloat16, torch.float32), []
    for name in models:
        shape = model(name).shape(1)
        sizes = (shape.D, shape.K, 8)
        made = {
            "gather": cute_gather.compiled("gather", arch, bf16[0], *sizes),
            "sum_rows": cute_gather.compiled("sum_rows", arch, bf16[0], *sizes),
            "weighted_sum": cute_gather_sum.compiled("weighted_sum", arch, *bf16, *sizes),
            "spread": cute_gather_sum.compiled("spread", arch, *bf16, *sizes, True, True),
            "count": cute_counting.compiled("count", arch),
            "place": cute_counting.compiled("place", arch),
        }
        for kernel, launch in made.items():
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(launch.cubin)
                file.flush()
                rows.append({"kernel": kernel, "model": name, "arch": arch, **look_at(Path(file.name))})
    return rows


def quacks(arch: str, *unused: str) -> list[dict[str, Any]]:
    """Compiles QuACK's GEMMs as our operations call them. Needs a process for one architecture."""
    import cutlass.pipeline
    import cutlass.utils
    import quack.cute_dsl_utils
    import quack.gemm
    import quack.gemm_runtime.host
    import torch
    from cutlass import BFloat16
    from quack.epilogue.library import dgated_mod, linear_act_mod
    from quack.gemm_config import _default_config_for_cap
    from quack.rounding import RoundingMode

    from moe_routing_bench.ops.quack_calls import dgated_config, scaled

    folder = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    major = int(os.environ["QUACK_ARCH"]) // 10
    for module in (quack.cute_dsl_utils, quack.gemm_runtime.host, quack.gemm):
        module.get_max_active_clusters = lambda *_, **__: UNITS[arch]
    shared: list[int] = []
    allocate = cutlass.utils.SmemAllocator.allocate

    def watched(self: Any, what: Any, *rest: Any, **named: Any) -> Any:
        shared.append(what if isinstance(what, int) else what.size_in_bytes())
        return allocate(self, what, *rest, **named)

    cutlass.utils.SmemAllocator.allocate = watched
    barriers: list[dict[str, Any]] = []
    begin = cutlass.pipeline.MbarrierArray.mbarrier_init

    def noted(self: Any, *rest: Any, **named: Any) -> Any:
        # a count that the kernel computes at run time is a value of the compiler, not a number
        known = {
            name: n if isinstance(n, int) else None
            for name, n in (
                ("stages", self.num_stages),
                ("arrivals", self.arrive_count),
                ("bytes", self.tx_count),
            )
        }
        barriers.append({**known, "by": self.op_type.name})
        return begin(self, *rest, **named)

    cutlass.pipeline.MbarrierArray.mbarrier_init = noted
    config, small = _default_config_for_cap(major), dgated_config(major)
    T, D, F, E, K = 512, 512, 256, 8, 2
    R, G = T * K, 2 * F

    def bf16(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16)

    index, span = torch.zeros(R, dtype=torch.int32), torch.zeros(E + 1, dtype=torch.int32)
    score_R = torch.empty(R)
    w_in_EGD, w_out_EDF = bf16(E, G, D), bf16(E, F, D).mT
    gated = linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    dgated = dgated_mod("swiglu", has_scale=True, has_reduce=True)

    def epilogue_of(tiles: Any) -> dict[str, Any]:
        return {
            "tile_M": tiles.tile_m, "tile_N": tiles.tile_n, "cluster_M": tiles.cluster_m,
            "cluster_N": tiles.cluster_n, "pingpong": tiles.pingpong, "cu_seqlens_m": span, "_launch": False,
        }  # fmt: skip

    epilogue = epilogue_of(config)

    def plain(a_major: str, b_major: str, **named: Any) -> Any:
        flags = {"varlen_m": False, "varlen_k": False, "gather_A": False, "concat_layout": None, **named}
        return quack.gemm._compile_gemm(
            BFloat16, BFloat16, BFloat16, None, a_major, b_major, "n", None, (config.tile_m, config.tile_n),
            (config.cluster_m, config.cluster_n, 1), config.pingpong, True,
            config.is_dynamic_persistent and arch == "sm_100a", None, None, 0, 0, 0, False,
            flags["concat_layout"], flags["varlen_m"], flags["varlen_k"], flags["gather_A"], False, False,
            (major, 0), RoundingMode.RN, 0, None,
        )  # fmt: skip

    calls = {
        "fc1: gather, SwiGLU": lambda: gated.gemm(
            bf16(T, D), w_in_EGD, bf16(R, G), epi_args={"mAuxOut": bf16(R, F)}, A_idx=index,
            concat_layout=("B",), **epilogue,
        ),
        "fc2: router score": lambda: scaled.gemm(
            bf16(R, F), w_out_EDF, bf16(R, D), epi_args={"score": score_R}, **epilogue
        ),
        "dh: dSwiGLU, dscore": lambda: dgated.gemm(
            bf16(T, D), bf16(E, F, D), bf16(R, G), bf16(R, G),
            epi_args={
                "mAuxOut": bf16(R, F), "mColVecBroadcast": score_R,
                "mColVecReduce": torch.empty(R, -(-F // small.tile_n)),
            },
            A_idx=index, **epilogue_of(small),
        ),
        "dx": lambda: plain("k", "n", varlen_m=True, concat_layout=("B",)),
        "dw_in": lambda: plain("m", "n", varlen_k=True, concat_layout=("out",)),
        "dw_out: gather": lambda: plain("m", "n", varlen_k=True, gather_A=True),
        "grouped GEMM": lambda: plain("k", "n", varlen_m=True),
    }  # fmt: skip
    rows = []
    for name, call in calls.items():
        shared.clear()
        barriers.clear()
        started = time.perf_counter()
        used = small if name.startswith("dh") else config
        row: dict[str, Any] = {"kernel": name, "arch": arch, "tile": [used.tile_m, used.tile_n]}
        row["cluster"] = [used.cluster_m, used.cluster_n, 1]
        try:
            call()
        except Exception as error:  # any error of the compiler is a result here
            lines = re.sub(r"\x1b\[\d+m", "", str(error)).strip().splitlines()
            row["error"] = f"{type(error).__name__}: {' '.join(lines)[:300]}"
        else:
            (cubin,) = folder.glob("*.cubin")
            row |= {"shared": sum(shared), "barriers": list(barriers), **look_at(cubin)}
            cubin.unlink()  # kernels of one class have the same file name
        row["seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
    return rows


def look_at(cubin: Path) -> dict[str, Any]:
    """Returns registers, stack, warps and instructions of machine code."""
    used = _output("cuobjdump", "-res-usage", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", used)
    assert match, used
    registers, stack, shared, _ = map(int, match.groups())
    described = _output("cuobjdump", "-elf", cubin)
    threads = re.search(r"EIATTR_REQNTID\s+Format:\s+\S+\s+Value:\s+0x([0-9a-f]+)", described)
    text = _output("nvdisasm", cubin)
    seen = collections.Counter(re.findall(INSTRUCTIONS, text))
    shape = re.search(r"HGMMA\.(\d+x\d+x\d+)", text)
    return {
        "registers": registers,
        "stack": stack,
        "spills": seen["STL"] + seen["LDL"],
        "static_shared": shared,
        "warps": int(threads[1], 16) // 32 if threads else 0,
        "instruction": shape.group(1) if shape else "",
        "cubin_bytes": cubin.stat().st_size,
        "seen": dict(sorted(seen.items())),
    }


def _output(tool: str, *arguments: object) -> str:
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None, "needs triton, for cuobjdump and nvdisasm"
    command = Path(spec.origin).parent / "backends/nvidia/bin" / tool
    done = subprocess.run([command, *map(str, arguments)], capture_output=True, text=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    print(json.dumps({"cute": ours, "quack": quacks}[sys.argv[1]](*sys.argv[2:])))
