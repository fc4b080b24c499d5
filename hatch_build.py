"""MRB_PREBUILD=1 pip wheel --no-deps .    a wheel for Linux with the C++ libraries of every level
MRB_PREBUILD=avx2,vnni pip wheel ...    only these levels
pip wheel --no-deps .                   pure Python, as with MRB_PREBUILD=0: compiled at its first use

The libraries are linked without -fopenmp, so they use the libgomp that torch has loaded. A second one would
be a second pool of threads.
"""

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src/moe_routing_bench"
# by its path, because importing the package needs torch
_spec = importlib.util.spec_from_file_location("levels", PACKAGE / "core/levels.py")
levels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(levels)

OF_MACHINE = {"x86_64": ("amx", "vnni", "avx512", "avx2"), "aarch64": ("neon",)}
# now: a symbol that is not there is an error when the library is loaded, which we report
LINK = ("-shared", "-fPIC", "-s", "-Wl,-z,now", "-Wl,-z,noexecstack")


def build(source: Path, level: str, folder: Path, compiler: str) -> Path:
    library = folder / levels.library_name(source, level)
    code = library.with_suffix(".o")
    _run(compiler, *levels.options(level), "-fPIC", "-c", source, "-o", code)
    _run(compiler, *LINK, code, "-o", library)
    code.unlink()
    return library


def _run(compiler: str, *words: str | Path) -> str:
    """What the compiler prints. What it says of errors is shown as it comes."""
    try:
        ran = subprocess.run([compiler, *words], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        ended = str(error.strerror)
    else:
        if ran.returncode == 0:
            return ran.stdout
        ended = f"it ended with {ran.returncode} on {' '.join(map(str, words))}"
    raise SystemExit(
        f"MRB_PREBUILD: {compiler} cannot compile the C++ kernels: {ended}. Name another compiler in CXX, or "
        "build without MRB_PREBUILD: then they are compiled at their first use."
    )


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        wanted, machine = os.environ.get("MRB_PREBUILD", "0"), platform.machine()
        if wanted in ("", "0") or version == "editable":
            return
        if sys.platform != "linux" or machine not in OF_MACHINE:
            self.app.display_warning(
                f"The C++ kernels run on Linux on {' and '.join(OF_MACHINE)}, not here "
                f"({sys.platform}, {machine}): this wheel is pure Python and runs kernels in PyTorch."
            )
            return
        names = OF_MACHINE[machine] if wanted == "1" else wanted.split(",")
        if unknown := set(names).difference(OF_MACHINE[machine]):
            known = ", ".join(OF_MACHINE[machine])
            raise SystemExit(f"MRB_PREBUILD is 0, 1 or some of {known} here, not {', '.join(unknown)}")
        self.scratch = tempfile.TemporaryDirectory()  # it goes with this hook, when the wheel is written
        folder = Path(self.scratch.name)
        sources = sorted(PACKAGE.rglob("*.cpp"), key=lambda path: -path.stat().st_size)
        compiler = os.environ.get("CXX", "g++")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(build, source, level, folder, compiler) for source in sources for level in names
            ]
            made = [job.result() for job in jobs]
        (folder / "compiler.txt").write_text(_run(compiler, "--version").partition("\n")[0])
        for path in (*made, folder / "compiler.txt"):
            build_data["force_include"][str(path)] = f"moe_routing_bench/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
