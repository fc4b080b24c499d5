"""All series of a cell that the parent times: their pairs, started when first needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moe_routing_bench.bench.outside.freezing import Strangers
from moe_routing_bench.bench.outside.pairs import Pair, PairError
from moe_routing_bench.bench.outside.process import OutsideProcess
from moe_routing_bench.bench.outside.seats import Secret
from moe_routing_bench.bench.series import TWIN, beside
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.supervisor import SubjectError, Worker
from moe_routing_bench.bench.trial import Setup, Trial
from moe_routing_bench.core.fork_server import server_harm, server_pid


class Protocol:
    """Times code from outside and the baseline beside it; takes(series) says which series those are.

    A baseline from outside is paired with its own twin, and nothing in that pair is trusted.
    """

    def __init__(self, setup: Setup, alive: list[int], trials: Mapping[int, Trial]):
        self.setup, self.baseline, self.trials = setup, alive[0], trials
        self._couple: dict[int, tuple[int, int]] = {}
        if setup.can_freeze:
            couples = [(s, beside(s)) for s in alive[1:] if {s, alive[0]} & setup.outside]
            if alive[0] in setup.outside:
                couples.append((alive[0], TWIN))
            self._couple = {series: couple for couple in couples for series in couple}
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._secret: Secret | None = None
        self._strangers: Strangers | None = None
        self._last: int | None = None  # whose code from outside ran last

    def takes(self, series: int) -> bool:
        return series in self._couple

    def worker(self, series: int) -> OutsideProcess:
        return self._pair(series).seats[series].worker

    def calls(self, series: int) -> int:
        return self._pair(series).calls[series]

    def judged(self, series: int) -> int:
        return self._pair(series).judged[series]

    def sample(self, series: int) -> float:
        """Seconds per call; nothing may be left running."""
        pair = self._pair(series)
        if series not in pair.trusted:
            self._last = series
        seconds = pair.sample(series)
        if self._strangers is not None and (left := self._strangers.end()):
            raise SubjectError(Status.SUSPECT, f"it left {left} processes running")
        return seconds

    def blame_for_harm(self, others: Iterable[Worker]) -> None:
        """What happened to a process when it was not its turn was done by the code that had one before."""
        workers = [*others, *(seat.worker for p in self._pairs.values() for seat in p.seats.values())]
        if self._last is None:
            return
        if harm := next(filter(None, (w.harm() for w in workers)), "") or server_harm():
            reason = f"the process of another implementation {harm} while it was running"
            raise PairError(self._last, SubjectError(Status.SUSPECT, reason))

    def finish(self, s: int) -> str:
        """The last checks of a subject; what readers should know about its times."""
        pair = self._pair(s)
        pair.finish(s)
        return pair.note(s) if s in self.setup.outside else ""

    def drop(self, s: int) -> None:
        """End the processes of a subject, and forget those of others that it ended."""
        self._last = None
        for couple, pair in list(self._pairs.items()):
            if s in couple or any(seat.worker.harm() for seat in pair.seats.values()):
                self._pairs.pop(couple).close()

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        if self._strangers is not None:
            self._strangers.end()
        if self._secret is not None:
            self._secret.close()
            self._secret = None

    def _pair(self, series: int) -> Pair:
        couple = self._couple[series]
        if couple not in self._pairs:
            if self._secret is None:
                self._secret = Secret(self.setup)
            indexes = {one: one if one >= 0 else self.baseline for one in couple}
            trusted = frozenset(one for one in couple if indexes[one] not in self.setup.outside)
            pair = Pair(self._secret, indexes, self.trials, trusted)
            try:
                pair.move_in()
            except SubjectError:
                pair.close()
                raise
            self._pairs[couple] = pair
            self._strangers = Strangers(server_pid())
        return self._pairs[couple]
