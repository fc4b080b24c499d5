"""The resume key of a cell: one hash over everything that could change its result.

If anything in it differs, the cell is measured again; otherwise the old result is kept. The code in it is all
that the run imports (sources.py): harness, span, operations, implementations, the router, and whatever "auto"
picks. Code from outside is hashed as files and never imported here: all files of its folder are in the key,
and what loads a file from elsewhere gets no time (loaded.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, PlainSerializer

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.sources import PACKAGE, Code, distribution_version, files_in, folder_hash, once
from moe_routing_bench.bench.spans.span import Span, check_measurable, span_named
from moe_routing_bench.core.machine import Machine
from moe_routing_bench.core.names import base_name
from moe_routing_bench.ops.registry import BUILT_IN, OURS, all_ops, included_folders
from moe_routing_bench.workloads.axes import key_values
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.workload import SUITE_VERSION, file_of, with_file

HARNESS = (
    "bench/runner.py", "bench/hosts/inside_sandbox.py", "bench/hosts/adopting.py",
)  # fmt: skip
LIBRARIES = ("numpy", "scipy", "triton", "nvidia-cutlass-dsl", "quack-kernels")
# how names of environment variables begin that decide a result or a time, and why
SETTINGS = {
    "OMP_": "how threads of OpenMP wait, are bound and share loops",
    "GOMP_": "the same for GNU's OpenMP, torch's on Linux",
    "KMP_": "the same for Intel's and LLVM's OpenMP",
    "MKL_": "which code MKL picks for a product, and whether its bits are the same each time",
    "DNNL_": "which code oneDNN picks for a product",
    "ONEDNN_": "the newer name of the same",
    "ATEN_": "which vector instructions torch's own kernels use",
    "TORCH": "what torch and its compiler do; TORCHINDUCTOR_ changes generated code",
    "MALLOC_": "when memory goes back to the system, which costs page faults",
    "OPENBLAS_": "which code OpenBLAS picks for a product, numpy's",
    "NUMBA_": "how Numba compiles, and its threads",
    "GLIBC_TUNABLES": "how the C library allocates, and which vector code it picks",
    "LD_PRELOAD": "libraries in place of others, such as another allocator",
    "LD_LIBRARY_PATH": "which of several libraries of one name is loaded",
    "CXX": "which C++ compiler makes extensions; CXXFLAGS its options",
    "CPATH": "which headers a compiler finds first",
    "CPLUS_INCLUDE_PATH": "the same for C++",
    "TRITON_INTERPRET": "Triton kernels run as Python, not compiled",
    "MRB_CUTE_ON_CPU": "CuTe kernels run as Python, not compiled",
    "MRB_NODES": "which NUMA nodes kernels take the machine to have",
}
# of those, what decides nothing, and why
SETTINGS_WITHOUT_EFFECT = {
    "OMP_NUM_THREADS": "a worker uses the experiment's threads, which are in the key (settle)",
    "MKL_NUM_THREADS": "the same",
    "OPENBLAS_NUM_THREADS": "a worker sets it to 1",
    "NUMBA_CACHE_DIR": "where compiled code is kept; its content is keyed by the source",
    "TORCHINDUCTOR_COMPILE_THREADS": "a worker sets it to 1",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled code is kept; its content is keyed by the source",
    "TORCH_EXTENSIONS_DIR": "where compiled extensions are kept",
    "TORCH_HOME": "where downloaded files are kept",
    "TORCH_LOGS": "what is written to the log",
}


# JSON has no keys but text: pairs of implementation and hash
ByImplementation = Annotated[
    Mapping[ImplementationRef, str],
    PlainSerializer(
        lambda hashes: [[asdict(implementation), text] for implementation, text in hashes.items()]
    ),
    BeforeValidator(lambda given: given if isinstance(given, Mapping) else _by_implementation(given)),
]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Hashes of a cell, taken before it is measured.

    key        the name of the cell in a sweep
    contracts  by implementation: the code that defines the right result
    sources    by implementation: the code that runs
    """

    key: str
    harness: str
    contracts: ByImplementation
    sources: ByImplementation


def _by_implementation(pairs: Any) -> dict[ImplementationRef, Any]:
    try:
        return {ImplementationRef(**implementation): text for implementation, text in pairs}
    except (TypeError, ValueError):
        raise ValueError("not pairs of an implementation and a hash") from None


def identify(experiment: Experiment, machine: Machine) -> Identity:
    fields = key_fields(experiment, machine)
    asked, span = experiment.implementations, span_named(experiment.span)
    return Identity(
        key=digest_of(fields),
        harness=fields["harness"],
        contracts={one: contract_hash(span, one) for one in asked},
        sources={one: source for one, (_, source) in zip(asked, fields["implementations"], strict=True)},
    )


def key_fields(experiment: Experiment, machine: Machine) -> dict[str, Any]:
    """The fields of the key, by name; a change in any of them changes the key."""
    check_measurable(experiment)
    span, values = span_named(experiment.span), key_values(experiment)
    recorded = experiment.workload, experiment.checkpoint
    # what "auto" picks depends on sizes, not on which tokens choose which experts
    sizes, inputs = digest_of(values | {"workload": ""}), Inputs(experiment)

    def source_of(one: ImplementationRef) -> tuple[str, dict[str, str]]:
        resolved = once(("resolved", sizes, one), lambda: span.resolved(one, inputs))

        def found() -> tuple[str, dict[str, str]]:
            source = _Source.of(span, one, resolved)
            return source.hash(span, one), source.code.versions

        return once(("source", span.name, one, *resolved), found)

    sources = {one: source_of(one) for one in experiment.implementations}
    first = experiment.implementations[0]
    return {
        "experiment": {**values, "workload": _workload_name(experiment.workload)},
        "suite": SUITE_VERSION,
        "recorded": once(("recorded", *recorded), lambda: recorded_hash(*recorded)),
        "contract": once(("contract", span.name, first), lambda: contract_hash(span, first)),
        "implementations": [[one.title, source] for one, (source, _) in sources.items()],
        "harness": once("harness", lambda: Code.of(PACKAGE / name for name in HARNESS).hash),
        "versions": {
            **{name: v for _, found in sources.values() for name, v in found.items()},
            **once("versions", versions),
        },
        "machine": machine.name,
        "settings": once("settings", settings),
    }


def _workload_name(name: str) -> str:
    """Returns the name without the folder of a recorded trace. The trace's content is in the key, so the file
    may lie anywhere."""
    file = file_of(name) if name else None
    return name if file is None else with_file(name, file.name)


def cell_key(experiment: Experiment, machine: Machine) -> str:
    return digest_of(key_fields(experiment, machine))


def digest_of(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: distribution_version(name) for name in LIBRARIES},
    }


def settings() -> dict[str, str]:
    """Returns the environment variables that change how torch runs."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(tuple(SETTINGS)) and name not in SETTINGS_WITHOUT_EFFECT
    }


def recorded_hash(workload: str, checkpoint: str) -> str:
    """Hashes a trace's bytes, and the sizes and times of a checkpoint's files. A new recording under the same
    name is another workload."""
    parts = []
    file = file_of(workload) if workload else None
    if file is not None and file.is_file():
        parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
    if checkpoint:
        stamps = [
            (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(checkpoint).glob("*"))
        ]
        parts.append(digest_of(stamps))
    return digest_of(parts) if parts else ""


def contract_hash(span: Span, implementation: ImplementationRef) -> str:
    """Hash of the reference code, which defines the right result."""
    return Code.of([*(Path(all_ops()[name].file) for name in span.ops), *span.roots(implementation)]).hash


@dataclass(frozen=True)
class _Source:
    """What "auto" picks for an implementation, and all code that then runs."""

    resolved: list[tuple[str, str]]
    code: Code
    folders: tuple[Path, ...] = ()  # from outside: whatever lies there may be loaded

    @staticmethod
    def of(span: Span, implementation: ImplementationRef, resolved: list[tuple[str, str]]) -> _Source:
        ops, files = all_ops(), list(span.roots(implementation))
        for op, name in [*span.named(implementation.name), *_inside(span, implementation.name), *resolved]:
            files += [Path(ops[op].file), *ops[op].source_files(base_name(name))]
        given = {place for path in files for place in (path, path.resolve())}
        folders = [
            folder for folder in included_folders() if any(path.is_relative_to(folder) for path in given)
        ]
        files += [path for folder in folders for path in files_in(folder) if path.suffix == ".py"]
        return _Source(resolved, Code.of(files), tuple(folders))

    def hash(self, span: Span, implementation: ImplementationRef) -> str:
        """Hashes its name, what "auto" picks, the code, and the packages and folders from outside."""
        parts = [implementation.title, self.resolved, self.code.hash, _packages(span, implementation)]
        return digest_of([*parts, *map(folder_hash, self.folders)])


def folders_of(span: Span, implementation: ImplementationRef, inputs: Inputs) -> tuple[Path, ...]:
    """Returns the folders from outside that hold its code. All files in them are in its hash."""
    return _Source.of(span, implementation, span.resolved(implementation, inputs)).folders


def code_of(span: Span, implementation: ImplementationRef, inputs: Inputs) -> Code:
    """All code that runs for an implementation: span, operations, and implementations named or picked."""
    return _Source.of(span, implementation, span.resolved(implementation, inputs)).code


def _inside(span: Span, name: str) -> list[tuple[str, str]]:
    """Returns the implementations inside an implementation. Code from outside has none, because it is not
    loaded here."""
    if any(origin != BUILT_IN for origin in span.origins(name)):
        return []
    try:
        parts = span.parts(name)
    except NotImplementedError:  # a library is absent: nothing will run
        return []
    return [(option, str(v)) for part in parts for option, v in part.config.items() if option in all_ops()]


def _packages(span: Span, implementation: ImplementationRef) -> list[str]:
    """Returns the versions of the packages that bring the implementations from outside."""
    origins = span.origins(implementation.name)
    names = [where for source, _, where in (o.partition(" ") for o in origins) if source == "package"]
    return [distribution_version(name) for name in names]


def package_version() -> str:
    version = distribution_version(OURS.replace("_", "-"))
    return "source" if version == "?" else version
