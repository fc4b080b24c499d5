"""The house keeps its own rules: imports run downhill, the library needs torch alone, the design is true."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from child_process import python
from repository import ROOT, SOURCE

FILES = sorted(SOURCE.rglob("*.py"))
MEASUREMENTS = ROOT / "measurements"
# lowest first; a file imports only from its own floor's files listed before it, or from lower floors
FLOORS = [
    ["layouts", "formats"],
    ["core"],
    ["parallel"],
    ["ops.tracing", "ops.targets", "ops.knobs", "ops.implementation", "ops.registry"],
    ["ops.decisions", "ops.preference", "ops.stand_ins", "ops.auto", "ops.catalog"],
    ["ops.hf", "ops.inductor", "ops.rivals", "ops.rows", "ops.coded", "ops.nodes"],
    ["ops.gpu", "ops.gpu_gemm", "ops.cute_threads", "ops.quack_calls", "ops.ggml_calls"],
    ["ops.topk", "ops.score_topk", "ops.make_plan", "ops.dispatch", "ops.grouped_gemm", "ops.combine"],
    ["ops.rms_norm", "ops.attention", "ops.linear"],
    ["ops.hops", "ops.ep_dispatch", "ops.ep_combine"],
    ["ops.expert_ffn"],
    ["routers"],
    ["controllers"],
    ["moe"],
    [""],  # the package's public names
    ["models"],
    ["conformance"],
    ["workloads"],
    ["planner"],
    ["bench"],
    ["results"],
    ["fleet"],
    ["tuning"],
    ["train"],
    ["studies"],
    ["report"],
    ["api"],
    ["cli"],
    ["__main__"],
]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path, of: str = "moe_routing_bench") -> list[str]:
    """Modules of a package that a file imports, relative to it, wherever in the file it does so."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if (SOURCE / (node.module or "").replace("moe_routing_bench", ".").replace(".", "/")).is_dir():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [name.removeprefix(of).lstrip(".") for name in names if name.partition(".")[0] == of]
    return found


def floor_of(module: str) -> int:
    for height, rooms in enumerate(FLOORS):
        if any(module == room or (room and module.startswith(room + ".")) for room in rooms):
            return height
    if module in ("ops", "conformance"):
        return 0  # empty packages
    if "." not in module:
        return FLOORS.index([""])  # a public name
    raise AssertionError(f"{module} has no floor; give it one in FLOORS")


def test_imports_run_downhill() -> None:
    # the package's own file names what it loads later (test_public.py)
    files = [path for path in FILES if module_of(path)]
    pairs = [(module_of(path), there) for path in files for there in imports_of(path)]
    upward = [f"{here} imports {there}" for here, there in pairs if floor_of(there) > floor_of(here)]
    assert pairs and not upward, upward


def test_the_command_line_is_a_shell_over_the_api() -> None:
    imported = imports_of(SOURCE / "api.py")
    assert imported and not [name for name in imported if name.partition(".")[0] in ("cli", "typer")]
    below = [path for path in FILES if floor_of(module_of(path)) < FLOORS.index(["cli"]) and module_of(path)]
    assert not [path for path in below if imports_of(path, of="typer")], "typer is for the command line"


def test_there_are_no_circles() -> None:
    modules = {module_of(path): path for path in FILES}
    needs = {m: {t for t in imports_of(p) if t in modules and t != m} for m, p in modules.items()}
    needs[""] = set()  # the public names stand on everything
    done: set[str] = set()
    while ready := {m for m, n in needs.items() if m not in done and n <= done}:
        done |= ready
    assert done == set(needs), f"in a circle: {sorted(set(needs) - done)}"


def test_an_implementation_imports_no_sibling() -> None:
    for path in SOURCE.glob("ops/*/*.py"):
        if path.stem in ("op", "__init__"):
            continue
        folder = f"ops.{path.parent.name}"
        for there in imports_of(path):
            assert not there.startswith(folder + ".") or there.startswith(f"{folder}.op"), (
                f"{module_of(path)} imports {there}: implementations do not know one another"
            )


def test_the_library_part_imports_torch_alone() -> None:
    highest = FLOORS.index([""])
    # these files say at their top what they need; the registry makes its absence a reason
    ours = [path for path in FILES if not path.stem.startswith(("gpu", "triton_", "cute_", "quack_"))]
    modules = [module_of(path) for path in ours if floor_of(module_of(path)) < highest]
    code = (
        # torch's DTensor imports sympy
        "import torch.distributed.fsdp, torch.distributed.tensor, sys; before = set(sys.modules)\n"
        f"for m in {[f'moe_routing_bench.{m}' for m in modules]!r}: __import__(m)\n"
        "import moe_routing_bench.public\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    ran = python(code)
    foreign = set(ran.stdout.split()) - set(sys.stdlib_module_names) - {"moe_routing_bench", "torch"}
    # what torch itself pulls in when it is first used in a new way
    assert not foreign, f"importing the library part also imports {foreign}"


@pytest.mark.parametrize(
    ("libraries", "own", "rooms"),
    [(("triton",), ("gpu", "triton_"), "ops."), (("cutlass", "cuda", "quack"), ("cute_", "quack_"), "")],
    ids=["triton", "cutlass"],
)
def test_gpu_libraries_are_needed_by_their_own_files_alone(
    libraries: tuple[str, ...], own: tuple[str, ...], rooms: str
) -> None:
    for path in FILES:
        if module_of(path).startswith(rooms) and not path.stem.startswith(own):
            assert not any(imports_of(path, of=library) for library in libraries), path
            ops = [name.removeprefix("ops.") for name in imports_of(path) if name.startswith("ops.")]
            assert not [name for name in ops if name.startswith(own)], path


def test_there_is_no_drawer() -> None:
    drawers = [p for p in FILES if re.fullmatch(r"(utils?|helpers?|common|misc)", p.stem)]
    assert not drawers, f"what is in {drawers} has a better home"


def test_every_letter_is_in_the_legend() -> None:
    from moe_routing_bench.core.shapes import LETTERS

    design = (ROOT / "DESIGN.md").read_text()
    for letter in LETTERS:
        assert f"`{letter}`" in design, f"DESIGN.md does not explain the letter {letter}"


def test_the_design_names_every_room() -> None:
    """Folders and the files beside them; what a single file inside a folder does, its first line says."""
    design = (ROOT / "DESIGN.md").read_text()
    rooms = {p.name + "/" for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    rooms |= {p.name for p in SOURCE.glob("*.py") if not p.stem.startswith("__")}
    missing = sorted(room for room in rooms if f"`{room}`" not in design)
    assert not missing, f"DESIGN.md, The rooms, does not name {missing}"


def test_the_index_names_every_measurement() -> None:
    named = set(re.findall(r"`(\w+/[\w./-]+)", (MEASUREMENTS / "README.md").read_text()))
    files = {str(p.relative_to(MEASUREMENTS)) for p in MEASUREMENTS.glob("*/*.*") if p.suffix != ".pyc"}
    assert files <= named, f"measurements/README.md does not name {sorted(files - named)}"


def test_measurements_use_public_names_alone() -> None:
    tests = {test.stem for test in (ROOT / "tests").rglob("*.py")}
    for path in MEASUREMENTS.rglob("*.py"):
        neighbours = {beside.stem for beside in path.parent.glob("*.py")}
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            named = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else named
            if modules[0].startswith("moe_routing_bench"):
                assert not [name for name in named if name.startswith("_")], f"{path.name}: private"
            assert not (tests - neighbours) & set(modules), f"{path.name} imports tests"


def test_the_public_names_are_all_there() -> None:
    import moe_routing_bench as mrb
    from moe_routing_bench import public

    imported = {n for n, v in vars(public).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    of_api = {
        "Experiment",
        "ImplementationRef",
        "Results",
        "bench",
        "check",
        "open",
        "sweep",
        "train",
        "tune",
    }
    assert sorted(imported | of_api) == sorted(mrb.__all__) and not imported & of_api
    assert all(hasattr(mrb, name) for name in mrb.__all__)


def test_every_dependency_is_imported_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *extras["hf"],
        *extras["triton"],
        *extras["cutedsl"],
        *extras["report"],
        *extras["store"],
        *extras["ray"],
    ]
    module = {"nvidia_cutlass_dsl": "cutlass", "quack_kernels": "quack"}
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in needed}
    names = {module.get(name, name) for name in names}
    source = "\n".join(path.read_text() for path in FILES)
    assert {name for name in names if not re.search(rf"^\s*(import|from) {name}\b", source, re.M)} == set()


def test_the_outside_example_is_short() -> None:
    kernel = ROOT / "examples" / "add_a_kernel" / "add_a_kernel.py"
    assert len(kernel.read_text().splitlines()) <= 30


def test_every_file_belongs_to_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MEASUREMENTS)
    what_for = importlib.import_module("what_for")
    files = what_for.lines_by_file(SOURCE)
    lost = [path for path in files if what_for.feature_of(path) is None]
    assert files and not lost, f"give them a feature in measurements/what_for.py: {lost}"
    idle = set(what_for.FEATURES) - {what_for.feature_of(path) for path in files}
    assert not idle, f"no file belongs to {idle}"
