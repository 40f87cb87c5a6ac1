"""`mpirun -n N nntile bench step CONFIG`: the ranks are the only contestant, in the processes of mpirun."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.measure.config_peer import contestant
from nntile_py.system import launcher as system
from nntile_py.system.clock import spread
from nntile_py.system.machine import machine


def check(config: str | None, peers: list[str]) -> None:
    """Raise ConfigError for what several processes cannot measure together."""
    size = system.started()[1]
    if config is None or peers:
        raise ConfigError(
            f"nntile bench step: mpirun or srun has started {size} of it; allowed on several ranks: a CONFIG, and no"
            " --peer, which is measured without mpirun"
        )


def measure_ranks(options: Mapping[str, Any], rounds: int, steps: int) -> dict[str, Any]:
    """As measure_step; called on every rank, the numbers are the first rank's: each round ends when all ranks have."""
    run, facts = contestant("nntile", dict(options))
    runtime = Runtime.current
    assert runtime and runtime.ranks
    with ExitStack() as running:
        running.push(runtime)  # it has been entered
        for user in runtime.users:
            runtime.forget(user)  # nobody wants the weights back
        losses = run(max(3, options.get("losses", 0)))
        times = []
        for _ in range(rounds):
            runtime.ranks.barrier()
            start = time.perf_counter()
            run(steps)
            runtime.ranks.barrier()
            times.append((time.perf_counter() - start) / steps)
        peaks = runtime.ranks.to_first(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    t = spread(times)
    row: dict[str, Any] = {"seconds": t, "tokens_per_s": facts["tokens"] / t["median"]}
    row |= {"gflop_per_s": facts["flop"] / t["median"] / 1e9, "first_loss": losses[0], "third_loss": losses[2]}
    row |= {"tasks_of_rank": facts["tasks"], "ranks": runtime.ranks.size, "peak_mib": max(peaks or [0])}
    row |= {"host_mib": sum(peaks or [0])} | ({"losses": losses} if options.get("losses") else {})
    return {"options": dict(options), "rounds": rounds, "steps_per_round": steps, **machine(), "nntile": row}
