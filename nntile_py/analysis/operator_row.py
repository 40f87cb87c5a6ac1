"""OperatorRow: a row of an analysis, with an operator's counts, time and efficiency."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nntile_py.analysis.counts import Counts
from nntile_py.analysis.roofline import Peak
from nntile_py.tasks.op import Category, Op


def bound_by_memory(counts: Counts, peak: Peak) -> bool | None:
    """Return True if, at the peak rates, the least bytes take longer than the flop; None if a rate is unknown."""
    if peak.flop is None or peak.bytes is None:
        return None
    return counts.least_bytes / peak.bytes > counts.flop / peak.flop


@dataclass(frozen=True, kw_only=True)
class OperatorRow(Counts):
    """An operator, or several equal operators, such as one of each layer; the counts are sums over all of them.

    Attributes:
        phase: forward, dX (gradients of inputs), dW (gradients of weights), dX dW, or update.
        title: what the operator computes; for a fused operator, the kinds of its parts.
        independent: {axis: size} of the axes over which the operator iterates.
        reduced: {axis: size} of the axes over which it sums.
        count: number of operators, in all micro-batches.
        ops: each distinct operator, with the number of its runs.
        group: name of the fused operator that includes this operator.
        seconds: measured time of all `count` operators; None if not measured.
    """

    name: str
    phase: str
    category: Category
    title: str
    independent: dict[str, int]
    reduced: dict[str, int]
    count: int
    ops: tuple[tuple[Op, int], ...] = field(repr=False)
    group: str | None = None
    seconds: float | None = None

    def peak_share(self, peak: Peak) -> float | None:
        """Return the measured flop/s in percent of the peak."""
        return 100 * self.flop / self.seconds / peak.flop if self.seconds and peak.flop else None

    def mue(self, peak: Peak) -> float | None:
        """Return the memory usage efficiency (MUE) in percent: 100 * Q/D * B/Bpeak; None if the time is not known.

        Q is the least number of bytes, D the moved bytes, B = D / seconds (Fuhrer et al. 2018; Ivanov et al. 2021,
        section III.C). The MUE is above 100 if operands were in a cache."""
        if not (self.seconds and peak.bytes and self.bytes):
            return None
        return 100 * self.least_bytes / self.bytes * (self.bytes / self.seconds) / peak.bytes

    def memory_bound(self, peak: Peak) -> bool | None:
        """Return True if the MUE is above the share of the peak flop/s; None if a peak rate is unknown.

        The comparison does not depend on the measured time."""
        return bound_by_memory(self, peak)

    def least_seconds(self, peak: Peak) -> float:
        """Return the measured time; without a measurement, the least time at the peak rates."""
        return float(peak.seconds(self.flop, self.bytes)) if self.seconds is None else self.seconds

    def to_dict(self, peak: Peak) -> dict[str, Any]:
        """Return the row as a dict for JSON and CSV. peak_share and mue are in percent, as in Ivanov et al. 2021."""
        return {
            "name": self.name, "phase": self.phase, "class": self.category.name, "what": self.title,
            "independent": self.independent, "reduced": self.reduced, "count": self.count, "flop": self.flop,
            "read_elements": self.read, "written_elements": self.written, "least_elements": self.least,
            "flop_per_element": self.intensity, "bytes": self.bytes, "seconds": self.seconds,
            "peak_share": self.peak_share(peak), "mue": self.mue(peak), "memory_bound": self.memory_bound(peak),
            "group": self.group,
        }  # fmt: skip
