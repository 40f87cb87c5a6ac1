"""Contestants of `nntile bench step`: each a process of its own, in turn, in numbers; one that fails is a row too."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure.common import shape
from nntile_py.system.clock import spread
from nntile_py.system.machine import machine

FOR_BERT = ("torch_packed", "torch_padded")  # see torch_bert.py
RANKED = ("ddp", "fsdp2", "fsdp2_offload")  # those with a process for each GPU
PEERS = ("torch_eager", "torch_compile", *FOR_BERT, *RANKED)
OF_CONFIG = ("torch_eager", "torch_compile", *FOR_BERT, "ddp")
OF_GPT2 = tuple(name for name in PEERS if name not in FOR_BERT)
PARENT = "NNTILE_BENCH_PARENT"  # the process that started a contestant, in its environment
NO_ANSWER = "no answer within"
TIME_LIMIT = 600.0  # seconds for the start of a contestant, and for one of its turns


def check_gpus(cuda: int, key: str = "--cuda") -> None:
    """Raise ConfigError if the machine has fewer; before any contestant starts."""
    from nntile_py.execution.starpu_settings import cuda_devices

    if cuda > (there := cuda_devices() if cuda else 0):
        raise ConfigError(f"{key}: {cuda} is not allowed; this machine has {there} CUDA devices")


# -- processes


class Child:
    """A process of step_worker.py, which answers its start and then each line of stdin with a line of JSON."""

    def __init__(self, label: str, *arguments: Any) -> None:
        self.label, self._rest = label, b""
        command = [sys.executable, "-m", "nntile_py.measure.step_worker", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env=os.environ | {PARENT: str(os.getpid())}, start_new_session=True,  # Ctrl-C is for this process
        )  # fmt: skip

    def send(self, line: str) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended: said when it is asked for its answer
            self.process.stdin.write(line.encode())

    def take(self) -> dict[str, Any] | None:
        """The answer, if it is there with what has arrived; NNTileError if it is an error, or will never come."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise self.gone()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"'):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise NNTileError(f"{self.label}{answer['error']}")
                return answer
        return None

    def gone(self) -> NNTileError:
        status = self.process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return NNTileError(f"{self.label}ended with {how}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            pipe.close()


def answers(children: Sequence[Child], seconds: float) -> list[dict[str, Any]]:
    """The next answer of each child; NNTileError as soon as one fails, or after `seconds`."""
    got: dict[Child, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout
            selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while len(got) < len(children):
            ready = selector.select(1.0)
            waiting = [child for child in children if child not in got]
            for child in [] if ready else waiting:
                # Whatever it had started may hold its stdout open.
                if child.process.poll() is not None and not (ready := selector.select(0)):
                    raise child.gone()
            if time.monotonic() >= end:
                raise NNTileError(f"{waiting[0].label}{NO_ANSWER} {seconds:g} s")
            for key, _ in ready:
                if (answer := key.data.take()) is not None:
                    got[key.data] = answer
                    selector.unregister(key.fileobj)
    return [got[child] for child in children]


def processes(o: dict[str, Any]) -> int:
    """Of a contestant that has one for each GPU; on the CPU, for tests, two."""
    return o["cuda"] or 2


def lead(name: str, o: dict[str, Any]) -> int:
    """Be the contestant for its ranks: hand on what is asked, answer once for all of them. The exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [Child(f"rank {k}: ", name, json.dumps(o), k, port) for k in range(processes(o))]
    try:
        print(json.dumps(answers(ranks, o["time_limit"])[0]), flush=True)
        for line in sys.stdin:
            for rank in ranks:
                rank.send(line)
            got = answers(ranks, o["time_limit"])
            most = {key: max(a[key] for a in got) for key in ("seconds", "peak_mib")}
            print(json.dumps(most | {"host_mib": sum(a["host_mib"] for a in got)}), flush=True)
    except NNTileError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    finally:
        for rank in ranks:
            rank.kill()
    return 0


class Side:
    """One contestant, stopped by a signal while it is not its turn. What it fails by is in `error`."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.limit, self.error = name, options["time_limit"], ""
        # Ranks and their leader end each other by their own limit, which says who it was.
        slack = 30.0 if name in RANKED else 0.0
        self.limit += slack
        self.child = Child("", name, json.dumps(options))
        self.times: list[float] = []
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer = answers([self.child], self.limit)[0]
        except NNTileError as error:
            self.error = str(error)
            self.child.kill()
            return {}
        self.child.process.send_signal(signal.SIGSTOP)
        return answer

    def run(self, steps: int) -> dict[str, Any]:
        """Time `steps` steps."""
        self.child.process.send_signal(signal.SIGCONT)
        self.child.send(f"{steps}\n")
        result = self._answer()
        if result:
            self.times.append(result["seconds"] / steps)
        return result

    def close(self) -> None:
        self.child.kill()  # ranks go with their leader


# -- one training step


def measure_step(
    options: dict[str, Any], names: Sequence[str], rounds: int, steps: int, tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Every contestant in turn, `rounds` times; medians, spread, ratios of the same round. A failure is a row.

    One starts after the other, so that nothing is compiled while another one chooses between kernels by measuring.
    tell: is told of each that has started."""
    options = {"time_limit": TIME_LIMIT} | options
    if "config" not in options:
        shape(options)  # refused here, not in a child
        if set(names) & set(RANKED) and options["batch"] % processes(options):
            raise ConfigError(f"--batch: {options['batch']} is not allowed; use a multiple of {processes(options)}")
    sides: list[Side] = []
    last: dict[str, Any] = {}
    try:
        for name in names:
            sides.append(Side(name, options))
            if tell:
                tell(f"{name} {sides[-1].error or 'is ready'}")
        for _ in range(rounds):
            for side in sides:
                if not side.error:
                    last[side.name] = side.run(steps)
    finally:
        for side in sides:
            side.close()
    facts = {key: value for side in sides for key, value in side.ready.items()}
    tokens, flop = facts.get("tokens", options["batch"] * options["seq"]), facts.get("flop")
    result: dict[str, Any] = {"options": options, "rounds": rounds, "steps_per_round": steps, **machine()}
    for side in sides:
        if side.error:
            result[side.name] = {"error": side.error}
            continue
        t = spread(side.times)
        row = {"seconds": t, "tokens_per_s": tokens / t["median"]}
        row |= {"gflop_per_s": flop / t["median"] / 1e9} if flop else {}
        row |= {key: value for key, value in last[side.name].items() if key != "seconds"}
        result[side.name] = row | {k: v for k, v in side.ready.items() if k not in ("flop", "tokens")}
    ours = next((side for side in sides if side.name == "nntile" and not side.error), None)
    peers = [side for side in sides if side.name != "nntile" and not side.error]
    if ours and peers:
        best = min(peers, key=lambda side: statistics.median(side.times))
        result["fastest_peer"] = best.name
        result["ratios"] = {side.name: ratios(ours.times, side.times) for side in peers}
        result["ratio_to_fastest_peer"] = result["ratios"][best.name]
    return result


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of our times to theirs, round by round, and of the medians."""
    found = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    return found | {"of_medians": statistics.median(ours) / statistics.median(theirs)}
