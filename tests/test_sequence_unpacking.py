"""Sequences taken apart inside of a model, padded as a user gives them, and put together again, packed or not.

The model mixes the positions of a sequence, as a gated MLP or a convolution does, against PyTorch in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise

import nntile_py as nt
from nntile_py.graph.bin_packing import best_fit
from nntile_py.graph.packed_inputs import row_places, token_places
from nntile_py.models.model_config import TokenConfig
from nntile_py.models.parts import sequences_apart, sequences_together
from nntile_py.schema import Count
from nntile_py.tasks import activation, add, cross_entropy, embedding, linear, rename
from nntile_py.testing import error

LENGTH, EMBED, VOCAB = 10, 14, 30
pytestmark = pytest.mark.usefixtures("runtime")
LENGTHS = [3, 10, 1, 9, 5, 7, 2]
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "embed": 7, "vocab": 10},
    "ragged": {"batch": 3, "embed": 5, "vocab": 11},
}
CUT = {"seq": 4}  # besides, without packing


class MixerConfig(TokenConfig):
    type: str = "mixer"
    embed: Count = EMBED
    positions: Count = LENGTH
    vocab: Count = VOCAB


class Mixer(nt.Model):
    """y = x + h + gelu(W h) of the positions h of each sequence, zeros where it is padded."""

    Config = MixerConfig

    def trace(self, g: Any, batch: Any) -> nt.Traced:
        c = self.config
        tokens = {"batch": batch.size, "seq": batch.seq}
        ids = g.input("input_ids", tokens, below=c.vocab)
        words = g.param("words", {"vocab": c.vocab, "embed": c.embed}, nt.Normal(0.5))
        mixing = g.param("mixing", {"place": c.positions, "mixed": c.positions}, nt.Normal(0.5))
        x = embedding(g, ids, words)
        h = sequences_apart(g, batch, x, c.positions)
        y = rename(g, linear(g, h, mixing, ["batch", "row", "mixed", "embed"]), mixed="place")
        y = add(g, activation(g, y, "gelu"), h)
        x = add(g, x, sequences_together(g, batch, y))
        logits = linear(g, x, words, ["batch", "seq", "vocab"])
        labels = g.input("labels", tokens, below=c.vocab, ignored=-100, scale="loss_scale")
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits, "apart": h})


def batch_of(lengths: list[int], length: int = LENGTH) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    mask = (np.arange(length) < np.array(lengths)[:, None]).astype(int)
    ids = rng.integers(0, VOCAB, mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask > 0, ids[:, ::-1], -100)}


def expected(weights: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Any], Any]:
    """Loss, gradients and logits in float64."""
    words, mixing = (torch.tensor(np.float64(weights[name]), requires_grad=True) for name in ("words", "mixing"))
    ids, mask = (torch.tensor(batch[name]) for name in ("input_ids", "attention_mask"))
    x = words[ids]
    h = F.pad(x * mask[..., None], (0, 0, 0, LENGTH - x.shape[1]))
    y = (h + F.gelu(torch.einsum("bpe,pq->bqe", h, mixing)))[:, : x.shape[1]] * mask[..., None]
    logits = (x + y) @ words.T
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(batch["labels"]).flatten())
    loss.backward()
    return loss.item(), {"words": words.grad, "mixing": mixing.grad}, logits.detach().numpy()


def model() -> Mixer:
    return Mixer(MixerConfig(), seed=3)


@pairwise(way=["packed", "padded", "padded and cut"], tiling=list(TILINGS), seq=[LENGTH, 7])
def test_as_in_float64(way: str, tiling: str, seq: int) -> None:
    """Sequences as long as the model's positions, and shorter ones; the loss, its gradients, what a model returns."""
    own, batch = model(), batch_of([min(n, seq) for n in LENGTHS], seq)
    loss, grads, logits = expected(own.weights, batch)
    tiles = TILINGS[tiling] | (CUT if "cut" in way else {})
    trainer = nt.Trainer(own, 7, seq, tiles, pack=way == "packed", precision="fp64")
    got, found = trainer.evaluate(batch, return_outputs=True)
    assert got == pytest.approx(loss, rel=1e-12)
    real = batch["attention_mask"] > 0
    assert error(found["logits"][real], logits[real]) < 1e-12
    apart = np.zeros((7, 1, LENGTH, EMBED))
    apart[:, 0, :seq] = own.weights["words"][batch["input_ids"]] * real[..., None]
    assert np.array_equal(found["apart"], apart)
    assert trainer.step(batch) == pytest.approx(loss, rel=1e-12)
    for name, value in trainer.gradients().items():
        assert error(value, grads[name]) < 1e-12, name
    trainer.close()


@pytest.mark.parametrize("policy", ["commute", "redux", "tree"])
def test_policies_and_passes(policy: str) -> None:
    own, batch = model(), batch_of([3, 10, 1, 9, 5, 7])
    loss, grads, _ = expected(own.weights, batch)
    options: dict[str, Any] = {"grad_accumulation": 2, "accumulate": policy, "precision": "fp64", "pack": True}
    trainer = nt.Trainer(own, 3, LENGTH, {"batch": 2, "embed": 5}, **options)
    assert trainer.step(batch) == pytest.approx(loss, rel=1e-12)
    assert all(error(value, grads[name]) < 1e-12 for name, value in trainer.gradients().items())
    trainer.close()


def test_without_a_mask() -> None:
    own, batch = model(), batch_of([LENGTH] * 3)
    trainer = nt.Trainer(own, 3, LENGTH, precision="fp64")
    without = {name: value for name, value in batch.items() if name != "attention_mask"}
    losses = [trainer.evaluate(without), trainer.evaluate(batch)]
    assert losses == pytest.approx([expected(own.weights, batch)[0]] * 2, rel=1e-12)
    holes = batch | {"attention_mask": (np.arange(30).reshape(3, 10) % 3 > 0).astype(int)}  # allowed where not packed
    assert trainer.evaluate(holes) == pytest.approx(expected(own.weights, holes)[0], rel=1e-12)
    trainer.close()


def test_an_encoder_of_it() -> None:
    """Bins of other sizes, each with no more sequences than it has rows."""
    own, rng = model(), np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, n) for n in [*LENGTHS, *[2] * 20]]
    encoder = nt.Encoder(own, "logits", precision="fp64")
    for ids, got in zip(texts, encoder(texts), strict=True):
        ones = np.ones((1, len(ids)), int)
        want = expected(own.weights, {"input_ids": ids[None], "attention_mask": ones, "labels": ids[None]})[2][0]
        assert error(got, want) < 1e-12
    encoder.close()


def test_bins_of_no_more_sequences() -> None:
    trainer = nt.Trainer(model(), 4, LENGTH, {"batch": 2}, pack=True)
    assert np.isfinite(trainer.step(batch_of([1, 1, 1, 1])))
    with pytest.raises(ValueError, match=r"5 sequences of 10 tokens do not fit into 2 bins of 20 and 2 sequences"):
        trainer.step(batch_of([2] * 5))
    trainer.close()
    lengths, order = [1, 2, 3, 4, 5, 6, 1, 1, 1], list(range(9))
    assert max(map(len, best_fit(lengths, order, 20, 2))) == 2 < max(map(len, best_fit(lengths, order, 20)))


def test_places() -> None:
    segments = np.array([[0, 2, 5, 5], [0, 0, 0, 0]])
    rows = row_places(segments, 2, 4)
    assert rows.tolist() == [[[0, 1, -1, -1], [2, 3, 4, -1]], [[-1] * 4] * 2]
    assert token_places(rows, 6).tolist() == [[0, 1, 4, 5, 6, -1], [-1] * 6]
    with pytest.raises(ValueError, match="2 sequences in a bin; allowed: 1"):
        row_places(segments, 1, 4)


class Short(Mixer):
    def trace(self, g: Any, batch: Any) -> nt.Traced:
        ids = g.input("input_ids", {"batch": batch.size, "seq": batch.seq}, below=VOCAB)
        x = embedding(g, ids, g.param("words", {"vocab": VOCAB, "embed": EMBED}, nt.Normal(0.5)))
        sequences_apart(g, batch, x, self.config.positions)
        return nt.Traced(None, {"h": sequences_apart(g, batch, x, 20)})


@pytest.mark.parametrize(
    ("own", "positions", "told"),
    [(Mixer, 9, "got length 9; allowed: at least seq = 10"), (Short, 10, "got length 20; allowed: the same")],
)
def test_refused(own: Any, positions: int, told: str) -> None:
    with pytest.raises(nt.ConfigError, match=f"sequences_apart: {told}"):
        nt.Trainer(own(MixerConfig(positions=positions)), 2, LENGTH, pack=True)
