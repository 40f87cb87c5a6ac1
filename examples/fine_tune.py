"""Fine-tune a BERT classifier of transformers on sentences of unequal length, and use it in transformers."""

import argparse
import tempfile

import numpy as np
import torch
import transformers

import nntile_py as nt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps

# Random weights, so that nothing is downloaded. For your model: BertForSequenceClassification.from_pretrained(...).
torch.manual_seed(0)
shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
hf = transformers.BertForSequenceClassification(
    transformers.BertConfig(vocab_size=100, max_position_embeddings=24, num_labels=2, **shape)
)
model = nt.models.from_hf(hf, dropout=0.1)

# Sentences of 8 to 24 tokens; class 1 if token 7 occurs.
rng = np.random.default_rng(0)
batch, seq = 16, 24


def samples() -> dict[str, np.ndarray]:
    input_ids = rng.integers(8, 100, (batch, seq))
    lengths = rng.integers(8, seq + 1, batch)
    labels = rng.integers(0, 2, batch)
    input_ids[labels == 1, 3] = 7
    attention_mask = (np.arange(seq) < lengths[:, None]).astype(int)
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask, "labels": labels}


with nt.Runtime(cpus=2):
    trainer = nt.Trainer(model, batch, seq, tiles={"batch": 8}, optimizer=nt.AdamW(lr=2e-3), clip_grad_norm=1.0)
    for step in range(steps):
        loss = trainer.step(samples())
        if step % 10 == 0:
            print(f"step {step}  loss {loss:.3f}")
    test = samples()
    loss, outputs = trainer.evaluate(test, return_outputs=True)
    right = (outputs["logits"].argmax(-1) == test["labels"]).mean()
    print(f"held out: loss {loss:.3f}, {right:.0%} right")

with tempfile.TemporaryDirectory() as folder:
    model.to_hf().save_pretrained(folder)
    again = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = again(**{name: torch.from_numpy(value) for name, value in test.items()}).logits
print(f"transformers' logits differ by {np.abs(theirs.numpy() - outputs['logits']).max():.1e}")
