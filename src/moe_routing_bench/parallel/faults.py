"""Finds out which rank failed, so that every other rank raises the same sentence about it.

If a rank dies or stalls, torch.distributed ends the exchange on the other ranks with an error, at once or
after the timeout of the group (`Ranks.limit`). Each of them then writes a note to the group's store and looks
for the notes of the others. A rank that writes none within GRACE seconds is to blame. The first verdict is
final, so all ranks report the same, even a rank that wakes up later. A group that failed is not used again,
because data that is still being sent could be mistaken for other data.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.parallel.ranks import RankError, Ranks

GRACE = 5.0  # seconds
ROWS_SHOWN = 16
NEVER_SENT = 71_077  # a tag that no message has


@contextmanager
def watched(
    ranks: Ranks | None, doing: str, split_WW: Tensor | None = None, replicas: bool = False
) -> Iterator[None]:
    """Put it around an exchange: its errors become a RankError. replicas: the exchange is between these."""
    group = None if ranks is None else ranks.replicas if replicas else ranks.group
    if ranks is None or group is None:
        yield
        return
    if ranks.failure:
        raise RankError(
            f"this group failed before and is not used again: {ranks.failure[0]}", ranks.failure[0].blamed
        )
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        blamed, how = _find_out(ranks, group, time.monotonic() - began)
        words = re.sub(r"^\[/[^]]*\] ", "", str(error).strip().splitlines()[0]).partition(
            ". This is typically"
        )[0]
        failed = RankError(
            f"{named(blamed)}{' of the replicas' * replicas} failed: {how}, after {doing} ended on rank "
            f"{ranks.rank} with: {words[:200]}. {split_sentence(split_WW)} Start the ranks again, for "
            "instance by torchrun --max-restarts.",
            blamed,
        )
        ranks.failure.append(failed)
        raise failed from None


def named(blamed: Sequence[int]) -> str:
    if not blamed:
        return "a rank that cannot be named"
    return f"rank {blamed[0]}" if len(blamed) == 1 else f"ranks {', '.join(map(str, blamed))}"


def split_sentence(split_WW: Tensor | None) -> str:
    if split_WW is None:
        return "The numbers of rows to send were not known yet."
    W = split_WW.shape[0]
    shown = f"{split_WW[:ROWS_SHOWN, :ROWS_SHOWN].tolist()}{', ...' if W > ROWS_SHOWN else ''}"
    return f"The rows from each rank (line) to each rank (column) were {shown}."


def differing(
    what: str, value_W: Sequence[object], advice: str, split_WW: Tensor | None = None
) -> RankError | None:
    """An error that names the ranks whose value differs from most ranks; if two ranks differ, both."""
    usual = max(set(value_W), key=list(value_W).count)
    blamed = [rank for rank, value in enumerate(value_W) if value != usual]
    if not blamed:
        return None
    if 2 * len(blamed) >= len(value_W):
        blamed = list(range(len(value_W)))
    shown = ", ".join(map(str, value_W[:ROWS_SHOWN]))
    return RankError(
        f"{named(blamed)} differs: {what} is {shown} on the ranks; {advice}. {split_sentence(split_WW)}",
        blamed,
    )


def _find_out(ranks: Ranks, group: dist.ProcessGroup, waited: float) -> tuple[tuple[int, ...], str]:
    """The ranks to blame, and the evidence. It runs in a thread, because a store may not answer if its owner
    stalls."""
    causes: list[tuple[tuple[int, ...], str]] = []
    asking = threading.Thread(target=lambda: causes.append(_ask(ranks, group, waited)), daemon=True)
    asking.start()
    asking.join(2 * GRACE)
    if not causes:
        return (0,), "the store of the group, which rank 0 or the launcher owns, does not answer"
    return causes[0]


def _ask(ranks: Ranks, group: dist.ProcessGroup, waited: float) -> tuple[tuple[int, ...], str]:
    here, world = dist.get_rank(group), dist.get_world_size(group)
    # torchrun restarts ranks with the same store
    notes = f"mrb_failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    silent, until, limit = tuple(range(world)), time.monotonic() + GRACE, ranks.limit.total_seconds()
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        store.set(f"{notes}/{here}", f"{waited:.3f}")
        for other in ranks.made_groups:
            _break(other)
        while silent and time.monotonic() < until and not store.check([f"{notes}/verdict"]):
            silent = tuple(rank for rank in silent if not store.check([f"{notes}/{rank}"]))
            time.sleep(0.02)
        waits = [] if silent else [float(store.get(f"{notes}/{rank}")) for rank in range(world)]
        verdict = store.compare_set(f"{notes}/verdict", "", json.dumps(_judge(silent, waits, limit)))
        # the owner of the store must not end before the others have read it
        store.set(f"{notes}/read/{here}", "1")
        blamed, how = json.loads(verdict)
        waiting = [f"{notes}/read/{rank}" for rank in range(world) if rank not in blamed]
        while not store.check(waiting) and time.monotonic() < until + GRACE / 2:
            time.sleep(0.02)
    except RuntimeError:
        return (0,), "the store of the group is gone; rank 0 or the launcher owns it"
    return tuple(blamed), how


def _judge(silent: tuple[int, ...], waits: list[float], limit: float) -> tuple[tuple[int, ...], str]:
    """The blamed ranks, and why. waits: how long each rank was in the failed exchange, if all reported it."""
    if silent:
        return silent, f"it did not say within {GRACE:g} s that it is alive"
    if waits and max(waits) > 0.9 * limit and min(waits) < max(waits) - limit / 2:
        return (waits.index(min(waits)),), f"others waited for it {max(waits):.1f} s, more than the timeout"
    return (), "all ranks are alive"


def _break(group: dist.ProcessGroup) -> None:
    """Makes ranks that wait for this rank fail at once. Gloo's abort does not do that (torch 2.13), but Gloo
    closes all its connections when a wait on one of them times out."""
    if dist.get_backend(group) != "gloo":
        return
    for rank in range(dist.get_world_size(group)):
        try:
            if rank != dist.get_rank(group):
                never = dist.irecv(torch.empty(1), group=group, group_src=rank, tag=NEVER_SENT)
                assert never is not None
                never.wait(timedelta(milliseconds=50))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
