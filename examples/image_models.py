"""Three nets on images of digits: a deep linear net, a deep ReLU net and an MLP-mixer (Tolstikhin et al. 2021).

The images are drawn here, like those of MNIST: 28 x 28 pixels, the segments of a digit, shifted, with noise. An image
is cut into 16 patches of 7 x 7 pixels. The nets do not use the axis seq: a Trainer gets seq = 1.
"""

import argparse

import numpy as np

import nntile_py as nt
from nntile_py.models.parts import norm
from nntile_py.schema import Count
from nntile_py.tasks import activation, add, bias_add, contract, cross_entropy, linear, transpose

PATCHES, PIXELS, DIGITS = 16, 49, 10


class NetConfig(nt.ModelConfig):
    layers: Count = 3
    embed: Count = 64  # width of a layer; in the mixer: channels


class MixerConfig(NetConfig):
    mixed: Count = 32  # width of the block that mixes patches
    ffn: Count = 128  # width of the block that mixes channels


class Deep(nt.Model):
    """Fully connected layers. Inputs: patches [batch, patch, pixel], labels [batch]."""

    Config = NetConfig
    act: str | None = None

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        x, labels = inputs(g, batch)
        axes, c = ["patch", "pixel"], self.config
        for layer in range(c.layers):
            # Two weights in turn have the axes (embed, wide) and (wide, embed): an axis cannot be read and written.
            out = {"wide": c.embed} if axes == ["embed"] else {"embed": c.embed}
            x = layer_of(g, x, f"layers.{layer}", {axis: x.size(axis) for axis in axes}, out, ["batch", *out])
            x = activation(g, x, self.act) if self.act else x
            axes = list(out)
        logits = layer_of(g, x, "head", {axes[0]: c.embed}, {"vocab": DIGITS}, ["batch", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})


class DeepLinear(Deep):
    """Layers without activations: the product of all weights is one matrix."""


class DeepReLU(Deep):
    act = "relu"


class Mixer(nt.Model):
    """MLP-mixer. Inputs: patches [batch, patch, pixel], labels [batch]."""

    Config = MixerConfig

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        c, (patches, labels) = self.config, inputs(g, batch)
        patch, embed, ffn, mixed = {"patch": PATCHES}, {"embed": c.embed}, {"ffn": c.ffn}, {"mixed": c.mixed}
        tokens = ["batch", "patch", "embed"]
        x = layer_of(g, patches, "stem", {"pixel": PIXELS}, embed, tokens)
        for layer in range(c.layers):
            here = f"layers.{layer}"
            with g.scope(f"h{layer}"):
                y = norm(g, x, f"{here}.norm1", 1e-5)
                y = activation(g, layer_of(g, y, f"{here}.token.0", patch, mixed, ["batch", "embed", "mixed"]), "gelu")
                y = layer_of(g, y, f"{here}.token.1", mixed, patch, ["batch", "embed", "patch"])
                x = add(g, x, transpose(g, y, tokens))
                y = norm(g, x, f"{here}.norm2", 1e-5)
                y = activation(g, layer_of(g, y, f"{here}.channel.0", embed, ffn, ["batch", "patch", "ffn"]), "gelu")
                x = add(g, x, layer_of(g, y, f"{here}.channel.1", ffn, embed, tokens))
        x = norm(g, x, "norm", 1e-5)
        share = g.input("share", patch, None, default=np.full(PATCHES, 1 / PATCHES))
        mean = contract(g, x, share, ["batch", "embed"])
        logits = layer_of(g, mean, "head", embed, {"vocab": DIGITS}, ["batch", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})


def inputs(g: nt.Graph, batch: nt.Batch):
    """Declare patches and labels."""
    patches = g.input("patches", {"batch": batch.size, "patch": PATCHES, "pixel": PIXELS}, None)
    return patches, g.input("labels", {"batch": batch.size}, below=DIGITS, ignored=-100, scale="loss_scale")


def layer_of(g: nt.Graph, x, name: str, inner: dict[str, int], out: dict[str, int], axes: list[str]):
    """Return x W + b with the axes `axes`: the product sums over the axes `inner`, the weight is [inner, out]."""
    fan_in = np.prod(list(inner.values()))
    weight = g.param(f"{name}.weight", inner | out, nt.Normal(float((2 / fan_in) ** 0.5)))
    return bias_add(g, linear(g, x, weight, axes), g.param(f"{name}.bias", out, nt.ZEROS))


# -- images like those of MNIST: the seven segments of a digit's display, as rows and columns of pixels

TOP, RIGHT, LEFT = (4, 5, 8, 18), (4, 14, 17, 19), (4, 14, 8, 10)  # first and last row, first and last column
SEGMENTS = [TOP, RIGHT, (13, 23, 17, 19), (22, 23, 8, 18), (13, 23, 8, 10), LEFT, (13, 14, 8, 18)]
SHOWN = ["012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356"]  # by digit


def images(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return patches [count, 16, 49] and digits [count]."""
    digits = rng.integers(0, DIGITS, count)
    pixels = rng.normal(0, 0.25, (count, 28, 28))
    for image, digit, (down, right) in zip(pixels, digits, rng.integers(-3, 4, (count, 2)), strict=True):
        for segment in SHOWN[digit]:
            top, bottom, left, end = SEGMENTS[int(segment)]
            image[top + down : bottom + down + 2, left + right : end + right + 1] += 1
    patches = pixels.reshape(count, 4, 7, 4, 7).transpose(0, 1, 3, 2, 4).reshape(count, PATCHES, PIXELS)
    return patches, digits


MODELS = {"linear": (DeepLinear, NetConfig), "relu": (DeepReLU, NetConfig), "mixer": (Mixer, MixerConfig)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    batch, tiles = 64, {"batch": 32, "embed": 32, "ffn": 64}
    held_out, digits = images(np.random.default_rng(1), batch)
    with nt.Runtime(cpus=2):
        for name, (kind, config) in MODELS.items():
            rng = np.random.default_rng(0)
            trainer = nt.Trainer(kind(config(), seed=0), batch, 1, tiles=tiles, optimizer=nt.AdamW(lr=1e-3))
            for _ in range(steps):
                patches, labels = images(rng, batch)
                loss = trainer.step({"patches": patches, "labels": labels})
            measured, logits = trainer.evaluate({"patches": held_out, "labels": digits}, return_logits=True)
            right = (logits.argmax(-1) == digits).mean()
            print(f"{name}: loss {loss:.3f}, held-out loss {measured:.3f}, {right:.0%} of the held-out digits")
            trainer.close()
