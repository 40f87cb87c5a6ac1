"""Plan a training step for `nntile plan`: estimate its cost without running it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.plan_room import Alternative, Evictions, evictions, refusal
from nntile_py.analysis.roofline import rates_text
from nntile_py.analysis.simulate import planned_seconds
from nntile_py.config.builders import auto_tiles, micro_batches, search_for, step_spec, with_micro_batches
from nntile_py.config.kept_tiles import KeptTiling
from nntile_py.config.sections import AUTO_TILES
from nntile_py.graph.built_step import Step
from nntile_py.graph.estimate import Estimate, estimate
from nntile_py.graph.graph import Graph
from nntile_py.graph.micro_batches import in_parts
from nntile_py.graph.params import numel
from nntile_py.graph.recompute_choice import StepEstimate, fastest
from nntile_py.graph.recompute_rule import AUTO
from nntile_py.graph.step import StepSpec
from nntile_py.graph.tile_choice import TileSearch, tiles_text
from nntile_py.models.registry import find
from nntile_py.models.torch_module import TorchModule
from nntile_py.system.console_tables import plain_table
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tasks.op import Lowering
from nntile_py.tiles import TaskList
from nntile_py.tiles.placement import Speed
from nntile_py.tiles.task import name_and_phase

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nntile_py.config.run_config import RunConfig


RELATIVE = "relative time"  # column: estimated time of a step, divided by the shortest time in the table


@dataclass(frozen=True)
class PlanAxis:
    """The size of an axis, the size of the axis's tiles, and an example: the axis is dimension `dim` of `tensor`."""

    size: int
    tile: int
    tensor: str
    dim: int


@dataclass
class PlanRow:
    """Operators of one kind and phase: their number, and sums over them.

    Attributes:
        tiles: number of tiles of the operators' outputs.
        bytes: bytes that the tasks read and write.
        seconds: seconds of the tasks, one after the other.
        kernels: number of tasks by kernel.
    """

    operators: int = 0
    tiles: int = 0
    tasks: int = 0
    flop: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class PlannedTilings:
    """The tiling that `tiles: auto` has chosen, and the estimates of all tilings of the search.

    Attributes:
        kept: the chosen tiling.
        searched: the search with its estimates; None if there is only one worker.
    """

    kept: KeptTiling
    searched: TileSearch | None

    def to_dict(self) -> dict[str, Any]:
        estimates = [vars(one) for one in self.searched.estimates] if self.searched else []
        return {"chosen": self.kept.tiles, "how": self.kept.how, "estimates": estimates}

    def render(self) -> Iterator[RenderableType]:
        """Yield a line with the tiling and a table of the estimates."""
        from rich.text import Text

        line = f"tiles               {tiles_text(self.kept.tiles)} (auto: "
        if not self.searched:
            yield Text(f"{line}one worker needs no tiles)")
            return
        yield Text(f"{line}{self.kept.how})\n")
        heads = ("tiles", "tasks", "parallel", RELATIVE, "MiB at peak", "fits")
        table = plain_table(heads, text=heads[:1])
        shortest = min(one.seconds for one in self.searched.estimates)
        for one in self.searched.estimates:
            numbers = f"{one.tasks:,}", f"{one.parallelism:.1f}", f"{one.seconds / shortest:.2f}"
            table.add_row(one.text, *numbers, f"{one.peak_bytes / 2**20:,.0f}", "yes" if one.fits else "no")
        yield table


@dataclass
class Plan:
    """Plan of one optimizer step.

    Attributes:
        flop: floating point operations of products and attention only.
        evicted_bytes: bytes that leave a GPU with too little memory and return.
        eviction_needs: bytes of main memory that an eviction plan needs, if main memory has less; else 0.
        state_bytes: bytes of weights, gradients and optimizer state, which stay in memory.
        task_seconds: mean seconds of a task.
        workers: text on the workers and their rates.
        digest: hash of the task list of the first micro-batch.
        torch_calls: {operator of PyTorch that has no kernel here: share of the tasks' time}.
        axes: {name: axis} of the parameters and inputs.
        captured: the model is a PyTorch module, whose axes got their names from the capture.
        rows: sums over operators, by phase and kind of operator.
        candidates: {number of micro-batches: estimates} for `recompute: auto` and `train.grad_accumulation: auto`.
        micro_batches: the number that `train.grad_accumulation: auto` chooses; None: the config has a number.
        tilings: the estimates of `tiles: auto`; None: the config has tile sizes.
        refused: why a run would not fit into memory; empty if a run fits.
    """

    parameters: int
    tokens: int
    tasks: int
    flop: float
    bytes_moved: int
    peak_bytes: int
    evicted_bytes: int
    eviction_needs: int
    state_bytes: int
    task_seconds: float
    step_seconds: float
    workers: str
    digest: str
    torch_calls: dict[str, float]
    axes: dict[str, PlanAxis]
    captured: bool
    rows: dict[tuple[str, str], PlanRow]
    candidates: dict[int, list[StepEstimate]] = field(default_factory=dict)
    micro_batches: int | None = None
    tilings: PlannedTilings | None = None
    refused: str = ""

    def choices(self) -> dict[str, Sequence[Alternative]]:
        """Return {name of a choice: the estimates that `auto` has compared}."""
        searched = self.tilings.searched if self.tilings else None
        combined = [one for found in self.candidates.values() for one in found]
        return {"recompute and micro-batches": combined, "tiles": searched.estimates if searched else []}

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"phase": phase, "operator": kind} | {k: v for k, v in vars(row).items() if k != "kernels"}
            | {"kernels": dict(row.kernels)}
            for (phase, kind), row in self.rows.items()
        ]  # fmt: skip
        axes = {name: vars(axis) for name, axis in self.axes.items()}
        candidates = {count: [vars(one) for one in found] for count, found in self.candidates.items()}
        own = {k: v for k, v in vars(self).items() if k not in ("rows", "candidates", "tilings")}
        tilings = {"tilings": self.tilings.to_dict()} if self.tilings else {}
        own |= {"axes": axes, "operators": rows} | tilings
        return own | ({"recompute": candidates} if candidates else {})

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        heads = ("phase", "operator", "count", "tiles", "tasks", "Gflop", "GB moved", "Mflop/task")
        table = plain_table(heads, text=heads[:2], overflow="ellipsis")
        for (phase, kind), row in self.rows.items():
            each = row.flop / max(row.tasks, 1) / 1e6
            numbers = [row.operators, row.tiles, row.tasks]
            cells = [f"{n:,}" for n in numbers] + [f"{row.flop / 1e9:.3f}", f"{row.bytes / 1e9:.3f}", f"{each:.2f}"]
            table.add_row(phase, kind, *cells)
        evicted, whole = self.evicted_bytes / 1e9, sum(row.flop for row in self.rows.values())
        needs = f"a plan needs runtime.memory of {-(-self.eviction_needs // 2**20):,} MiB"
        lines = [
            f"parameters          {self.parameters:,}",
            f"tokens a step       {self.tokens:,}",
            f"tasks a step        {self.tasks:,}",
            f"flop a step         {self.flop / 1e9:,.1f} G of products and attention, {whole / 1e9:,.1f} G in all",
            f"bytes moved a step  {self.bytes_moved / 1e9:,.2f} GB",
            f"bytes at peak       {self.peak_bytes / 2**20:,.1f} MiB",
            f"  kept all the time {self.state_bytes / 2**20:,.1f} MiB: weights, gradients, optimizer state",
            *([f"evicted             {evicted:,.3g} GB a step leave the GPU and return"] if evicted else []),
            *([f"no eviction plan    StarPU chooses the tiles that leave: {needs}"] if self.eviction_needs else []),
            f"mean task           {self.task_seconds * 1e6:,.0f} us",
            f"time a step         {self.step_seconds:,.3g} s, on {self.workers}",
            *self._torch_calls(),
            *(self._axes() if self.captured else ()),
            f"program             {self.digest[:16]}",
        ]
        tilings = self.tilings.render() if self.tilings else ()
        return Group(table, Text(), *map(Text, lines), *tilings, *(self._recompute() if self.candidates else ()))

    def _recompute(self) -> Iterator[RenderableType]:
        """Yield the chosen values of `recompute` and of the number of micro-batches, then a table of estimates."""
        from rich.text import Text

        count = self.micro_batches
        best = fastest(self.candidates[count] if count else next(iter(self.candidates.values())))
        why = "fastest estimate that fits" if best.fits else "no value fits; this has the smallest peak"
        if count:
            yield Text(f"micro-batches       {count}, with recompute {best.values} ({why})\n")
        else:
            yield Text(f"recompute           {best.values} ({why}, with the config's number of micro-batches)\n")
        heads = ("recompute", "micro-batches", RELATIVE, "MiB at peak", "GB evicted", "fits")
        table = plain_table(heads, text=heads[:1])
        shortest = min(one.seconds for found in self.candidates.values() for one in found)
        for count, found in self.candidates.items():
            for one in found:
                evicted = f"{one.evicted_bytes / 1e9:.3g}"
                cells = f"{count}", f"{one.seconds / shortest:.2f}", f"{one.peak_bytes / 2**20:,.0f}", evicted
                table.add_row(one.values, *cells, "yes" if one.fits else "no")
        yield table

    def _torch_calls(self) -> list[str]:
        """Return the line on calls of PyTorch; none if there are no such calls."""
        if not self.torch_calls:
            return []
        every = sum(self.torch_calls.values())
        each = ", ".join(f"{name} {share:.1%}" for name, share in self.torch_calls.items())
        return [f"calls of PyTorch    {every:.1%} of the tasks' time, estimated: {each}"]

    def _axes(self) -> list[str]:
        """Return the lines on axes, each with an example."""
        lines: list[str] = []
        for name, axis in self.axes.items():
            cut = f" in tiles of {axis.tile}" if axis.tile < axis.size else ""
            head = "axes" if not lines else ""
            lines.append(f"{head:<19} {name}: {axis.size}{cut}, such as dimension {axis.dim} of {axis.tensor}")
        return lines


def plan(config: RunConfig, spec: StepSpec | None = None) -> Plan:
    """Return the plan of a training step of the config. Nothing runs, and no weight is initialised.

    spec: the config's StepSpec, if the caller has it already."""
    with no_search_for_cycles():
        asked, config = config, with_micro_batches(config)
        spec = spec or step_spec(config)
        step = spec.step()
        tilings = None
        if config.tiles == AUTO_TILES:
            tilings = PlannedTilings(auto_tiles(config), search_for(config) if config.workers > 1 else None)
        made = summarise(step, tilings.searched.speed if tilings and tilings.searched else None, config=config)
        made.tilings = tilings
        if asked.train.auto_micro_batches:
            made.candidates = micro_batches(asked)
            made.micro_batches = config.train.grad_accumulation
        elif spec.recompute == AUTO:
            made.candidates = dict(in_parts(spec, (1, 2, 4, 8)))
        made.refused = refusal(config, step, made.choices())
        return made


def summarise(step: Step, speed: Speed | None = None, *, config: RunConfig) -> Plan:
    """Return the plan of a training step whose task lists are built.

    speed: rates of one worker; None: those of the device model.
    """
    repeats, gpu = config.train.grad_accumulation, config.runtime.cuda != 0
    parts: list[tuple[Lowering, int]] = [(step.first, 1), (step.update, 1)]
    if step.more:
        parts.insert(1, (step.more, repeats - 1))
    sums = _Sums()
    sums.add_operators(step.graph, step.first, repeats)
    sums.add_operators(step.update_graph, step.update, 1, phase="update")
    lists = step.in_turn(repeats)
    of = estimate(lists, config.workers, gpu, speed)
    for lowering, times in parts:
        sums.add_tasks(lowering, times, of.speed, outputs=lowering is step.first)
    seconds, moved = _seconds(config, lists, of, step.peak_bytes())
    rows, every = sums.rows, sum(sums.torch_calls.values())
    slowest = sorted(sums.torch_calls.items(), key=lambda item: -item[1])
    return Plan(
        parameters=numel(step.params),
        tokens=repeats * config.train.batch * config.train.seq,
        tasks=sum(row.tasks for row in rows.values()),
        flop=repeats * step.flop,
        bytes_moved=sum(row.bytes for row in rows.values()),
        peak_bytes=step.peak_bytes(),
        evicted_bytes=moved.bytes,
        eviction_needs=moved.needs,
        state_bytes=sum(step.kept_tiles().values()),
        task_seconds=of.mean_task,
        step_seconds=seconds,
        workers=rates_text(config, of.speed.flop_s, of.speed.bytes_s),
        digest=step.first.tasks.digest(),
        axes=_axes(step),
        captured=issubclass(find(config.model.type), TorchModule),
        torch_calls={name: part / every for name, part in slowest if name},
        rows=rows,
    )


class _Sums:
    """Sums over the operators and tasks of a step.

    Attributes:
        rows: sums by phase and kind of operator.
        torch_calls: {operator of PyTorch, or "": seconds of the tasks that call it}.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], PlanRow] = {}
        self.torch_calls: dict[str, float] = defaultdict(float)
        self._kinds: dict[str, tuple[str, str]] = {}
        self._calls: dict[str, str] = {}  # {operator: PyTorch's operator that it calls, or ""}
        self._recomputed: set[str] = set()  # names of operators that run again in the backward pass

    def add_operators(self, graph: Graph, lowering: Lowering, times: int, phase: str = "") -> None:
        """Add the operators of a graph, which run `times` times. phase: their phase; "": each operator has its own."""
        with_tasks = {task.op for task in lowering.tasks.tasks}
        for op in graph.ops:
            name = op.full_name
            if name not in with_tasks:  # it has no work, or the tasks of another operator do its work
                continue
            self._kinds[name] = key = (phase or op.phase, f"{op.kind} {op.torch_call}".rstrip())
            self._calls[name] = op.torch_call
            row = self.rows.setdefault(key, PlanRow())
            row.operators += 1
            row.flop += graph.computed(op, lowering.tiling) * times
            row.tiles += sum(1 for t in op.outputs for _ in lowering.indices(t))

    def add_tasks(self, lowering: Lowering, times: int, speed: Speed, *, outputs: bool) -> None:
        """Add the tasks of a list that runs `times` times. outputs: True: count the tiles that recomputations write."""
        for task in lowering.tasks.tasks:
            name, again = name_and_phase(task.op)
            if again == "recompute":
                row = self.rows.setdefault((again, self._kinds[name][1]), PlanRow())
                row.flop += times * task.flop
                row.operators += name not in self._recomputed
                row.tiles += sum(access.mode != "R" for access in task.accesses) if outputs else 0
                self._recomputed.add(name)
            else:
                name, row = task.op, self.rows[self._kinds[task.op]]
            seconds = speed.seconds(task) + speed.beside
            row.seconds += times * seconds
            self.torch_calls[self._calls[name]] += times * seconds
            row.tasks += times
            row.bytes += times * task.bytes
            row.kernels[task.kernel] += times


def _seconds(config: RunConfig, lists: Sequence[TaskList], of: Estimate, peak: int) -> tuple[float, Evictions]:
    """Return the estimated seconds of a step, and the tiles that leave a GPU and return. peak: bytes at the peak."""
    gpu, runtime, moved = config.runtime.cuda != 0, config.runtime, Evictions(0, 0, 0)
    if not (config.planned or (gpu and config.workers == 1)):  # one GPU runs tasks in planned order and groups, too
        return of.seconds, moved
    seconds = planned_seconds(lists, config.workers, of.speed)
    if gpu and config.workers == 1 and not runtime.cpus and not runtime.disk:
        moved = evictions(config, lists, peak)
        seconds += moved.moved / of.speed.host_s
    return seconds, moved


def _axes(step: Step) -> dict[str, PlanAxis]:
    """Return the axes of a step's parameters and inputs, with an example of each, a weight where there is one."""
    graph, tiling = step.graph, step.first.tiling
    tensors = [*graph.params, *(one.tensor for one in graph.inputs.values())]
    found: dict[str, PlanAxis] = {}
    for tensor in tensors:
        for dim, axis in enumerate(tensor.axes):
            size = tensor.size(axis)
            if size > 1:
                found.setdefault(axis, PlanAxis(size, tiling.tile(axis, size), tensor.name.partition("+")[0], dim))
    return found
