"""Level neon, where there is no ARM: it compiles, and its processors are known.

measurements/cpu/arm_kit.py runs it under qemu."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_routing_bench import ops
from moe_routing_bench.core import cpp, levels, machine
from moe_routing_bench.formats.named import NAMES

pytestmark = pytest.mark.slow

CROSS = "aarch64-linux-gnu-g++"
SOURCES = sorted(Path(ops.__file__).parent.glob("*/native.cpp"))
AARCH64 = 183  # e_machine of ELF
# Neoverse N1, and Neoverse V1 after it
CPUINFO = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd aes sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm dcpop asimddp ssbs{}
CPU implementer\t: 0x41
"""


@pytest.mark.skipif(shutil.which(CROSS) is None, reason="apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_it_compiles(source: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    flags = [flag for flag in levels.options("neon") if flag != "-O3"]  # quicker
    command = [CROSS, *flags, "-Werror", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    assert int.from_bytes(library.read_bytes()[18:20], "little") == AARCH64


@pytest.mark.parametrize("more", ["", " sve bf16 i8mm"])
def test_its_processors_are_known(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda path: file)
    file.write_text(CPUINFO.format(more))
    cpp.best_level.cache_clear()
    try:
        assert cpp.best_level() == "neon"
        file.write_text(CPUINFO.format(more).replace("asimddp", ""))
        cpp.best_level.cache_clear()
        assert cpp.best_level() is None
        assert "asimddp" in str(cpp.why_not())
    finally:
        cpp.best_level.cache_clear()


def test_what_was_run_under_qemu() -> None:
    """Nothing failed, every planted error was noticed, and no format is passed over in silence."""
    result = json.loads((Path(__file__).parents[2] / "measurements/cpu/arm_kit.json").read_text())
    assert result["guest"]["level"] == "neon" and result["failed"] == 0
    ran = {f"{row['op']}.{row['spec']}": row["by_dtype"] for row in result["kit"]}
    assert all(ran[f"{op}.native"]["bfloat16"]["passed"] for op in ("dispatch", "combine", "grouped_gemm"))
    assert {f"expert_ffn.native(store={name})" for name in NAMES} <= {*ran, *result["not_run"]}
    assert all(by_dtype["float32"]["passed"] > 0 for by_dtype in ran.values())
    assert result["planted"] and all(fault["cell"] for fault in result["planted"])
