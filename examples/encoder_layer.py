"""Compute an encoder layer of torch.nn in tiles, fused and naive: loss and gradients are the same as PyTorch's."""

import argparse

import numpy as np
import torch

import nntile_py as nt

argparse.ArgumentParser(description=__doc__).parse_args()
batch, seq, embed, heads = 4, 24, 32, 4
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(embed, heads, 4 * embed, dropout=0.0, batch_first=True)
weights = {f"layers.0.{name}": value.detach().numpy() for name, value in layer.named_parameters()}
rng = np.random.default_rng(0)
x, labels = rng.normal(size=(2, batch, seq, embed)).astype(np.float32)

out = layer(torch.from_numpy(x))
loss = torch.nn.functional.mse_loss(out, torch.from_numpy(labels))
loss.backward()

model = nt.models.TransformerEncoder(nt.models.TransformerEncoderConfig(embed=embed, heads=heads), weights)
with nt.Runtime(cpus=2):
    for fusion in (True, False):
        attention = "vendor" if fusion else "naive"
        trainer = nt.Trainer(
            model, batch, seq, {"batch": 2, "heads": 2}, optimizer=nt.SGD(lr=0.0), fusion=fusion, attention=attention
        )
        got, gradients = trainer.step({"x": x, "labels": labels}), trainer.gradients()
        worst = max(
            np.abs(gradients[f"layers.0.{name}"] - p.grad.numpy()).max() for name, p in layer.named_parameters()
        )
        print(f"{'fused' if fusion else 'naive'}: {trainer.tasks_per_step} tasks, loss {got:.6f} (torch: {loss:.6f}),")
        print(f"       gradients differ by at most {worst:.1e}")
        trainer.close()
