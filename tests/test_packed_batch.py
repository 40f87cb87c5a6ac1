"""Packed batches that are no whole number of tiles: a step takes what train.batch says, and all that is told agrees."""

import re
from pathlib import Path

import numpy as np
import pytest
from test_packed import LENGTH, inputs, made

import nntile_py as nt
from nntile_py.analysis.draw import draw
from nntile_py.analysis.plan import plan
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.data.sampler import Sampler
from nntile_py.graph.bin_packing import Bins, bins_of
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import Tiling

pytestmark = pytest.mark.usefixtures("runtime")
CONFIG = """\
model: {type: bert, layers: 1, embed: 64, heads: 2}
data: {max_bytes: 100000}
tokenizer: {vocab_size: 300}
train: {steps: 3, batch: 8, seq: 16, pack: true}
tiles: {batch: 4, embed: 32}
"""


def test_the_plan_of_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    """5 sequences in tiles of 4: 5 / 8 of the tokens and of the flop, in all that is told."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    whole, part = plan(load(path)), plan(load(path, ["train.batch=5"]))
    assert (part.tokens, part.flop) == (5 * 16, pytest.approx(whole.flop * 5 / 8))
    layer = "forward", "Contract"
    assert part.rows[layer].flop == pytest.approx(whole.rows[layer].flop * 5 / 8)
    pictures = [draw(load(path, sets), work="inference") for sets in ([], ["train.batch=5"])]
    told = [float(re.search(r"([\d.]+) Mflop, [\d.]+ MB moved", one)[1]) for one in pictures]  # type: ignore[index]
    assert told[1] == pytest.approx(told[0] * 5 / 8, rel=0.01)
    lists = [step_spec(load(path, sets)).step().first.tasks.tasks for sets in ([], ["train.batch=5"])]
    of_tasks = [sum(task.flop for task in tasks if task.kernel == "contract") for tasks in lists]
    assert of_tasks[1] == pytest.approx(of_tasks[0] * 5 / 8)


def test_a_step_takes_no_more() -> None:
    """Any lengths of 5 sequences, and others up to as many tokens."""
    trainer = nt.Trainer(made("bert"), 5, LENGTH, {"batch": 4}, pack=True)
    assert trainer.tokens_per_step == 5 * LENGTH
    for lengths in ([LENGTH] * 5, [LENGTH] * 4 + [8, 8], [1] * 30):
        assert np.isfinite(trainer.step(inputs(lengths)))
    with pytest.raises(ValueError, match=r"6 sequences of 96 tokens do not fit into 2 bins of 48, 80 tokens in all"):
        trainer.step(inputs([LENGTH] * 6))
    trainer.close()


@pytest.mark.parametrize("masked", [True, False])
def test_arrays_padded_to_the_longest(masked: bool) -> None:
    """As tokenizers pad them, are the same step as those padded to seq, or as lists."""
    whole = inputs([5, 7, 3] if masked else [7, 7, 7])
    narrow = {name: value[:, :7] for name, value in whole.items() if masked or name != "attention_mask"}
    losses = []
    for given in (whole, narrow):
        trainer = nt.Trainer(made("bert"), 3, LENGTH, pack=True)
        losses.append(trainer.step(given))
        trainer.close()
    assert losses[0] == losses[1]


def test_padding_inside_of_a_text() -> None:
    """RoBERTa counts no position there, packed as in the padded batch."""
    given = inputs([7, 9, 4])
    given["input_ids"][1, 3:5] = 1
    losses = []
    for pack in (False, True):
        trainer = nt.Trainer(made("roberta"), 3, LENGTH, pack=pack)
        losses.append(trainer.step(given))
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("batch", "tile"), [(5, 4), (7, 3), (3, 8), (8, 4)])
def test_text_fills_just_that(batch: int, tile: int, passes: int) -> None:
    spec = StepSpec(made("bert"), batch, LENGTH, Tiling({"batch": tile}), pack=True, grad_accumulation=passes)
    bins = bins_of(spec)
    order = Sampler(np.random.default_rng(0).integers(1, LENGTH + 1, 2000), 0, batch * passes, bins, passes)
    tokens = [sum(place.length for place in order.step(step)[1]) for step in range(1, 30)]
    assert max(tokens) <= batch * LENGTH * passes and np.mean(tokens) > 0.85 * batch * LENGTH * passes
    assert bins.room == bins.capacity or batch % tile  # all of it where the batch divides


def test_any_batch_has_its_places() -> None:
    """Sequences of a batch find their places whatever their lengths."""
    rng = np.random.default_rng(0)
    for batch, tile in ((5, 4), (7, 3), (11, 4), (9, 2)):
        count = -(-batch // tile)
        bins = Bins(count, -(-batch // count) * LENGTH, LENGTH, tokens=batch * LENGTH)
        for _ in range(200):
            least = rng.integers(1, LENGTH + 1)
            assert len(bins.places(rng.integers(least, LENGTH + 1, batch).tolist())) == batch
