"""Four nets on images of digits: a deep linear net, a deep ReLU net, an MLP-mixer (Tolstikhin et al. 2021) and a small
convolutional net.

The images are drawn here, like those of MNIST: 28 x 28 pixels, the segments of a digit, shifted, with noise. For three
nets an image is cut into 16 patches of 7 x 7 pixels. For the convolutional net an image is given as windows of 3 x 3
pixels, one around each pixel, so that a convolution is a product. The nets do not use the axis seq: a Trainer gets
seq = 1.
"""

import argparse

import numpy as np

import nntile_py as nt
from nntile_py.models.parts import norm
from nntile_py.schema import Count
from nntile_py.tasks import activation, add, bias_add, contract, cross_entropy, linear, transpose

PATCHES, PIXELS, DIGITS = 16, 49, 10
AXES = {"patch": PATCHES, "pixel": PIXELS}


class NetConfig(nt.ModelConfig):
    layers: Count = 3
    embed: Count = 64  # width of a layer; in the mixer: channels


class MixerConfig(NetConfig):
    mixed: Count = 32  # width of the block that mixes patches
    ffn: Count = 128  # width of the block that mixes channels


class ConvConfig(nt.ModelConfig):
    embed: Count = 16  # channels of the first convolution
    ffn: Count = 64  # width of the fully connected layer


class OfPatches(nt.Model):
    """A net that reads patches."""

    @staticmethod
    def arrays(pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"patches": patches(pixels)}


class Deep(OfPatches):
    """Fully connected layers. Inputs: patches [batch, patch, pixel], labels [batch]."""

    Config = NetConfig
    act: str | None = None

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        x, labels = inputs(g, batch, "patches", AXES)
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


class Mixer(OfPatches):
    """MLP-mixer. Inputs: patches [batch, patch, pixel], labels [batch]."""

    Config = MixerConfig

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        c, (x, labels) = self.config, inputs(g, batch, "patches", AXES)
        patch, embed, ffn, mixed = {"patch": PATCHES}, {"embed": c.embed}, {"ffn": c.ffn}, {"mixed": c.mixed}
        tokens = ["batch", "patch", "embed"]
        x = layer_of(g, x, "stem", {"pixel": PIXELS}, embed, tokens)
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


class Conv(nt.Model):
    """A convolution of 3 x 3, two convolutions of 2 x 2 with stride 2, and two fully connected layers.

    The pixels that two convolutions of 2 x 2 join have axes of their own: 7 x 7 positions of `patch`, in each 2 x 2
    positions of `place`, in each 2 x 2 positions of `sub`, and around each the 3 x 3 pixels of a window. So each of the
    convolutions sums over the innermost axis. Inputs: windows [batch, patch, place, sub, pixel], labels [batch].
    """

    Config = ConvConfig

    @staticmethod
    def arrays(pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"windows": windows(pixels)}

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        c, (x, labels) = self.config, inputs(g, batch, "windows", {"patch": 49, "place": 4, "sub": 4, "pixel": 9})
        places = ["batch", "patch", "place", "sub", "embed"]
        x = activation(g, layer_of(g, x, "conv1", {"pixel": 9}, {"embed": c.embed}, places), "relu")
        inner, out = {"sub": 4, "embed": c.embed}, {"wide": 2 * c.embed}
        x = activation(g, layer_of(g, x, "conv2", inner, out, [*places[:3], "wide"]), "relu")
        inner, out = {"place": 4, "wide": 2 * c.embed}, {"channel": 2 * c.embed}
        x = activation(g, layer_of(g, x, "conv3", inner, out, [*places[:2], "channel"]), "relu")
        inner, out = {"patch": 49, "channel": 2 * c.embed}, {"ffn": c.ffn}
        x = activation(g, layer_of(g, x, "dense", inner, out, ["batch", "ffn"]), "relu")
        logits = layer_of(g, x, "head", out, {"vocab": DIGITS}, ["batch", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})


def inputs(g: nt.Graph, batch: nt.Batch, name: str, axes: dict[str, int]):
    """Declare images and labels."""
    pixels = g.input(name, {"batch": batch.size} | axes, None)
    return pixels, g.input("labels", {"batch": batch.size}, below=DIGITS, ignored=-100, scale="loss_scale")


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
    """Return pixels [count, 28, 28] and digits [count]."""
    digits = rng.integers(0, DIGITS, count)
    pixels = rng.normal(0, 0.25, (count, 28, 28))
    for image, digit, (down, right) in zip(pixels, digits, rng.integers(-3, 4, (count, 2)), strict=True):
        for segment in SHOWN[digit]:
            top, bottom, left, end = SEGMENTS[int(segment)]
            image[top + down : bottom + down + 2, left + right : end + right + 1] += 1
    return pixels, digits


def patches(pixels: np.ndarray) -> np.ndarray:
    """Return patches [count, 16, 49] of pixels [count, 28, 28], row by row."""
    return pixels.reshape(-1, 4, 7, 4, 7).transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, PIXELS)


def windows(pixels: np.ndarray) -> np.ndarray:
    """Return windows [count, 49, 4, 4, 9] of pixels [count, 28, 28], with zeros outside of the image."""
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))  # [count, 28, 28, 3, 3]
    nested = around.reshape(-1, 7, 2, 2, 7, 2, 2, 9)  # rows and columns: patch, place, sub
    return np.ascontiguousarray(nested.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, 49, 4, 4, 9))


MODELS = {
    "linear": (DeepLinear, NetConfig), "relu": (DeepReLU, NetConfig), "mixer": (Mixer, MixerConfig),
    "conv": (Conv, ConvConfig),
}  # fmt: skip

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
                pixels, labels = images(rng, batch)
                loss = trainer.step({**kind.arrays(pixels), "labels": labels})
            measured, logits = trainer.evaluate({**kind.arrays(held_out), "labels": digits}, return_logits=True)
            right = (logits.argmax(-1) == digits).mean()
            print(f"{name}: loss {loss:.3f}, held-out loss {measured:.3f}, {right:.0%} of the held-out digits")
            trainer.close()
