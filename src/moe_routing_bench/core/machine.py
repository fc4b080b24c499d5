"""Facts about this machine, and a name for it that does not change between runs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

# instruction sets that decide which kernels can run, with their names in /proc/cpuinfo
NOTABLE = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd",
    "asimddp", "sve", "bf16",
)  # fmt: skip
# added later; they are not part of names, which must not change because resuming and comparing use them
NOT_IN_NAMES = ("avx512_vnni", "asimddp")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts that decide whether two measurements may be compared.

    Machine(cpu="Intel(R) Xeon(R) Processor", cores=2, memory_gib=24, instructions=("avx2", "amx_bf16"), ...)
    has the name "xeon-2-cores-24-gib-1f3a9c02". The digits are a hash of facts that cannot change at run
    time.
    """

    cpu: str
    cores: int  # that this process may use
    memory_gib: int
    instructions: tuple[str, ...]
    gpus: tuple[str, ...]
    system: str
    python: str
    torch: str

    @property
    def name(self) -> str:
        named = tuple(flag for flag in self.instructions if flag not in NOT_IN_NAMES)
        fixed = (self.cpu, self.cores, self.memory_gib, named, self.gpus)
        digits = hashlib.sha256(repr(fixed).encode()).hexdigest()[:8]
        words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)|processor|cpu|@.*", "", self.cpu.lower()))
        return f"{'-'.join(words[-2:]) or 'cpu'}-{self.cores}-cores-{self.memory_gib}-gib-{digits}"

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, **asdict(self)}


def this_machine() -> Machine:
    flags, model = _cpuinfo()
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Machine(
        cpu=model,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        memory_gib=round(_memory_bytes() / 2**30),
        instructions=tuple(flag for flag in NOTABLE if flag in flags),
        gpus=gpus,
        system=f"{platform.system()} {platform.release()}",
        python=sys.version.split()[0],
        torch=torch.__version__,
    )


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Inside the context, torch computes with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpuinfo() -> tuple[set[str], str]:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    return set(flags[1].split()) if flags else set(), name.strip()


def _memory_bytes() -> int:
    """All memory of the system; 0 if sysconf does not know it."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
