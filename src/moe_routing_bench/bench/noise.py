"""Signs that other work disturbs a measurement: system load, stolen CPU time, throttling."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

MAX_STEAL_PERCENT = 1.0
MAX_LOAD_PER_CORE = 0.5
MAX_CORES_OF_OTHERS = 0.15  # what a desktop does by itself


@dataclass(frozen=True, kw_only=True)
class NoiseReading:
    """The counters of one moment: load 2.1 on 2 cores is a busy machine.

    NoiseReading(load_1min=0.3, cpu_seconds=2e3, steal_seconds=40.0, available_gib=18.5, throttle_count=None):
    quiet now; since boot, 2 % of the time of all cores went to other guests of the host; this system does
    not report whether the processor ever slowed itself down.
    """

    load_1min: float
    cpu_seconds: float  # of all cores since boot, busy or idle
    steal_seconds: float  # of these, what the host gave to other guests
    available_gib: float
    throttle_count: int | None  # times a core slowed itself down since boot; None if not reported

    @property
    def steal_percent(self) -> float:
        """The share since boot; NoiseDuring has the share during a run."""
        return 100 * self.steal_seconds / self.cpu_seconds if self.cpu_seconds > 0 else 0.0

    def complaints(self, cores: int) -> list[str]:
        complaints = []
        if self.load_1min > MAX_LOAD_PER_CORE * cores:
            complaints.append(f"load {self.load_1min:.1f} on {cores} cores: something else is running")
        if self.steal_percent > MAX_STEAL_PERCENT:
            complaints.append(
                f"{self.steal_percent:.1f} % of time since boot was taken by other guests of the host"
            )
        if self.throttle_count:
            complaints.append("the processor has throttled since boot")
        return complaints


@dataclass(frozen=True, kw_only=True)
class NoiseDuring:
    """What changed between two moments: NoiseDuring(before=noise_now(), after=noise_now()) around a run.

    before.steal_seconds = 40.0 and after.steal_seconds = 43.0, with cpu_seconds 2000.0 and 2060.0, is a
    steal_percent of 5.0 for the run, however quiet the machine was before it.
    """

    before: NoiseReading
    after: NoiseReading

    @property
    def load_before(self) -> float:
        return self.before.load_1min

    @property
    def load_after(self) -> float:
        return self.after.load_1min

    @property
    def steal_percent(self) -> float:
        # both counters tick in steps of 10 ms and may be corrected downwards by the system
        total = self.after.cpu_seconds - self.before.cpu_seconds
        taken = self.after.steal_seconds - self.before.steal_seconds
        return min(100.0, max(0.0, 100 * taken / total)) if total > 0 else 0.0

    @property
    def throttles(self) -> int | None:
        """How many times a core slowed itself down in between; None if the system does not report it."""
        if self.before.throttle_count is None or self.after.throttle_count is None:
            return None
        return max(0, self.after.throttle_count - self.before.throttle_count)

    def complaints(self, cores: int, threads: int = 1) -> list[str]:
        """Says what disturbed the run. `threads` is the load that the run itself causes."""
        complaints = []
        if self.load_before > MAX_LOAD_PER_CORE * cores:
            complaints.append(
                f"load {self.load_before:.1f} on {cores} cores before the run: something else was running"
            )
        if self.load_after > threads + MAX_LOAD_PER_CORE * cores:
            complaints.append(
                f"load {self.load_after:.1f} on {cores} cores after a run of {threads} threads: "
                "something else was running"
            )
        if self.steal_percent > MAX_STEAL_PERCENT:
            complaints.append(
                f"{self.steal_percent:.1f} % of time was taken by other guests of the host during the run"
            )
        if self.throttles:
            complaints.append(f"the processor throttled {self.throttles} times during the run")
        return complaints

    def to_dict(self) -> dict[str, float | int | None]:
        return {
            "load_before": self.load_before,
            "load_after": self.load_after,
            "steal_percent": self.steal_percent,
            "throttles": self.throttles,
            "available_gib": min(self.before.available_gib, self.after.available_gib),
        }


class Neighbours:
    """What other processes and guests used since this was made; unlike the load, nothing from before counts.

    neighbours = Neighbours(); ...; neighbours.complaint() says "others used 0.9 cores", or None.
    """

    def __init__(self) -> None:
        self._before, self._started = self._counters(), time.perf_counter()

    def complaint(self) -> str | None:
        busy, steal = (now - then for now, then in zip(self._counters(), self._before, strict=True))
        seconds = max(time.perf_counter() - self._started, 1e-9)
        if busy / seconds > MAX_CORES_OF_OTHERS:
            return f"others used {busy / seconds:.1f} cores meanwhile"
        if 100 * steal / seconds > MAX_STEAL_PERCENT * (psutil.cpu_count() or 1):
            return f"other guests of the host took {steal / seconds:.2f} cores meanwhile"
        return None

    def _counters(self) -> tuple[float, float]:
        """Returns the processor time of other processes so far, and the stolen time."""
        times = psutil.cpu_times()
        idle = ("idle", "iowait", "steal", "guest", "guest_nice")  # guests are counted in user already
        waiting = sum(getattr(times, name, 0.0) for name in idle)
        return sum(times) - waiting - time.process_time(), getattr(times, "steal", 0.0)


def noise_now() -> NoiseReading:
    times = psutil.cpu_times()
    # Linux counts the time of guests in user and nice already
    counted_twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return NoiseReading(
        load_1min=psutil.getloadavg()[0],
        cpu_seconds=sum(times) - counted_twice,
        steal_seconds=getattr(times, "steal", 0.0),
        available_gib=psutil.virtual_memory().available / 2**30,
        throttle_count=_throttle_count(),
    )


def _throttle_count() -> int | None:
    counts = list(Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count"))
    return sum(int(path.read_text()) for path in counts) if counts else None
