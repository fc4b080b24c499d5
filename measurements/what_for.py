"""The tables of what_for.md: each feature with its lines, and the structure of the package.

    python measurements/what_for.py

A file belongs to the first feature whose pattern it matches. Lines count comments and blank lines. A test
fails if a file belongs to no feature.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from marked import rewrite, table

ROOT = Path(__file__).parent.parent
PACKAGE = "src/moe_routing_bench"
BEFORE = "53e2052"  # where the issue about the house began
CODE = (".py", ".cpp", ".h", ".html", ".css", ".js")
# feature: patterns below the package, who needs it (a row of SPEC section 1), how it is reached
FEATURES = {
    "Attention, linear, rms_norm as operations": (
        "ops/attention/* ops/linear/* ops/rms_norm/*", "engineer, kernel author",
        "`mrb bench attention`, `linear`, `rms_norm`"),
    "Whole decoder block, dense and MoE": (
        "bench/spans/decoder.py models/dense_block.py models/feed_forward.py", "engineer",
        "`mrb bench decoder`"),
    "Search of a kernel's knobs": (
        "tuning/* cli/tune.py ops/knobs.py report/tuning_figures.py", "engineer",
        "`mrb tune layer`, `mrb.tune`"),
    "Audit of tuned files of vLLM and SGLang": (
        "studies/tuned_*.py cli/tuned.py", "vLLM/SGLang user", "`mrb tune check`, `import`, `export`"),
    "Deployments: serving plans": (
        "planner/serving.py cli/serve.py", "engineer with GPUs; not in SPEC 1", "`mrb parallel serve`"),
    "Rehearsal of a GPU hour": (
        "cli/rehearse.py bench/pretend.py workloads/gpu_cases.py bench/warming.py", "kernel author",
        "`mrb gpu rehearse`, `mrb sweep gpu-hour`"),
    "Rivals (vLLM, SGLang, FlashInfer, ScatterMoE, SonicMoE, llama.cpp)": (
        "ops/rivals.py ops/ggml_calls.py ops/expert_ffn/vllm_*.py ops/expert_ffn/llama_cpp.py "
        "ops/expert_ffn/flashinfer_*.py ops/expert_ffn/scatter_moe.py ops/expert_ffn/sonic_moe.py "
        "ops/expert_ffn/gpt_oss_triton.py", "engineer", "`mrb bench layer --impl all`"),
    "Code from outside is held and filtered": (
        "bench/hosts/holding.py bench/hosts/filtering.py bench/hosts/adopting.py bench/hosts/freezing.py "
        "bench/hosts/inside_sandbox.py bench/hosts/sandbox.py", "all (trust)",
        "`--include-path`, `--sandbox`"),
    "Stores on a URL: segments, tables, manifest": (
        "fleet/segments.py fleet/store.py fleet/folding.py fleet/old_layout.py fleet/shipping.py "
        "fleet/claims.py "
        "fleet/leases.py results/objects.py results/tables.py", "engineer with a fleet; not in SPEC 1",
        "`mrb sweep --out s3://...`, `mrb results compact`"),
    "Python API": ("api.py public.py __init__.py __main__.py", "all", "`mrb.bench`, `mrb.open`, ..."),
    "Pack the experts of a checkpoint": ("cli/freeze.py", "HF user", "`mrb model freeze`, `kernels`"),
    "Regret of auto": ("results/regrets.py workloads/regret_cases.py", "maintainer", "`mrb results regret`"),
    "Triton kernels and their interpreter kit": (
        "ops/*/triton_*.py ops/gpu.py ops/gpu_gemm.py ops/targets.py ops/tracing.py "
        "conformance/instrumented.py "
        "conformance/interpreting.py", "kernel author", "`TRITON_INTERPRET=1 pytest tests/interpreted`"),
    "CuTe and QuACK kernels": (
        "ops/*/cute_*.py ops/*/quack_*.py ops/cute_threads.py ops/quack_calls.py", "kernel author with a GPU",
        "names of implementations"),
    "C++ kernels": (
        "ops/*/native*.py ops/*/*.cpp ops/*.h ops/nodes.py ops/coded.py core/cpp.py core/levels.py "
        "core/topology.py",
        "engineer, HF user", '`impl="native"`, auto; the wheel'),
    "Experts on many ranks": (
        "parallel/* ops/ep_*/* ops/hops.py moe/expert_parallel.py bench/spans/parallel.py "
        "bench/hosts/rank*.py "
        "core/placement.py", "engineer", "`mrb bench parallel`, `ParallelMoE`"),
    "Planner: step, placement, cache": (
        "planner/* cli/parallel.py report/parallel_pictures.py", "engineer; not in SPEC 1", "`mrb parallel`"),
    "Operations: meaning, plain torch, auto, registry": (
        "ops/*", "all", "every command"),
    "Routers": ("routers/*", "researcher, student", "`MoE(router=...)`, `mrb list routers`"),
    "Balance controllers": (
        "controllers/* studies/drift.py cli/balance.py report/balance_pictures.py", "researcher",
        "`mrb train`, `mrb bench balance`"),
    "MoE layer, presets, statistics, relatives": (
        "moe/*", "all, researcher (SPEC 5)", "`mrb.MoE`, `preset`, `--layer-kind`"),
    "Formats and packed weights": (
        "formats/* core/frozen.py core/packed_files.py cli/formats.py studies/format_losses.py "
        "bench/decoded_weights.py "
        "workloads/stored_cases.py", "HF user, engineer", "`layer.freeze()`, `--store`"),
    "Layout algebra": ("layouts/* studies/triton_tiles.py", "kernel author", "docs/layouts.md: import only"),
    "Code without a GPU": (
        "cli/compile.py studies/comp*.py studies/cute_code.py studies/triton_code.py bench/compiling.py",
        "kernel author", "`mrb gpu compile`"),
    "Conformance kit": (
        "conformance/* cli/check.py cli/explain.py report/check_tables.py bench/kit.py", "kernel author",
        "`mrb check`, `mrb explain`"),
    "Traces, engines' routing files, replay": (
        "workloads/trace*.py workloads/serving.py models/replay.py models/tracing.py cli/trace.py "
        "report/trace_pictures.py", "HF user, researcher", "`mrb model trace`"),
    "Plug-ins and checkpoints of models": (
        "models/* core/published.py", "HF user", "`plugin.freeze`, `plugin.load`, `convert`"),
    "Training study": (
        "train/* cli/train.py report/training_figures.py results/trainings.py", "researcher (SPEC 1)",
        "`mrb train`"),
    "Profile": ("studies/profiles.py cli/profile.py report/block_pictures.py", "engineer",
        "`mrb model profile`"),
    "Doctor, power study": (
        "cli/doctor.py studies/power*", "engineer", "`mrb doctor`, `--power`"),
    "Workloads, experiment, cases": ("workloads/*", "engineer, researcher", "`--workload`, `--case`"),
    "Benchmark": (
        "bench/* cli/bench.py cli/options.py core/fork_server.py core/host_allocator.py", "engineer, author",
        "`mrb bench`"),
    "Compare, gate, history": (
        "results/compare.py results/history.py cli/compare.py report/over_commits.py "
        "report/two_runs.py", "engineer",
        "`mrb results compare`, `gate`, `history`"),
    "Decisions for auto": (
        "results/decisions.py results/winners.py cli/decide.py report/winners.py", "engineer (SPEC 1)",
        "`mrb tune decide`, `mrb results`"),
    "Bundles and merging": (
        "fleet/bundle.py results/merge.py results/recompute.py results/remeasure.py cli/bundle.py "
        "cli/merge.py",
        "engineer with several machines", "`mrb bundle`, `mrb results merge`"),
    "Sweeps, shards, engines": (
        "fleet/* cli/sweep.py", "engineer; Ray not in SPEC 1", "`mrb sweep`"),
    "Records, queries, export": ("results/* cli/query.py", "engineer", "`mrb results query`, `export`"),
    "Report and tables": ("report/* cli/report.py", "engineer, student", "`mrb results report`"),
    "Values and helpers of all": ("core/* */__init__.py cli/* studies/*", "all", "every command"),
}  # fmt: skip


def feature_of(path: str) -> str | None:
    for name, (patterns, *_) in FEATURES.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns.split()):
            return name
    return None


def lines_by_file(root: Path) -> dict[str, int]:
    """The lines of every code file below a folder, by its path."""
    files = sorted(
        path for path in root.rglob("*") if path.suffix in CODE and "__pycache__" not in path.parts
    )
    return {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in files}


def growth() -> dict[str, int]:
    """Lines that each feature gained since BEFORE; "" for those of files that are gone. git finds renames."""
    line = ["git", "diff", "--numstat", "-z", "-M30%", BEFORE, "--", PACKAGE]
    words = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    gained = dict.fromkeys(["", *FEATURES], 0)
    while len(words) > 1:
        added, deleted, path = words.pop(0).split("\t")
        if not path:  # a renamed file: the old and the new name follow
            path = words[1]
            del words[:2]
        if added != "-" and path.endswith(CODE):
            there = (ROOT / path).exists()
            name = feature_of(path.removeprefix(f"{PACKAGE}/")) if there else ""
            gained[name or ""] += int(added) - int(deleted)
    return gained


def features() -> str:
    """Those that grew most come first."""
    lines, gained = dict.fromkeys(FEATURES, 0), growth()
    for path, count in lines_by_file(ROOT / PACKAGE).items():
        name = feature_of(path)
        assert name is not None, f"{path} belongs to no feature"
        lines[name] += count
    rows = [
        (name, f"{lines[name]:,}", f"{gained[name]:+,}", *FEATURES[name][1:])
        for name in sorted(FEATURES, key=lambda name: -gained[name])
    ]
    rows.append(("files that are gone", "0", f"{gained['']:+,}", "", ""))
    rows.append(("all", f"{sum(lines.values()):,}", f"{sum(gained.values()):+,}", "", ""))
    return table(("feature", "lines", "since the issue", "user", "reached by"), rows)


def imports(root: Path) -> Iterator[tuple[str, str]]:
    """Pairs of modules: one that imports and one that is imported, each below a package."""
    for path in root.rglob("*.py"):
        here = str(path.relative_to(root).with_suffix("")).replace("/", ".")
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
                if (
                    root / str(node.module).removeprefix("moe_routing_bench").lstrip(".").replace(".", "/")
                ).is_dir():
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                (here, name.removeprefix("moe_routing_bench."))
                for name in names
                if name.startswith("moe_routing_bench.")
            )


def room(module: str, rooms: set[str]) -> str:
    first = module.partition(".")[0]
    return first if first in rooms else "(root)"


def counts(tree: Path) -> dict[str, str]:
    """The numbers of one commit, unpacked in a folder."""
    package = tree / PACKAGE
    rooms = {path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    between = [(room(a, rooms), room(b, rooms)) for a, b in imports(package)]
    pairs = {(a, b) for a, b in between if a != b}
    files = [path for path in package.rglob("*.py") if "__pycache__" not in path.parts]
    several = [len([*(package / name).rglob("*.py")]) for name in ("bench", "cli", "results")]
    own = [sum(lines_by_file(tree / part).values()) for part in ("src", "tests", "measurements")]
    return {
        "folders": f"{len(rooms)}",
        "Python files at the root": f"{len([*package.glob('*.py')])}",
        "pairs of folders with imports": f"{len(pairs)}",
        "imports between folders": f"{sum(a != b for a, b in between):,}",
        "pairs that import each other": f"{sum((b, a) in pairs for a, b in pairs) // 2}",
        "Python files": f"{len(files)}",
        "files in bench, cli, results": ", ".join(map(str, several)),
        "lines of src, tests, measurements": ", ".join(f"{count:,}" for count in own),
    }


def structure() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        archive = subprocess.run(
            ["git", "archive", BEFORE, "src", "tests", "measurements"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(scratch, filter="data")
        before, after = counts(Path(scratch)), counts(ROOT)
    return table(("", "before", "after"), [(name, before[name], after[name]) for name in before])


def main() -> None:
    rewrite(Path(__file__).parent / "what_for.md", {"features": features(), "structure": structure()})


if __name__ == "__main__":
    main()
