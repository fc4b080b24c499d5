"""ParallelMoE on 4,096 pretended GPUs: fake tensors say cuda, refuse mixed devices and have no values.

Run it in a process of its own, because it replaces parts of torch. Forward alone: backward asks a driver.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_routing_bench.moe import expert_parallel
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.ops import hops
from moe_routing_bench.parallel import traffic
from moe_routing_bench.parallel.faults import ROWS_SHOWN
from moe_routing_bench.parallel.placing import contiguous
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import Part
from moe_routing_bench.routers.router import build

D, F, E, K, W, T = 16, 12, 4096, 2, 4096, 8
GPU = torch.device("cuda:0")
MODULES = (traffic, hops, expert_parallel)


class Reads:
    """Replaces on_host: the numbers that a device would have, and their sizes."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def __call__(self, numbers: Tensor) -> list[Any]:
        assert numbers.device == GPU
        self.sizes.append(tuple(numbers.shape))
        if numbers.dim() == 1:
            return [1] * numbers.shape[0]
        rows = [[1] * W for _ in range(numbers.shape[0])]
        if len(rows) > 3:  # counts of a chunk: a row to each of the first ranks, then the facts
            pairs = T // 2 * K
            rows[0] = rows[1] = [1] * pairs + [0] * (W - pairs)
            rows[-5:] = [[number] * W for number in (T // 2, K, traffic.DTYPES.index(torch.float32), 0, 0)]
        return rows


class Stream:
    """A stream that knows which stages are finished when its next work begins."""

    now: Stream

    def __init__(self, device: object = None) -> None:
        self.finished: set[tuple[str, int]] = set()

    def record_event(self) -> frozenset[tuple[str, int]]:
        return frozenset(self.finished)

    def wait_event(self, event: frozenset[tuple[str, int]]) -> None:
        self.finished |= event


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.now = Stream.now, stream
    yield
    Stream.now = before


class AtOnce:
    """Replaces the thread of the exchanges, because two threads cannot share a mode of fake tensors."""

    def __init__(self, threads: int, initializer: Callable[[], None] | None = None) -> None:
        if initializer is not None:
            initializer()

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done


class Dice(torch.Generator):
    def __new__(cls, device: object = None) -> torch.Generator:  # type: ignore[misc]
        return PLAIN_DICE()


PLAIN_DICE = torch.Generator


def begin() -> tuple[Reads, Ranks]:
    """Makes this process rank 3 of W. A mesh reads its own numbers, so it is made before tensors are fake."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).parent / "data/pretended_gpus.cpp", Path(folder) / "gpus.so"
        torch_folder = Path(torch.__file__).parent
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        linked = ["-o", library, f"-L{torch_folder / 'lib'}", "-lc10"]
        subprocess.run(["g++", *options, source, *linked], check=True)
        ctypes.CDLL(str(library))
    reads = Reads()
    for module in MODULES:
        module.on_host = reads  # type: ignore[attr-defined]
    expert_parallel.ThreadPoolExecutor = AtOnce  # type: ignore[misc]
    torch.Generator = Dice  # type: ignore[misc]
    Tensor.uniform_ = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign, assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=W)
    mesh = init_device_mesh("cuda", (1, W), mesh_dim_names=("dp", "ep"))
    return reads, Ranks.on_mesh(contiguous(E, ranks=W), mesh)


def layer_on_gpu(ranks: Ranks, **options: Any) -> ParallelMoE:
    with torch.device(GPU):
        router = build("softmax_topk", D, E, K)
    object.__setattr__(router, "to", lambda device: router)  # fake parameters cannot be moved
    return ParallelMoE(
        D, F, E, K, ranks=ranks, device=GPU, router=router,
        shared_F=4, layout="block(4)", impl="staged(grouped_gemm=block_sparse)", plan_impl="argsort",
        dispatch_impl="all_to_all", combine_impl="all_to_all", **options,
    )  # fmt: skip


def fixed_sizes_never_wait(reads: Reads, ranks: Ranks) -> None:
    layer = layer_on_gpu(ranks, send_layout="padded(capacity=4)")
    assert reads.sizes == [(3, W), (1,)], reads.sizes  # checksums and the seed, when the layer is built
    assert (layer.like.shape[0], layer.like.to_local().shape[0]) == (E, ranks.places)  # type: ignore
    y_TD, _ = layer(torch.empty(T, D, device=GPU))
    assert (y_TD.shape, y_TD.device) == ((T, D), GPU)
    assert len(reads.sizes) == 2


def chunks_overlap_on_streams(reads: Reads, ranks: Ranks) -> None:
    main = Stream.now = Stream()
    kept: set[tuple[int, Stream]] = set()
    torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
    torch.cuda.stream = on_stream  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: main  # type: ignore[assignment, return-value]
    of_thread: list[torch.device] = []
    torch.cuda.set_device = of_thread.append  # type: ignore[assignment]
    Tensor.record_stream = lambda tensor, stream: kept.add((id(tensor), stream))  # type: ignore
    parts: list[Part] = []

    def staged(name: str, after: str, not_after: str) -> None:
        plain = getattr(ParallelMoE, name)

        def stage(layer: ParallelMoE, part: Part, rows: Tensor) -> Tensor:
            if not any(part is one for one in parts):
                parts.append(part)
            place = next(place for place, one in enumerate(parts) if one is part)
            stream = Stream.now
            assert (stream is main) == (name == "experts_computed"), name
            assert not after or (after, place) in stream.finished, (name, place, stream.finished)
            assert (not_after, place - 1) not in stream.finished, (name, place, stream.finished)
            assert name != "experts_computed" or (id(rows), main) in kept
            result: Tensor = plain(layer, part, rows)
            stream.finished.add((name, place))
            return result

        setattr(ParallelMoE, name, stage)

    staged("_there", "", "experts_computed")  # the next rows are sent while the experts compute
    staged("experts_computed", "_there", "given_back")
    staged("given_back", "experts_computed", "")
    reads.sizes.clear()
    y_TD, _ = layer_on_gpu(ranks, chunks=2)(torch.empty(T, D, device=GPU))
    assert y_TD.shape == (T, D) and of_thread == [GPU]
    assert {("given_back", 0), ("given_back", 1)} <= main.finished
    # the host waits once for each chunk; of each rank it reads two sums, what a message shows, and the facts
    assert reads.sizes[2:] == [(2 + ROWS_SHOWN + 5, W)] * 2, reads.sizes


def main() -> None:
    reads, ranks = begin()
    with FakeTensorMode(), torch.no_grad():
        fixed_sizes_never_wait(reads, ranks)
        chunks_overlap_on_streams(reads, ranks)
