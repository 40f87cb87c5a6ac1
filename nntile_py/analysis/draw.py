"""`nntile graph`: the dataflow graph of a config, or its tile tasks, as a picture made by graphviz.

Operators are ellipses marked by class as in the data-movement paper (contraction, normalization, element-wise); data
are boxes, weights cylinders, inputs parallelograms. Nodes carry flop and sizes, edges the bytes that go along them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.analysis.workloads import Built, Phase, Work, build
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import CATEGORIES, ELEMENTWISE, Category, Op, Tensor
from nntile_py.tiles import Task, Tile
from nntile_py.tiles.dtypes import DTYPES

if TYPE_CHECKING:
    from nntile_py.config.run import RunConfig

MOST_NODES = 4000  # above, dot takes minutes and nobody reads the picture
MOST_SECONDS = 60.0  # that dot may take: its time grows faster than the number of nodes
MOST_ALIKE = 4  # operators of a kind at the end of a step that are drawn one by one beside the rest of it
MOST_CURVED = 250  # nodes; above, dot spends its time on curves: 13 s with straight edges are minutes
PHASES = ("all", "forward", "backward", "update")
GET_DOT = (
    "graphviz's program `dot` is not on the PATH; get it with `apt-get install graphviz` (macOS: `brew install "
    "graphviz`)"
)
# kind of tensor: shape, colour, what the legend says
_DATA = {
    "temp": ("box", "#b9dfb0", "activation or its gradient"),
    "param": ("cylinder", "#f6b45a", "weight"),
    "grad": ("cylinder", "#fbe3a6", "gradient of a weight"),
    "state": ("cylinder", "#d8c7ea", "state of the optimizer"),
    "input": ("parallelogram", "#b4d2ee", "input"),
    "scalar": ("doubleoctagon", "#b9dfb0", "result that is kept"),
}


class NoPicture(NNTileError):
    """Graphviz made none: why, and what `nntile graph` advises then."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


def draw(
    config: RunConfig, *, level: str = "logical", work: Work = "train", layer: int | None = None, phase: str = "all",
    fusion: str = "after",
) -> str:  # fmt: skip
    """The picture in the DOT language. fusion: `before` (every operator a task of its own), `after`, or `both`."""
    titles = {"before": "before fusion", "after": "after fusion"}
    parts = ["before", "after"] if fusion == "both" else [fusion]
    lines = ["digraph {", 'graph [fontname="Helvetica" ranksep=0.3 nodesep=0.25]']
    lines += ['node [style=filled fontname="Helvetica" fontsize=10]', 'edge [fontname="Helvetica" fontsize=8]']
    for part in parts:
        # Without a backward pass nothing before an activation is kept for it.
        only: Phase = "forward" if phase == "forward" else "all"
        built = build(config, work, only, fusion=Fusion.of(False) if part == "before" else None)
        body, count, flop, volume = _logical(built, layer, phase) if level == "logical" else _tiles(built, layer, phase)
        if not count:
            asked = f"--phase {phase}" + ("" if layer is None else f" --layer {layer}")
            raise ConfigError(f"{asked}: nothing of {work} is there{_layers(built)}")
        unit = "operators" if level == "logical" else "tasks"
        label = f"{titles[part]}: {count} {unit}, {si(flop)}flop, {si(volume)}B moved at least"
        lines += [f"subgraph cluster_{part} {{", f"label={_quote(label)} fontsize=14 color=gray"]
        lines += _renamed(body, part)
        lines.append("}")
    return "\n".join([*lines, *_legend(level), "}", ""])


def write(dot: str, out: Path) -> None:
    """Write the picture: .dot as it is, else what `dot` makes of it (.svg, .png, .pdf)."""
    if out.suffix in (".dot", ".gv"):
        out.write_text(dot, encoding="utf-8")
        return
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out: {out} has no suffix .svg, .png, .pdf or .dot")
    try:
        made = picture(dot, out.suffix[1:])
    except NoPicture as error:
        raise NNTileError(f"{error}{error.advice}; {_kept(dot, out.with_suffix('.dot'))}") from None
    out.write_bytes(made)


def picture(dot: str, form: str) -> bytes:
    """What graphviz makes of it: svg, png or pdf."""
    program = shutil.which("dot")
    if program is None:
        raise NoPicture(GET_DOT, ", or give --out a name that ends in .dot: that needs no program")
    if (nodes := dot.count("shape=")) > MOST_NODES:
        raise ConfigError(f"--out: {nodes} nodes are too many for a picture (at most {MOST_NODES}): choose --layer, "
                          "--phase or larger tiles, or write a .dot")  # fmt: skip
    straight = ["-Gsplines=line", "-Gnslimit=1", "-Gnslimit1=1"] if nodes > MOST_CURVED else []
    try:  # run() kills dot when the time is over
        how = [program, f"-T{form}", *straight]
        made = subprocess.run(how, input=dot.encode(), capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        why = f"graphviz's dot was stopped after {MOST_SECONDS:g} s on {nodes} nodes"
        less = ": choose fewer with --layer, --phase or --level logical, or give --out a name that ends in .dot and "
        raise NoPicture(why, f"{less}lay that out with graphviz's `sfdp -Tsvg`, which is faster") from None
    if made.returncode:
        raise NoPicture(f"dot: {made.stderr.decode(errors='replace').strip()}", "")
    return made.stdout


def _kept(dot: str, path: Path) -> str:
    """Leaves the graph where no picture could be made, but over no file of the user's; and says so."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(dot)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != dot.encode():
            return f"{path} exists and was left as it is"
    return f"the graph is in {path}"


def si(number: float) -> str:
    """1234567 as '1.23 M', to go before a unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


# -- the two levels


def _phases(built: Built, layer: int | None, phase: str) -> Iterator[tuple[Graph, list[Op], set[str]]]:
    """Of each graph, once: the operators that are asked for, and the names that their tasks carry."""
    seen: list[Graph] = []
    weights: set[str] = set()  # of the layer
    for graph, _ in built.graphs:
        if graph in seen:
            continue
        seen.append(graph)
        inside = [op for op in graph.ops if layer is None or _layer(op) == layer]
        weights |= {t.name for op in inside for t in op.inputs if t.storage.kind == "param"}
        if layer is not None and len(seen) == 2:  # the update's operators are named by the weights
            inside = [op for op in graph.ops if any(t.name in weights for t in op.inputs)]
        chosen = [op for op in inside if phase in ("all", "update" if len(seen) == 2 else op.phase)]
        yield graph, chosen, {op.name if op.phase == "forward" else f"{op.name}.{op.phase}" for op in chosen}


def _layer(op: Op) -> int | None:
    """Of an operator that a model made within its scope h0, h1, ...: the number of the layer."""
    found = re.match(r"h(\d+)\.", op.name)
    return int(found[1]) if found else None


def _layers(built: Built) -> str:
    """How many layers there are, for a message; nothing where a model has none."""
    numbers = {_layer(op) for graph, _ in built.graphs for op in graph.ops} - {None}
    return f"; the model has {len(numbers)} layers" if numbers else ""


def _logical(built: Built, layer: int | None, phase: str) -> tuple[list[str], int, float, float]:
    lines: list[str] = []
    names: dict[Tensor, str] = {}
    count, flop, volume = 0, 0.0, 0.0

    def data(tensor: Tensor) -> str:
        if tensor not in names:
            names[tensor] = f"t{len(names)}"
            shape = ", ".join(f"{axis} {size}" for axis, size in tensor.sizes.items())
            label = f"{tensor.name.partition('#')[0]}\n{shape}\n{si(_bytes(tensor))}B"
            lines.append(f"{names[tensor]} [{_data_style(tensor.storage.kind)} label={_quote(label)}]")
        return names[tensor]

    for graph, ops, _ in _phases(built, layer, phase):
        # Beside the rest of a step its end is drawn short: each weight has its own there, in rows wider than all else.
        short = phase == "all" and graph is not built.graphs[0][0] and len(ops) > MOST_ALIKE
        kinds = Counter(op.kind for op in ops)
        alike: dict[str, list[Op]] = {}
        for op in ops:
            count, flop, volume = count + 1, flop + op.flop(), volume + _volume(op)
            if short and kinds[op.kind] > MOST_ALIKE:
                alike.setdefault(op.kind, []).append(op)
                continue
            node, inputs = f"o{count}", dict.fromkeys(op.inputs)
            cost = f"{si(op.flop())}flop, {op.flop() / max(op.words(), 1):.3g} per word"
            if short and (grads := sum(t.storage.kind == "grad" for t in inputs)) > MOST_ALIKE:
                cost += f"\nof all {grads} gradients"
                inputs = dict.fromkeys(t for t in inputs if t.storage.kind != "grad")
            lines.append(f"{node} [{_operator(op.category, op.title, _short(op.name), cost)}]")
            lines += [f"{data(t)} -> {node} [label={_quote(si(_bytes(t)) + 'B')}]" for t in inputs]
            lines += [f"{node} -> {data(t)} [label={_quote(si(_bytes(t)) + 'B')}]" for t in op.outputs]
        for kind, group in alike.items():
            cost = f"{si(sum(op.flop() for op in group))}flop, {si(sum(map(_volume, group)))}B"
            told = "of each weight; --phase update draws them"
            lines.append(f"o{kind} [{_operator(group[0].category, f'{len(group)} {kind}', told, cost)}]")
            read = dict.fromkeys(t for op in group for t in op.inputs if t.storage.kind == "scalar")
            lines += [f"{data(t)} -> o{kind} [label={_quote(si(_bytes(t)) + 'B')}]" for t in read]
    return lines, count, flop, volume


def _tiles(built: Built, layer: int | None, phase: str) -> tuple[list[str], int, float, float]:
    """Tasks, and a node for each version of a tile: a write makes the next one."""
    lines: list[str] = []
    now: dict[tuple[str, tuple[int, ...]] | int, str] = {}
    made: dict[str, int] = {}
    kinds = {t.storage.name: t.storage.kind for graph, _ in built.graphs for t in _tensors(graph)}
    chosen = [names for _, _, names in _phases(built, layer, phase)]
    of_op = {op.name: op.category for graph, _ in built.graphs for op in graph.ops}
    count, flop, volume = 0, 0.0, 0.0

    def version(tile: Tile, fresh: bool) -> str:
        key = (tile.tensor, tile.index) if tile.persistent else id(tile)
        if fresh or key not in now:
            number = made[f"{key}"] = made.get(f"{key}", -1) + 1
            now[key] = f"d{len(lines)}"
            label = repr(tile) + (f" version {number}" if number else "") + f"\n{list(tile.shape)} {si(tile.bytes)}B"
            lines.append(f"{now[key]} [{_data_style(kinds.get(tile.tensor, 'temp'))} label={_quote(label)}]")
        return now[key]

    done: list[Graph] = []
    for graph, low in built.graphs:
        if graph in done:  # further micro-batches are like the first
            continue
        done.append(graph)
        for task in low.tasks.tasks:
            if task.op not in chosen[len(done) - 1]:
                continue
            count, flop, volume = count + 1, flop + task.flop, volume + task.bytes
            _task(task, f"k{count}", of_op, version, lines)
    return lines, count, flop, volume


def _task(task: Task, node: str, of_op: dict[str, Category], version: object, lines: list[str]) -> None:
    assert callable(version)
    name = task.op.removesuffix(".backward")
    cost = f"{si(task.flop)}flop, {si(task.bytes)}B"
    lines.append(f"{node} [{_operator(of_op.get(name, ELEMENTWISE), task.kernel, _short(name), cost)}]")
    reads = [a for a in task.accesses if a.mode != "W"]
    lines += [f"{version(a.tile, False)} -> {node} [label={_quote(si(a.tile.bytes) + 'B')}]" for a in reads]
    for access in task.accesses:
        if access.mode != "R":
            mode = "" if access.mode in ("W", "RW") else f" {access.mode.lower()}"
            label = si(access.tile.bytes) + "B" + mode
            lines.append(f"{node} -> {version(access.tile, True)} [label={_quote(label)}]")


# -- pieces of DOT


def _tensors(graph: Graph) -> Iterator[Tensor]:
    for op in graph.ops:
        yield from (*op.inputs, *op.outputs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel * DTYPES[tensor.dtype].bytes


def _volume(op: Op) -> int:
    return sum(_bytes(t) for t in {*op.inputs, *op.outputs})


def _short(name: str) -> str:
    """Of an operator: without its kind, which is told anyway."""
    return name.replace("transformer.", "").rpartition(".")[0] or "model"


def _operator(category: Category, title: str, *lines: str) -> str:
    label = "\n".join([f"{category.mark} {title}", *lines])
    return f'shape=ellipse fillcolor="{category.colour}" label={_quote(label)}'


def _data_style(kind: str) -> str:
    shape, colour, _ = _DATA[kind]
    return f'shape={shape} fillcolor="{colour}"'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _renamed(body: list[str], part: str) -> list[str]:
    """The same lines with nodes of their own: `o1 -> t2 [...]` becomes `before_o1 -> before_t2 [...]`."""
    result = []
    for line in body:
        nodes, bracket, rest = line.partition(" [")
        result.append(" -> ".join(f"{part}_{node}" for node in nodes.split(" -> ")) + bracket + rest)
    return result


def _legend(level: str) -> list[str]:
    what = "operator" if level == "logical" else "task"
    lines = ["subgraph cluster_legend {", 'label="legend" fontsize=12 color=gray rankdir=LR']
    rows = [_operator(category, f"{category.name} {what}") for category in CATEGORIES]
    rows += [f"{_data_style(kind)} label={_quote(text)}" for kind, (_, _, text) in _DATA.items()]
    lines += [f"legend{n} [{row}]" for n, row in enumerate(rows)]
    lines.append(" -> ".join(f"legend{n}" for n in range(len(rows))) + " [style=invis]")
    return [*lines, "}"]
