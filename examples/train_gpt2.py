"""Train a small GPT-2 from Python on your own arrays, then use the model in transformers."""

import argparse

import numpy as np

import nntile_py as nt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps

# A text that a model learns in seconds: the numbers from 0 to 49, repeated.
vocab, batch, seq = 50, 8, 32
starts = np.random.default_rng(0).integers(0, vocab, (steps, batch, 1))
samples = (starts + np.arange(seq)) % vocab

config = nt.models.GPT2Config(layers=2, embed=64, heads=4, vocab=vocab, positions=seq)
model = nt.models.GPT2(config, seed=0)
with nt.Runtime(cpus=2):
    trainer = nt.Trainer(model, batch, seq, tiles={"batch": 4, "heads": 2}, optimizer=nt.AdamW(lr=3e-3))
    # submit() returns at once; result() waits. Two steps are in flight at a time.
    pending = [trainer.submit({"input_ids": ids, "labels": ids}) for ids in samples]
    losses = [step.result().loss for step in pending]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps of {trainer.tasks_per_step} tasks")

hf = model.to_hf().eval()
import torch  # noqa: E402

with torch.no_grad():
    following = hf(input_ids=torch.arange(seq)[None]).logits[0, -1].argmax().item()
print(f"after 0, 1, ..., {seq - 1} transformers says {following}")
