"""The selection of layouts as a shortest path, and the sweep over vector widths."""

import csv
import io
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nntile_py.analysis.layout_path import Stage, chain, length, shortest
from nntile_py.analysis.workloads import logical, preset
from nntile_py.errors import ConfigError
from nntile_py.measure.selection_experiment import SelectionExperiment, WidthExperiment
from nntile_py.schema import validated
from nntile_py.tasks import Tensor
from nntile_py.tasks.op import Op

SMALL = {"train.batch": 2, "train.seq": 8, "model.embed": 16, "model.heads": 2, "model.ffn": 24, "runtime.cpus": 1}


def test_the_shortest_path_is_that_of_all_paths() -> None:
    """With orders that an operator does not have, and more orders on one side than on the other."""
    rng, sizes = np.random.default_rng(3), (2, 4, 3, 1, 3)
    tensors = [Tensor(f"t{k}", ["a"], [1], "fp32") for k in range(len(sizes))]
    of = []
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        table = rng.random((a, b))
        table[rng.random((a, b)) < 0.2] = math.inf
        of.append(Stage(Op([], []), *tensors[k : k + 2], [("a",)] * a, [("a",)] * b, table))
    best = min(itertools.product(*map(range, sizes)), key=lambda path: length(of, path))
    path, seconds = shortest(of)
    assert path == list(best) and seconds == pytest.approx(length(of, best)) and math.isfinite(seconds)


def test_the_chain_passes_through_attention_and_the_feed_forward_block() -> None:
    config = preset("encoder", [f"{key}={value}" for key, value in SMALL.items()])
    found = chain(logical(config, "encoder", config.fusion, "forward")[0])
    names = [op.name for _, op, _ in found]
    assert found[0][0].name == "x" and names[0] == "h0.attn.q.Contract" and "LayerNorm" in found[-1][1].title
    assert {"h0.attn.out_proj.Contract", "h0.mlp.linear1.Contract", "h0.mlp.linear2.Contract"} <= set(names)
    assert all(a[2] is b[0] and a[0] in a[1].inputs for a, b in itertools.pairwise(found))


@pytest.mark.long
def test_a_selection_is_measured_and_drawn(tmp_path: Path) -> None:
    made = validated(SelectionExperiment, {"work": "encoder", "set": SMALL, "repeats": 1}, "cpu.")
    result = made.run(tmp_path, Console(stderr=True))
    rows = list(csv.DictReader(io.StringIO(result.csv)))
    assert len(rows) > 6 and all(float(row["us"]) >= float(row["fastest us"]) for row in rows)
    orders = [(row["order read"], row["order written"]) for row in rows]
    assert all(a[1].split() == b[0].split() for a, b in itertools.pairwise(orders))
    assert result.pictures["png"] and "shortest path takes" in result.totals[0]
    kept = (tmp_path / "timings.jsonl").read_text()
    again = made.run(tmp_path, Console(stderr=True))
    assert again.csv == result.csv and (tmp_path / "timings.jsonl").read_text() == kept


def test_widths_of_each_fused_kernel(tmp_path: Path) -> None:
    section = {"work": "encoder", "set": {**SMALL, "fusion.found": True}, "widths": [2, 8], "repeats": 1}
    result = validated(WidthExperiment, section, "cpu.").run(tmp_path)
    rows = list(csv.DictReader(io.StringIO(result.csv)))
    timed = ("us by default", "us at 2", "us at 8")
    assert len(rows) >= 4 and all(float(row[key]) > 0 for row in rows for key in timed)
    assert {row["best width"] for row in rows} <= {"2", "8"}
    for wrong, why in (({"widths": [3]}, r"cpu\.widths\.0: got 3; allowed: 1, 2, 4"), ({"widths": []}, r"cpu\.widths")):
        with pytest.raises(ConfigError, match=why):
            validated(WidthExperiment, section | wrong, "cpu.")
    none = validated(WidthExperiment, section | {"set": {**SMALL, "fusion.found": False}}, "cpu.")
    with pytest.raises(ConfigError, match=r"set: the layer has no generated kernels; needed are fusion.found"):
        none.run(tmp_path)
