"""RanksHost: a layer on several processes. Each rank is a child, and all make the same calls together.

A sample is from the moment the last rank begins to the moment the last one ends. The policy's threads are
those of a rank. A result is joined from the tokens and the experts of all ranks, and judged like any other.
Only our own code is measured. What fails ends all ranks.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moe_routing_bench.bench.calls import GRADIENT
from moe_routing_bench.bench.hosts import rank_worker
from moe_routing_bench.bench.hosts.children import LOG_TAIL, A, Child, Vitals
from moe_routing_bench.bench.hosts.messages import HandedOver, Ready, Timed
from moe_routing_bench.bench.hosts.shared import SharedHost
from moe_routing_bench.bench.spans.parallel import STAGES
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.moe.expert_parallel import EXPERTS
from moe_routing_bench.workloads.experiment import Experiment

# of these tensors a rank has a part; it has all of any other
IN_PARTS = ("out", f"{GRADIENT}x_TD", f"{GRADIENT}{EXPERTS}")


class RanksHost(SharedHost):
    max_calls = 1  # the ranks meet before each

    def check_weights(self) -> None:
        """Every rank computes with copies, so nobody can change another's."""

    def _start(self) -> Child:
        return RankGroup(
            replace(self.setup.experiment, implementations=self.implementations), self.setup.cores
        ).ready(self._meanwhile)


class RankGroup(Child):
    """The child of rank 0, and those of the others. A request goes to all, and their answers become one."""

    def __init__(self, experiment: Experiment, cores: tuple[int, ...]):
        self._meeting, each = tempfile.TemporaryDirectory(), experiment.threads
        enough = len(cores) == each * experiment.W  # else nobody is pinned
        own = [cores[rank * each : (rank + 1) * each] if enough else () for rank in range(experiment.W)]
        super().__init__(experiment, own[0], rank_worker.serve, "0", self._meeting.name)
        self.others = [
            Child(experiment, own[rank], rank_worker.serve, str(rank), self._meeting.name)
            for rank in range(1, experiment.W)
        ]
        self._in_step = True

    def ask(self, what: str, answer_type: type[A], **details: Any) -> A:
        for child in (self, *self.others):
            child._asked, child.limit = what, self.limit
            child._send({"do": what, **details})
        answers = self._answers(answer_type)
        return answers[0].model_copy(update=_together(answers, STAGES[self.experiment.direction]))

    def file(self, name: str) -> Path:
        """Joins the results of all ranks. What every rank holds whole must be the same on all of them."""
        parts = [load_file(Child.file(child, name)) for child in (self, *self.others)]
        whole = {}
        for tensor, first in parts[0].items():
            if tensor.startswith(IN_PARTS):
                whole[tensor] = torch.cat([part[tensor] for part in parts])
            elif all(torch.equal(part[tensor], first) for part in parts):
                whole[tensor] = first
            else:
                raise ImplementationError(Status.WRONG_VALUE, f"ranks have different values of the {tensor}")
        save_file(whole, path := super().file(f"all-{name}"))
        return path

    def harm(self) -> str:
        if not self._in_step:
            return "lost one of its ranks"
        return super().harm() or next(filter(None, (child.harm() for child in self.others)), "")

    def count_threads(self) -> int:
        return super().count_threads() + sum(child.count_threads() for child in self.others)

    def vitals(self) -> Vitals:
        each = [super().vitals(), *(child.vitals() for child in self.others)]
        return Vitals(
            rss_bytes=sum(one.rss_bytes for one in each),
            peak_bytes=sum(one.peak_bytes for one in each),
            threads=sum(one.threads for one in each),
        )

    def begin_watch(self) -> None:
        super().begin_watch()
        for child in self.others:
            child.begin_watch()

    def log_tail(self) -> str:
        logs = [super().log_tail(), *(child.log_tail() for child in self.others)]
        return "\n".join(filter(None, logs))[-LOG_TAIL:]

    def close(self) -> None:
        super().close()
        for child in self.others:
            child.close()
        self._meeting.cleanup()

    def _begin(self) -> None:
        self._answers(Ready)
        for child in (*self.others, self):
            child._check_settings()

    def _answers(self, answer_type: type[A]) -> list[A]:
        """Returns the answers of all ranks. The first failure counts, because the other ranks may be waiting
        for that one."""
        ranks = (self, *self.others)
        found: dict[int, A] = {}
        until = time.monotonic() + self.limit
        self._in_step = False
        while len(found) < len(ranks):
            ways = {
                way: rank
                for rank, child in enumerate(ranks)
                if rank not in found
                for way in (child._pipe, child._process.sentinel)
            }
            ready = {ways[way] for way in wait(list(ways), max(0.0, until - time.monotonic()))}
            if not ready:
                raise self._late()
            for rank in sorted(ready):
                try:
                    found[rank] = ranks[rank]._answer(answer_type)
                except ImplementationError as failure:
                    raise ImplementationError(failure.status, f"rank {rank}: {failure.reason}") from None
        self._in_step = True
        return [found[rank] for rank in range(len(ranks))]


def _together(answers: list[Any], stages: tuple[str, ...]) -> dict[str, Any]:
    """Joins what differs from rank to rank into one answer."""
    whole: dict[str, Any] = {}
    if isinstance(answers[0], Timed):
        ends = np.array([answer.stamps for answer in answers]).max(0)  # the last rank counts
        whole["seconds"] = float(ends[-1] - ends[0])
        whole["stages"] = dict(zip(stages, np.diff(ends).tolist(), strict=True))
    if isinstance(answers[0], HandedOver):
        whole["wrong_type"] = next((answer.wrong_type for answer in answers if answer.wrong_type), "")
        same = all(answer.print == answers[0].print for answer in answers)
        whole["print"] = answers[0].print if same else "one of the ranks changed its inputs"
        whole["aliases"] = any(answer.aliases for answer in answers)
        whole["changed"] = tuple(sorted({name for answer in answers for name in answer.changed}))
    return whole
