"""Draw the two levels of `nntile graph`: operators with their tensors, or tasks with their tiles."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from nntile_py.analysis import dot
from nntile_py.analysis.counts import Counts, Tally
from nntile_py.analysis.folding import Folded, Unit, fold, layer_number, starred
from nntile_py.analysis.workloads import Built
from nntile_py.graph.graph import Graph
from nntile_py.system.units import counted, si
from nntile_py.tasks.op import ELEMENTWISE, Category, Op, Tensor
from nntile_py.tiles import Task, Tile
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import name_and_phase

MOST_ALIKE = 4  # if more update operators are of one kind, a picture of a whole step draws one node for them
BOXES = {"forward": "forward pass", "backward": "backward pass", "update": "update of the weights"}


Bound = Callable[[Counts], bool]  # returns True for the counts of a memory-bound operator


def _phases(graphs: Sequence[Graph], layer: int | None, phase: str) -> Iterator[tuple[Graph, list[Op], set[str]]]:
    """Yield each distinct graph, its operators of this layer and phase, and the names that their tasks have."""
    seen: list[Graph] = []
    weights: set[str] = set()  # names of the layer's weights
    for graph in graphs:
        if graph in seen:
            continue
        seen.append(graph)
        inside = [op for op in graph.ops if layer is None or layer_number(op.name) == layer]
        weights |= {t.name for op in inside for t in op.inputs if t.storage.kind == "param"}
        if layer is not None and len(seen) == 2:  # operators of the update are named after weights
            inside = [op for op in graph.ops if any(t.name in weights for t in op.inputs)]
        chosen = [op for op in inside if phase in ("all", "update" if len(seen) == 2 else op.phase)]
        yield graph, chosen, {op.full_name for op in chosen}


def count_layers(graphs: Sequence[Graph]) -> int:
    """Return the number of the model's layers; 0 if the model has none."""
    return len({layer_number(op.name) for graph in graphs for op in graph.ops} - {None})


class GraphDrawing:
    """Base class of LogicalDrawing and TaskDrawing: nodes, sums, phases and folded layers of a picture.

    Args:
        graphs: the graphs of the workload; the second graph is the update.
        part: prefix of the nodes' names.
        layer: draw only this layer. None: all.
        phase: draw only this phase; `all`: all phases.
        folded: draw equal layers once.

    Attributes:
        count: number of operators or tasks, those that are not drawn included; flop, volume: their flop and bytes.
    """

    def __init__(self, graphs: Sequence[Graph], part: str, layer: int | None, phase: str, folded: bool) -> None:
        self.graphs, self.picture = graphs, dot.Picture(part)
        self.count, self.flop, self.volume = 0, 0.0, 0.0
        self.phase, self.many = phase, phase == "all"
        # nodes: for a tensor or tile, the phase and the node of its latest version. again: its nodes in other boxes.
        self.nodes: dict[Hashable, tuple[str, str]] = {}
        self.again: dict[Hashable, dict[dot.Group, str]] = {}
        self.folds: dict[str, Folded] = {}  # by phase
        self.same: dict[Hashable, Hashable] = {}
        self.fold = folded and layer is None
        self.owners = _owners(graphs[0])
        self.draw(layer)

    def draw(self, layer: int | None) -> None:
        raise NotImplementedError

    @property
    def size_text(self) -> str:
        """Text with the number of operators or tasks."""
        raise NotImplementedError

    def fold_layers(self, units: list[tuple[str, Unit]]) -> None:
        """Fold equal layers in each phase separately: equal forward passes may have different backward passes.

        units: each operator or task with its phase."""
        for phase in dict.fromkeys(phase for phase, _ in units):
            own = [(n, unit) for n, (of, unit) in enumerate(units) if of == phase]
            self.folds[phase] = fold(own) if self.fold else Folded()
            self.same |= self.folds[phase].same

    def drawn_read(self, phase: str, unit: int, number: int, key: Hashable) -> Hashable:
        """Return the tensor or tile that the picture shows as read by a unit (operator or task) that reads `key`.

        unit: number of the unit. number: position of `key` among the unit's reads."""
        key = self.folds[phase].comes_from.get((unit, number), key)
        return self.same.get(key, key)

    def node_name(self, phase: str, layer: int | None, name: str) -> str:
        """Return the name of a node; in folded layers a star replaces the layer's number."""
        return starred(name) if self.folds[phase].run_of(layer) else name

    def layer_of(self, op: Op, updates: bool) -> int | None:
        """Return the number of an operator's layer; None outside of layers.

        The update of a weight (`updates`) belongs to a layer if only this layer uses the weight."""
        if not updates:
            return layer_number(op.name)
        return next((self.owners[t.name] for t in op.inputs if t.name in self.owners), None)

    def group(self, phase: str, layer: int | None) -> dot.Group:
        """Return the boxes around a node of this phase and layer."""
        box = (BOXES[phase],) if self.many else ()
        if run := self.folds[phase].run_of(layer):
            box = (*box, f"x {run[1] - run[0] + 1}: layers {run[0]} to {run[1]} are alike, drawn once")
        return box

    def data(
        self, key: Hashable, phase: str, layer: int | None, kind: str, lines: tuple[str, ...], fresh: bool = False
    ) -> str:
        """Return the node of a tensor or tile `key` in the box of this phase and layer; add the node if it is missing.

        fresh: an operator or task writes `key`, so the node is a new one."""
        group, name = self.group(phase, layer), self.node_name(phase, layer, _data_name(lines[0]))
        if fresh or key not in self.nodes:
            self.nodes[key] = phase, self.picture.data(group, kind, name, *lines[1:])
            self.again[key] = {}
        writer_phase, node = self.nodes[key]
        if writer_phase == phase:
            return node
        if group not in self.again[key]:
            self.again[key][group] = self.picture.data(group, kind, name, again=True)
        return self.again[key][group]

    def all_of(self, kind: str, category: Category, count: int, flop: float, volume: float) -> str:
        """Add one node that stands for all `count` update operators of a kind, and return the node's name."""
        lines = "of each weight; --phase update draws them", f"{si(flop)}flop, {si(volume)}B"
        return self.picture.operator(self.group("update", None), category, f"{count} {kind}", *lines)


class LogicalDrawing(GraphDrawing):
    """Drawing of operators and tensors. Operators without tasks are left out.

    The numbers in a node are those of one micro-batch. The numbers in the title are sums over all micro-batches.

    Args:
        tally: counts the operators.
        bound: returns True for a memory-bound operator. If set, such operators are marked, and edges show their bytes.
        overview: draw tensors as edges between operators; only inputs and results are nodes.
    """

    def __init__(
        self, graphs: Sequence[Graph], part: str, layer: int | None, phase: str, folded: bool, tally: Tally,
        bound: Bound | None = None, overview: bool = False,
    ) -> None:  # fmt: skip
        self.bound, self.repeats, self.overview = bound, tally.repeats, overview
        self.writers: dict[Tensor, tuple[str, str]] = {}  # in an overview: phase and node of each tensor's writer
        self.facts = {fact.op: fact for n, graph in enumerate(graphs) for fact in tally.facts(graph, n).values()}
        self.renamed: dict[Tensor, Tensor] = {}  # {output of an operator without tasks: input with the same values}
        for op in (op for graph in graphs for op in graph.ops if op not in self.facts):
            self.renamed[op.output] = self._before(op.inputs[0])
        super().__init__(graphs, part, layer, phase, folded)

    def _before(self, tensor: Tensor) -> Tensor:
        return self.renamed.get(tensor, tensor)

    @property
    def size_text(self) -> str:
        return counted(self.count, "operator") + f" in {self.repeats} micro-batches" * (self.repeats > 1)

    def draw(self, layer: int | None) -> None:
        chosen = [
            (op, "update" if n else op.phase, self.layer_of(op, n > 0))
            for n, (_, ops, _) in enumerate(_phases(self.graphs, layer, self.phase)) for op in ops if op in self.facts
        ]  # fmt: skip
        self.fold_layers([(phase, self._unit(op, of)) for op, phase, of in chosen])
        kinds = Counter(op.kind for op, phase, _ in chosen if phase == "update")
        # In a picture of a whole step, the updates of all weights would be wider than the rest: they are joined.
        short = self.many and kinds.total() > MOST_ALIKE
        alike: dict[str, list[Op]] = {}
        for number, (op, phase, of) in enumerate(chosen):
            fact = self.facts[op]
            self.count, self.flop = self.count + fact.times, self.flop + fact.counts.flop
            self.volume += fact.counts.bytes
            if short and phase == "update" and kinds[op.kind] > MOST_ALIKE:
                alike.setdefault(op.kind, []).append(op)
            elif self.folds[phase].draws(of):
                self._operator(number, op, phase, of, short and phase == "update")
        for kind, group in alike.items():
            total = Counts.total(self.facts[op].counts for op in group)
            node = self.all_of(kind, group[0].category, len(group), total["flop"], total["bytes"])
            for tensor in dict.fromkeys(t for op in group for t in op.inputs if t.storage.kind == "scalar"):
                self.picture.edge(self._tensor(tensor, "update", None), node, _bytes(tensor))

    def _operator(self, number: int, op: Op, phase: str, layer: int | None, short: bool) -> None:
        fact = self.facts[op]
        each = fact.counts.intensity
        intensity = f"{each:.3g}" if each < 999.5 else f"{each:,.0f}"
        cost = [f"{si(fact.counts.flop / fact.times)}flop, {intensity} per element"]
        grads = {t for t in op.inputs if t.storage.kind == "grad"}
        left_out = grads if short and len(grads) > MOST_ALIKE else set()
        cost += [f"of all {len(grads)} gradients"] if left_out else []
        inputs = [(k, self._before(t)) for k, t in enumerate(op.inputs) if t not in left_out]
        reads = [self.drawn_read(phase, number, k, t) for k, t in inputs]
        tensors = [t for t in dict.fromkeys(reads) if isinstance(t, Tensor)]
        starts = [(start, t) for t in tensors if (start := self._start(t, phase, layer))]
        if self.overview and (weights := sum(_bytes(t) for t in tensors if t.storage.kind == "param")):
            cost.insert(0, f"weights {si(weights)}B")
        name = self.node_name(phase, layer, _short(op.name))
        bound = self.bound is not None and self.bound(fact.counts)
        node = self.picture.operator(self.group(phase, layer), op.category, op.title, name, *cost, bound=bound)
        for start, tensor in starts:
            self.picture.edge(start, node, _bytes(tensor), text=self._beside(tensor))
        for tensor in op.outputs:
            if self.overview and tensor.storage.kind != "scalar":
                self.writers[tensor] = phase, node
            else:
                end = self._tensor(tensor, phase, layer)
                self.picture.edge(node, end, _bytes(tensor), text=self._beside(tensor))

    def _start(self, tensor: Tensor, phase: str, layer: int | None) -> str | None:
        """Return the node from which the edge of a tensor that is read starts; None if an overview draws no edge."""
        if not self.overview or tensor.storage.kind in ("input", "scalar"):
            return self._tensor(tensor, phase, layer)
        writer_phase, node = self.writers.get(tensor, ("", ""))
        return node if writer_phase == phase else None

    def _unit(self, op: Op, layer: int | None) -> Unit:
        looks = op.kind, op.title, tuple(t.shape for t in (*op.inputs, *op.outputs))
        return Unit(layer, looks, [self._before(t) for t in op.inputs], list(op.outputs))

    def _beside(self, tensor: Tensor) -> str:
        """Return the text beside a tensor's edge: the bytes, or "" in a picture without bytes."""
        return f"{si(_bytes(tensor))}B" if self.bound or self.overview else ""

    def _tensor(self, tensor: Tensor, phase: str, layer: int | None) -> str:
        shape = ", ".join(f"{axis} {size}" for axis, size in tensor.sizes.items())
        lines = tensor.name, shape, f"{si(_bytes(tensor))}B"
        return self.data(tensor, phase, layer, tensor.storage.kind, lines)


class TaskDrawing(GraphDrawing):
    """Drawing of tasks and tiles. Each write of a tile makes a new version of the tile, with a node of its own."""

    def __init__(self, built: Built, part: str, layer: int | None, phase: str, folded: bool) -> None:
        # Micro-batches after the first are not drawn.
        self.lists = {id(graph): lowering for graph, lowering in reversed(built.graphs)}
        super().__init__([graph for graph, _ in built.graphs], part, layer, phase, folded)

    @property
    def size_text(self) -> str:
        return counted(self.count, "task")

    def draw(self, layer: int | None) -> None:
        self.kinds = {t.storage.name: t.storage.kind for graph in self.graphs for t in _tensors(graph)}
        self.versions: Counter[Hashable] = Counter()
        self.of_op = {op.full_name: op for graph in self.graphs for op in graph.ops}
        self.shares = self._shares()
        chosen: list[tuple[Task, str, int | None]] = []
        for n, (graph, ops, names) in enumerate(_phases(self.graphs, layer, self.phase)):
            layers = {op.name: self.layer_of(op, n > 0) for op in ops}
            again = {op.name for op in graph.ops if layer is None or layer_number(op.name) == layer}
            for task in self.lists[id(graph)].tasks.tasks:
                name, phase = name_and_phase(task.op)
                if task.op in names or (phase == "recompute" and self.phase in ("all", "backward") and name in again):
                    shown = "update" if n else "backward" if phase == "recompute" else phase
                    chosen.append((task, shown, layers.get(name)))
        self.fold_layers([(phase, _unit_of_task(task, of)) for task, phase, of in chosen])
        self.tiles = {a.tile.key: a.tile for task, _, _ in chosen for a in task.accesses}
        kinds = Counter(task.kernel for task, phase, _ in chosen if phase == "update")
        alike: dict[str, list[Task]] = {}
        for number, (task, phase, of) in enumerate(chosen):
            self.count, self.flop, self.volume = self.count + 1, self.flop + self._flop(task), self.volume + task.bytes
            if self.many and phase == "update" and kinds[task.kernel] > MOST_ALIKE:
                alike.setdefault(task.kernel, []).append(task)
            elif self.folds[phase].draws(of):
                self._task(number, task, phase, of)
        for kind, group in alike.items():
            flop, volume = sum(map(self._flop, group)), sum(task.bytes for task in group)
            self.all_of(kind, self._category(group[0]), len(group), flop, volume)

    def _shares(self) -> dict[str, float]:
        """Return for each operator its flop, fused operations included, divided by the sum of its tasks' flop.

        Tasks of a fused product count the product's flop only, and a transposition counts none.
        """
        sums, known = defaultdict[str, float](float), dict[str, float]()
        for graph in self.graphs:
            lowering = self.lists[id(graph)]
            for task in lowering.tasks.tasks:
                sums[task.op] += task.flop
            known |= {op.full_name: graph.computed(op, lowering.tiling) for op in graph.ops}
        return {name: flop / sums[name] for name, flop in known.items() if sums[name]}

    def _flop(self, task: Task) -> float:
        return task.flop * self.shares.get(task.op, 1.0)

    def _category(self, task: Task) -> Category:
        op = self.of_op.get(task.op)
        return op.category if op else ELEMENTWISE

    def _task(self, number: int, task: Task, phase: str, layer: int | None) -> None:
        reads = [self.drawn_read(phase, number, k, a.tile.key) for k, a in enumerate(task.accesses) if a.mode != "W"]
        starts = [(self._tile(self.tiles[key], phase, layer), self.tiles[key]) for key in reads]
        name = self.node_name(phase, layer, _short(name_and_phase(task.op)[0]))
        cost = f"{si(self._flop(task))}flop, {si(task.bytes)}B"
        node = self.picture.operator(self.group(phase, layer), self._category(task), _title(task), name, cost)
        for start, tile in starts:
            self.picture.edge(start, node, tile.bytes)
        for access in task.accesses:
            if access.mode != "R":
                written = self._tile(access.tile, phase, layer, fresh=True)
                self.picture.edge(node, written, access.tile.bytes, access.mode)

    def _tile(self, tile: Tile, phase: str, layer: int | None, fresh: bool = False) -> str:
        if fresh or tile.key not in self.nodes:
            self.versions[tile.key] += 1
        number = self.versions[tile.key] - 1
        lines = repr(tile) + (f" version {number}" if number else ""), f"{list(tile.shape)} {si(tile.bytes)}B"
        return self.data(tile.key, phase, layer, self.kinds.get(tile.tensor, "temp"), lines, fresh)


def _title(task: Task) -> str:
    """Return a task's kernel with its fused operations; a generated kernel without the hash of its source."""
    return re.sub("_[0-9a-f]{8}$", "", task.kernel) + getattr(task.args, "title", "")


def _unit_of_task(task: Task, layer: int | None) -> Unit:
    looks = task.kernel, tuple((a.mode, a.tile.shape) for a in task.accesses)
    keys = [a.tile.key for a in task.accesses]
    return Unit(layer, looks, keys, [a.tile.key for a in task.accesses if a.mode != "R"])


def _owners(graph: Graph) -> dict[str, int]:
    """Return {name of a weight: number of its layer} for the weights that only one layer uses."""
    users: dict[str, set[int | None]] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor.storage.kind == "param":
                users.setdefault(tensor.name, set()).add(layer_number(op.name))
    single = {name: next(iter(of)) for name, of in users.items() if len(of) == 1}
    return {name: layer for name, layer in single.items() if layer is not None}


# -- pieces


def _tensors(graph: Graph) -> Iterator[Tensor]:
    for op in graph.ops:
        yield from (*op.inputs, *op.outputs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel * DTYPES[tensor.dtype].bytes


def _short(name: str) -> str:
    """Return an operator's name without its kind, which the node's title shows."""
    return name.replace("transformer.", "").rpartition(".")[0] or "model"


def _data_name(name: str) -> str:
    return name.partition("#")[0].removeprefix("transformer.")
