"""Comparison of contestants. Each has its own processes; contestants are timed one after the other, round by round.

All contestants stay in memory; a signal stops a contestant outside its turns. If the contestants do not fit into memory
together, each contestant ends after its turn and is started again for the next turn.
"""

from __future__ import annotations

import signal
import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from nntile_py.analysis.workloads import FORWARD
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.execution.runtime import Runtime
from nntile_py.measure.contestants import OURS, RANKED, world_size
from nntile_py.measure.process import WorkerProcess, answers
from nntile_py.measure.sweep_spec import Measure
from nntile_py.system import launcher
from nntile_py.system.clock import clocked, spread
from nntile_py.system.machine import machine

TIME_LIMIT = 600.0  # seconds for the start of a contestant, and for one of its turns
PASS_TURNS = 15  # measurements in a turn of forward passes, which are short; the turn's time is their median
OUT_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "cannot allocate", "unable to allocate", "signal 9")


class Contestant:
    """A contestant with its worker process, or with a process for each GPU.

    Attributes:
        error: why the contestant failed; empty if it did not.
        facts: figures that the contestant reports at its first start, such as the tokens of a step.
    """

    def __init__(self, name: str, config: RunConfig, how: Measure, time_limit: float) -> None:
        self.name, self.error, self.limit = name, "", time_limit
        self.facts: dict[str, Any] = {}
        self.last: dict[str, Any] = {}  # peaks of memory in the last turn
        self.times: list[float] = []  # seconds of a step, for each turn
        measure = how.model_copy(update={"contestant": OURS, "peers": []}).model_dump()
        self._request = {"config": config.model_dump(by_alias=True), "measure": measure, "contestant": name}
        self._count = world_size(config) if name in RANKED else None
        self._repeats = PASS_TURNS if how.work in FORWARD else 1
        self.workers: list[WorkerProcess] = []

    def start(self) -> None:
        requests = [self._request]
        if self._count:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            requests = [self._request | {"place": {"rank": rank, "port": port}} for rank in range(self._count)]
        labels = [f"rank {rank}: " if self._count else "" for rank in range(len(requests))]
        self.workers = [WorkerProcess(label, errors=False) for label in labels]
        facts = self._ask(requests)
        self.facts = self.facts or (facts[0] if facts else {})

    def turn(self, steps: int) -> None:
        """Measure the seconds of a step: the time of `steps` steps in flight together, divided by `steps`."""
        if not self.workers:
            self.start()
        self._signal(signal.SIGCONT)
        if not self.error and (replies := self._ask([{"repeats": self._repeats, "steps": steps}] * len(self.workers))):
            self.times.append(max(each["seconds"] for each in replies))
            self.last = {"peak_mib": max(each["peak_mib"] for each in replies)}
            self.last |= {"host_mib": sum(each["host_mib"] for each in replies)}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []

    def _ask(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send a request to each process; return the answers of the processes, or [] after an error.

        After its answer, a single process is stopped until its next turn. After an error, all processes end.
        """
        for worker, request in zip(self.workers, requests, strict=True):
            worker.send(request)
        try:
            replies = answers(self.workers, self.limit)
        except NNTileError as error:
            self.error = str(error)
            self.close()
            return []
        self._signal(signal.SIGSTOP)
        return replies

    def _signal(self, number: signal.Signals) -> None:
        for worker in [] if self._count else self.workers:  # several: not stopped, as waiting ranks time out
            with suppress(ProcessLookupError):
                worker.process.send_signal(number)


def measure_in_turns(
    config: RunConfig, how: Measure, names: Sequence[str], rounds: int, *,
    hold: bool | None = None, losses: int = 0, time_limit: float = TIME_LIMIT,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time the contestants alternately; return medians, spread, ratios by round, and errors of failed contestants.

    Args:
        how: Workload, and `steps` of a turn. `contestant`, `peers`, `repeats` and `warmup` are ignored.
        names: The contestants.
        rounds: Turns of each contestant.
        hold: True: keep all contestants in memory. False: end each contestant after its turn. None: as True; if a
            contestant then lacks memory, measure all contestants again as with False.
        losses: Number of steps, from the first, whose losses are reported.
        time_limit: Seconds of a contestant's start, and of a turn.
        tell: Called with a line of text when a contestant is ready or has had its turn.
    """
    tell = tell or (lambda _: None)
    how = how.model_copy(update={"warmup": max(3, losses)})
    result = _run(config, how, names, rounds, hold is not False, losses, time_limit, tell)
    if hold is None and len(names) > 1 and any(map(_short_of_memory, (result[name] for name in names))):
        tell("memory is short: each contestant now ends after its turn and starts anew for the next")
        result = _run(config, how, names, rounds, False, losses, time_limit, tell)
    return result


def _short_of_memory(row: dict[str, Any]) -> bool:
    return any(text in row.get("error", "").lower() for text in OUT_OF_MEMORY)


def _run(
    config: RunConfig, how: Measure, names: Sequence[str], rounds: int, hold: bool, losses: int, time_limit: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Time the contestants alternately. They start one after the other, so that no start disturbs a measurement."""
    sides = [Contestant(name, config, how, time_limit) for name in names]
    try:
        for side in sides if hold else ():
            side.start()
            tell(f"{side.name} {side.error or 'is ready'}")
        for number in range(rounds):
            for side in sides[:: 1 if number % 2 == 0 else -1]:
                if not side.error:
                    side.turn(how.steps)
                if not hold:
                    side.close()
                    tell(f"{side.name} {side.error or f'has had turn {number + 1} of {rounds}'}")
    finally:
        for side in sides:
            side.close()
    return _result(config, how, sides, rounds, hold, losses)


def _result(
    config: RunConfig, how: Measure, sides: Sequence[Contestant], rounds: int, hold: bool, losses: int
) -> dict[str, Any]:
    flop = next((side.facts["flop"] for side in sides if "flop" in side.facts), None)
    result: dict[str, Any] = {
        "config": config.model_dump(by_alias=True), "measure": how.model_dump(), "rounds": rounds,
        "steps_per_round": how.steps, "memory": "held" if hold else "given back after each turn", **machine(),
    }  # fmt: skip
    for side in sides:
        if side.error:
            result[side.name] = {"error": side.error}
            continue
        result[side.name] = _row(side.times, side.facts, side.last, flop, losses)
    ours = next((side for side in sides if side.name == OURS and not side.error), None)
    peers = [side for side in sides if side.name != OURS and not side.error]
    if ours and peers:
        best = min(peers, key=lambda side: statistics.median(side.times))
        result["fastest_peer"] = best.name
        result["ratios"] = {side.name: ratios(ours.times, side.times) for side in peers}
        result["ratio_to_fastest_peer"] = result["ratios"][best.name]
    return result


def _row(
    times: Sequence[float], facts: dict[str, Any], last: dict[str, Any], flop: float | None, losses: int
) -> dict[str, Any]:  # fmt: skip
    """Return a contestant's metrics.

    Args:
        times: Seconds of a step, for each turn.
        facts: Figures from the contestant's start.
        last: Peaks of memory in its last turn.
        flop: Floating-point operations of a step; None if unknown.
        losses: Number of steps, from the first, whose losses are reported.
    """
    t, first = spread(times), facts["losses"]
    row = {"seconds": t, "tokens_per_s": facts["tokens"] / t["median"]}
    row |= {"gflop_per_s": flop / t["median"] / 1e9} if flop else {}
    row |= {key: last[key] for key in ("peak_mib", "host_mib")} | {"first_loss": first[0], "third_loss": first[2]}
    row |= {"losses": first[:losses]} if losses else {}
    return row | {key: facts[key] for key in ("tokens", "tasks", "processes", "captured") if key in facts}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return nntile_py's times divided by a peer's: median, minimum, maximum over rounds, and ratio of the medians."""
    by_round = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    return by_round | {"of_medians": statistics.median(ours) / statistics.median(theirs)}


# -- ranks started by mpirun


def check_ranks(peers: Sequence[str]) -> None:
    """Raise ConfigError for peers: under mpirun, peers are not measured."""
    if peers:
        raise ConfigError(
            f"nntile bench step: mpirun or srun has started {launcher.started()[1]} of it; allowed on several ranks: a"
            " CONFIG without --peer; peers are measured without mpirun"
        )


def measure_ranks(config: RunConfig, how: Measure, rounds: int, losses: int = 0) -> dict[str, Any]:
    """Time steps that all ranks run together. Every rank must call the function; each returns its own times."""
    from nntile_py.measure.worker import Session

    how = how.model_copy(update={"warmup": max(3, losses)})
    with ExitStack() as running:
        session = Session({"config": config.model_dump(by_alias=True), "measure": how.model_dump()}, running)
        runtime, run = Runtime.current, session.run
        assert runtime and runtime.ranks and run
        all_ranks = runtime.ranks

        def together(steps: int) -> None:
            run(steps)
            all_ranks.barrier()

        times = []
        for _ in range(rounds):
            all_ranks.barrier()
            times += [seconds / how.steps for seconds in clocked(lambda _: together(how.steps), 1)]
        last = session.times(1, 1)
    row = _row(times, session.facts, last, session.facts["flop"], losses) | {"ranks": all_ranks.size}
    row["tasks_of_rank"] = row.pop("tasks")
    return {"measure": how.model_dump(), "rounds": rounds, "steps_per_round": how.steps, **machine(), OURS: row}


# -- a point of a sweep


def point_with_peers(config: RunConfig, how: Measure, time_limit: float) -> dict[str, Any]:
    """Return the metrics of a sweep's point with `measure.peers`. Keys of a peer's metrics begin with its name."""
    result = measure_in_turns(config, how, [OURS, *how.peers], how.repeats, time_limit=time_limit)
    ours = result[OURS]
    if "error" in ours:
        raise NNTileError(ours["error"])
    t = ours["seconds"]
    row = {"seconds": t["median"], "seconds_min": t["min"], "seconds_max": t["max"], "ms": t["median"] * 1e3}
    row |= {key: ours[key] for key in ("tokens_per_s", "gflop_per_s", "peak_mib", "host_mib", "tokens", "tasks")}
    for peer in how.peers:
        if "error" in (theirs := result[peer]):
            row[f"{peer} error"] = theirs["error"]
            continue
        seconds, ratio = theirs["seconds"]["median"], result["ratios"][peer]
        metrics = {"seconds": seconds, "ms": seconds * 1e3, "ratio": ratio["median"]}
        metrics |= {"ratio_min": ratio["min"], "ratio_max": ratio["max"]}
        metrics |= {key: theirs[key] for key in ("tokens_per_s", "peak_mib")}
        row |= {f"{peer} {key}": value for key, value in metrics.items()}
    return row
