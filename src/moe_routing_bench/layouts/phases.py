"""Checks a ring of stages in shared memory: can threads wait forever, is a stage overwritten or read too
early?

A kernel that loads ahead has S stages. Each has a barrier `full`, on which the threads that fill it arrive,
and a barrier `empty`, on which the threads that read it arrive. A barrier counts arrivals; when all arrivals
of a phase have come, the next phase begins. A wait names the parity of a phase and passes when that phase is
over. Threads that do the same are one `Agent` here, with as many arrivals as they make per turn.

`faults_of` tries every order of the agents' steps, by a search over all states. There are 43,440 states for 5
stages, 2 + 2 agents and 11 turns; each additional agent multiplies them by the stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class Agent:
    """Threads that do the same: Agent(arrivals=128) arrives 128 times per turn.

    first_parity: the parity it waits for in its first round over the stages. A filler begins with 1, the
    phase before the first, so that it does not wait for an empty stage. skips: it does not wait at all.
    """

    arrivals: int = 1
    first_parity: int | None = None
    skips: bool = False


@dataclass(frozen=True, kw_only=True)
class Ring:
    """QuACK's first GEMM on sm_90a, two blocks to a cluster: 128 threads copy rows, one loads weights by TMA.

    Ring(stages=5, full=129, empty=8, fillers=(Agent(128), Agent(1)), readers=(Agent(4), Agent(4)))
    """

    stages: int
    full: int  # arrivals that end a phase
    empty: int
    fillers: tuple[Agent, ...]
    readers: tuple[Agent, ...]
    turns: int = 0  # of every agent; 0: twice around and one more

    def __post_init__(self) -> None:
        if self.stages < 1 or self.full < 1 or self.empty < 1 or not self.fillers or not self.readers:
            raise ValueError("a ring needs stages, arrivals, at least one filler and at least one reader")

    @property
    def last_turn(self) -> int:
        return self.turns or 2 * self.stages + 1


T = TypeVar("T")
# the parity of a barrier's phase, and the number of arrivals that are still missing
Barrier = tuple[int, int]


@dataclass(frozen=True)
class State:
    """turn: how many stages an agent has finished; step: 0 waits, 1 works, 2 arrives."""

    turn: tuple[int, ...]
    step: tuple[int, ...]
    full: tuple[Barrier, ...]
    empty: tuple[Barrier, ...]


def faults_of(ring: Ring) -> list[str]:
    """Everything that can go wrong, in words; empty if nothing can."""
    agents = len(ring.fillers) + len(ring.readers)
    start = State(
        (0,) * agents, (0,) * agents, ((0, ring.full),) * ring.stages, ((0, ring.empty),) * ring.stages
    )
    seen, queue, faults = {start}, deque([start]), dict[str, None]()
    while queue:
        state = queue.popleft()
        moved = False
        for now, fault in _moves(ring, state):
            moved = True
            if fault:
                faults[fault] = None
            elif now not in seen:
                seen.add(now)
                queue.append(now)
        if not moved and min(state.turn) < ring.last_turn:
            faults[_standstill(ring, state)] = None
    return sorted(faults)


def _moves(ring: Ring, state: State) -> Iterator[tuple[State, str]]:
    fillers = len(ring.fillers)
    for who, (turn, step) in enumerate(zip(state.turn, state.step, strict=True)):
        if turn >= ring.last_turn:
            continue
        fills, stage = who < fillers, turn % ring.stages
        agent = (*ring.fillers, *ring.readers)[who]
        if step == 0:
            first = agent.first_parity if agent.first_parity is not None else int(fills)
            waits_for = (turn // ring.stages + first) % 2
            parity, _ = (state.empty if fills else state.full)[stage]
            if agent.skips or parity != waits_for:
                yield replace(state, step=_put(state.step, who, 1)), ""
        elif step == 1:
            fault = _overwrites(ring, state, turn) if fills else _reads_wrong(ring, state, turn)
            yield replace(state, step=_put(state.step, who, 2)), fault
        else:
            barriers = state.full if fills else state.empty
            parity, missing = barriers[stage]
            missing -= agent.arrivals
            if missing < 0:
                name = "full" if fills else "empty"
                yield state, f"more threads arrive on `{name}` than it counts"
                continue
            count = ring.full if fills else ring.empty
            barrier = (parity, missing) if missing else (1 - parity, count)
            changed = {"full" if fills else "empty": _put(barriers, stage, barrier)}
            turns = _put(state.turn, who, turn + 1)
            yield replace(state, turn=turns, step=_put(state.step, who, 0), **changed), ""


def _overwrites(ring: Ring, state: State, turn: int) -> str:
    """A fault if a reader has not yet read the stage that is being filled."""
    before = turn - ring.stages
    fillers = len(ring.fillers)
    late = [
        who
        for who in range(fillers, len(state.turn))
        if (state.turn[who], state.step[who]) < (before, 2) and before >= 0
    ]
    return f"turn {turn} overwrites what a reader has not read yet" if late else ""


def _reads_wrong(ring: Ring, state: State, turn: int) -> str:
    """A fault if a filler has not yet filled the stage for this turn."""
    early = [who for who in range(len(ring.fillers)) if (state.turn[who], state.step[who]) < (turn, 2)]
    return f"turn {turn} is read before it is filled" if early else ""


def _standstill(ring: Ring, state: State) -> str:
    fillers = len(ring.fillers)
    waiting = [
        f"{'filler' if who < fillers else 'reader'} {who if who < fillers else who - fillers} in turn {turn}"
        for who, turn in enumerate(state.turn)
        if turn < ring.last_turn
    ]
    return f"everybody waits: {', '.join(waiting)}"


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
