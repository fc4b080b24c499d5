"""The worker: a process that runs implementations, good and bad, on request. It decides nothing.

It answers requests of the parent (children.py) over a pipe, in JSON: load inputs, call an implementation and
write its result to a file, time a sample. The parent checks what matters: it makes the inputs again, judges
the results, and measures every timed span with its own clock too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_routing_bench.bench.calls import Caller, Result, named_tensors, wrong_type
from moe_routing_bench.bench.clock import CacheFlusher, Clock
from moe_routing_bench.bench.device import clock_for, cuda_of, memory_place, others_on
from moe_routing_bench.bench.hosts.filtering import forbid
from moe_routing_bench.bench.inputs import ROUTINGS, Call, Inputs, fingerprint, touch
from moe_routing_bench.bench.judging import activations, weights_print
from moe_routing_bench.bench.kit import kit_results, run_kit
from moe_routing_bench.bench.loaded import LoadedFiles
from moe_routing_bench.bench.spans.span import is_ours, span_named
from moe_routing_bench.conformance.check import poisoned_memory
from moe_routing_bench.core import fork_server
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment, device_kind

TIMED = "timed"  # the file of a result without a name
Requests = Mapping[str, Callable[..., dict[str, Any]]]


def serve(pipe: Connection, cell_json: str, scratch: str, cores: tuple[int, ...], code: str = "ours") -> None:
    """The main function of a worker process. Everything it prints goes to a log in its scratch folder."""
    experiment = Experiment.from_json(cell_json)
    settle(experiment, Path(scratch), pipe.fileno(), cores)
    if code == "outside":
        wait_until_held(pipe)
    answer_requests(pipe, lambda: _Worker(experiment, Path(scratch)).requests())


def answer_requests(pipe: Connection, load: Callable[[], Requests]) -> None:
    """Loads, reports that it is ready, and answers one request after the other until the parent hangs up."""
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
        if device_kind(device) == "pretend":
            cuda_of(device).start()
        self.others = others_on(device)
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
        self._clocks: dict[int, Clock] = {}  # a graph captures the calls of some implementations only
        self._timed: list[Any] = []
        self._kept: list[Any] = []
        self._kept_args: Mapping[str, Any] = {}
        self._named: dict[str, Result] = {}  # handed over, and read again after the next one
        self._state: dict[str, Any] = {}
        self._poison = False

    def next_cell(self, experiment: str) -> dict[str, Any]:
        """Begins another cell with the same settings and weights, and uses again what was made of them."""
        self._take(Experiment.from_json(experiment), self.inputs)
        return {}

    def requests(self) -> Requests:
        return {
            "next_cell": self.next_cell,
            "describe": self.describe,
            "kit": self.kit,
            "prepare": self.prepare,
            "go": self.go,
            "hand_over": self.hand_over,
            "stages": self.stages,
            "weights": self.weights,
            "loaded": self.loaded,
            "device": self.device,
        }

    def describe(self, place: int) -> dict[str, Any]:
        """What the implementation declares; even loading it may fail."""
        implementation = self.experiment.implementations[place]
        parts = self.span.parts(implementation.name)
        return {
            "label": implementation.called(self.span.label(implementation.name)),
            "origin": "; ".join(sorted({part.origin for part in parts})) or BUILT_IN,
            "deterministic": all(part.deterministic for part in parts),
            "reuses_output": any(part.reuses_output for part in parts[-1:]),
            "compiles": self.span.compiles(implementation.name),
            "host_sync": "; ".join(part.host_sync for part in parts if part.host_sync),
            "ties": parts[0].ties if parts else "",
        }

    def kit(self, place: int, name: str) -> dict[str, Any]:
        """name: of the file for the results; empty if nobody asks for them."""
        one = self.experiment.implementations[place]
        passed, failed, first = run_kit(self.experiment, one)
        refused: list[str] = []
        if name and not failed:
            tensors, refused = kit_results(self.experiment, one)
            save_file(tensors, self.scratch / f"{name}.safetensors")
        return {"passed": passed, "failed": failed, "first": first[:2000], "refused": refused}

    def prepare(
        self, place: int, first: int, step: int, calls: int, keep: int, warm: bool, poison: bool
    ) -> dict[str, Any]:
        """Prepare a sample: new inputs, and caches as the policy says. keep: the call whose result will be
        handed over, -1 for none. warm: hot caches need a call before. poison: new memory holds nonsense."""
        self._clock = self._clock_of(place)
        made = [self._call(place, first + c, (step + c) % ROUTINGS) for c in range(calls)]
        self._kept, self._kept_args, self._poison = [], made[keep][1], poison
        if keep >= 0:
            self._state = _global_state()
            if (reason := self._why_not(place)) is not None:
                return {"unsupported": reason}
        caller = self._caller(place)
        self._timed = [caller.ready(call, args) for call, args in made]
        if keep >= 0:
            self._timed[keep] = partial(_keep, self._timed[keep], self._kept)
        if self.flusher is None:
            if warm:
                caller.ready(*self._call(place, first + calls, step))()
        else:
            self.flusher.flush()
            if self.experiment.cache == "weights-cold":
                touch(list(made[0][1].values()), self.weights_in_use)
        return {}

    def _why_not(self, place: int) -> str | None:
        """Says why it cannot make the call whose result is kept; None if it can."""
        backward = self.experiment.direction != "forward"
        if backward and not self.span.differentiable:
            return "it has no gradient; measure forward"
        with torch.set_grad_enabled(backward):
            return self.span.why_not(self.experiment.implementations[place], self.inputs, self._kept_args)

    def go(self) -> dict[str, Any]:
        """Run the timed span. The parent's clock also times this request."""
        with poisoned_memory() if self._poison else nullcontext():
            seconds, clock = self._clock.span(self._timed), self._clock
            return {"seconds": seconds, "used": clock.used, "launch_seconds": clock.launch_seconds}

    def hand_over(self, place: int, name: str) -> dict[str, Any]:
        """Saves the kept result. If the result before it had a name, that one is saved once more."""
        caller = self._caller(place)
        # the last: a graph's calls are made before they are captured too
        result = caller.result(self._kept[-1], self._kept_args)
        answer: dict[str, Any] = {"wrong_type": wrong_type(result.out), "runs": caller.computation.runs}
        if not answer["wrong_type"]:
            self._save(name or TIMED, result)
            answer["aliases"] = _aliases(result.out, self._kept_args)
        for earlier, kept in self._named.items():
            self._save(f"{earlier}-later", kept)
        self._named = {name: result} if name and not answer["wrong_type"] else {}
        answer["print"] = fingerprint(activations(self._kept_args))
        answer["changed"] = [name for name, now in _global_state().items() if now != self._state[name]]
        return answer

    def _save(self, name: str, result: Result) -> None:
        save_file(named_tensors(result), self.scratch / f"{name}.safetensors")

    def stages(self, place: int, number: int, step: int) -> dict[str, Any]:
        _, args = self._call(place, number, step)
        seconds = {}
        for name, stage in self.span.stages(self.experiment.implementations[place], self.inputs, args):
            clock = clock_for(self.experiment.device, self.experiment.view, replayable=False)
            seconds[name] = clock.span([stage])
        return {"stages": seconds}

    def weights(self) -> dict[str, Any]:
        return {"print": weights_print(self.span, self.inputs)}

    def device(self) -> dict[str, Any]:
        return {"others": self.others}

    def loaded(self) -> dict[str, Any]:
        return {"files": self.files.found()}

    def _call(self, place: int, number: int, step: int) -> tuple[Call, dict[str, Any]]:
        call = self.span.call(self.experiment.implementations[place], self.inputs, number, step)
        return call, self.span.arguments(call)

    def _caller(self, place: int) -> Caller:
        if place not in self._callers:
            implementation, device = self.experiment.implementations[place], self.experiment.device
            built = self.span.built(implementation, self.inputs)
            if device_kind(device) == "pretend":
                waits = any(part.host_sync for part in self.span.parts(implementation.name))
                run = cuda_of(device).computing(built.run, implementation.name, waits=waits)
                built = replace(built, run=run)
            self._callers[place] = Caller(self.span, built, self.experiment.direction)
        return self._callers[place]

    def _clock_of(self, place: int) -> Clock:
        if place not in self._clocks:
            experiment = self.experiment
            ours = all(map(is_ours, self.span.origins(experiment.implementations[place].name)))
            replayable = ours and experiment.direction != "backward"
            self._clocks[place] = clock_for(experiment.device, experiment.view, replayable=replayable)
        return self._clocks[place]


def _keep(run: Callable[[], Any], holder: list[Any]) -> None:
    holder.append(run())


def start_threads(place: str, *, autograd: bool = True) -> None:
    """Start the threads of OpenMP, of a GPU driver and of autograd for a GPU now, so that threads counted
    later are a kernel's. A process that will fork has no autograd, which refuses to work in its child."""
    with torch.set_grad_enabled(autograd):
        ones = torch.ones(512, 512, device=place, requires_grad=autograd)
        total = torch.mm(ones, ones).relu_().sum()
        if autograd:
            torch.autograd.grad(total, ones)


def settle(
    experiment: Experiment, scratch: Path, pipe: int, cores: tuple[int, ...], keep: Sequence[int] = ()
) -> None:
    """Gives the process its own group and log, pins its threads, limits its memory, and makes it die with its
    parent (core/fork_server.py).

    keep: open files that stay open.
    """
    fork_server.settle(scratch, (pipe, *keep))
    # Transformers imports scipy late, and the threads of its OpenBLAS would be taken for a kernel's
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of processes would be taken for a kernel's
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.compile_threads = 1  # type: ignore[attr-defined]
    with contextlib.suppress(
        ImportError
    ):  # torch.compile imports it, and its thread would be taken for a kernel's
        import tqdm  # type: ignore[import-untyped]

        tqdm.tqdm.monitor_interval = 0
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


def wait_until_held(pipe: Connection) -> None:
    """Before anything from outside is loaded: the parent holds this process, and the kernel refuses it what
    is not its business. Where the kernel cannot, the parent sees that, and says so in the record."""
    with contextlib.suppress(OSError):
        forbid()
    pipe.recv_bytes()


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
    """True if the result shares memory with an input. Later writes to the result would change the input."""
    mine = {t.untyped_storage().data_ptr() for t in tensors_in(out) if t.numel()}
    return bool(mine & {t.untyped_storage().data_ptr() for t in tensors_in(args) if t.numel()})


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())
