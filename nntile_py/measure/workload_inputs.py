"""Random inputs of a measured workload, the same for all contestants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.analysis.workloads import FORWARD, Built, Work, spec_of
from nntile_py.config.builders import predicted
from nntile_py.config.run_config import RunConfig
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.packed_flop import PackedFlop
from nntile_py.graph.padding import MASK
from nntile_py.graph.step import StepSpec

Array = np.ndarray[Any, Any]


def rows_of(config: RunConfig, work: Work) -> int:
    """Return the number of sequences of a training step, or of a forward pass."""
    return config.train.batch * (config.train.grad_accumulation if work == "train" else 1)


def inputs_of(config: RunConfig, work: Work, alpha: float = 1.0, spec: StepSpec | None = None) -> dict[str, Array]:
    """Return random padded inputs. alpha: mean length of the sequences divided by train.seq."""
    rows, training = rows_of(config, work), work == "train"
    return (spec or spec_of(config, work)).random_inputs(rows, config.seed, alpha, predicted(config), training=training)


def count_tokens(config: RunConfig, work: Work, inputs: Mapping[str, Array]) -> int:
    """Return the number of tokens of a step or pass that are not padding."""
    return int(inputs[MASK].sum()) if MASK in inputs else rows_of(config, work) * config.train.seq


def planned_flop(config: RunConfig, work: Work, alpha: float, built: Built) -> float:
    """Return the flop of a planned workload; for packed sequences, the flop for the lengths of the random inputs."""
    training = work == "train"
    spec = spec_of(config, work)
    if not (training or work in FORWARD) or not spec.pack:
        return built.flop
    passes = config.train.grad_accumulation if training else 1
    filled = bins_of(spec, training=training).fill(inputs_of(config, work, alpha, spec), passes, spec.batch, shift=True)
    return PackedFlop.of(built.graphs[0][0])(filled)
