"""What a config would do on machines that nobody has at hand: `nntile plan --nodes`.

Nodes with CPU workers run what mpirun runs: each its part of one program, that is made for all (rank_tasks.py). Nodes
with GPUs run the same program each, on its part of the batch, on the largest where it is uneven: it is made once. Sums
meet inside a node as on one machine, then between nodes (tiles/allreduce.py), while the backward pass goes on; the
update is the same on all nodes, whose optimizer states are spread over the workers of a node. All of it is played task
by task (simulate.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.simulate import Played, of_ranks, played, programs
from nntile_py.config.builders import step_spec
from nntile_py.errors import ConfigError
from nntile_py.graph.step import StepSpec
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tiles import TaskList, Tile, Tiling, device_model
from nntile_py.tiles.allreduce import ClusterNode, Network, with_sums
from nntile_py.tiles.placement import Speed
from nntile_py.tiles.tasklist import Task

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nntile_py.config.run_config import RunConfig

MOST_NODES = 4096
IDLE = 0.5  # share of a step that workers are busy, below which it is not computing that limits
GOOD = 0.95  # efficiency from which on nothing is to blame
FULL = 0.8  # share of its time in use, from which on what is used holds all else back
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|b|B)/s\s*")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DEFAULT = {True: "400Gb/s", False: "40Gb/s"}  # of GPU nodes, of others


@dataclass(frozen=True)
class Machines:
    """Nodes that are alike. workers: GPUs of each, or 1, which stands for all its cores."""

    nodes: int
    workers: int
    network: Network


def machines(
    config: RunConfig, nodes: int | None, gpus_per_node: int | None = None, network: str | None = None,
    gpus_per_nic: int | None = None, name: Callable[[str], str] = lambda key: "--" + key.replace("_", "-"),
) -> Machines | None:  # fmt: skip
    """The nodes that are asked for; None without `nodes`.

    network: bits or bytes a second of a card, each way. gpus_per_nic: GPUs that share a card; default 1. name: of a
    key, in errors. Raises ConfigError.
    """
    given = {"gpus_per_node": gpus_per_node, "network": network, "gpus_per_nic": gpus_per_nic}
    if nodes is None:
        if key := next((key for key, value in given.items() if value is not None), None):
            raise ConfigError(f"{name(key)}: got {given[key]}; allowed: only with {name('nodes')}")
        return None
    _check(name("nodes"), nodes, MOST_NODES)
    if config.runtime.nodes not in (None, nodes):
        need = f"with {name('nodes')} {nodes}: the same, or null"
        raise ConfigError(f"runtime.nodes: got {config.runtime.nodes}; allowed {need}")
    gpu = config.runtime.cuda != 0
    if config.runtime.shard_weights and gpu:
        need = f"with {name('nodes')} and GPUs: false, as it is not played"
        raise ConfigError(f"runtime.shard_weights: got true; allowed {need}")
    for key in ("gpus_per_node", "gpus_per_nic"):
        if not gpu and given[key] is not None:
            need = "none where runtime.cuda is 0, whose nodes have CPU cores; for GPUs, --set runtime.cuda=1"
            raise ConfigError(f"{name(key)}: got {given[key]}; allowed: {need}")
    workers = (config.workers if gpus_per_node is None else gpus_per_node) if gpu else 1
    _check(name("gpus_per_node"), workers, MOST_NODES)
    share = 1 if gpus_per_nic is None else gpus_per_nic
    _check(name("gpus_per_nic"), share, workers)
    if gpu and workers > 1 and not of_node(config, workers).planned:
        need = "with several GPUs a node, neither scheduler nor CPU workers beside them"
        raise ConfigError(f"runtime.placement, runtime.cpus: {name('nodes')} plays planned tasks; allowed: {need}")
    rate = _rate(name("network"), _DEFAULT[gpu] if network is None else network)
    return Machines(nodes, workers, device_model.network(rate, share))


def of_node(config: RunConfig, workers: int) -> RunConfig:
    """The config with so many GPUs."""
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"cuda": workers})})


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{name}: got {value}; allowed: an integer from 1 to {most}")


def _rate(name: str, text: str) -> float:
    """Bytes/s."""
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _SCALE[match[2]] / (1 if match[3] == "B" else 8) if match else 0.0
    if not rate > 0:
        raise ConfigError(f"{name}: got {text!r}; allowed: bits or bytes a second, such as 400Gb/s or 50GB/s")
    return rate


@dataclass
class NodesPlan:
    """Of one optimizer step on all nodes; tasks, messages and bytes are of one node."""

    nodes: int
    workers: int
    machine: str
    network: str
    tokens: int
    tasks: int
    messages: int
    inside_bytes: int
    between_bytes: int
    peak_bytes: int  # on the fullest worker
    lacking_bytes: int  # of them, that it has no room for
    step_seconds: float
    computed_seconds: float  # until the backward pass has ended
    exposed_seconds: float  # until its sums are there, too
    update_seconds: float
    busy: float  # shares of a step: the workers, the part for what comes from other nodes, ...
    adding: float
    card: float  # the network card that sends most, ...
    thread: float
    own_seconds: float  # of a node by itself, with its part of the batch; that of `efficiency`
    alone_seconds: float
    efficiency: float
    parts: float  # of the batch, each such as that node alone has: fewer than nodes where they are uneven
    worker_seconds: float | None
    worker_efficiency: float | None
    strong: bool
    limit: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"tokens_per_s": self.tokens_per_s}

    def render(self) -> RenderableType:
        kind = "with the whole batch" if self.strong else "with its part of the batch"
        if not self.strong and self.parts < self.nodes:
            kind = f"with the largest part, by tokens/s: all nodes together have {self.parts:.3g} of it"
        found = [f"{self.efficiency:.3f} of a node alone {kind} ({self.alone_seconds:,.3g} s)"]
        if self.worker_seconds is not None and self.workers > 1:
            found.append(f"{self.worker_efficiency:.3f} of one GPU ({self.worker_seconds:,.3g} s)")
        phases = [
            f"{self.computed_seconds:,.3g} s to the end of the backward pass",
            f"{self.exposed_seconds:,.3g} s until its sums are there", f"{self.update_seconds:,.3g} s update",
        ]  # fmt: skip
        return facts({
            "nodes": f"{self.nodes:,}, each {self.machine}",
            "network": self.network,
            "tokens a step": f"{self.tokens:,}",
            "tasks a step": f"{self.tasks:,} and {self.messages:,} messages sent, of each node",
            "bytes a step": f"{self.inside_bytes / 1e9:,.2f} GB between workers of a node, "
            f"{self.between_bytes / 1e9:,.2f} GB from each node to others",
            "memory at peak": f"{self.peak_bytes / 2**30:,.1f} GiB of the fullest worker"
            + (f", {self.lacking_bytes / 2**30:,.1f} more than it has" if self.lacking_bytes else ""),
            "time a step": f"{self.step_seconds:,.3g} s: {', '.join(phases)}",
            "throughput": f"{self.tokens_per_s:,.0f} tokens/s",
            "efficiency": ", ".join(found),
            "limited by": self.limit,
        })  # fmt: skip


def facts(values: Mapping[str, str]) -> RenderableType:
    """Lines of a name and its value; a long one is continued below itself."""
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 2))
    shown.add_column(min_width=18)
    for name, value in values.items():
        shown.add_row(Text(name), Text(value))
    return shown


def plan_nodes(config: RunConfig, on: Machines, *, strong: bool = False, every: bool = False) -> NodesPlan:
    """The plan of a training config on these nodes, each with its part of the batch; nothing is run.

    An uncut batch has a tile for each GPU. strong: efficiency is against one node, and one GPU, with the whole batch.
    every: all nodes are played, not one that stands for them.
    """
    with no_search_for_cycles():
        batch, gpu = config.train.batch, config.runtime.cuda != 0
        rows = -(-batch // on.nodes)  # of a node that has the most
        spec = _spec(config, rows, on.workers, alone=on.nodes == 1)
        lists = _lists(spec)
        speed = device_model.speed(lists, gpu) if gpu else device_model.node(config.workers)
        node = programs(lists, on.workers, speed, group=gpu)
        sums = len(lists) - 2  # the list that makes gradients, if several: the last
        if gpu or on.nodes == 1:
            places = (ClusterNode(n, on.nodes, on.network, on.workers, speed) for n in range(on.nodes if every else 1))
            nodes = [[*node[:sums], with_sums(node[sums], at), *node[sums + 1 :]] for at in places]
        else:
            nodes = _ranks(config, on.nodes)
        steps = played(nodes, on.workers, speed, on.network)
        own = alone = _seconds(played([node], on.workers, speed) if on.nodes > 1 else steps, lists, speed)
        if on.nodes > 1 and (strong or len(spec.cuts.parts("batch", spec.rows)) == 1):
            alone = _alone(config, batch if strong else rows, on.workers, speed)
        share, rest = divmod(batch, 1 if strong else on.nodes * on.workers)
        single = None if rest or not share or not gpu else _alone(config, batch if strong else share, 1, speed)
    seconds = _seconds(steps, lists, speed)
    parts = 1.0 if strong else batch / rows
    peak = max(peaks(nodes[0], on.workers))
    made = NodesPlan(
        nodes=on.nodes,
        workers=on.workers,
        machine=_machine(config, on, speed),
        network=_network(on),
        tokens=config.train.grad_accumulation * batch * config.train.seq,
        tasks=sum(len(one.tasks) for one in lists),
        messages=sum(of.messages for of in steps),
        inside_bytes=sum(of.inside for of in steps),
        between_bytes=sum(of.between for of in steps),
        peak_bytes=peak,
        lacking_bytes=max(0, peak - _memory(config)),
        step_seconds=seconds,
        computed_seconds=steps[sums].start + steps[sums].computed - steps[0].start,
        exposed_seconds=steps[sums].seconds - steps[sums].computed,
        update_seconds=steps[-1].seconds,
        busy=sum(sum(of.busy) for of in steps) / on.workers / seconds,
        adding=sum(sum(of.adding) for of in steps) / on.workers / seconds,
        card=max(steps[sums].cards.values(), default=0.0) / (steps[sums].sending or 1.0),
        thread=steps[sums].thread / (steps[sums].sending or 1.0),
        own_seconds=own,
        alone_seconds=alone,
        efficiency=alone * parts / on.nodes / seconds,
        parts=parts,
        worker_seconds=single,
        worker_efficiency=None if single is None else single / (on.nodes * on.workers if strong else 1) / seconds,
        strong=strong,
    )
    made.limit = _limit(made, steps[sums].last)
    return made


def _machine(config: RunConfig, on: Machines, speed: Speed) -> str:
    kind = f"{on.workers} GPU" if config.runtime.cuda else f"{config.workers} CPU core"
    many = "s" * ((on.workers if config.runtime.cuda else config.workers) > 1)
    told = "each of" if config.runtime.cuda and many else "of"
    return f"{kind}{many}, {told} {speed.flop_s / 1e9:,.0f} Gflop/s and {speed.bytes_s / 1e9:,.0f} GB/s"


def _memory(config: RunConfig) -> int:
    """Bytes that tiles may take of a worker: a GPU's, or all of a CPU node's."""
    runtime = config.runtime
    return runtime.cuda_memory or device_model.MEMORY if runtime.cuda else runtime.memory or sys.maxsize


def _network(on: Machines) -> str:
    cards = -(-on.workers // on.network.share)
    each = f"{on.network.bytes_s / 1e9:,.3g} GB/s each way, {on.network.latency * 1e6:.0f} us a message"
    return f"{cards} card{'s' * (cards > 1)} a node, {'each ' * (cards > 1)}of {each}"


def _limit(made: NodesPlan, last: Tile | None) -> str:
    """What to blame for the efficiency, in words; or for times that cannot be right."""
    if made.lacking_bytes:
        told = f"memory: {made.lacking_bytes / 2**30:,.1f} GiB have no room on the fullest worker, which is not played"
        return f"{told}; smaller tiles.batch or train.batch, or more workers a node"
    if made.busy < IDLE and made.efficiency >= GOOD:
        return f"how few tasks a node's workers have: they are busy for {made.busy:.0%} of a step; smaller tiles.batch"
    if made.efficiency >= GOOD:
        return f"computing: workers are busy for {made.busy:.0%} of a step"
    fair, ms = made.efficiency * made.step_seconds, made.exposed_seconds * 1e3
    if made.own_seconds - fair > made.step_seconds - made.own_seconds:
        return (
            f"how small a node's part of the batch is: alone a node takes {made.own_seconds:.3g} s for it, where"
            f" {fair:.3g} s would be in proportion"
        )
    if made.card >= FULL:
        return (
            f"the network's bandwidth: a card sends for {made.card:.0%} of the time from the first message to the last"
            f" sum, which ends {ms:.3g} ms after the backward pass"
        )
    if made.thread >= FULL:
        return f"the number of messages: the thread that sends and receives them is busy for {made.thread:.0%} of that"
    if made.adding * made.step_seconds > (made.step_seconds - made.own_seconds) / 2:
        return f"adding up what comes from other nodes: {made.adding:.1%} of the workers' time"
    told = f" ({last}, {last.bytes / 1e6:,.3g} MB)" if last else ""
    return f"sums that begin late: the last{told} ends {ms:.3g} ms after the backward pass"


def _spec(config: RunConfig, rows: int, workers: int, *, alone: bool) -> StepSpec:
    spec = replace(step_spec(config), batch=rows, alone=alone)
    if config.tiles.batch is None and workers > 1:
        spec = replace(spec, tiling=Tiling({**spec.tiling.tiles, "batch": -(-rows // workers)}))
    return spec


def _ranks(config: RunConfig, ranks: int) -> list[list[list[Task]]]:
    """What each of these nodes, with CPU workers, runs where mpirun starts a rank on it: its part of one program."""
    spec = replace(_spec(config, config.train.batch, ranks, alone=True), ranks=ranks)
    return of_ranks(_lists(spec), ranks, device_model.rank(config.workers), config.runtime.shard_weights)


def _lists(spec: StepSpec) -> list[TaskList]:
    """Of a step, in the order in which they run."""
    step = spec.step()
    more = [step.more.tasks] * (spec.grad_accumulation - 1) if step.more else []
    return [step.first.tasks, *more, step.update.tasks]


def _alone(config: RunConfig, rows: int, workers: int, speed: Speed) -> float:
    """Seconds of a step of so many sequences where there is one node."""
    lists = _lists(_spec(config, rows, workers, alone=True))
    made = programs(lists, workers, speed, group=config.runtime.cuda != 0)
    return _seconds(played([made], workers, speed), lists, speed)


def _seconds(steps: Sequence[Played], lists: Sequence[TaskList], speed: Speed) -> float:
    """Of the step; not less than one thread takes to submit its tasks."""
    return max(steps[-1].end - steps[0].start, sum(len(one.tasks) for one in lists) * speed.submit)


def peaks(lists: Sequence[Sequence[Task]], workers: int) -> list[int]:
    """Bytes of tiles on each worker at the worst point of a step, its tasks in order; weights and states are there.

    A worker keeps its copy of a tile until another writes it. Without what kernels need beside tiles.
    """
    held: dict[Hashable, tuple[Tile, set[int]]] = {}
    now, peak = [0] * workers, [0] * workers

    def drop(tile: Tile, but: int = -1) -> None:
        _, there = held.pop(tile.key, (tile, set()))
        for worker in there - {but}:
            now[worker] -= tile.bytes
        if but in there:
            held[tile.key] = tile, {but}

    for tasks in [*lists, *lists]:  # the first time puts in place what stays
        for task in tasks:
            worker = max(task.worker, 0)
            for tile in task.clears:
                drop(tile)
            for access in task.accesses:
                if access.mode != "R":
                    drop(access.tile, but=worker)
                there = held.setdefault(access.tile.key, (access.tile, set()))[1]
                if worker not in there:
                    there.add(worker)
                    now[worker] += access.tile.bytes
            peak[worker] = max(peak[worker], now[worker])
            for tile in task.frees:
                drop(tile)
    return peak
