"""Recycled memory: never two owners, comes back when the last view is gone, bounded, safe under threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from child_process import python
from moe_routing_bench.core import host_allocator as module
from moe_routing_bench.core.host_allocator import Recycled

MB = 1 << 20
pytestmark = pytest.mark.skipif(not module.CAN_RECYCLE, reason="the system has no MADV_FREE")


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = Recycled()
    first = pool.empty(8, MB, dtype=torch.bfloat16)
    at, view = first.data_ptr(), first[3:5].transpose(0, 1)
    del first
    second = pool.empty(8, MB, dtype=torch.bfloat16)
    assert second.data_ptr() != at
    view.fill_(1)
    second.fill_(2)
    assert bool((view == 1).all())
    del view
    third = pool.empty(4, MB, dtype=torch.float32)  # the same bytes under another shape
    assert third.data_ptr() == at and third.shape == (4, MB) and third.is_contiguous()


def test_small_tensors_and_other_sizes_are_plain() -> None:
    pool = Recycled()
    assert pool.empty(3, 0, dtype=torch.float32).shape == (3, 0)
    small = pool.empty(10, dtype=torch.int64)
    assert small.untyped_storage().resizable()
    large = pool.empty(32 * MB, dtype=torch.uint8)
    at = large.data_ptr()
    del large
    # a block of 32 MB is not spent on 8 MB
    assert pool.empty(8 * MB, dtype=torch.uint8).data_ptr() != at


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    pool = Recycled()
    for size in range(8, 40, 2):
        pool.empty(size * MB, dtype=torch.uint8)
    pool.empty(8 * MB, dtype=torch.uint8)
    assert sum(map(len, pool._free)) + pool._in_use <= 38 * MB
    pool.release()
    assert not pool._free and not pool._returned


def test_a_gradient_lives_in_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(2 * MB))
    weight.grad = Recycled().empty(2 * MB, dtype=torch.float32).fill_(3.0)
    gc.collect()
    torch.optim.SGD([weight], lr=1.0).step()
    assert bool((weight == -3).all())


def test_threads_never_share_a_block() -> None:
    pool, wrong = Recycled(), []

    def work(mark: int) -> None:
        for _ in range(40):
            mine = pool.empty(5 * MB, dtype=torch.uint8)
            mine[::4096].fill_(mark)
            other = pool.empty(5 * MB, dtype=torch.uint8)
            other[::4096].fill_(mark + 100)
            if not bool((mine[::4096] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(pool._free) + len(pool._returned) <= 12  # three at a time in each thread


@pytest.mark.slow
def test_the_end_of_a_process_is_quiet() -> None:
    code = (
        "import torch; from moe_routing_bench.core.host_allocator import recycled\n"
        "kept = recycled.empty(8 << 20, dtype=torch.uint8).fill_(1)\n"
        "recycled.empty(8 << 20, dtype=torch.uint8)"
    )
    assert not python(code).stderr
