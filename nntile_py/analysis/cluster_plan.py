"""Plan of a training step on several nodes, simulated without them: `nntile plan --nodes`.

CPU nodes are simulated as ranks of mpirun: each rank runs its part of one common program (rank_tasks.py). GPU nodes run
the same program on different parts of the batch; the plan is that of the node with the largest part. Gradients are
summed inside a node as on one machine, then between nodes (tiles/allreduce.py) during the backward pass. All nodes
compute the same update. The workers of a node share the optimizer states. Every task is simulated (simulate.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.simulate import SimulatedList, programs, rank_programs, simulate
from nntile_py.analysis.workloads import of_step
from nntile_py.config.builders import step_spec, uncut
from nntile_py.errors import ConfigError
from nntile_py.graph.step import StepSpec
from nntile_py.system.console_tables import facts
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.system.units import counted
from nntile_py.tiles import TaskList, Tile, Tiling, device_model
from nntile_py.tiles.allreduce import ClusterNode, Network, with_sums
from nntile_py.tiles.placement import Speed
from nntile_py.tiles.task import Task

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nntile_py.config.run_config import RunConfig

MOST_NODES = 4096
BUSY_ENOUGH = 0.5  # share of a step in which workers compute; below it, arithmetic does not limit the step
GOOD = 0.95  # efficiency from which only arithmetic limits the step
FULL = 0.8  # a network card or the message thread limits the step if it is in use for this share of the time
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|b|B)/s\s*")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DEFAULT = {True: "400Gb/s", False: "40Gb/s"}  # network cards of GPU nodes (True) and of CPU nodes


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes. workers: GPUs of each node; 1 for a CPU node, whose cores are one worker."""

    nodes: int
    workers: int
    network: Network


def requested_cluster(
    config: RunConfig, nodes: int | None, gpus_per_node: int | None = None, network: str | None = None,
    gpus_per_nic: int | None = None, name: Callable[[str], str] = lambda key: "--" + key.replace("_", "-"),
) -> Cluster | None:  # fmt: skip
    """Check the options that describe a cluster, and return the Cluster; None if `nodes` is None.

    Args:
        nodes: number of nodes.
        gpus_per_node: GPUs of each node. Default: the config's number of workers.
        network: rate of a network card in each direction, such as 400Gb/s.
        gpus_per_nic: GPUs that share a network card; default 1.
        name: returns the name of an option for error messages.

    Raises:
        ConfigError: an option is out of range, or the config does not allow it.
    """
    options = {"gpus_per_node": gpus_per_node, "network": network, "gpus_per_nic": gpus_per_nic}
    if nodes is None:
        if key := next((key for key, value in options.items() if value is not None), None):
            raise ConfigError(f"{name(key)}: got {options[key]}; allowed: only with {name('nodes')}")
        return None
    _check(name("nodes"), nodes, MOST_NODES)
    if config.runtime.nodes not in (None, nodes):
        need = f"with {name('nodes')} {nodes}: the same, or null"
        raise ConfigError(f"runtime.nodes: got {config.runtime.nodes}; allowed {need}")
    gpu = config.runtime.cuda != 0
    if config.runtime.shard_weights and gpu:
        need = f"with {name('nodes')} and GPUs: false, as the simulation lacks it"
        raise ConfigError(f"runtime.shard_weights: got true; allowed {need}")
    for key in ("gpus_per_node", "gpus_per_nic"):
        if not gpu and options[key] is not None:
            need = "none if runtime.cuda is 0: nodes then have CPU cores only; for GPUs, --set runtime.cuda=1"
            raise ConfigError(f"{name(key)}: got {options[key]}; allowed: {need}")
    workers = (config.workers if gpus_per_node is None else gpus_per_node) if gpu else 1
    _check(name("gpus_per_node"), workers, MOST_NODES)
    share = 1 if gpus_per_nic is None else gpus_per_nic
    _check(name("gpus_per_nic"), share, workers)
    if gpu and workers > 1 and not of_node(config, workers).planned:
        need = "with several GPUs a node, neither scheduler nor CPU workers beside them"
        raise ConfigError(f"runtime.placement, runtime.cpus: {name('nodes')} simulates planned tasks; allowed: {need}")
    rate = _rate(name("network"), _DEFAULT[gpu] if network is None else network)
    return Cluster(nodes, workers, device_model.network(rate, share))


def of_node(config: RunConfig, workers: int) -> RunConfig:
    """Return a copy of the config with `workers` GPUs."""
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"cuda": workers})})


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{name}: got {value}; allowed: an integer from 1 to {most}")


def _rate(name: str, text: str) -> float:
    """Return a network's rate in bytes/s. text: such as 400Gb/s. name: name of the option for an error message."""
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _SCALE[match[2]] / (1 if match[3] == "B" else 8) if match else 0.0
    if not rate > 0:
        raise ConfigError(f"{name}: got {text!r}; allowed: bits or bytes a second, such as 400Gb/s or 50GB/s")
    return rate


@dataclass
class ClusterPlan:
    """Plan of one optimizer step on all nodes; tasks, messages and bytes are of one node.

    Attributes:
        workers: GPUs of a node; 1 for a CPU node.
        machine: text on the workers of a node.
        network: text on the network cards of a node.
        inside_bytes: sent between workers of the node.
        between_bytes: sent to other nodes.
        peak_bytes: of tiles on the fullest worker.
        lacking_bytes: the part of peak_bytes that exceeds the worker's memory.
        computed_seconds: from the start of the step to the end of the backward pass.
        exposed_seconds: from the end of the backward pass to the end of the gradients' sums.
        busy: share of a step in which workers compute.
        adding: share of a step in which workers add gradients of other nodes.
        card: share of the time from the first message to the last sum in which the busiest network card sends.
        thread: share of the time from the first message to the last sum in which the message thread works.
        own_seconds: step time of a single node with its part of the batch.
        alone_seconds: step time of a single node with the batch of the efficiency's reference.
        efficiency: throughput of the cluster divided by `nodes` times that of the reference, a single node.
        parts: the batch divided by the largest part of a node; less than the number of nodes if parts are uneven.
        worker_seconds: step time of one GPU as the reference; None if GPUs would have unequal parts.
        worker_efficiency: efficiency with one GPU as the reference; None like worker_seconds.
        strong: the reference has the whole batch, not one part of it.
        limit: text on the cause that limits the efficiency.
    """

    nodes: int
    workers: int
    machine: str
    network: str
    tokens: int
    tasks: int
    messages: int
    inside_bytes: int
    between_bytes: int
    peak_bytes: int
    lacking_bytes: int
    step_seconds: float
    computed_seconds: float
    exposed_seconds: float
    update_seconds: float
    busy: float
    adding: float
    card: float
    thread: float
    own_seconds: float
    alone_seconds: float
    efficiency: float
    parts: float
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
            kind = f"with the largest part, in tokens/s: the batch is {self.parts:.3g} such parts"
        efficiency = [f"{self.efficiency:.3f} of a single node {kind} ({self.alone_seconds:,.3g} s)"]
        if self.worker_seconds is not None and self.workers > 1:
            efficiency.append(f"{self.worker_efficiency:.3f} of one GPU ({self.worker_seconds:,.3g} s)")
        phases = [
            f"{self.computed_seconds:,.3g} s to the end of the backward pass",
            f"{self.exposed_seconds:,.3g} s more for the gradients' sums", f"{self.update_seconds:,.3g} s update",
        ]  # fmt: skip
        return facts({
            "nodes": f"{self.nodes:,}, each {self.machine}",
            "network": self.network,
            "tokens a step": f"{self.tokens:,}",
            "tasks a step": f"{self.tasks:,} on each node, which sends {counted(self.messages, 'message')}",
            "bytes a step": f"{self.inside_bytes / 1e9:,.2f} GB between workers of a node, "
            f"{self.between_bytes / 1e9:,.2f} GB from each node to other nodes",
            "memory at peak": f"{self.peak_bytes / 2**30:,.1f} GiB on the fullest worker"
            + (f", {self.lacking_bytes / 2**30:,.1f} more than it has" if self.lacking_bytes else ""),
            "time a step": f"{self.step_seconds:,.3g} s: {', '.join(phases)}",
            "throughput": f"{self.tokens_per_s:,.0f} tokens/s",
            "efficiency": ", ".join(efficiency),
            "limited by": self.limit,
        })  # fmt: skip


def plan_cluster(config: RunConfig, on: Cluster, *, strong: bool = False, every: bool = False) -> ClusterPlan:
    """Return the plan of a training step in which each node has a part of the batch. Nothing runs.

    If the config does not cut the batch into tiles, each GPU gets one tile of its node's part. The same holds for
    `tiles: auto`: its estimates are for this machine, not for the cluster.

    Args:
        on: the cluster.
        strong: the reference of the efficiency is a single node, or GPU, with the whole batch instead of one part.
        every: simulate all GPU nodes instead of one node that stands for all.
    """
    config = uncut(config)
    with no_search_for_cycles():
        batch, gpu = config.train.batch, config.runtime.cuda != 0
        rows = -(-batch // on.nodes)  # the largest part of a node
        spec = _spec(config, rows, on.workers, alone=on.nodes == 1)
        lists = _lists(spec)
        speed = device_model.speed(lists, gpu) if gpu else device_model.node(config.workers)
        node = programs(lists, on.workers, speed, group=gpu)
        sums = len(lists) - 2  # number of the last list that computes gradients
        nodes = _gpu_nodes(node, sums, on, speed, every) if gpu or on.nodes == 1 else _ranks(config, on.nodes)
        steps = simulate(nodes, on.workers, speed, on.network)
        own = alone = _seconds(simulate([node], on.workers, speed) if on.nodes > 1 else steps, lists, speed)
        if on.nodes > 1 and (strong or len(spec.cuts.parts("batch", spec.rows)) == 1):
            alone = _alone(config, batch if strong else rows, on.workers, speed)
        single = _on_one_gpu(config, on, speed, strong)
    seconds = _seconds(steps, lists, speed)
    parts = 1.0 if strong else batch / rows
    peak = max(peaks(nodes[0], on.workers))
    plan = ClusterPlan(
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
    plan.limit = _limit(plan, steps[sums].last)
    return plan


def _machine(config: RunConfig, on: Cluster, speed: Speed) -> str:
    kind = f"{on.workers} GPU" if config.runtime.cuda else f"{config.workers} CPU core"
    many = "s" * ((on.workers if config.runtime.cuda else config.workers) > 1)
    each = "each of" if config.runtime.cuda and many else "of"
    return f"{kind}{many}, {each} {speed.flop_s / 1e9:,.0f} Gflop/s and {speed.bytes_s / 1e9:,.0f} GB/s"


def _memory(config: RunConfig) -> int:
    """Return the bytes that tiles may take in the memory of a GPU or of a CPU node."""
    runtime = config.runtime
    return runtime.cuda_memory or device_model.MEMORY if runtime.cuda else runtime.memory or sys.maxsize


def _network(on: Cluster) -> str:
    cards = -(-on.workers // on.network.share)
    each = f"{on.network.bytes_s / 1e9:,.3g} GB/s each way, {on.network.latency * 1e6:.0f} us a message"
    return f"{counted(cards, 'card')} a node, {'each ' * (cards > 1)}of {each}"


def _limit(plan: ClusterPlan, last: Tile | None) -> str:
    """Return a text on the cause that limits the efficiency.

    If a worker lacks memory, the text says so: the simulated times are then wrong. last: tile whose sum ends last."""
    if plan.lacking_bytes:
        lacking = f"memory: the fullest worker lacks {plan.lacking_bytes / 2**30:,.1f} GiB"
        return f"{lacking}, which is not simulated; try smaller tiles.batch or train.batch, or more workers a node"
    if plan.busy < BUSY_ENOUGH and plan.efficiency >= GOOD:
        return f"too few tasks for a node's workers: they are busy for {plan.busy:.0%} of a step; smaller tiles.batch"
    if plan.efficiency >= GOOD:
        return f"computing: workers are busy for {plan.busy:.0%} of a step"
    fair, ms = plan.efficiency * plan.step_seconds, plan.exposed_seconds * 1e3
    if plan.own_seconds - fair > plan.step_seconds - plan.own_seconds:
        return (
            f"the small part of the batch on each node: a single node takes {plan.own_seconds:.3g} s for it, in"
            f" proportion to the batch it would take {fair:.3g} s"
        )
    if plan.card >= FULL:
        return (
            f"the network's bandwidth: a card sends for {plan.card:.0%} of the time from the first message to the last"
            f" sum; the last sum ends {ms:.3g} ms after the backward pass"
        )
    if plan.thread >= FULL:
        return f"the number of messages: the thread that sends and receives is busy for {plan.thread:.0%} of the time"
    if plan.adding * plan.step_seconds > (plan.step_seconds - plan.own_seconds) / 2:
        return f"the addition of other nodes' gradients: {plan.adding:.1%} of the workers' time"
    tile = f" ({last}, {last.bytes / 1e6:,.3g} MB)" if last else ""
    return f"sums that start late: the last sum{tile} ends {ms:.3g} ms after the backward pass"


def _spec(config: RunConfig, rows: int, workers: int, *, alone: bool) -> StepSpec:
    spec = replace(step_spec(config), batch=rows, one_machine=alone)
    if "batch" not in config.tile_sizes and workers > 1:
        spec = replace(spec, tiling=Tiling({**spec.tiling.tiles, "batch": -(-rows // workers)}))
    return spec


def _gpu_nodes(node: list[list[Task]], sums: int, on: Cluster, speed: Speed, every: bool) -> list[list[list[Task]]]:
    """Return the tasks of each simulated node, for each task list of a step, with the sums of gradients over nodes.

    Args:
        node: a node's tasks without the sums, for each task list.
        sums: position of the task list that gets the sums of gradients.
        on: the cluster.
        speed: speed of a worker.
        every: True: simulate all nodes. False: simulate only the first node."""
    places = (ClusterNode(n, on.nodes, on.network, on.workers, speed) for n in range(on.nodes if every else 1))
    return [[*node[:sums], with_sums(node[sums], at), *node[sums + 1 :]] for at in places]


def _ranks(config: RunConfig, ranks: int) -> list[list[list[Task]]]:
    """Return the tasks of each CPU node, for each task list of a step. Each node is a rank of one common program."""
    spec = replace(_spec(config, config.train.batch, ranks, alone=True), ranks=ranks)
    return rank_programs(_lists(spec), ranks, device_model.rank(config.workers), config.runtime.shard_weights)


def _lists(spec: StepSpec) -> list[TaskList]:
    """Return a step's task lists in the order in which they run."""
    return of_step(spec.step(), spec.grad_accumulation).lists


def _alone(config: RunConfig, rows: int, workers: int, speed: Speed) -> float:
    """Return the seconds of a step of `rows` sequences on a single node."""
    lists = _lists(_spec(config, rows, workers, alone=True))
    node = programs(lists, workers, speed, group=config.runtime.cuda != 0)
    return _seconds(simulate([node], workers, speed), lists, speed)


def _on_one_gpu(config: RunConfig, on: Cluster, speed: Speed, strong: bool) -> float | None:
    """Return the seconds of a step on a single GPU: with the GPU's part of the batch, or with all of it if `strong`.

    Returns None if the workers are CPU cores, or if the GPUs' parts of the batch are unequal."""
    share, rest = divmod(config.train.batch, 1 if strong else on.nodes * on.workers)
    if rest or not share or not config.runtime.cuda:
        return None
    return _alone(config, config.train.batch if strong else share, 1, speed)


def _seconds(steps: Sequence[SimulatedList], lists: Sequence[TaskList], speed: Speed) -> float:
    """Return the seconds of a simulated step; at least the time that one thread takes to submit the step's tasks."""
    return max(steps[-1].end - steps[0].start, sum(len(one.tasks) for one in lists) * speed.submit)


def peaks(lists: Sequence[Sequence[Task]], workers: int) -> list[int]:
    """Return for each worker the peak bytes of its tiles, weights and states included, if tasks run in list order.

    A worker keeps its copy of a tile until another worker writes the tile. Kernels' workspaces are not counted.
    """
    held: dict[Hashable, tuple[Tile, set[int]]] = {}
    now, peak = [0] * workers, [0] * workers

    def drop(tile: Tile, but: int = -1) -> None:
        _, holders = held.pop(tile.key, (tile, set()))
        for worker in holders - {but}:
            now[worker] -= tile.bytes
        if but in holders:
            held[tile.key] = tile, {but}

    for tasks in [*lists, *lists]:  # the first step puts persistent tiles in place
        for task in tasks:
            worker = max(task.worker, 0)
            for tile in task.clears:
                drop(tile)
            for access in task.accesses:
                if access.mode != "R":
                    drop(access.tile, but=worker)
                holders = held.setdefault(access.tile.key, (access.tile, set()))[1]
                if worker not in holders:
                    holders.add(worker)
                    now[worker] += access.tile.bytes
            peak[worker] = max(peak[worker], now[worker])
            for tile in task.frees:
                drop(tile)
    return peak
