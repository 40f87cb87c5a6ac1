"""examples/image_models.py: four nets, their losses and weights after steps equal PyTorch's."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import nntile_py as nt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import image_models as own

BATCH, TILES = 6, {"batch": 4, "embed": 5, "ffn": 7}
Weights = dict[str, torch.Tensor]


def deep(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights, torch.Tensor], torch.Tensor]:
    def logits(p: Weights, pixels: torch.Tensor) -> torch.Tensor:
        x = torch.tensor(own.patches(pixels.numpy())).flatten(1)
        for layer in range(3):
            weight = p[f"layers.{layer}.weight"]
            x = act(x @ weight.reshape(-1, weight.shape[-1]) + p[f"layers.{layer}.bias"])
        return x @ p["head.weight"] + p["head.bias"]

    return logits


def mixer(p: Weights, pixels: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor, name: str) -> torch.Tensor:
        x = F.gelu(x @ p[f"{name}.0.weight"] + p[f"{name}.0.bias"])
        return x @ p[f"{name}.1.weight"] + p[f"{name}.1.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    x = torch.tensor(own.patches(pixels.numpy())) @ p["stem.weight"] + p["stem.bias"]
    for layer in range(3):
        here = f"layers.{layer}"
        x = x + block(norm(x, f"{here}.norm1").transpose(1, 2), f"{here}.token").transpose(1, 2)
        x = x + block(norm(x, f"{here}.norm2"), f"{here}.channel")
    return norm(x, "norm").mean(1) @ p["head.weight"] + p["head.bias"]


def conv(p: Weights, pixels: torch.Tensor) -> torch.Tensor:
    def weight(name: str, side: int) -> torch.Tensor:  # [pixels of the window, in, out] as [out, in, side, side]
        w = p[f"{name}.weight"]
        return w.reshape(side, side, -1, w.shape[-1]).permute(3, 2, 0, 1)

    x = torch.relu(F.conv2d(pixels[:, None], weight("conv1", 3), p["conv1.bias"], padding=1))
    x = torch.relu(F.conv2d(x, weight("conv2", 2), p["conv2.bias"], stride=2))
    x = torch.relu(F.conv2d(x, weight("conv3", 2), p["conv3.bias"], stride=2))
    dense = p["dense.weight"]
    x = torch.relu(x.permute(0, 2, 3, 1).flatten(1) @ dense.reshape(-1, dense.shape[-1]) + p["dense.bias"])
    return x @ p["head.weight"] + p["head.bias"]


NETS: dict[str, Callable[[Weights, torch.Tensor], torch.Tensor]] = {
    "linear": deep(lambda x: x), "relu": deep(torch.relu), "mixer": mixer, "conv": conv,
}  # fmt: skip
SIZES: dict[str, dict[str, int]] = {"linear": {}, "relu": {}, "mixer": {"mixed": 9, "ffn": 18}, "conv": {"ffn": 18}}


@pytest.mark.parametrize("name", NETS)
def test_steps_are_those_of_pytorch(runtime: nt.Runtime, name: str) -> None:
    """In fp64, with tiles that do not divide the sizes: losses of three steps, weights after them, logits."""
    kind, config = own.MODELS[name]
    model: Any = kind(config(embed=12, **SIZES[name]), seed=3)
    p = {key: torch.tensor(np.asarray(w, np.float64), requires_grad=True) for key, w in model.weights.items()}
    trainer = nt.Trainer(model, BATCH, 1, tiles=TILES, precision="fp64", optimizer=nt.SGD(lr=0.05))
    optimizer, rng = torch.optim.SGD(p.values(), lr=0.05), np.random.default_rng(0)
    for _ in range(3):
        pixels, digits = own.images(rng, BATCH)
        arrays = {**kind.arrays(pixels), "labels": digits}
        want = F.cross_entropy(NETS[name](p, torch.tensor(pixels)), torch.tensor(digits))
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        assert trainer.step(arrays) == pytest.approx(want.item(), rel=1e-10)
    trained = trainer.state_dict()
    assert trained.keys() == p.keys()
    for key, weight in trained.items():
        np.testing.assert_allclose(weight, p[key].detach().numpy(), rtol=1e-9, atol=1e-12)
    _, logits = trainer.evaluate(arrays, return_logits=True)
    np.testing.assert_allclose(logits, NETS[name](p, torch.tensor(pixels)).detach().numpy(), rtol=1e-9, atol=1e-10)


def test_images_are_the_digits() -> None:
    """Without noise each digit has its segments; patches are cut row by row."""
    pixels, digits = own.images(np.random.default_rng(0), 40)
    patches = own.patches(pixels)
    assert np.array_equal(patches.reshape(40, 4, 4, 7, 7).transpose(0, 1, 3, 2, 4).reshape(40, 28, 28), pixels)
    lit = (pixels > 0.6).sum((1, 2))
    assert set(digits) == set(range(10)) and patches.shape == (40, own.PATCHES, own.PIXELS)
    assert lit[digits == 8].mean() > lit[digits == 0].mean() > lit[digits == 1].mean()
