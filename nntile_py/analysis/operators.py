"""Every operator of a step with its flop and the words that it moves, alone and within the fused operator that runs it.

The accounting of Ivanov et al. 2021 ("Data movement is all you need", sections III and IV, Tables I and III). Words are
counted, not estimated: those of the tiles that the operator's own tasks read and write. Pure data, nothing is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.counts import Counts, Fact, Tally, looks
from nntile_py.analysis.workloads import FORWARD, Work, logical
from nntile_py.config.builders import default_layouts
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.graph.step import TILE_DTYPE
from nntile_py.tasks.op import CATEGORIES, Category, Op
from nntile_py.tasks.space import Space, space
from nntile_py.tiles import Tiling, device_model

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig


@dataclass(frozen=True)
class Peaks:
    """What all workers together can do: flop/s and bytes/s; None where it is not known. source: how it was found."""

    flop: float | None
    bytes: float | None
    source: str


def bound_by_memory(counts: Counts, peaks: Peaks) -> bool | None:
    """Whether the least bytes take longer than the flop; None where a peak is not known."""
    if peaks.flop is None or peaks.bytes is None:
        return None
    return counts.least_bytes / peaks.bytes > counts.flop / peaks.flop


@dataclass(frozen=True, kw_only=True)
class Row(Counts):
    """An operator, or `count` of them that are alike, such as one of each layer: figures are of all of them.

    phase: forward, dX (gradients of what it read), dW (of weights), dX dW, or update. independent, reduced: the axes of
    its iteration space and their sizes. group: the fused operator that runs it. seconds: measured, or None.
    """

    name: str
    phase: str
    category: Category
    title: str
    independent: dict[str, int]
    reduced: dict[str, int]
    count: int
    ops: tuple[tuple[Op, int], ...] = field(repr=False)  # those of other sizes, and how many are like each
    group: str | None = None
    seconds: float | None = None

    def peak_share(self, peaks: Peaks) -> float | None:
        """Percent of the peak flop/s that it reached."""
        return 100 * self.flop / self.seconds / peaks.flop if self.seconds and peaks.flop else None

    def mue(self, peaks: Peaks) -> float | None:
        """Memory usage efficiency, percent: Q/D B/Bpeak with Q the least bytes, D those moved, B = D / seconds.

        (Fuhrer et al. 2018; section III.C of the paper.) Above 100 where operands were in a cache."""
        if not (self.seconds and peaks.bytes and self.bytes):
            return None
        reached = self.bytes / self.seconds
        return 100 * self.least_bytes / self.bytes * reached / peaks.bytes

    def memory_bound(self, peaks: Peaks) -> bool | None:
        """Whether MUE is above the share of the peak flop/s: so for any time that it takes, and told without one."""
        return bound_by_memory(self, peaks)

    def to_dict(self, peaks: Peaks) -> dict[str, Any]:
        """Percent in peak_share and mue, as in the paper."""
        return {
            "name": self.name, "phase": self.phase, "class": self.category.name, "what": self.title,
            "independent": self.independent, "reduced": self.reduced, "count": self.count, "flop": self.flop,
            "read_words": self.read, "written_words": self.written, "least_words": self.least,
            "flop_per_word": self.intensity, "bytes": self.bytes, "seconds": self.seconds,
            "peak_share": self.peak_share(peaks), "mue": self.mue(peaks), "memory_bound": self.memory_bound(peaks),
            "group": self.group,
        }  # fmt: skip


@dataclass(frozen=True)
class Analysis:
    """`operators`: before fusion; `groups`: those that run, after it. `title`: of what, with its sizes."""

    title: str
    operators: list[Row]
    groups: list[Row]
    peaks: Peaks

    def totals(self) -> dict[str, Any]:
        """Sums by class before fusion, of all, and of all after fusion; percent of the words that fusion saves."""
        classes = {of.name: _total([r for r in self.operators if r.category is of]) for of in CATEGORIES}
        before, after = _total(self.operators), _total(self.groups)
        for entry in classes.values():
            for key in ("flop", "seconds"):
                whole = before[key]
                entry[f"percent_{key}"] = 100 * entry[key] / whole if whole and entry[key] is not None else None
        words = before["read_words"] + before["written_words"]
        left = after["read_words"] + after["written_words"]
        saved = 100 * (1 - left / words) if words else 0.0
        return {**classes, "all": before, "fused": after, "movement_saved_percent": saved}

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "peaks": {"flop_per_s": self.peaks.flop, "bytes_per_s": self.peaks.bytes, "source": self.peaks.source},
            "operators": [row.to_dict(self.peaks) for row in self.operators],
            "groups": [row.to_dict(self.peaks) for row in self.groups],
            "totals": self.totals(),
        }


def _total(rows: Sequence[Row]) -> dict[str, Any]:
    seconds = [row.seconds for row in rows]
    return {
        "operators": sum(row.count for row in rows),
        "flop": sum(row.flop for row in rows),
        "read_words": sum(row.read for row in rows),
        "written_words": sum(row.written for row in rows),
        "least_words": sum(row.least for row in rows),
        "bytes": sum(row.bytes for row in rows),
        "seconds": math.fsum(s for s in seconds if s is not None) if None not in seconds else None,
    }


def analyse(config: RunConfig, work: Work = "train") -> Analysis:
    """Of a workload with the sizes of `config`, in the default layouts, which is told where it runs in others. Raises
    ConfigError where it has no such work, or sizes do not fit.

    Stacked products of queries, keys and values (fusion.qkv) stay so before fusion, as in the paper: they are other
    operators, not fewer tasks of the same ones."""
    if config.train.pack:
        raise ConfigError("train.pack: got true; allowed in an analysis: false, as words are then of no fixed number")
    title, config = _title(config, work), default_layouts(config)
    full, none = config.fusion, unfused(config)
    count = Tally(config, work)
    before = [count.facts(graph, n) for n, graph in enumerate(logical(config, work, none))]
    after = [count.facts(graph, n) for n, graph in enumerate(logical(config, work, full))]
    for number, graph in enumerate(logical(config, work, none)):
        owners = _owners(graph, full, count.cuts)
        for fact in before[number].values():
            if (fused := after[number].get(owners.get(fact.place, -1))) is not None:
                fact.group = fused
                fused.members.append(fact)
    groups, names = _rows([fact for facts in after for fact in facts.values()])
    operators, _ = _rows([fact for facts in before for fact in facts.values()], names)
    return Analysis(title, operators, groups, nominal(config))


def unfused(config: RunConfig) -> Fusion:
    """None but that of queries, keys and values, if the config has it."""
    return Fusion.of(False).changed(qkv=config.fusion.qkv)


def _owners(graph: Graph, fusion: Fusion, cuts: Tiling) -> dict[int, int]:
    """Fuses a graph: for the place of each operator before, that of the one that does its work after it.

    That is the one that makes what it made, or, where nothing makes this any more, does the work of who read it."""
    places = {op: place for place, op in enumerate(graph.ops)}
    makes = {op: list(op.outputs) for op in graph.ops}
    readers = Rewriter(graph).readers
    fuse(graph, fusion, cuts)
    maker = {tensor: place for place, op in enumerate(graph.ops) for tensor in op.outputs}
    found: dict[int, int] = {}
    for op in reversed(list(places)):
        direct = [maker[t] for t in makes[op] if t in maker]
        passed = [found[places[r]] for t in makes[op] for r in readers.get(t, []) if places[r] in found]
        if direct or passed:
            found[places[op]] = (direct or passed)[0]
    return found


def nominal(config: RunConfig) -> Peaks:
    """What the config says of the workers, or else what plans take them for."""
    count, own = config.workers, config.profile
    if own.peak_flop and own.peak_bytes:
        return Peaks(count * own.peak_flop, count * own.peak_bytes, "config")
    gpu = config.runtime.cuda != 0
    speed = device_model.worker(TILE_DTYPE.get(config.precision, config.precision), gpu)
    kind = "GPU" if gpu else "CPU worker"
    told = f"not measured: what plans take {count} {kind}{'s' * (count > 1)} for"
    return Peaks(count * speed.flop_s, count * speed.bytes_s, told)


def _title(config: RunConfig, work: str) -> str:
    sizes = {name: getattr(config.model, name) for name in ("layers", "embed", "heads") if hasattr(config.model, name)}
    if work not in ("train", "inference"):
        sizes.pop("layers", None)
    told = [f"{name} {size}" for name, size in ({"batch": config.train.batch, "seq": config.train.seq} | sizes).items()]
    what = {"train": f"a training step of {config.model.type}", "inference": f"a forward pass of {config.model.type}"}
    told += [config.precision]
    if config.layout == "searched" and work not in FORWARD:  # which run in the default ones
        told += ["in the default layouts, though it runs in searched ones"]
    return f"{what.get(work, work)}: {', '.join(told)}"


def _rows(facts: Sequence[Fact], groups: Mapping[int, str] | None = None) -> tuple[list[Row], dict[int, str]]:
    """Facts that are alike become one row; also the name of the row of each fact, by id.

    groups: the names for what facts are part of after fusion."""
    alike: dict[tuple[str, Hashable, str | None], list[Fact]] = {}
    for fact in facts:
        update = fact.phase == "update"
        group = groups.get(id(fact.group)) if groups else None
        what = fact.op.kind if update else (starred(fact.op.name), looks(fact.op))
        alike.setdefault((fact.phase, what, group), []).append(fact)
    rows, names, taken = [], dict[int, str](), dict[str, int]()
    for (phase, _, group), some in alike.items():
        name = _name(some)
        taken[name] = taken.get(name, 0) + 1
        name += f" ({taken[name]})" if taken[name] > 1 else ""
        names |= {id(fact): name for fact in some}
        rows.append(_row(name, phase, group, some))
    return rows, names


def _row(name: str, phase: str, group: str | None, some: Sequence[Fact]) -> Row:
    distinct: dict[Hashable, tuple[Op, int]] = {}
    for fact in some:
        op, times = distinct.get(looks(fact.op), (fact.op, 0))
        distinct[looks(fact.op)] = op, times + fact.times
    first = some[0]
    over = space(first.op) if len(distinct) == 1 else Space({})
    free = {axis: over.sizes[axis] for axis in over.independent}
    counts = Counts.total(fact.counts for fact in some)
    kinds = [member.op.kind for member in first.members]
    return Row(
        name=name, phase=phase, category=first.op.category, title=" + ".join(kinds) or first.op.title,
        independent=free, reduced={axis: size for axis, size in over.sizes.items() if axis not in free},
        count=sum(fact.times for fact in some), group=group, ops=tuple(distinct.values()), **counts,
    )  # fmt: skip


def starred(name: str) -> str:
    """The same place in all layers."""
    return re.sub(r"(?<![^.])(h?)\d+(?=\.)", r"\1*", name)


def _name(some: Sequence[Fact]) -> str:
    """Where it is, what it is, and of gradients whose."""
    first = some[0]
    if first.phase == "update":
        return first.op.kind
    names = {fact.op.name for fact in some}
    name = first.op.name if len(names) == 1 else starred(first.op.name)
    name = name.removeprefix("transformer.")
    return name if first.phase == "forward" else f"{name} {first.phase}"
