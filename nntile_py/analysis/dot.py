"""Write pictures in the DOT language: nodes in nested boxes, edges whose width shows their bytes, and a legend."""

from __future__ import annotations

import json
from collections.abc import Iterable

from nntile_py.tasks.op import CATEGORIES, Category

FONT = 'fontname="Helvetica"'
HEAD = [
    "digraph {", f"graph [{FONT} ranksep=0.3 nodesep=0.2 color=gray]",
    f'node [style=filled {FONT} fontsize=10 color="#6b7280" margin="0.08,0.04"]',
    f'edge [{FONT} fontsize=8 color="#4b5563" arrowsize=0.6]',
]  # fmt: skip
# {kind of tensor: (shape of its node, colour, text in the legend)}
DATA = {
    "temp": ("box", "#b9dfb0", "activation or its gradient"),
    "param": ("cylinder", "#f6b45a", "weight"),
    "grad": ("cylinder", "#fbe3a6", "gradient of a weight"),
    "state": ("cylinder", "#d8c7ea", "state of the optimizer"),
    "input": ("parallelogram", "#b4d2ee", "input"),
    "scalar": ("octagon", "#b9dfb0", "result"),
}
# {mode of an access: (style of the edge, text in the legend)}
MODES = {
    "RW": ("solid", "read or written; wide: many bytes"),
    "COMMUTE": ("dashed", "added in any order"),
    "REDUX": ("dotted", "added to a copy on each worker"),
}
BOUND = 'color="#c2410c" penwidth=2.5', "memory-bound"  # style of a memory-bound operator, text in the legend
AGAIN = "dashed", "second node of a tensor that another part writes"  # style of the node, text in the legend

Group = tuple[str, ...]  # titles of the boxes around a node, the outermost first


class Picture:
    """The nodes and edges of one graph. A file in the DOT language may hold several graphs.

    Args:
        part: prefix of the nodes' names, different for each graph of a file.

    Attributes:
        groups: lines of the nodes, by the boxes around them.
        edges: (start, end, bytes, mode, text).
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.groups: dict[Group, list[str]] = {}
        self.edges: list[tuple[str, str, float, str, str]] = []
        self.used: dict[str, None] = {}  # entries of the legend, in order
        self._count = 0

    def data(self, group: Group, kind: str, *lines: str, again: bool = False) -> str:
        """Add a node for a tensor or a tile and return the node's name.

        lines: text in the node. again: another box has a node for the same tensor or tile already."""
        self.used |= {kind: None, **({"again": None} if again else {})}
        return self._node("t", group, data_style(kind, again), lines)

    def operator(self, group: Group, category: Category, title: str, *lines: str, bound: bool = False) -> str:
        """Add a node for an operator or a task and return the node's name. bound: the operator is memory-bound."""
        self.used |= {category.name: None, **({"bound": None} if bound else {})}
        style = f"{operator_style(category)} {BOUND[0]}" if bound else operator_style(category)
        return self._node("o", group, style, [f"{category.mark} {title}", *lines])

    def edge(self, start: str, end: str, size: float, mode: str = "RW", text: str = "") -> None:
        """Add an edge between two nodes that stands for `size` bytes, with a text beside it."""
        mode = mode if mode in MODES else "RW"
        self.used[mode] = None
        self.edges.append((start, end, size, mode, text))

    def _node(self, kind: str, group: Group, style: str, lines: Iterable[str]) -> str:
        name, self._count = f"{self.part}_{kind}{self._count}", self._count + 1
        self.groups.setdefault(group, []).append(f"{name} [{style} label={quote(chr(10).join(lines))}]")
        return name

    def lines(self, title: str) -> list[str]:
        """Return the graph as lines of the DOT language: all nodes in a box with this title, and all edges."""
        most = max((size for _, _, size, *_ in self.edges), default=1) or 1
        edges = [
            f"{a} -> {b} [penwidth={0.5 + 2.5 * (size / most) ** 0.5:.2f} style={MODES[mode][0]}"
            + (f" label={quote(text)}]" if text else "]")
            for a, b, size, mode, text in self.edges
        ]
        return [*self._boxed((), title, 14), *edges]

    def _boxed(self, group: Group, title: str, size: int) -> list[str]:
        depth = len(group)
        inner = dict.fromkeys(g[: depth + 1] for g in self.groups if len(g) > depth and g[:depth] == group)
        self._count += 1
        lines = [f"subgraph cluster_{self.part}{self._count} {{", f"label={quote(title)} fontsize={size} color=gray"]
        lines += ['style="rounded,dashed" color="#6b7280"'] if depth > 1 else []
        lines += self.groups.get(group, [])
        for box in reversed(inner):  # dot puts the last box leftmost
            lines += self._boxed(box, box[-1], 12)
        return [*lines, "}"]


def legend(used: Iterable[str]) -> list[str]:
    """Return a legend as lines of the DOT language.

    used: names of the operator classes, kinds of tensors and modes that the picture shows."""
    rows, names = [], set(used)
    for category in CATEGORIES:
        if category.name in names:
            rows.append(f"{operator_style(category)} label={quote(f'{category.mark} {category.name}')}")
    rows += [f"{data_style(kind)} label={quote(text)}" for kind, (_, _, text) in DATA.items() if kind in names]
    if "bound" in names:
        rows.append(f"shape=ellipse fillcolor=white {BOUND[0]} label={quote(BOUND[1])}")
    if "again" in names:
        rows.append(f'shape=box style="filled,{AGAIN[0]}" fillcolor=white label={quote(AGAIN[1])}')
    lines = ["subgraph cluster_legend {", 'label="legend" fontsize=12 color=gray']
    lines += [f"legend{n} [fontsize=9 height=0.3 {row}]" for n, row in enumerate(rows)]
    for mode, (style, text) in MODES.items():
        if mode in names:
            label = quote(f"{ARROWS[style]}  {text}")
            lines.append(f"legend{len(rows)} [fontsize=9 shape=plaintext style=solid label={label}]")
            rows.append("")
    lines.append(" -> ".join(f"legend{n}" for n in range(len(rows))) + " [style=invis]")
    return [*lines, "}"]


ARROWS = {"solid": "──▶", "dashed": "╌╌▶", "dotted": "┄┄▶"}


def operator_style(category: Category) -> str:
    return f'shape=ellipse fillcolor="{category.colour}"'


def data_style(kind: str, again: bool = False) -> str:
    shape, colour, _ = DATA[kind]
    return f'shape={shape} fillcolor="{colour}' + ('80" style="filled,dashed"' if again else '"')


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
