"""The worker: a process that runs implementations, good and bad, on request. It decides nothing.

It answers requests of the parent (children.py) over a pipe, in JSON: load inputs, call a subject and write
its result to a file, time a sample. The parent checks what matters: it makes the inputs again, judges the
results, and measures every timed span with its own clock too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_routing_bench.bench.calls import Caller, Result, named_tensors, wrong_type
from moe_routing_bench.bench.clock import CacheFlusher, calls_per_sample
from moe_routing_bench.bench.device import clock_for, memory_place
from moe_routing_bench.bench.inputs import ROUTINGS, Call, Inputs, fingerprint, touch
from moe_routing_bench.bench.judging import activations, weights_print
from moe_routing_bench.bench.kit import run_kit
from moe_routing_bench.bench.loaded import LoadedFiles
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.conformance.check import poisoned_memory
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment

MAX_CALLS = 256  # in one sample: each has its own inputs, all made before the sample
# five thousand steps of the timer. Longer samples are no better: noise comes in bursts of many milliseconds,
# so in the same time, samples of 16 calls give twice the variance of 1 to 4 (calls of 0.3 ms)
SAMPLE_SECONDS = 5e-4
Requests = Mapping[str, Callable[..., dict[str, Any]]]


def serve(pipe: Connection, cell_json: str, scratch: str, cores: tuple[int, ...]) -> None:
    """The main function of a worker process. Everything it prints goes to a log in its scratch folder."""
    experiment = Experiment.from_json(cell_json)
    settle(experiment, Path(scratch), pipe.fileno(), cores)
    answer_requests(pipe, lambda: _Worker(experiment, Path(scratch)).requests())


def answer_requests(pipe: Connection, load: Callable[[], Requests]) -> None:
    """Load, say so, and then answer one request after the other until the parent hangs up."""
    try:
        requests = load()
    except BaseException as error:
        _send(pipe, {"error": _described(error), "error_type": type(error).__name__})
        return
    _send(pipe, {"ready": True})
    with torch.no_grad():
        while True:
            try:
                request = json.loads(pipe.recv_bytes())
            except EOFError:
                return
            what = request.pop("do")
            try:
                answer = requests[what](**request)
            except BaseException as error:  # also SystemExit: a kernel must not end the worker
                answer = {"error": _described(error), "error_type": type(error).__name__}
            _send(pipe, answer)


class _Worker:
    def __init__(self, experiment: Experiment, scratch: Path):
        self.files = LoadedFiles(scratch)
        for folder in experiment.include:
            include_folder(folder)
        self.scratch, device = scratch, experiment.device
        self.clock = clock_for(device, experiment.view)
        self.flusher = CacheFlusher() if experiment.cache != "hot" else None
        self._take(experiment, None)
        for place in {"cpu", memory_place(device)}:
            start_threads(place)

    def _take(self, experiment: Experiment, before: Inputs | None) -> None:
        self.experiment, self.span = experiment, span_named(experiment.span)
        self.inputs = Inputs(experiment, put=memory_place(experiment.device))
        if before is not None:
            self.inputs.take_weights(before)
        self.weights_in_use = self.inputs.weights if self.span.weights else None
        self._callers: dict[int, Caller] = {}
        self._timed: list[Any] = []
        self._kept: list[Any] = []
        self._kept_args: Mapping[str, Any] = {}
        self._judged: dict[str, Result] = {}

    def next_cell(self, experiment: str) -> dict[str, Any]:
        """Another cell with the same policy and weights: what was made of them is used again."""
        self._take(Experiment.from_json(experiment), self.inputs)
        return {}

    def requests(self) -> Requests:
        return {
            "next_cell": self.next_cell,
            "describe": self.describe,
            "gate": self.gate,
            "kit": self.kit,
            "calibrate": self.calibrate,
            "prepare": self.prepare,
            "go": self.go,
            "hand_over": self.hand_over,
            "stages": self.stages,
            "weights": self.weights,
            "loaded": self.loaded,
        }

    def describe(self, subject: int) -> dict[str, Any]:
        """What the implementation declares; even loading it may fail."""
        spec = self.experiment.implementations[subject].name
        parts = self.span.parts(spec)
        return {
            "label": self.experiment.implementations[subject].called(self.span.label(spec)),
            "origin": "; ".join(sorted({part.origin for part in parts})) or BUILT_IN,
            "deterministic": all(part.deterministic for part in parts),
            "reuses_output": any(part.reuses_output for part in parts[-1:]),
            "host_sync": "; ".join(part.host_sync for part in parts if part.host_sync),
            "ties": parts[0].ties if parts else "",
        }

    def gate(
        self, subject: int, number: int, step: int, poison: bool, name: str, then: bool
    ) -> dict[str, Any]:
        """One call on fresh inputs. Its result is saved to a file at once, and again after the next call: if
        `then`, that is one of its own, else the next gate's."""
        call, args = self._call(subject, number, step)
        backward = self.experiment.direction != "forward"
        if backward and not self.span.differentiable:
            return {"unsupported": "it has no gradient; measure forward"}
        with torch.set_grad_enabled(backward):
            reason = self.span.why_not(self.experiment.implementations[subject], self.inputs, args)
        if reason is not None:
            return {"unsupported": reason}
        state = _global_state()
        caller = self._caller(subject)
        holder: list[Any] = []
        with poisoned_memory() if poison else nullcontext():
            seconds = self.clock.span([partial(_keep, caller.ready(call, args), holder)])
        result = caller.result(holder[0], args)
        answer: dict[str, Any] = {"seconds": seconds, "wrong_type": wrong_type(result.out), "print": ""}
        if not answer["wrong_type"]:
            save_file(named_tensors(result), self.scratch / f"{name}.safetensors")
            answer["aliases"] = _aliases(result.out, args)
        answer["print"] = fingerprint(activations(args))
        answer["runs"] = caller.computation.runs
        if then:
            caller.ready(*self._call(subject, number + 1, step))()
        earlier = {name: result} if then else self._judged
        for one, kept in earlier.items():
            if not wrong_type(kept.out):
                save_file(named_tensors(kept), self.scratch / f"{one}-later.safetensors")
        self._judged = {} if then or name == "again" else {name: result}
        changed = [name for name, now in _global_state().items() if now != state[name]]
        return {**answer, "changed": changed}

    def kit(self, subject: int) -> dict[str, Any]:
        passed, failed, first = run_kit(self.experiment, self.experiment.implementations[subject])
        return {"passed": passed, "failed": failed, "first": first[:2000]}

    def calibrate(self, subject: int, first: int) -> dict[str, Any]:
        numbers = iter(range(first, first + 10**6))
        caller = self._caller(subject)

        def make(n: int) -> list[Any]:
            calls = [next(numbers) for _ in range(min(n, MAX_CALLS))]
            return [caller.ready(*self._call(subject, number, number % ROUTINGS)) for number in calls]

        if self.flusher is not None:
            return {"calls": 1}  # caches are cold only for the first call
        return {"calls": min(MAX_CALLS, calls_per_sample(self.clock, make, SAMPLE_SECONDS))}

    def prepare(
        self, subject: int, first: int, step: int, calls: int, keep: int, warm: bool
    ) -> dict[str, Any]:
        """Prepare a sample: new inputs, and caches as the policy says. keep: the call whose result will be
        handed over, -1 for none. warm: hot caches need a call before."""
        caller = self._caller(subject)
        made = [self._call(subject, first + c, (step + c) % ROUTINGS) for c in range(calls)]
        self._kept, self._kept_args = [], made[keep][1]
        self._timed = [caller.ready(call, args) for call, args in made]
        if keep >= 0:
            self._timed[keep] = partial(_keep, self._timed[keep], self._kept)
        if self.flusher is None:
            if warm:
                caller.ready(*self._call(subject, first + calls, step))()
        else:
            self.flusher.flush()
            if self.experiment.cache == "weights-cold":
                touch(list(made[0][1].values()), self.weights_in_use)
        return {}

    def go(self) -> dict[str, Any]:
        """Run the timed span. The parent's clock also times this request."""
        return {"seconds": self.clock.span(self._timed)}

    def hand_over(self, subject: int, name: str) -> dict[str, Any]:
        result = self._caller(subject).result(self._kept[0], self._kept_args)
        answer: dict[str, Any] = {"wrong_type": wrong_type(result.out), "print": ""}
        if not answer["wrong_type"]:
            save_file(named_tensors(result), self.scratch / f"{name}.safetensors")
        answer["print"] = fingerprint(activations(self._kept_args))
        return answer

    def stages(self, subject: int, number: int, step: int) -> dict[str, Any]:
        _, args = self._call(subject, number, step)
        seconds = {}
        for name, stage in self.span.stages(self.experiment.implementations[subject], self.inputs, args):
            seconds[name] = self.clock.span([stage])
        return {"stages": seconds}

    def weights(self) -> dict[str, Any]:
        return {"print": weights_print(self.span, self.inputs)}

    def loaded(self) -> dict[str, Any]:
        return {"files": self.files.found()}

    def _call(self, subject: int, number: int, step: int) -> tuple[Call, dict[str, Any]]:
        call = self.span.call(self.experiment.implementations[subject], self.inputs, number, step)
        return call, self.span.arguments(call)

    def _caller(self, subject: int) -> Caller:
        if subject not in self._callers:
            built = self.span.built(self.experiment.implementations[subject], self.inputs)
            self._callers[subject] = Caller(self.span, built, self.experiment.direction)
        return self._callers[subject]


def _keep(run: Callable[[], Any], holder: list[Any]) -> None:
    holder.append(run())


def start_threads(place: str) -> None:
    """Start the threads of OpenMP and of a GPU driver now, so that threads counted later are a kernel's."""
    ones = torch.ones(512, 512, device=place)
    torch.mm(ones, ones).relu_().sum()


def settle(
    experiment: Experiment, scratch: Path, pipe: int, cores: tuple[int, ...], keep: Sequence[int] = ()
) -> None:
    """Its own process group and log, pinned threads, a memory cap; and it dies when its parent dies.

    keep: open files that stay open.
    """
    os.setsid()
    # close the fork server's files, so that kernels cannot write to them
    for fd in [int(name) for name in os.listdir("/proc/self/fd")] if sys.platform == "linux" else []:  # noqa: PTH208
        if fd > 2 and fd not in (pipe, *keep):
            with contextlib.suppress(OSError):
                os.close(fd)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Transformers imports scipy late, and the threads of its OpenBLAS would be taken for a kernel's
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of processes would be taken for a kernel's
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.compile_threads = 1  # type: ignore[attr-defined]
    torch.set_num_threads(experiment.threads)
    # a kernel may bring an OpenMP or MKL of its own, which asks these; launchers such as Ray set them to 1
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(experiment.threads)
    if cores:
        os.sched_setaffinity(0, cores)
    if memory_place(experiment.device) == "cpu":  # CUDA reserves addresses for the memory of all GPUs
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = now + int(experiment.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    gc.disable()


def _global_state() -> dict[str, Any]:
    """Settings a kernel must not change, because they affect other kernels' results or times."""
    return {
        "torch's number of threads": torch.get_num_threads(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's flush of denormals": bool(torch.tensor([1e-310], dtype=torch.float64)[0] * 1 == 0),
        "the processors it may use": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    }


def _aliases(out: Any, args: Mapping[str, Any]) -> bool:
    """Does the result share memory with an input? Later writes to it would change the input."""
    mine = {t.untyped_storage().data_ptr() for t in tensors_in(out) if t.numel()}
    return bool(mine & {t.untyped_storage().data_ptr() for t in tensors_in(args) if t.numel()})


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())
