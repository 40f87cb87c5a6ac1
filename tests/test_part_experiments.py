"""Experiments of ByteTransformer's parts: flop by formula and by count, shares of time."""

import csv
import io
from pathlib import Path

import pytest

from nntile_py.errors import ConfigError
from nntile_py.measure.experiments import EXPERIMENTS
from nntile_py.measure.part_experiments import PRODUCTS, BreakdownExperiment, FlopExperiment
from nntile_py.schema import validated

SMALL = {"model.layers": 1, "model.head": "none", "model.embed": 32, "model.heads": 4, "train.batch": 5,
         "train.seq": 48, "tiles": {"batch": 2}, "runtime.cpus": 1}  # fmt: skip


def section(cls: type, **keys: object) -> object:
    return validated(cls, {"config": str(EXPERIMENTS / "bert_tiny.yaml"), "set": SMALL, **keys}, "cpu.")


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_counts_are_those_of_table_2(tmp_path: Path) -> None:
    """Of each part, also with a last bin that is not full, and of a mean length that is no whole number."""
    made = section(FlopExperiment, alphas=[0.25, 0.6, 1.0])
    result = made.run(tmp_path)  # type: ignore[attr-defined]
    rows = rows_of(result.csv)
    assert [row["part"] for row in rows] == [*PRODUCTS, "all"] * 3
    for row in rows:
        assert row["padded here"] == row["baseline (paper)"]
        assert row["packed, padded MHA here"] == row["zero padding (paper)"]
        assert row["packed here"] == row["zero padding + fused MHA (paper)"]
    tokens, width = 5 * 12, 32
    products, attention = 6 * tokens * width**2, 4 * 5 * 12**2 * width
    assert [float(row["packed here"]) for row in rows[:2]] == pytest.approx([products / 1e9, attention / 1e9])
    random = [float(row["packed here, random lengths"]) for row in rows if row["part"] == "MHA"]
    packed = [float(row["packed here"]) for row in rows if row["part"] == "MHA"]
    assert random[1] > packed[1] and random[2] == packed[2]  # of unequal lengths, and of whole ones
    assert result.pictures["png"] and "0.0e+00" in result.totals[1]


def test_only_one_layer_of_bert_has_the_parts() -> None:
    two = section(FlopExperiment, alphas=[1.0], set={**SMALL, "model.layers": 2})
    with pytest.raises(ConfigError, match=r"config: a pass has 10 products and attentions; allowed: 5, those of one"):
        two.run(Path())  # type: ignore[attr-defined]


def test_a_breakdown_has_each_part_and_the_papers_numbers(tmp_path: Path) -> None:
    parts = {"norm": ["h0.attn.LayerNorm"], "product": ["h0.mlp.dense.Contract", "h0.mlp.dense.Contract (2)"]}
    made = section(BreakdownExperiment, seqs=[16, 24], parts=parts, printed={"norm+product": [60, 40]}, repeats=2)
    assert made.resolved().train.seq == 24  # type: ignore[attr-defined]
    rows = rows_of(made.run(tmp_path).csv)  # type: ignore[attr-defined]
    assert [row["part"] for row in rows] == ["norm", "product", "norm+product"]
    assert all(float(row["ms at 16"]) > 0 for row in rows)
    assert [row["% in the paper at 24"] for row in rows] == ["", "", "40"] and rows[2]["% at 24"] == "100.0"
    wrong = section(BreakdownExperiment, seqs=[16], parts={"norm": ["h0.nothing"]})
    with pytest.raises(ConfigError, match=r"parts: no operator 'h0.nothing'; allowed: .*h0.attn.LayerNorm"):
        wrong.run(tmp_path)  # type: ignore[attr-defined]
