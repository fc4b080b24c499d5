"""What this machine is, and a name for it that stays the same from run to run."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

# instruction sets that change which kernels can run, in the words of /proc/cpuinfo
NOTABLE = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts that decide whether two measurements may be compared.

    Machine(cpu="Intel(R) Xeon(R) Processor", cores=2, memory_gib=24, instructions=("avx2", "amx_bf16"), ...)
    has the name "xeon-2-cores-24-gib-1f3a9c02"; the digits are a hash of what cannot change while it runs.
    """

    cpu: str
    cores: int  # this process may use
    memory_gib: int
    instructions: tuple[str, ...]
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str

    @property
    def name(self) -> str:
        fixed = (self.cpu, self.cores, self.memory_gib, self.instructions, self.gpus)
        digits = hashlib.sha256(repr(fixed).encode()).hexdigest()[:8]
        words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)|processor|cpu|@.*", "", self.cpu.lower()))
        return f"{'-'.join(words[-2:]) or 'cpu'}-{self.cores}-cores-{self.memory_gib}-gib-{digits}"

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What may disturb a measurement, at one moment: load 2.1 on 2 cores is a busy machine."""

    load_1min: float
    steal_percent: float  # time the host gave to somebody else since boot
    available_gib: float
    throttled: bool | None  # None: this system does not tell

    def complaints(self, cores: int) -> list[str]:
        found = []
        if self.load_1min > 0.5 * cores:
            found.append(f"load {self.load_1min:.1f} on {cores} cores: something else is running")
        if self.steal_percent > 1:
            found.append(f"{self.steal_percent:.1f} % of time was taken by other guests of the host")
        if self.throttled:
            found.append("the processor has throttled since boot")
        return found


def this_machine() -> Machine:
    flags, model = _cpuinfo()
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Machine(
        cpu=model,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        instructions=tuple(flag for flag in NOTABLE if flag in flags),
        gpus=gpus,
        system=f"{platform.system()} {platform.release()}",
        python=sys.version.split()[0],
        torch=torch.__version__,
    )


def weather() -> Weather:
    times = psutil.cpu_times()
    total = sum(times)
    return Weather(
        load_1min=psutil.getloadavg()[0],
        steal_percent=100 * getattr(times, "steal", 0.0) / total if total else 0.0,
        available_gib=psutil.virtual_memory().available / 2**30,
        throttled=_throttled(),
    )


def _cpuinfo() -> tuple[set[str], str]:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    return set(flags[1].split()) if flags else set(), name.strip()


def _throttled() -> bool | None:
    counts = list(Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count"))
    return any(int(path.read_text()) > 0 for path in counts) if counts else None
