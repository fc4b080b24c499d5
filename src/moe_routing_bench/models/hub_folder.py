"""Writes our operations as a folder in the format of Hugging Face's `kernels`, which needs only torch.

    build/<variant>/__init__.py      what a user calls: moe_experts, register, freeze, thaw
    build/<variant>/metadata.json    id, name, version, license, backend, sha256 of every file
    build/<variant>/...              the files of this package that they need, with relative imports

Variants: torch-cpu (plain torch, C++ that is compiled on first use), torch-cuda and torch-rocm (the Triton
files too). Only `register` and `freeze` import Transformers. kernels.get_kernel loads the folder, from disk
if LOCAL_KERNELS names it.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
OURS = PACKAGE.name
NAME = "moe-routing-bench"
VERSION = 0  # alpha, by the format's convention
VARIANTS: dict[str, dict[str, object]] = {
    "torch-cpu": {"type": "cpu"},
    "torch-cuda": {"type": "cuda", "archs": ["8.0", "9.0", "10.0"]},
    "torch-rocm": {"type": "rocm", "archs": ["gfx942"]},
}
ROOTS = ("models/transformers.py", "models/running.py")
# files that need packages the format does not allow
LEFT_OUT = (
    "hf_*.py", "vllm_*.py", "llama_cpp.py", "cute_*.py", "quack_*.py", "flashinfer_*.py", "gpt_oss_triton.py",
    "scatter_moe.py", "sonic_moe.py",
)  # fmt: skip
KERNELS, TRANSFORMERS = ("0.17.2", "0.18"), ("5.16", "6")  # from, and below

PUBLIC = '''"""Mixture-of-Experts kernels of moe-routing-bench. `moe_experts` computes a layer's experts;
`register` gives them to every Mixture-of-Experts model of Transformers. Written by `mrb model kernels`."""

import sys

_BELOW = "this build of moe-routing-bench needs {0} from {1} on and below {2}, and this is {3}"


def _between(what, version, first, end):
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    ends = [tuple(int(part) for part in text.split(".")) for text in (first, end)]
    if not ends[0] <= numbers < ends[1]:
        raise ImportError(_BELOW.format(what, first, end, version))


if sys.version_info < (3, 11):
    raise ImportError("this build of moe-routing-bench needs Python from 3.11 on")
if "kernels" in sys.modules:
    _between("kernels", sys.modules["kernels"].__version__, *KERNELS)


def moe_experts(
    hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, *, activation="swiglu", impl="auto"
):
    """The experts of a layer, weights as Transformers keeps them: gate_up_proj (E, 2F, D), down_proj
    (E, D, F). An id outside 0 .. E-1 means no expert."""
    from .core.experts import ExpertWeights
    from .models.running import run_experts

    weights = ExpertWeights(
        w_in_EDG=gate_up_proj.transpose(1, 2), w_out_EFD=down_proj.transpose(1, 2), activation=activation
    ).validate()
    return run_experts(hidden_states, top_k_index, top_k_weights, weights, impl)


def _plugin():
    import transformers

    _between("transformers", transformers.__version__, *TRANSFORMERS)
    from .models import transformers as plugin

    return plugin


def register(impl="auto"):
    """Make it known to Transformers; answers the name for model.set_experts_implementation."""
    return _plugin().register(impl)


def freeze(model, impl="auto"):
    """For inference: these kernels in every experts module of a model, with the weights packed once. Answers
    how many bytes that saved and what error to expect; impl may be a format: "int8_a8"."""
    return _plugin().freeze(model, impl)


def thaw(model):
    """Plain parameters again."""
    _plugin().thaw(model)


__all__ = ["freeze", "moe_experts", "register", "thaw"]
'''


def export_folder(target: Path) -> dict[str, int]:
    """Writes all variants below `target`, which must be new or empty. Returns how many files each variant
    has."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; name another")
    return {variant: _write(target / "build" / variant, variant) for variant in VARIANTS}


def _write(folder: Path, variant: str) -> int:
    backend = VARIANTS[variant]
    triton = backend["type"] != "cpu"
    sources = {path: path.read_text() for path in _needed(triton)}
    mark = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:7]
    name = f"_{OURS}_{backend['type']}_{mark}"
    files = {"__init__.py": PUBLIC.replace("*KERNELS", repr_words(KERNELS)).replace(
        "*TRANSFORMERS", repr_words(TRANSFORMERS)
    )}  # fmt: skip
    files[f"{OURS}/__init__.py"] = _for_older(OURS)
    for path, text in sources.items():
        place = path.relative_to(PACKAGE)
        files[str(place)] = text if path.suffix != ".py" else _relative(text, len(place.parts), name)
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    digests = {file: _digest(text) for file, text in sorted(files.items())}
    metadata = {
        "id": name,
        "name": NAME,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return len(files)


def repr_words(words: tuple[str, ...]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def _for_older(module: str) -> str:
    """Text of the module that older versions of `kernels` import: build/<variant>/<name>."""
    return f'''"""For older versions of `kernels`: the same names as in the folder above."""

import importlib.util
import sys
from pathlib import Path

_file = Path(__file__).parents[1] / "__init__.py"
_name = "{module}_" + str(abs(hash(str(_file))))
_spec = importlib.util.spec_from_file_location(_name, _file)
_module = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({{name: getattr(_module, name) for name in _module.__all__}})
__all__ = list(_module.__all__)
'''


def _needed(triton: bool) -> list[Path]:
    """Lists what the roots import, all implementations of the operations, and C++ with its headers."""
    ours = [path for path in PACKAGE.glob("ops/*/*") if path.suffix in (".py", ".cpp")]
    kept = [path for path in ours if not any(path.match(name) for name in LEFT_OUT)]
    queue = [*(PACKAGE / root for root in ROOTS), *PACKAGE.glob("ops/*.h"), *kept]
    if not triton:
        queue = [path for path in queue if not path.stem.startswith("triton_")]
    needed: dict[Path, None] = {}
    while queue:
        path = queue.pop()
        if path in needed or path == PACKAGE / "__init__.py":
            continue
        needed[path] = None
        queue += [package for parent in path.parents if (package := parent / "__init__.py").is_file()]
        if path.suffix == ".py":
            queue += _imported(path)
    return sorted(path for path in needed if path.is_relative_to(PACKAGE) and path.parent != PACKAGE.parent)


def _imported(path: Path) -> list[Path]:
    files = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != OURS:
            continue
        base = PACKAGE.joinpath(*(node.module or "").split(".")[1:])
        places = [base.with_suffix(".py"), *((base / name.name).with_suffix(".py") for name in node.names)]
        files += [place for place in places if place.is_file()]
    return files


def _relative(text: str, depth: int, name: str) -> str:
    """Makes imports of this package relative, and gives torch operators the names of this build."""
    dots = "." * depth
    text = re.sub(rf"^(\s*)from {OURS}\.", rf"\1from {dots}", text, flags=re.M)
    text = re.sub(rf"^(\s*)from {OURS} import", rf"\1from {dots} import", text, flags=re.M)
    return text.replace(f'"{OURS}::', f'"{name}::').replace(f"torch.ops.{OURS}.", f"torch.ops.{name}.")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
