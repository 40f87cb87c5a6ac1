"""Experiments of kinds `flop` and `breakdown`: a BERT layer in the parts of ByteTransformer (Zhai et al. 2023).

The parts are the products GEMM0 to GEMM3 (queries, keys and values; output of attention; two of the feed-forward
block), MHA (attention between GEMM0 and GEMM1) and, in a breakdown, the operators that memory bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.operators import analyse
from nntile_py.analysis.workloads import spec_of
from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.graph import Graph
from nntile_py.graph.packed_flop import PackedFlop
from nntile_py.graph.padding import MASK
from nntile_py.graph.step_inputs import StepInputs
from nntile_py.measure.experiment_parts import ConfigPart, ExperimentResult
from nntile_py.measure.sweep_points import overrides_of
from nntile_py.measure.workload_inputs import inputs_of
from nntile_py.schema import Count, Part
from nntile_py.system.console_tables import csv_text
from nntile_py.system.load import Load, is_busy
from nntile_py.system.pictures import files_of, new_figure
from nntile_py.tasks.op import CONTRACTION, Op

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

PRODUCTS = ("GEMM0", "MHA", "GEMM1", "GEMM2", "GEMM3")  # in the order in which they run
COLOURS = ("#0072b2", "#d55e00", "#56b4e9", "#009e73", "#8fd0b8", "#f0e442", "#e69f00", "#999999", "#cc79a7")
Flop = dict[str, float]


# -- Table II: flop


class FlopExperiment(ConfigPart):
    """A section of kind `flop`: the flop of a layer's products, padded and packed, counted and by formula."""

    measure: ClassVar = False  # nothing runs
    work: ClassVar = "inference"
    alphas: Annotated[list[Part], Field(min_length=1)]
    """Mean lengths of the sequences divided by train.seq; rounded to whole lengths."""

    def run(self, folder: Path) -> ExperimentResult:
        """Count each part for each alpha; `folder` stays empty.

        Raises:
            ConfigError: the config's model has other products than a layer of BERT.
        """
        config = self.resolved()
        padded = self._padded(config)
        lines, totals = [], dict[float, list[float]]()
        for alpha in (round(alpha * config.train.seq) / config.train.seq for alpha in self.alphas):
            columns = [
                padded, formulas(config, 1, 1), self._packed(config, alpha, equal=True), formulas(config, alpha, alpha),
                self._packed(config, alpha, equal=False),
            ]  # fmt: skip
            # The paper's second column: products of packed tokens around attention of padded sequences.
            columns[2:2] = [columns[2] | {"MHA": padded["MHA"]}, formulas(config, alpha, 1)]
            sums = [sum(column.values()) for column in columns]
            totals[alpha] = sums
            lines += [[part, f"{alpha:.4g}", *(f"{column[part] / 1e9:.9g}" for column in columns)] for part in PRODUCTS]
            lines.append(["all", f"{alpha:.4g}", *(f"{of / 1e9:.9g}" for of in sums)])
        heads = [
            "part", "alpha", "padded here", "baseline (paper)", "packed, padded MHA here", "zero padding (paper)",
            "packed here", "zero padding + fused MHA (paper)", "packed here, random lengths",
        ]  # fmt: skip
        return ExperimentResult(csv_text(heads, lines), self._picture(totals), totals=_notes(totals))

    @staticmethod
    def _padded(config: RunConfig) -> Flop:
        return {name: op.products() for name, op in _products(spec_of(config, "inference").evaluation().graph)}

    def _packed(self, config: RunConfig, alpha: float, *, equal: bool) -> Flop:
        """Count packed sequences: all of the length alpha * train.seq (equal), or of random lengths."""
        packed = load(self.config, [*overrides_of(self.set_), "train.pack=true"])
        graph = spec_of(packed, "inference").evaluation().graph
        filled = _filled(packed, alpha, equal=equal)
        result: Flop = {}
        for name, op in _products(graph):
            alone = Graph(graph.dtype)
            alone.live, alone.ops = graph.live, [op]
            result[name] = PackedFlop.of(alone)(filled)
        return result

    def _picture(self, totals: Mapping[float, list[float]]) -> dict[str, bytes]:
        figure = new_figure((6.5, 3.6))
        axes = figure.subplots()
        alphas = list(totals)
        shown = {"padded": 0, "packed, padded MHA": 2, "packed": 4, "packed, random lengths": 6}
        for colour, (name, column) in zip(COLOURS, shown.items(), strict=False):
            style = "--" if "random" in name else "-"
            axes.plot(alphas, [totals[a][column] / 1e9 for a in alphas], style, marker="o", color=colour, label=name)
        for column in (1, 3, 5):
            values = [totals[a][column] / 1e9 for a in alphas]
            label = "formulas of the paper" if column == 5 else None
            axes.plot(alphas, values, "x", color="black", markersize=8, label=label)
        axes.set_xlabel("alpha: mean length divided by the longest")
        axes.set_ylabel("Gflop of a layer's products")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        config = self.resolved()
        figure.suptitle(f"Flop of a BERT layer, batch {config.train.batch}, longest {config.train.seq}", fontsize=10)
        return files_of(figure)


def formulas(config: RunConfig, products: float, attention: float) -> Flop:
    """Return the flop of each part by the formulas of Table II.

    Args:
        products: mean length divided by the longest, of the tokens in products.
        attention: mean length divided by the longest, of the tokens in attention.
    """
    model = config.model
    batch, k = config.train.batch, float(getattr(model, "embed", 0))
    m = batch * config.train.seq
    each = products * m * k * k
    mha = 4 * (attention * m) ** 2 / batch * k
    return {"GEMM0": 6 * each, "MHA": mha, "GEMM1": 2 * each, "GEMM2": 8 * each, "GEMM3": 8 * each}


def _products(graph: Graph) -> Iterator[tuple[str, Op]]:
    ops = [op for op in graph.ops if op.category is CONTRACTION]
    if len(ops) != len(PRODUCTS):
        raise ConfigError(
            f"config: a pass has {len(ops)} products and attentions; allowed: {len(PRODUCTS)}, those of one layer of"
            " BERT without a head, with fused attention and fusion.qkv"
        )
    return zip(PRODUCTS, ops, strict=True)


def _filled(config: RunConfig, alpha: float, *, equal: bool) -> StepInputs:
    """Pack sequences into bins: all of the length alpha * train.seq (equal), or of random lengths of this mean."""
    spec = spec_of(config, "inference")
    inputs = inputs_of(config, "inference", 1.0 if equal else alpha, spec)
    if equal:
        mask = np.zeros((config.train.batch, config.train.seq), np.int64)
        mask[:, : round(alpha * config.train.seq)] = 1
        inputs = {**inputs, MASK: mask}
    return bins_of(spec, training=False).fill(inputs, 1, spec.batch, shift=True)


def _notes(totals: Mapping[float, list[float]]) -> list[str]:
    """Return sentences that compare the counts with the formulas."""
    off = max(abs(of[k] / of[k + 1] - 1) for of in totals.values() for k in (0, 2, 4))
    more = max(of[6] / of[5] - 1 for of in totals.values())
    return [
        "Numbers are Gflop (10^9).",
        f"Largest relative difference between a total here and the paper's formula, for equal lengths: {off:.1e}",
        f"Random lengths of the same mean need up to {more:.1%} more flop than the formula: attention is quadratic in"
        " the length, and a mean of squares is above the square of the mean",
    ]


# -- Figure 3: time


class BreakdownExperiment(ConfigPart):
    """A section of kind `breakdown`: the share of a forward pass's time that each part takes, operator by operator."""

    work: ClassVar = "inference"
    seqs: Annotated[list[Count], Field(min_length=1)]
    """Lengths of the sequences."""
    parts: dict[str, list[str]]
    """Names of operators, as `nntile analyze --work inference` lists them, by part."""
    printed: dict[str, list[float]] = Field(default_factory=dict)
    """The paper's percentages, by part or by parts joined with +, for each entry of `seqs`; see the paper's text."""
    repeats: Count = 7

    def resolved(self) -> RunConfig:
        """Return the config with the longest sequences."""
        return self._at(max(self.seqs))

    def _at(self, seq: int) -> RunConfig:
        return load(self.config, [*overrides_of(self.set_), f"train.seq={seq}"])

    def run(self, folder: Path) -> ExperimentResult:
        """Time each operator by itself; `folder` stays empty.

        Raises:
            ConfigError: `parts` names an operator that the pass lacks.
        """
        from nntile_py.profiling.operator_timer import measure

        times: dict[int, dict[str, float]] = {}
        notes = ["Each operator is timed by itself, on the workers of the config."]
        for seq in self.seqs:
            config = self._at(seq)
            analysis = analyse(config, "inference")
            known = {row.name: row for row in analysis.groups}
            for name in (name for names in self.parts.values() for name in names):
                if name not in known:
                    raise ConfigError(f"parts: no operator {name!r}; allowed: {', '.join(known)}")
            kept = {name for names in self.parts.values() for name in names}
            some = replace(analysis, operators=[], groups=[row for row in analysis.groups if row.name in kept])
            with Load() as load:
                rows = {row.name: row for row in measure(some, config, self.repeats).groups}
            if is_busy(load.others):
                notes.append(f"Other processes kept {load.others:.1f} cores busy at {seq} tokens: times are too long")
            times[seq] = {part: _seconds(rows, names) for part, names in self.parts.items()}
        heads = ["part", *(f"{head} at {seq}" for seq in self.seqs for head in ("ms", "%", "% in the paper"))]
        lines = []
        for part in [*self.parts, *(name for name in self.printed if name not in self.parts)]:
            cells = []
            for number, seq in enumerate(self.seqs):
                seconds = sum(times[seq][name] for name in part.split("+"))
                share = 100 * seconds / sum(times[seq].values())
                printed = self.printed.get(part, [])
                cells += [f"{seconds * 1e3:.3f}", f"{share:.1f}", f"{printed[number]:g}" if printed else ""]
            lines.append([part, *cells])
        return ExperimentResult(csv_text(heads, lines), self._picture(times), totals=notes)

    def _picture(self, times: Mapping[int, Mapping[str, float]]) -> dict[str, bytes]:
        """Draw one bar for each length: the share of each part."""
        figure = new_figure((8, 1.6 + 0.6 * len(times)))
        axes = figure.subplots()
        left = dict.fromkeys(times, 0.0)
        for part, colour in zip(self.parts, COLOURS * 2, strict=False):
            for place, (seq, of) in enumerate(times.items()):
                share = 100 * of[part] / sum(of.values())
                axes.barh(place, share, left=left[seq], color=colour, label=part if place == 0 else None)
                if share > 4:
                    axes.text(left[seq] + share / 2, place, f"{share:.0f}", ha="center", va="center", fontsize=8)
                left[seq] += share
        axes.set_yticks(range(len(times)), [f"{seq} tokens" for seq in times])
        axes.invert_yaxis()
        axes.set_xlabel("percent of the time of a layer's forward pass, each operator timed by itself")
        figure.legend(loc="outside upper center", ncols=4, fontsize=8)
        return files_of(figure)


def _seconds(rows: Mapping[str, OperatorRow], names: list[str]) -> float:
    return sum(rows[name].seconds or 0.0 for name in names)
