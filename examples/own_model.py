"""A model of your own: blocks whose attention and MLP stand side by side (as in PaLM), trained to copy.

From a YAML it is `model: {type: "own_model.py:Parallel", embed: 64, heads: 4}`; see docs/write-a-model.md.
"""

import argparse

import numpy as np

import nntile_py as nt
from nntile_py.models.model_config import TokenConfig
from nntile_py.models.parts import dense, norm
from nntile_py.schema import Count
from nntile_py.tasks import activation, add, attention, bias_add, cross_entropy, embedding, linear, transpose

INIT = nt.Normal(0.02)


class ParallelConfig(TokenConfig):
    layers: Count = 2
    embed: Count
    heads: Count
    positions: Count | None = None


class Parallel(nt.Model):
    """Causal language model of parallel blocks. Inputs: input_ids, labels."""

    Config = ParallelConfig
    objective = "causal"

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        c, tokens = self.config, {"batch": batch.size, "seq": batch.seq}
        embed, ffn, heads = {"embed": c.embed}, {"ffn": 4 * c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        ids = g.input("input_ids", tokens, below=c.vocab)
        labels = g.input("labels", tokens, below=c.vocab, ignored=-100, shifted=True, scale="loss_scale")
        position = g.input("positions", {"seq": batch.seq}, below=c.positions, default=np.arange(batch.seq))

        table = g.param("tokens.weight", {"vocab": c.vocab} | embed, INIT)
        places = g.param("positions.weight", {"position": c.positions} | embed, INIT)
        x = bias_add(g, embedding(g, ids, table), embedding(g, position, places))
        for layer in range(c.layers):
            here = f"layers.{layer}"
            with g.scope(f"h{layer}"):
                y = norm(g, x, f"{here}.norm", 1e-5)
                parts = [dense(g, y, f"{here}.{part}", embed, heads, INIT) for part in "qkv"]
                q, k, v = (transpose(g, part, ["batch", "heads", "seq", "head_dim"]) for part in parts)
                a = attention(g, q, k, v, nt.Mask(causal=True), "vendor")
                a = transpose(g, a, ["batch", "seq", "heads", "head_dim"])
                m = activation(g, dense(g, y, f"{here}.up", embed, ffn, INIT), "gelu")
                x = add(g, x, dense(g, a, f"{here}.out", heads, embed, INIT))
                x = add(g, x, dense(g, m, f"{here}.down", ffn, embed, INIT))
        x = norm(g, x, "norm", 1e-5)
        logits = linear(g, x, table, ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    rng, batch, half = np.random.default_rng(0), 8, 10
    model = Parallel(ParallelConfig(embed=64, heads=4, vocab=20, positions=2 * half), seed=0)
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer(model, batch, 2 * half, tiles={"batch": 4, "ffn": 128}, optimizer=nt.AdamW(lr=3e-3))
        for step in range(steps):
            first = rng.integers(0, 20, (batch, half))
            ids = np.concatenate([first, first], 1)
            labels = ids.copy()
            labels[:, :half] = -100  # no loss for the first half, which is random; the second half repeats it
            loss = trainer.step({"input_ids": ids, "labels": labels})
            if step % 25 == 0 or step == steps - 1:
                print(f"step {step}  loss {loss:.3f}")
