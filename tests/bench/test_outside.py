"""The protocol for code from outside: what it is made of, and honest cells of every kind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from moe_routing_bench.bench.hosts import sandbox
from moe_routing_bench.bench.hosts.freezing import Strangers, _has_ended
from moe_routing_bench.bench.hosts.memory import SharedMemory, places_for, read_memory, with_tensors
from moe_routing_bench.bench.hosts.secret_inputs import SecretInputs
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.untrusted import read_file, receive
from moe_routing_bench.core.fork_server import PRELOAD, fork_server, server_pid, without_main_module
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from repository import SOURCE
from timing import had_time

SHAPE = MoEShape(T=24, D=32, F=32, E=8, K=2)
HONEST = '''"""The default under another name."""
from moe_routing_bench.ops.expert_ffn.op import op

honest = op.get(op.default).run


def run(x_TD, gate_TK, plan, weights):
    return honest(x_TD, gate_TK, plan, weights)
'''


def secret(key: bytes = b"1", **more: object) -> SecretInputs:
    case = Experiment(case="own/x", span="expert_ffn", **vars(replace(SHAPE, **more)))  # type: ignore[arg-type]
    return SecretInputs(Inputs(case), key)


def test_inputs_follow_from_the_secret_alone() -> None:
    one, again, other = (
        secret().at(7, 1, "compact"),
        secret().at(7, 1, "compact"),
        secret(b"2").at(7, 1, "compact"),
    )
    assert torch.equal(one.x_TD, again.x_TD) and torch.equal(one.plan.pair_R, again.plan.pair_R)
    assert not torch.equal(one.x_TD, other.x_TD)
    assert not torch.equal(secret().at(8, 1, "compact").plan.pair_R, one.plan.pair_R)


@pytest.mark.parametrize("layout", ["compact", "block(16)", "padded(capacity_factor=1.0)"])
def test_a_secret_plan_is_valid_and_as_skewed_as_the_workload(layout: str) -> None:
    inputs = secret()
    plan = inputs.at(5, 2, layout).plan.validate()
    public = inputs.workload(2).routing
    load_E = torch.bincount(public.expert_TK.flatten(), minlength=SHAPE.E)
    kept = plan.count_E + plan.dropped_E
    assert sorted(kept.tolist()) == sorted(load_E.tolist())


def test_weights_repeat_nowhere() -> None:
    flat = secret(D=1024, F=1024).weights.w_in_EDG.flatten()
    period = 1_048_573
    assert flat.numel() > 2 * period
    assert (flat[:1000] == flat[period : period + 1000]).float().mean() < 0.1
    assert flat.float().std() * 1024**0.5 == pytest.approx(1, rel=0.01)


def test_arguments_go_through_shared_memory_unchanged() -> None:
    args = {"x_TD": secret().at(1, 0, "compact").x_TD, "plan": secret().at(1, 0, "compact").plan, "K": 2}
    tensors = list(tensors_in(args))
    places, num_bytes = places_for(tensors)
    memory = SharedMemory.new("test", num_bytes)
    for place, tensor in zip(places, tensors, strict=True):
        memory.tensor(place).copy_(tensor)
    seen = SharedMemory.open(memory.path, num_bytes, writable=False)
    made = with_tensors(args, iter([seen.tensor(place) for place in places]))
    assert all(torch.equal(a, b) for a, b in zip(tensors_in(made), tensors, strict=True))
    assert made["K"] == 2 and made["plan"].layout == args["plan"].layout
    memory.close()


def test_shared_memory_cannot_be_cut_nor_written_once_it_is_sealed() -> None:
    memory = SharedMemory.new("test", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.keep_others_from_writing()
    with pytest.raises(PermissionError):
        SharedMemory.open(memory.path, 4096, writable=True)
    memory.bytes()[0] = 7  # the parent's own view still can
    memory.close()


def test_memory_of_a_process_is_read_and_what_is_not_its_memory_is_not() -> None:
    x = torch.arange(1000)
    (copy,) = read_memory(os.getpid(), [(x.data_ptr(), 8000)])
    assert torch.equal(copy.view(torch.int64), x)
    with pytest.raises(OSError):
        read_memory(os.getpid(), [(4096, 8)])


def leave_a_process_behind(pid: str) -> None:
    """It is in a session of its own, and the process that started it has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(pid).write_text(f"{os.getpid()}\n")
            time.sleep(120)
        os._exit(0)
    os.wait()


def rest_in_a_session(began: Connection) -> None:
    os.setsid()
    began.send(True)
    time.sleep(120)


def test_what_workers_leave_behind_is_ended_and_what_this_process_started_is_not(tmp_path: Path) -> None:
    strangers, written = Strangers(server_pid()), tmp_path / "pid"
    job = subprocess.Popen(["sleep", "120"], start_new_session=True)
    worker = fork_server().Process(target=leave_a_process_behind, args=(str(written),))
    began, begins = fork_server().Pipe(duplex=False)
    another = fork_server().Process(target=rest_in_a_session, args=(begins,))
    try:
        with without_main_module():
            worker.start()
            another.start()
        worker.join()
        assert began.recv()
        while not (written.exists() and written.read_text().endswith("\n")):
            time.sleep(0.01)
        assert strangers.end() == 1
        assert strangers.end() == 0, "nobody is blamed twice"
        assert job.poll() is None and another.is_alive()
    finally:
        for one in (job, another):
            one.kill()
        job.wait()
        another.join()
    assert _has_ended(int(written.read_text()))


def test_everything_is_forked_from_one_server_that_knows_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first starts it."""
    asked: list[list[str]] = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda self, names: asked.append(names))
    for more in ((), ("moe_routing_bench.cli",)):
        assert fork_server(*more) is multiprocessing.get_context("forkserver")
    assert asked[0] == [*PRELOAD] and asked[1] == [*PRELOAD, "moe_routing_bench.cli"]
    assert {
        "moe_routing_bench.bench.hosts.shared_worker",
        "moe_routing_bench.bench.hosts.isolated_worker",
    } <= {*PRELOAD}
    callers = [path for path in SOURCE.rglob("*.py") if "set_forkserver_preload" in path.read_text()]
    assert [path.name for path in callers] == ["fork_server.py"]


def test_messages_have_deadlines_and_a_greatest_length() -> None:
    ours, theirs = os.pipe()
    never, _kept = os.pipe()
    os.write(theirs, (64).to_bytes(4, "big"))
    with pytest.raises(TimeoutError):
        receive(ours, never, seconds=0.05, most_bytes=100)
    os.write(theirs, (200).to_bytes(4, "big"))
    with pytest.raises(ValueError, match="200 bytes"):
        receive(ours, never, seconds=1, most_bytes=100)
    os.write(theirs, (3).to_bytes(4, "big") + b"yes")
    assert receive(ours, never, seconds=1, most_bytes=100) == b"yes"
    os.close(theirs)
    with pytest.raises(EOFError):
        receive(ours, never, seconds=1, most_bytes=100)


def test_only_regular_files_of_a_reasonable_length_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file", 5) == b"12345"
    for name, most in (("file", 4), ("link", 9), ("pipe", 9), ("absent", 9)):
        with pytest.raises(ValueError):
            read_file(tmp_path / name, most)


def test_the_sandbox_has_no_network_and_writes_to_its_scratch_folder_alone(monkeypatch, tmp_path) -> None:
    words = sandbox.command(tmp_path, ["python", "-c", "pass"])
    assert {"--unshare-net", "--unshare-pid", "--die-with-parent"} <= set(words)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--bind"] == [str(tmp_path)]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="apt install bubblewrap"):
        sandbox.check_sandbox()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in ("copy", "another"):
        (tmp_path / "expert_ffn").mkdir(exist_ok=True)
        (tmp_path / "expert_ffn" / f"{name}.py").write_text(HONEST)
    return str(tmp_path)


def experiment(folder: str, *specs: str, span: str = "expert_ffn", **more: object) -> Experiment:
    how = {"max_seconds": 120, "max_rounds": 20, "sandbox": bool(more.pop("sandbox", False))}
    routers = more.pop("routers", ("",) * len(specs))
    case = Experiment(case="own/x", span=span, **vars(SHAPE), **{"dtype": "float32", **more})  # type: ignore[arg-type]
    implementations = tuple(ImplementationRef(name=s, router=r) for s, r in zip(specs, routers, strict=True))  # type: ignore[call-overload]
    return replace(case, workload="uniform", implementations=implementations, include=(folder,), **how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("specs", "more"),
    [
        (("staged", "copy"), {}),
        (("staged", "copy"), {"direction": "train"}),
        pytest.param(("staged", "copy"), {"direction": "backward"}, marks=pytest.mark.nightly),
        pytest.param(("staged", "copy"), {"dtype": "bfloat16"}, marks=pytest.mark.nightly),
        (("staged", "copy", "another"), {}),
        pytest.param(("copy",), {}, marks=pytest.mark.nightly),
        pytest.param(("copy", "staged"), {}, marks=pytest.mark.nightly),
        pytest.param(("staged", "copy"), {"span": "layer"}, marks=pytest.mark.nightly),
        (("staged", "copy"), {"span": "layer", "routers": ("switch", "softmax_topk")}),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.timing
def test_honest_cells_of_every_kind_pass(
    folder: str, specs: tuple[str, ...], more: dict[str, object]
) -> None:
    outcome = run_cell(experiment(folder, *specs, **more))
    had_time(*outcome.implementations)
    for one in outcome.implementations:
        assert one.status is Status.PASSED, f"{one.implementation.name}: {one.status} {one.reason}"
        assert one.checked_timed_calls >= 1
    notes = [note for note in outcome.notes if "is from outside" in note]
    assert len(notes) == len({"copy", "another"} & set(specs))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.timing
def test_the_twin_of_a_shared_process_says_nothing_about_isolated_ones(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_routing_bench.bench.verdict.aa_floor", lambda a, twin: 0.5)
    outcome = run_cell(experiment(folder, "staged", "eager_loop", "copy"))
    had_time(*outcome.implementations)
    ours, theirs = (one.comparison for one in outcome.implementations[1:])
    assert ours is not None and ours.aa_floor == 0.5
    assert theirs is not None and theirs.aa_floor == 0.0 and "twin" not in theirs.reason


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.timing
def test_an_honest_cell_passes_in_a_sandbox(folder: str) -> None:
    try:
        sandbox.check_sandbox()
    except ValueError as missing:
        pytest.skip(str(missing))
    one = run_cell(experiment(folder, "staged", "copy", sandbox=True)).implementations[1]
    had_time(one)
    assert one.status is Status.PASSED, one.reason
