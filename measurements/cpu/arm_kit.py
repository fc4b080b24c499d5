"""The kit on ARM without an ARM machine: level neon cross-compiled and run under qemu. Verified, not timed.

    dpkg --add-architecture arm64 && apt-get update && apt-get install g++-aarch64-linux-gnu qemu-user-static
    python measurements/cpu/arm_kit.py /tmp/arm       an hour, 3 GB, Debian, as root; writes arm_kit.json
    python measurements/cpu/arm_kit.py /tmp/arm --quick     one format, nothing written

A run that was ended goes on; --so-far writes what there is.

The folder becomes a small Debian for arm64: Python, torch's wheel for aarch64, what the tests import. In it
cpp.py compiles as everywhere; CXX names the cross compiler, a program for x86 that runs outside of qemu. The
emulated processor has ARMv8.2-A and nothing later, so an instruction above level neon would end the run. qemu
shows the host's /proc/cpuinfo, so the guest's is written from what its processor says of itself (AT_HWCAP).

Then errors are planted into the code for NEON, one at a time, and the same cases of the kit must fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.formats.named import INT8_ROWS, NAMES

ROOT = Path(__file__).parents[2]
GUEST = Path(__file__).with_name("arm_guest.py")
TESTS = "tests/ops/test_stored_experts.py"
COMPILER, PROCESSOR = "aarch64-linux-gnu-g++", "neoverse-n1"
DEBS = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libgomp1 "
    "zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libexpat1 libncursesw6 libtinfo6 libreadline8 "
    "libuuid1 libdb5.3 libnsl2 libtirpc3 libcrypt1"
).split()
# the last torch whose wheel for aarch64 needs no CUDA
WHEELS = (
    "torch==2.10.0 numpy sympy mpmath typing-extensions setuptools<81 filelock networkx jinja2 markupsafe "
    "fsspec pytest<10 pytest-timeout pluggy iniconfig packaging pygments hypothesis sortedcontainers"
).split()
# the bits of AT_HWCAP, in order, in the words of /proc/cpuinfo
HWCAP = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop "
    "sha3 sm3 sm4 asimddp sha512 sve"
).split()
SPECS = (
    *((op, "native") for op in ("make_plan", "dispatch", "combine", "grouped_gemm", "expert_ffn")),
    ("expert_ffn", "native(store=bfloat16)"),
    *(("expert_ffn", f"native(store={name})") for name in NAMES),
    *(("expert_ffn", f"native(store={name}{INT8_ROWS})") for name in NAMES if name != "fp8_block"),
)
# file, what stands there, what is put there instead, and who must fail
FAULTS: dict[str, tuple[str, str, str, tuple[str, str]]] = {
    "codes of four columns in the other order": (
        "coded.h", "vmovl_u8(four(b))", "vmovl_u8(vrev32_u8(four(b)))",
        ("expert_ffn", "native(store=int4_g32)"),
    ),
    "the last of 16 numbers of a row dropped": (
        "int8_rows.h", "for (int i = 0; i < HALF; i++) {\n    const int32_t code",
        "for (int i = 0; i < HALF - 1; i++) {\n    const int32_t code",
        ("expert_ffn", "native(store=int8_a8)"),
    ),
    "float16 scales of the next columns": (
        "coded.h", "vreinterpret_f16_u16(vld1_u16(b))", "vreinterpret_f16_u16(vld1_u16(b + 1))",
        ("expert_ffn", "native(store=q8_0)"),
    ),
    "zero taken off twice": (
        "int8_rows.h", "SIGNED = 1", "SIGNED = 0", ("expert_ffn", "native(store=int8_a8)"),
    ),
    "the sign of float8 in its exponent too": (
        "coded.h", "vdup_n_s16((short)0xbfff)", "vdup_n_s16((short)0xffff)",
        ("expert_ffn", "native(store=fp8_block)"),
    ),
    "gates left out": ("numbers.h", "vfmaq_f32(c, a, b)", "vaddq_f32(c, b)", ("combine", "native")),
    "bfloat16 rounded up always": (
        "numbers.h", "vaddq_u32(odd, vdupq_n_u32(0x7fff))", "vdupq_n_u32(0xffff)", ("dispatch", "native"),
    ),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """A root for qemu, once."""
    if (folder / "ready").exists():
        return
    debs = folder / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *(f"{name}:arm64" for name in DEBS)], cwd=debs, check=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(folder / "root")], check=True)
    platforms = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version=3.11", "--target", str(folder / "site"),
         *(f"--platform={name}_aarch64" for name in platforms), *WHEELS], check=True,
    )  # fmt: skip
    asking = "import ctypes; print(ctypes.CDLL(None).getauxval(16))"
    bits = int("".join(guest(folder, "-c", asking)))
    features = " ".join(name for i, name in enumerate(HWCAP) if bits >> i & 1)
    (folder / "root/proc").mkdir(exist_ok=True)
    (folder / "root/proc/cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
    (folder / "ready").touch()


def guest(folder: Path, *args: str, source: Path = ROOT / "src") -> Iterator[str]:
    """The lines that Python in the guest writes."""
    environment = {
        **os.environ, "CXX": COMPILER, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONPATH": f"{folder / 'site'}:{source}", "TORCH_EXTENSIONS_DIR": str(folder / "libraries"),
        "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    root = folder / "root"
    command = [emulator(), "-cpu", PROCESSOR, "-L", str(root), str(root / "usr/bin/python3.11"), *args]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout


def emulator() -> str:
    path = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if path is None or shutil.which(COMPILER) is None:
        raise SystemExit("apt-get install g++-aarch64-linux-gnu qemu-user-static")
    return path


def results(folder: Path) -> Path:
    """Where results are kept, so that a run that was ended goes on; another folder for other kernels."""
    files = sorted((ROOT / "src/moe_routing_bench/ops").rglob("*"))
    kernels = [file for file in files if file.suffix in (".h", ".cpp")]
    digits = hashlib.sha256(b"".join(file.read_bytes() for file in kernels)).hexdigest()[:16]
    (folder / "results" / digits).mkdir(parents=True, exist_ok=True)
    return folder / "results" / digits


def kit(folder: Path, specs: Iterable[tuple[str, str]], so_far: bool = False) -> list[dict[str, Any]]:
    files = {spec: results(folder) / f"{'.'.join(spec)}.json" for spec in specs}
    missing = [spec for spec, file in files.items() if not file.exists()]
    for line in guest(folder, str(GUEST), "all", json.dumps(missing)) if missing and not so_far else ():
        row = json.loads(line)
        files[row["op"], row["spec"]].write_text(line)
    return [json.loads(file.read_text()) for file in files.values() if file.exists() or not so_far]


def planted(folder: Path, fault: str, so_far: bool = False) -> dict[str, str] | None:
    name, right, wrong, spec = FAULTS[fault]
    kept = results(folder) / f"{fault}.json"
    if so_far and not kept.exists():
        return None
    if not kept.exists():
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(ROOT / "src", copy, dirs_exist_ok=True)
            file = Path(copy) / "moe_routing_bench/ops" / name
            text = file.read_text()
            assert text.count(right) == 1, f"{name} has no longer one {right!r}"
            file.write_text(text.replace(right, wrong))
            (line,) = guest(folder, str(GUEST), "first", json.dumps([spec]), source=Path(copy))
        kept.write_text(line)
    cell, sentence = (json.loads(kept.read_text())["failures"] or [["", "not noticed"]])[0]
    return {"fault": fault, "file": name, "cell": cell, "noticed": sentence}


def tests(folder: Path, so_far: bool = False) -> dict[str, int] | None:
    kept = results(folder) / "tests.txt"
    if so_far and not kept.exists():
        return None
    if not kept.exists():
        lines = "".join(guest(folder, "-m", "pytest", "-q", "-m", "not nightly", "--timeout", "0", TESTS))
        kept.write_text(lines)
    last = kept.read_text().splitlines()[-1]
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}


def about(folder: Path) -> list[str]:
    kept = folder / "about.txt"
    if not kept.exists():
        asking = "from moe_routing_bench.core import cpp; import platform as p, torch; "
        asking += "print(p.machine(), p.python_version(), torch.__version__, cpp.best_level())"
        kept.write_text("".join(guest(folder, "-c", asking)))
    return kept.read_text().split()


def first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main(
    folder: Path,
    quick: Annotated[bool, typer.Option("--quick", help="One format.")] = False,
    so_far: Annotated[bool, typer.Option("--so-far", help="Run no more; name what was not run.")] = False,
) -> None:
    folder = folder.resolve()
    prepare(folder)
    if quick:
        print(json.dumps(kit(folder, [("expert_ffn", "native(store=int8_a8)")]), indent=1))
        return
    machine, python, version, level = about(folder)
    rows, ran = kit(folder, SPECS, so_far), tests(folder, so_far)
    faults = {fault: planted(folder, fault, so_far) for fault in FAULTS}
    have = {(row["op"], row["spec"]) for row in rows}
    missing = [".".join(spec) for spec in SPECS if spec not in have]
    missing += [fault for fault, result in faults.items() if result is None] + [TESTS] * (ran is None)
    document = {
        "what": "verified under qemu, not timed",
        "not_run": missing,
        "command": "python measurements/cpu/arm_kit.py FOLDER",
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "compiler": first_line(COMPILER, "--version"),
        "qemu": first_line(emulator(), "--version"),
        "guest": {
            "processor": PROCESSOR, "machine": machine, "python": python, "torch": version, "level": level,
            "cpuinfo": (folder / "root/proc/cpuinfo").read_text().splitlines()[1],
        },
        "passed": sum(count.get("passed", 0) for row in rows for count in row["by_dtype"].values()),
        "failed": sum(len(row["failures"]) for row in rows),
        "kit": rows,
        TESTS: ran,
        "planted": [result for result in faults.values() if result],
        "host": environment_document(this_machine()),
    }  # fmt: skip
    GUEST.with_name("arm_kit.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
