"""Packed sequences: what is refused, and how it is told."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_packed import LENGTH, inputs, made
from typer.testing import CliRunner

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.analysis.workloads import build
from nntile_py.cli import app
from nntile_py.config.run_config import load
from nntile_py.execution.program import Store, programs
from nntile_py.graph.packed_inputs import OWN
from nntile_py.tiles import R, TaskList, Tile, W

pytestmark = pytest.mark.usefixtures("runtime")


def test_refused() -> None:
    trainer = nt.Trainer(made("bert"), 2, LENGTH, pack=True)
    good = inputs([3, 5])
    holes, empty, left = (good["attention_mask"].copy() for _ in range(3))
    holes[0, 1], empty[1], left[0] = 0, 0, np.arange(LENGTH) >= 13
    ids = [np.arange(3), np.arange(5)]
    for changes, told in (
        ({"attention_mask": holes}, r"attention_mask\[0\]: has holes; allowed with pack: ones, then zeros"),
        ({"attention_mask": left}, r"attention_mask\[0\]: has holes"),
        ({"attention_mask": empty}, r"attention_mask\[1\]: an empty sequence; allowed: at least one token"),
        ({"input_ids": good["input_ids"] + 40}, "input_ids: values go from .*; allowed: 0 to 29"),
        ({"input_ids": good["input_ids"][:, :4]}, r"input_ids: got .*; allowed: ints \(2, 16\)"),
        ({"input_ids": ids}, "attention_mask: got lists of arrays too"),
        ({"labels": np.zeros((3, LENGTH), int)}, r"labels: got int64 \(3, 16\); allowed: ints \(2, 16\)"),
        ({"labels": [0, 1]}, r"labels: got int64 \(2,\); allowed: ints \(2, 16\)"),
        ({"input_ids": good["input_ids"][0]}, r"input_ids: got int64 \(16,\); allowed: ints \(1, 16\)"),
        ({"input_ids": good["input_ids"] + 0.5}, r"input_ids: got float64 .*; allowed: ints \(2, 16\)"),
        ({"attention_mask": np.full((2, LENGTH), 0.5)}, "attention_mask: got float64 .*; allowed: ints"),
        ({"attention_mask": [1, 1]}, r"attention_mask: got .*; allowed: ints \(2, 16\)"),
    ):
        with pytest.raises(ValueError, match=told):
            trainer.step(good | changes)
    for lists, told in (
        ({"input_ids": ids, "attention_mask": ids}, "attention_mask: got lists of arrays too"),
        ({"input_ids": ids, "labels": ids[::-1]}, "labels: its rows differ in length from those of input_ids"),
        ({"input_ids": [np.arange(17)]}, r"input_ids\[0\]: a sequence of 17 tokens; allowed: at most seq = 16"),
        ({"input_ids": []}, "input_ids: got .*; allowed: a list of arrays"),
        ({"input_ids": [np.zeros(0, int)]}, r"input_ids\[0\]: an empty sequence; allowed: at least one"),
        ({"input_ids": [[1, 2], []]}, r"input_ids\[1\]: an empty sequence"),
        ({"input_ids": [np.ones((2, 3), int), np.arange(5)]}, r"input_ids\[0\]: got shape \(2, 3\); allowed: \[tok"),
        ({"input_ids": [1, np.arange(3)]}, r"input_ids\[0\]: got shape \(\); allowed: \[tokens\]"),
        ({"input_ids": [[1, [2]], [3]]}, r"input_ids\[0\]: is not an array"),
        ({"input_ids": good["input_ids"], "labels": ids}, "input_ids: got an array, and a list of arrays as labels; "),
        ({"input_ids": ids}, "labels: missing; the model needs input_ids, labels$"),
        ({"labels": ids}, "input_ids: missing; the model needs input_ids, labels$"),
        ({}, "no inputs of tokens were given; the model needs input_ids, labels$"),
    ):
        with pytest.raises(ValueError, match=told):
            trainer.step(lists)
    trainer.close()


class NoSegments(nt.Model):
    """Attention that knows nothing of sequences within a row."""

    class Config(nt.ModelConfig):
        type: str = "none"

    def trace(self, g: Any, batch: Any) -> Any:
        tokens, heads = {"batch": batch.size, "seq": batch.seq}, {"heads": 2, "head_dim": 4}
        table = g.param("table", {"vocab": 30, **heads}, nt.Normal(0.1))
        ids = g.input("input_ids", tokens, below=30)
        flat = ops.embedding(g, ids, g.param("words", {"vocab": 30, "embed": 8}, nt.Normal(0.1)))
        x = ops.linear(g, flat, g.param("q", {"embed": 8, **heads}, nt.Normal(0.1)), ["batch", "seq", *heads])
        x = ops.transpose(g, x, ["batch", "heads", "seq", "head_dim"])
        y = ops.transpose(g, ops.attention(g, x, x, x, ops.Mask(causal=True)), ["batch", "seq", *heads])
        logits = ops.linear(g, y, table, ["batch", "seq", "vocab"])
        labels = g.input("labels", tokens, below=30, ignored=-100, scale="loss_scale")
        return nt.Traced(ops.cross_entropy(g, logits, labels), {"logits": logits})


class FirstOfARow(NoSegments):
    """Takes the first token of a row, where several sequences begin."""

    def trace(self, g: Any, batch: Any) -> Any:
        ids = g.input("input_ids", {"batch": batch.size, "seq": batch.seq}, below=30)
        x = ops.embedding(g, ids, g.param("words", {"vocab": 30, "embed": 8}, nt.Normal(0.1)))
        out = g.param("out", {"classes": 2, "embed": 8}, nt.Normal(0.1))
        logits = ops.linear(g, ops.select(g, x, "seq", 0), out, ["batch", "classes"])
        labels = g.input("labels", {"batch": batch.size}, below=2, ignored=-100, scale="loss_scale")
        return nt.Traced(ops.cross_entropy(g, logits, labels), {"logits": logits})


@pytest.mark.parametrize("name", ["foo", *OWN, "positions", "masked_places"])
def test_names_that_no_user_gives(name: str) -> None:
    """What a bin has besides, and what a model makes of other inputs, are none of the inputs that are told."""
    trainer, given = nt.Trainer(made("bert"), 2, LENGTH, pack=True), inputs([3, 5])
    with pytest.raises(ValueError, match=f"{name}: unknown input; allowed: input_ids, token_type_ids, labels, "):
        trainer.step(given | {name: given["labels"]})
    trainer.close()


@pytest.mark.parametrize("name", ["bert", "gpt2", "deberta"])
def test_labels_of_padding(name: str) -> None:
    """They count in a padded batch, as in transformers; what packed sequences take has the same loss."""
    given = inputs([3, 5])
    everywhere = given | {"labels": given["input_ids"]}
    of_tokens = given | {"labels": np.where(given["attention_mask"] > 0, given["input_ids"], -100)}
    packed, padded = (nt.Trainer(made(name), 2, LENGTH, pack=pack) for pack in (True, False))
    told = r"labels\[0\]: has labels where attention_mask is 0; allowed with pack: -100 there"
    for call in (packed.step, packed.evaluate):
        with pytest.raises(ValueError, match=told):
            call(everywhere)
    assert packed.evaluate(of_tokens) == pytest.approx(padded.evaluate(of_tokens), rel=2e-6)
    assert padded.evaluate(everywhere) != pytest.approx(padded.evaluate(of_tokens), rel=1e-4)
    packed.close()
    padded.close()


def test_labels_of_sequences_are_one_each() -> None:
    trainer = nt.Trainer(made("bert", head="classification", classes=2), 2, LENGTH, pack=True)
    for labels in (np.zeros((2, LENGTH), int), [0, 1, 1], [[0], [1]]):
        with pytest.raises(ValueError, match=r"labels: got int64 .*; allowed: ints \(2,\)"):
            trainer.step(inputs([3, 5]) | {"labels": labels})
    trainer.close()


@pytest.mark.parametrize("pack", ["yes", 1, None])
def test_pack_is_true_or_false(pack: Any) -> None:
    with pytest.raises(nt.ConfigError, match=f"pack: got {pack!r}; allowed: True or False"):
        nt.Trainer(made("bert"), 2, LENGTH, pack=pack)


def test_tasks_in_python_are_refused() -> None:
    """They would take what lies behind the filled part of a tile for data."""

    @nt.task(x="R", y="W")
    def copied(x: Any, y: Any) -> None:
        y[:] = x

    tasks = TaskList(live=["seq"])
    x, y = (Tile(name, (0, 0), (1, 4), "fp32", persistent=True, axes=("batch", "seq")) for name in "xy")
    tasks.initialised.add(x)
    tasks.emit(copied, [R(x), W(y)], op="mine")
    with pytest.raises(nt.ConfigError, match=r"pack: mine runs a task in Python .*; allowed: pack: false"):
        programs([tasks.resolve()], Store())


def test_models_that_cannot_be_packed() -> None:
    with pytest.raises(nt.ConfigError, match=r"tiles\.seq: got 4; allowed with pack: none"):
        nt.Trainer(made("bert"), 2, LENGTH, {"seq": 4}, pack=True)
    with pytest.raises(nt.ConfigError, match=r"model NoSegments: pack needs a mask with segments in Attention"):
        nt.Trainer(NoSegments(NoSegments.Config()), 2, LENGTH, pack=True)
    with pytest.raises(nt.ConfigError, match=r"model FirstOfARow: pack needs first_tokens"):
        nt.Trainer(FirstOfARow(FirstOfARow.Config()), 2, LENGTH, pack=True)


SPEC = """\
model: {type: bert, layers: 1, embed: 16, heads: 2, attention_dropout: 0.1, attention: naive}
data: {max_bytes: 20000}
tokenizer: {vocab_size: 300}
train: {steps: 1, batch: 2, seq: 8, pack: true}
runtime: {cpus: 1}
"""
COMMANDS = ["plan"], ["plan", "--nodes", "2"], ["graph", "--out", "g.dot"]


@pytest.mark.parametrize(
    ("sets", "allowed"),
    [([], r"0, or model\.attention: segments"), (["model.type=deberta"], r"0, or model\.attention: segments")],
    ids=["naive", "deberta"],
)
def test_dropout_of_attention(sets: list[str], allowed: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Every command tells it, and from Python it is the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SPEC)
    told = rf"model\.attention_dropout: got 0\.1; allowed with packed sequences: {allowed}"
    config = load("run.yaml", sets)
    for first, *options in COMMANDS:
        done = CliRunner().invoke(app, [first, "run.yaml", *options, *(f"--set={one}" for one in sets)])
        assert isinstance(done.exception, nt.ConfigError) and re.search(told, str(done.exception)), (first, done.output)
    with pytest.raises(nt.ConfigError, match=told):
        build(config)  # a sweep's
    model = made(config.model.type, attention="naive", attention_dropout=0.1)
    with pytest.raises(nt.ConfigError, match=told):
        nt.Trainer(model, 2, LENGTH, pack=True)
