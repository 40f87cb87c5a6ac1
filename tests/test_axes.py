"""Operators refuse tensors whose axes do not fit, in words that a model's author understands."""

from collections.abc import Callable

import pytest

import nntile_py as nt
from nntile_py.tasks import (
    Tensor,
    add,
    bias_add,
    binary_cross_entropy,
    cross_entropy,
    gated,
    layer_norm,
    linear,
    multiply,
    rms_norm,
    squared_error,
    transpose,
)

Text = Callable[[nt.Graph, Callable[..., Tensor]], object]

WRONG: dict[str, tuple[Text, str]] = {
    "add": (
        lambda g, p: add(g, p(batch=2, embed=4), p(embed=4)),
        r"add: both need the same axes \(bias_add takes fewer\); got p0\[batch 2, embed 4\], p1\[embed 4\]",
    ),
    "sizes": (
        lambda g, p: add(g, p(batch=2, embed=4), p(batch=2, embed=5)),
        r"Add: embed has different sizes in p0\[batch 2, embed 4\] and p1\[batch 2, embed 5\]",
    ),
    "multiply": (lambda g, p: multiply(g, p(embed=4), p(ffn=4)), "multiply: p0.*have to have the same axes and sizes"),
    "bias_add": (lambda g, p: bias_add(g, p(batch=2, embed=4), p(ffn=4)), "bias_add: the bias needs some of the axes"),
    "transpose": (
        lambda g, p: transpose(g, p(batch=2, embed=4), ["batch", "ffn"]),
        r"transpose: the axes batch, ffn are not those of the tensor; got p0\[batch 2, embed 4\]",
    ),
    "linear": (
        lambda g, p: linear(g, p(batch=2, embed=4), p(ffn=3, embed=4), ["batch", "vocab"]),
        r"a product of p0\[batch 2, embed 4\] and p1\[ffn 3, embed 4\] cannot have the axes batch, vocab",
    ),
    "gated": (lambda g, p: gated(g, p(ffn=4), p(embed=4), "silu"), "gated: p0.*have to have the same axes and sizes"),
    "layer_norm": (
        lambda g, p: layer_norm(g, p(embed=4, batch=2), p(embed=4), p(embed=4), 1e-5),
        "layer_norm: a weight must have the last axis of x alone",
    ),
    "rms_norm": (
        lambda g, p: rms_norm(g, p(batch=2, ffn=4), p(embed=4), 1e-6),
        "rms_norm: a weight must have the last axis of x alone",
    ),
    "cross_entropy": (
        lambda g, p: cross_entropy(g, p(batch=2, seq=3, vocab=4), g.input("labels", {"batch": 2}, below=4)),
        "cross_entropy: the labels .* need the axes of .* but the last one",
    ),
    "binary_cross_entropy": (
        lambda g, p: binary_cross_entropy(g, p(batch=2), p(seq=2)), "binary_cross_entropy: the target .* does not fit"
    ),
    "squared_error": (lambda g, p: squared_error(g, p(batch=2), p(seq=2)), "squared_error: the target .* does not fit"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_refused(text: Text, message: str) -> None:
    g, made = nt.Graph(), 0

    def param(**axes: int) -> Tensor:
        nonlocal made
        made += 1
        return g.param(f"p{made - 1}", axes, nt.ZEROS)

    with pytest.raises(ValueError, match=message):
        text(g, param)
