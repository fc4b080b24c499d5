"""Records the signatures of other libraries that ops/expert_ffn calls, read from source, never imported.

    python tests/rival_signatures.py vllm=0.27.1=FOLDER ...

FOLDER holds the package: an unpacked wheel, or a checkout. It rewrites tests/data/rival_signatures.json.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data/rival_signatures.json"
NAMES = (
    "flashinfer.fused_moe.core.cutlass_fused_moe",
    "scattermoe.parallel_experts.parallel_linear",
    "sonicmoe.enums.ActivationType",
    "sonicmoe.functional.moe_general_routing_inputs",
    "triton_kernels.matmul.FusedActivation",
    "triton_kernels.matmul.matmul",
    "triton_kernels.reduce.reduce",
    "triton_kernels.specialize.FnSpecs",
    "triton_kernels.swiglu.swiglu_fn",
    "triton_kernels.tensor_details.ragged_tensor.make_ragged_tensor_metadata",
    "vllm.model_executor.layers.fused_moe.fused_moe.fused_experts",
)


def signature(folder: Path, name: str) -> str | list[str]:
    """The parameters of a function or dataclass, "x, bias=..."; the members of an enum; "" of a variable."""
    module, _, wanted = name.rpartition(".")
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and wanted in map(ast.unparse, node.targets):
            return ""
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return _parameters(node.args)
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            members = [ast.unparse(one.targets[0]) for one in node.body if isinstance(one, ast.Assign)]
            typed = [f"{ast.unparse(one.target)}{'=...' * (one.value is not None)}" for one in fields]
            return ", ".join(typed) if typed else members
    raise ValueError(f"{file} has no {wanted}")


def _parameters(args: ast.arguments) -> str:
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        one.annotation = None
    args.defaults = [ast.Constant(...) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(...) for default in args.kw_defaults]
    return ast.unparse(args)


if __name__ == "__main__":
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    for package, version, folder in (word.split("=", 2) for word in sys.argv[1:]):
        own = [name for name in NAMES if name.partition(".")[0] == package]
        found = {name: signature(Path(folder), name) for name in own}
        known[package] = {"version": version, "names": found}
    DATA.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
