"""Flop, words and operators are the same in plans, analyses and pictures, and are those of the tasks."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from test_analyze import by_name

import nntile_py as nt
from nntile_py.analysis import analysis_report
from nntile_py.analysis.operators import analyse
from nntile_py.analysis.plan import plan
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.graph.lowering import lower
from nntile_py.graph.packed_flop import PackedFlop
from nntile_py.measure import worker
from nntile_py.measure.workload_inputs import inputs_of
from nntile_py.system.units import counted, si
from nntile_py.tasks.op import CONTRACTION
from nntile_py.training.repeated_steps import filled_pass


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "sets", [[], ["train.grad_accumulation=3"], ["accumulate=commute", "tiles.seq=32"], ["tiles.seq=16"]]
)
@pytest.mark.parametrize("name", ["gpt2", "albert", "modernbert"])
def test_plan_and_analysis_move_the_same_bytes(name: str, sets: list[str]) -> None:
    """Weights that are tied, or of all layers, have gradients that are read to be added to; so do micro-batches; and
    attention with a window is not taken for one without."""
    config = load(f"experiments/{name}_tiny.yaml", ["train.seq=64", *sets])
    made, planned = analyse(config), plan(config)
    # The tree that sums the norm has another shape in a step: the part that ends a gradient's sum orders the gradients.
    spec = step_spec(config)
    trees = spec.step().update, lower(spec.update(spec.graphs), spec.cuts, spec.accumulate)
    nodes, of_analysis = (sum(task.kernel == "add_scalars" for task in one.tasks.tasks) for one in trees)
    scalars = 2 * 8 * (nodes - of_analysis)  # each node's sum is written and read
    assert made.totals()["fused"]["bytes"] + scalars == planned.bytes_moved
    assert all(row.moved >= row.least for row in (*made.operators, *made.groups))
    if name == "gpt2" and not sets:
        row, table = by_name(made)["embed.EmbeddingGrad dW (2)"], config.model.vocab * config.model.embed
        assert row.written == 2 * table < row.read  # for each of two tiles of the batch


@pytest.mark.parametrize("sets", [[], ["tiles.seq=32"], ["tiles.seq=32", "model.attention=naive"]])
def test_plan_and_analysis_count_what_tasks_compute(sets: list[str]) -> None:
    """Pairs of tiles that a causal mask leaves out are in neither; the flop of a step are those of the products."""
    config = load("experiments/gpt2_tiny.yaml", sets)
    made, planned, step = analyse(config), plan(config), step_spec(config).step()
    totals = made.totals()
    assert sum(row.flop for row in planned.rows.values()) == pytest.approx(totals["all"]["flop"], rel=1e-12)
    assert totals["fused"]["flop"] == pytest.approx(totals["all"]["flop"], rel=1e-12)
    assert planned.flop == step.flop == pytest.approx(totals["contraction"]["flop"], rel=1e-12)
    beside = "attention_normalise", "attention_delta"
    kinds = {op.kind for op in step.graph.ops if op.category is CONTRACTION}
    tasks = [task for task in step.first.tasks.tasks if task.kernel not in beside]
    flop = sum(task.flop for task in tasks if task.op.removesuffix(".backward").rpartition(".")[2] in kinds)
    assert flop == pytest.approx(planned.flop, rel=1e-12)
    if "model.attention=naive" in sets:
        pairs = 8 * 6 * 128 * 129 // 2  # batch, heads, queries and the keys that each attends to
        for name, count in (("Softmax", 2), ("SoftmaxGrad dX", 3)):
            assert by_name(made)[f"h*.attn.{name}"].least == 4 * count * pairs


@pytest.mark.parametrize("sets", [[], ["train.grad_accumulation=2", "model.attention=naive", "tiles.seq=64"]])
def test_picture_and_table_agree(sets: list[str]) -> None:
    """Operators, flop, bytes, flop a word, what bounds them: of each operator, and of all."""
    config = load("experiments/gpt2_tiny.yaml", ["model.layers=1", *sets])
    made = analyse(config)
    for fusion, rows, key in (("before", made.operators, "all"), ("after", made.groups, "fused")):
        text, total = analysis_report.dot_of(made, fusion), made.totals()[key]
        batches = " in 2 micro-batches" if sets else ""
        told = f"{total['operators']} operators{batches}, {si(total['flop'])}flop, {si(total['bytes'])}B moved"
        assert told in text and "Rename" not in text
        nodes = re.findall(r'ellipse([^\n]*) label="[^"]*\\n([^"\\]*) per element"', text)
        wanted = Counter[tuple[bool, str]]()
        for row in (row for row in rows if row.phase != "update"):  # the update has one node for all weights
            told = f"{si(row.flop / row.count)}flop, {row.intensity:.3g}"
            wanted[bool(row.memory_bound(made.peak)), told] += row.count // (2 if sets else 1)
        assert Counter(("penwidth=2.5" in style, told) for style, told in nodes) >= wanted, fusion


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize(("model", "sets"), [("bert", []), ("bert", ["model.attention=naive"]), ("gpt2", [])])
def test_flop_of_packed_work_are_those_of_its_lengths(model: str, sets: list[str], alpha: float) -> None:
    """2 T E F for each product on T tokens, 4 E n^2 for attention in a sequence of n tokens, half of it if causal."""
    more = ["train.pack=true", "train.batch=8", "train.seq=64", "tiles={}", "tiles.batch=2"]
    config = load(f"experiments/{model}_tiny.yaml", [*more, *sets])
    spec, c = step_spec(config), config.model
    filled = filled_pass(spec, inputs_of(config, "inference", alpha, spec))
    evaluation = spec.with_inputs(filled.arrays).evaluation()
    lengths = [place.length for place in filled.places]
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    head, share = (0, 0.5) if model == "gpt2" else (c.embed**2, 1.0)
    layer = 2 * tokens * (4 * c.embed**2 + 2 * c.embed * c.ffn) + 4 * c.embed * pairs * share
    expected = c.layers * layer + 2 * tokens * (head + c.embed * c.vocab)
    assert PackedFlop.of(evaluation.graph)(filled) == pytest.approx(expected, rel=1e-12)


def test_flop_of_a_packed_step(runtime: nt.Runtime) -> None:
    """The gradient of a product has twice its flop, that of fused attention 2.5 times."""
    config = load("experiments/bert_tiny.yaml", ["train.pack=true", "train.seq=64", "model.layers=1", "model.masked=0"])
    spec = step_spec(config)
    trainer = nt.Trainer.of_spec(spec)
    filled = trainer.filled(inputs_of(config, "train", 0.5, spec))
    step = spec.with_inputs(filled.arrays).step()
    flop = {name: sum(of.values()) for name, of in vars(step.packed_flop).items() if name != "fixed"}
    forward = PackedFlop.of(spec.with_inputs(filled.arrays).evaluation().graph)
    assert flop["by_slot"] == pytest.approx(3 * sum(forward.by_slot.values()), rel=1e-12)
    assert flop["by_band"] == pytest.approx(3.5 * sum(forward.by_band.values()), rel=1e-12)
    assert trainer.submit(filled).flop == step.packed_flop(filled) < step.flop


def test_a_rate_above_the_peak_is_refused(runtime: nt.Runtime) -> None:
    config = load("experiments/gpt2_tiny.yaml")
    worker.check_rate(config, 1e9)
    with pytest.raises(nt.NNTileError, match=r"1,000,000,000 Gflop/s are more than the workers' peak of [\d,]+ Gf"):
        worker.check_rate(config, 1e18)


def test_a_number_with_its_noun() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1234)] == ["0 steps", "1 step", "2 steps", "1,234 steps"]
