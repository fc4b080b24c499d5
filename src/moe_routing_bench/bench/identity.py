"""Everything that could change an answer, as one hash: the resume key of a cell.

If any of it differs the cell is measured again; if all of it is the same, the old answer stands. Code from
outside is hashed as files and never imported here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.spans import Span, span_named
from moe_routing_bench.machine import Machine
from moe_routing_bench.ops.registry import BUILT_IN, OURS, Op, all_ops
from moe_routing_bench.workloads.workload import SUITE_VERSION, file_of

PACKAGE = Path(__file__).parent.parent
# the meaning of every span: change one of these, and results before and after are answers to other questions
MEANING = ("accuracy.py", "routing.py", "plan.py", "experts.py", "layer.py", "routers/softmax_topk.py")
SETTINGS = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "TORCH", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD",
    "TRITON_INTERPRET",
)  # fmt: skip
# what implementations with such names are made of beside their own files
SHARED = {
    "triton_": ("ops/gpu*.py",),
    "native": ("native.py", "prepared.py", "recycled.py", "ops/*.h", "ops/rows.py", "ops/*/native.cpp"),
}


def key_fields(cell: Cell, machine: Machine) -> dict[str, Any]:
    """What goes into the key, by name: each field alone changes it."""
    span = span_named(cell.case.span)
    return {
        "case": asdict(cell.case),
        "contract": contract_hash(span),
        "workload": {
            "name": cell.workload,
            "suite": SUITE_VERSION,
            "seed": cell.seed,
            "ranks": cell.W,
            "recorded": recorded_hash(cell.workload),
        },
        "subjects": [[s.spec, s.layout, source_hash(span, s.spec)] for s in cell.subjects],
        "policy": asdict(cell.policy),
        "harness": harness_hash(),
        "versions": versions(),
        "machine": machine.name,
        "settings": settings(),
    }


def cell_key(cell: Cell, machine: Machine) -> str:
    return digest_of(key_fields(cell, machine))


def digest_of(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "triton": _distribution_version("triton"),
    }


def settings() -> dict[str, str]:
    """Environment variables that change how torch runs."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def recorded_hash(workload: str) -> str:
    """Of a trace's bytes: another recording under the same name is another workload."""
    file = file_of(workload)
    return "" if file is None or not file.is_file() else hashlib.sha256(file.read_bytes()).hexdigest()


def contract_hash(span: Span) -> str:
    """The reference code that says what is right."""
    files = [PACKAGE / name for name in MEANING]
    return _files_hash((*files, *(PACKAGE / "ops" / op / "op.py" for op in span.ops)))


def harness_hash() -> str:
    """The code that measures and judges."""
    folders = ("bench", "conformance")
    return _files_hash(tuple(path for name in folders for path in sorted((PACKAGE / name).glob("*.py"))))


def source_hash(span: Span, spec: str) -> str:
    """The source of a subject's implementations, with those inside them, and their options."""
    parts = []
    for op_name, one in zip(span.ops, span.split(spec), strict=True):
        op, name = all_ops()[op_name], one.partition("(")[0].strip()
        parts.append([one, _source(op, name)])
        if op.origin(name) == BUILT_IN:
            inner = {k: str(v) for k, v in op.get(one).config.items() if k in all_ops()}
            parts += [[v, _source(all_ops()[k], v.partition("(")[0])] for k, v in inner.items()]
    return digest_of(parts)


def _source(op: Op, name: str) -> str:
    origin = op.origin(name)
    if origin == BUILT_IN:
        own = sorted((PACKAGE / "ops" / op.name).glob(f"{name}.*"))  # a launcher and its C++
        shared = next((patterns for start, patterns in SHARED.items() if name.startswith(start)), ())
        return _files_hash((*own, *(path for pattern in shared for path in sorted(PACKAGE.glob(pattern)))))
    kind, _, where = origin.partition(" ")
    if kind == "file":
        # with whatever helper files stand beside it
        path = Path(where)
        return _files_hash((path, *sorted(path.parent.glob("_*.py"))))
    found = importlib.util.find_spec(where)
    roots = [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    files = sorted(path for root in roots for path in root.rglob("*.py"))
    if found is not None and not files and found.origin:
        files = [Path(found.origin)]
    return digest_of([_files_hash(tuple(files)), _distribution_version(where)])


def _distribution_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def package_version() -> str:
    try:
        return importlib.metadata.version(OURS.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _files_hash(paths: tuple[Path, ...]) -> str:
    return _hash_of(tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths))


@cache
def _hash_of(stamped: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in stamped:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
