"""Analyse the operators of a workload: flop and moved elements of each, before and after fusion.

The method is that of Ivanov et al. 2021 ("Data movement is all you need", sections III and IV, Tables I and III).
Moved elements are those of the tiles that the operator's tasks read and write. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.conclusion import conclusion
from nntile_py.analysis.counts import Counts, Fact, Tally, looks
from nntile_py.analysis.folding import starred
from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.roofline import Peak, assumed_peak
from nntile_py.analysis.workloads import FORWARD, Work, logical, work_title
from nntile_py.config.builders import default_layouts
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.op import CATEGORIES, Op
from nntile_py.tasks.space import Space, space
from nntile_py.tiles import Tiling

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig


@dataclass(frozen=True)
class Analysis:
    """The analysed operators of a workload.

    Attributes:
        title: text with the workload and its sizes.
        operators: operators before fusion.
        groups: operators after fusion.
        peak: peak rates of all workers together.
        config: the config, with the default layouts.
        work: the workload.
    """

    title: str
    operators: list[OperatorRow]
    groups: list[OperatorRow]
    peak: Peak
    config: RunConfig = field(repr=False)
    work: Work

    def totals(self) -> dict[str, Any]:
        """Return sums of counts and times in a dict.

        Each class of operators has an entry with its sums before fusion. `all` and `fused` have the sums over all
        operators before and after fusion. `movement_saved_percent` is the share of moved elements that fusion saves."""
        classes = {of.name: _total([r for r in self.operators if r.category is of]) for of in CATEGORIES}
        before, after = _total(self.operators), _total(self.groups)
        for entry in classes.values():
            for key in ("flop", "seconds"):
                whole = before[key]
                entry[f"percent_{key}"] = 100 * entry[key] / whole if whole and entry[key] is not None else None
        moved_before, moved_after = (of["read_elements"] + of["written_elements"] for of in (before, after))
        saved = 100 * (1 - moved_after / moved_before) if moved_before else 0.0
        return {**classes, "all": before, "fused": after, "movement_saved_percent": saved}

    def conclusion(self) -> list[str]:
        """Return sentences: whether memory bounds the workload, its longest operators, and advice on the config."""
        return conclusion(self.groups, self.peak, self.config, self.work)

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "peaks": {k: v for k, v in self.peak.to_dict().items() if k != "cpu_share"},
            "operators": [row.to_dict(self.peak) for row in self.operators],
            "groups": [row.to_dict(self.peak) for row in self.groups],
            "totals": self.totals(),
            "conclusion": self.conclusion(),
        }


def _total(rows: Sequence[OperatorRow]) -> dict[str, Any]:
    seconds = [row.seconds for row in rows]
    return {
        "operators": sum(row.count for row in rows),
        "flop": sum(row.flop for row in rows),
        "read_elements": sum(row.read for row in rows),
        "written_elements": sum(row.written for row in rows),
        "least_elements": sum(row.least for row in rows),
        "bytes": sum(row.bytes for row in rows),
        "seconds": math.fsum(s for s in seconds if s is not None) if None not in seconds else None,
    }


def analyse(config: RunConfig, work: Work = "train") -> Analysis:
    """Analyse a workload with the config's sizes, in the default layouts: count all operators before and after fusion.

    The title says if the config itself has other layouts. If one product computes queries, keys and values
    (fusion.qkv), it counts as one operator also before fusion, as in Ivanov et al. 2021.

    Raises:
        ConfigError: the config has no such workload, or sizes do not fit.
    """
    if config.train.pack:
        raise ConfigError(
            "train.pack: got true; allowed in an analysis: false, as packed batches have no fixed number of elements"
        )
    title, config = _title(config, work), default_layouts(config)
    full, none = config.fusion, unfused(config)
    tally = Tally(config, work)
    before = [tally.facts(graph, n) for n, graph in enumerate(logical(config, work, none))]
    after = [tally.facts(graph, n) for n, graph in enumerate(logical(config, work, full))]
    for number, graph in enumerate(logical(config, work, none)):
        owners = _owners(graph, full, tally.cuts)
        for fact in before[number].values():
            if (fused := after[number].get(owners.get(fact.place, -1))) is not None:
                fact.group = fused
                fused.members.append(fact)
    groups, names = _rows([fact for facts in after for fact in facts.values()])
    operators, _ = _rows([fact for facts in before for fact in facts.values()], names)
    return Analysis(title, operators, groups, assumed_peak(config), config, work)


def unfused(config: RunConfig) -> Fusion:
    """Return a Fusion that fuses nothing, except queries, keys and values as the config does."""
    return Fusion.of(False).changed(qkv=config.fusion.qkv)


def _owners(graph: Graph, fusion: Fusion, cuts: Tiling) -> dict[int, int]:
    """Fuse the graph in place. Returns {operator's position before fusion: position of its fused operator}.

    An operator's fused operator is the one that writes the operator's output. If no operator writes this output any
    more, it is the fused operator of an operator that read the output."""
    places = {op: place for place, op in enumerate(graph.ops)}
    outputs = {op: list(op.outputs) for op in graph.ops}
    readers = Rewriter(graph).readers
    fuse(graph, fusion, cuts)
    writer = {tensor: place for place, op in enumerate(graph.ops) for tensor in op.outputs}
    owners: dict[int, int] = {}
    for op in reversed(list(places)):
        direct = [writer[t] for t in outputs[op] if t in writer]
        passed = [owners[places[r]] for t in outputs[op] for r in readers.get(t, []) if places[r] in owners]
        if direct or passed:
            owners[places[op]] = (direct or passed)[0]
    return owners


def _title(config: RunConfig, work: Work) -> str:
    title = work_title(config, work)
    if config.layout == "searched" and work not in FORWARD:  # forward passes run in the default layouts
        title += ", in the default layouts, though it runs in searched ones"
    return title


def _rows(facts: Sequence[Fact], groups: Mapping[int, str] | None = None) -> tuple[list[OperatorRow], dict[int, str]]:
    """Join the facts of equal operators into rows. Returns the rows, and {id of a fact: name of its row}.

    Args:
        groups: {id of a fact after fusion: name of its row}; None: `facts` are after fusion themselves.
    """
    alike: dict[tuple[str, Hashable, str | None], list[Fact]] = {}
    for fact in facts:
        update = fact.phase == "update"
        group = groups.get(id(fact.group)) if groups else None
        what = fact.op.kind if update else (starred(fact.op.name), looks(fact.op))
        alike.setdefault((fact.phase, what, group), []).append(fact)
    rows, names, taken = [], dict[int, str](), dict[str, int]()
    for (phase, _, group), joined in alike.items():
        name = _name(joined)
        taken[name] = taken.get(name, 0) + 1
        name += f" ({taken[name]})" if taken[name] > 1 else ""
        names |= {id(fact): name for fact in joined}
        rows.append(_row(name, phase, group, joined))
    return rows, names


def _row(name: str, phase: str, group: str | None, facts: Sequence[Fact]) -> OperatorRow:
    distinct: dict[Hashable, tuple[Op, int]] = {}
    for fact in facts:
        op, times = distinct.get(looks(fact.op), (fact.op, 0))
        distinct[looks(fact.op)] = op, times + fact.times
    first = facts[0]
    over = space(first.op) if len(distinct) == 1 else Space({})
    free = {axis: over.sizes[axis] for axis in over.independent}
    counts = Counts.total(fact.counts for fact in facts)
    kinds = [member.op.kind for member in first.members]
    return OperatorRow(
        name=name, phase=phase, category=first.op.category, title=" + ".join(kinds) or first.op.title,
        independent=free, reduced={axis: size for axis, size in over.sizes.items() if axis not in free},
        count=sum(fact.times for fact in facts), group=group, ops=tuple(distinct.values()), **counts,
    )  # fmt: skip


def _name(facts: Sequence[Fact]) -> str:
    """Return the name of a row of equal operators: place in the model and kind; for gradients also dX, dW or both."""
    first = facts[0]
    if first.phase == "update":
        return first.op.kind
    names = {fact.op.name for fact in facts}
    name = first.op.name if len(names) == 1 else starred(first.op.name)
    name = name.removeprefix("transformer.")
    return name if first.phase == "forward" else f"{name} {first.phase}"
