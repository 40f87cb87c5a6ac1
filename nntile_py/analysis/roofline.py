"""Peak rates of workers, and the least time that they allow for a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nntile_py.config.builders import planned_speed
from nntile_py.graph.step import TILE_DTYPE
from nntile_py.system.units import counted
from nntile_py.tiles import device_model

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak rates of one worker, or of several workers together.

    Attributes:
        flop: flop/s; None if unknown.
        bytes: bytes/s; None if unknown.
        source: text that says where the rates come from.
        cpu_share: share of the time in which the threads of the measurement had a core; None if not measured.
    """

    flop: float | None
    bytes: float | None
    source: str
    cpu_share: float | None = None

    def seconds(self, flop: Any, size: Any) -> Any:
        """Return the least seconds for `flop` operations and `size` bytes; NaN if a rate is unknown.

        Both may be numbers or arrays."""
        if self.flop is None or self.bytes is None:
            return np.nan * flop
        return np.maximum(flop / self.flop, size / self.bytes)

    def of_workers(self, count: int) -> Peak:
        """Return the rates of `count` equal workers together."""
        flop, size = (None if rate is None else count * rate for rate in (self.flop, self.bytes))
        return replace(self, flop=flop, bytes=size)

    def at_least(self, flop: float, reached: str) -> Peak:
        """Return a peak of at least `flop` flop/s, which a task has reached. reached: text on the task for `source`.

        A task can exceed the measured peak if a busy machine disturbed the measurement."""
        if self.flop is None or flop <= self.flop:
            return self
        return replace(self, flop=flop, source=f"{self.source}; {self.flop / 1e9:,.1f} Gflop/s, but {reached}")

    def to_dict(self) -> dict[str, Any]:
        """Return the rates for summary.json and analysis.json."""
        return {
            "flop_per_s": self.flop, "bytes_per_s": self.bytes, "source": self.source, "cpu_share": self.cpu_share,
        }  # fmt: skip


def assumed_peak(config: RunConfig) -> Peak:
    """Return the peak rates of all workers together: from `profile` in the config, else those that plans assume."""
    count, own = config.workers, config.profile
    if own.peak_flop and own.peak_bytes:
        return Peak(own.peak_flop, own.peak_bytes, "config").of_workers(count)
    speed = planned_speed(config)
    assumed = speed == device_model.worker(TILE_DTYPE[config.precision], config.runtime.cuda != 0)
    source = "not measured: the device model of plans" if assumed else "measured for `tiles: auto`, as in plans"
    return Peak(speed.flop_s, speed.bytes_s, source).of_workers(count)


def rates_text(config: RunConfig, flop: float | None, size: float | None) -> str:
    """Return the rates of the config's workers as text, such as "2 CPU workers of 100 Gflop/s and 10 GB/s each".

    flop, size: flop/s and bytes/s of one worker; None: unknown."""
    workers = counted(config.workers, "GPU" if config.runtime.cuda else "CPU worker")
    rates = "unknown Gflop/s" if flop is None else f"{flop / 1e9:,.0f} Gflop/s"
    rates += " and unknown GB/s" if size is None else f" and {size / 1e9:,.0f} GB/s"
    return f"{workers} of {rates}{' each' if config.workers > 1 else ''}"
