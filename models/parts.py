"""Layers that several models' texts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ONES, ZEROS, Array, Batch, Init, Part
from nntile_py.models.base import ModelConfig, TokenConfig
from nntile_py.schema import BelowOne, Count, Layers, Natural, Switch
from nntile_py.tasks.attention import WITH_DROPOUT, Backend
from nntile_py.tasks.contract import linear
from nntile_py.tasks.elementwise import add, bias_add
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.gather import gather
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.select import select

Sizes = Mapping[str, int]
ActivationName = Literal["gelu", "gelu_new", "quick_gelu", "relu", "silu", "tanh"]


class PaddedConfig(TokenConfig):
    """Config of a model whose embedding may have a row without a gradient."""

    padding_idx: Natural | None = None
    """Row of the embedding's table that gets no gradient from look-ups, as torch.nn.Embedding's padding_idx
    (transformers' pad_token_id); null: each row gets one."""

    @model_validator(mode="after")
    def _padding_in_vocab(self) -> Self:
        if self.vocab and self.padding_idx is not None and self.padding_idx >= self.vocab:
            need = f"less than model.vocab = {self.vocab}"
            raise ConfigError(f"model.padding_idx: got {self.padding_idx}; allowed: {need}")
        return self


class LayerConfig(ModelConfig):
    """Of a model that is made of layers of attention and a feed-forward part."""

    layers: Layers
    """Layers, each of attention and a feed-forward part."""
    embed: Count
    """Width of the model: entries of a token's vector."""
    heads: Count
    """Attention heads."""
    ffn: Count | None = None
    """Width of the feed-forward part; null: 4 times `embed`."""
    attention: Backend = "vendor"
    """The attention backend. `vendor`: the fastest fused kernel (ATen, cuDNN); if `tiles.seq` cuts sequences, as
    `merge`. `merge`: tile by tile in one pass, merged by log-sum-exp. `flash`: tile by tile in two passes. `naive`:
    stores all scores in memory. `segments`: kernels for packed sequences (`train.pack`) and for `attention_dropout`;
    without both as `vendor`, with dropout and `tiles.seq` as `naive`. `varlen`, `cudnn`: as `vendor`, but packed
    sequences on CUDA use only ATen's variable-length flash attention, or only cuDNN's ragged kernel."""
    attention_dropout: BelowOne = 0.0
    """Probability of dropout of attention weights; needs `attention: segments` or `naive`, which use the same random
    numbers. With `train.pack` only `segments` allows it, and models that store their scores (DeBERTa) refuse it."""

    def check_dropout(self) -> None:
        """Raise ConfigError if the attention backend has no dropout of attention weights."""
        if self.attention_dropout and self.attention not in WITH_DROPOUT:
            raise ConfigError(
                f"model.attention_dropout: got {self.attention_dropout}; allowed: 0 unless model.attention is"
                f" {' or '.join(WITH_DROPOUT)}"
            )


class DecoderConfig(LayerConfig, TokenConfig):
    """Config of a model that predicts the next token."""

    positions: Count | None = None
    """Length of the longest sequence; null: `train.seq`."""
    tie_embeddings: Switch = False
    """Compute the logits with the weights of the embedding; false: with weights of their own."""
    new_head: Switch = False
    """Draw the head's weights anew where the checkpoint `from` has none, as that of a bare LlamaModel."""


class Dense(NamedTuple):
    """A product's weight and bias, the axes that it sums over, and the axes of its result: see dense_weights."""

    weight: Tensor
    bias: Tensor | None
    inner: Sizes
    out: Sizes

    def __call__(self, g: Graph, x: Tensor) -> Tensor:
        axes = [axis for axis in x.axes if axis not in self.inner] + list(self.out)
        return linear(g, x, self.weight, axes, self.bias)


def dense_weights(
    g: Graph,
    name: str,
    inner: Sizes,
    out: Sizes,
    init: Init,
    *,
    bias: bool = True,
    transposed: bool = False,
    part: tuple[str, str, int, int] | None = None,
) -> Dense:
    """Declare weights for x W + b, as of torch.nn.Linear. The result is called as `weights(g, x)`.

    The product sums over the axes `inner` of x; its result has the axes `out` after batch and seq. The weight is
    NAME.weight [out, inner], with `transposed` [inner, out] (as GPT-2's Conv1D); the bias is NAME.bias [out]. part =
    (name of a weight, name of a bias, number, count): W and b are a part of this weight and bias, which are divided in
    `count` equal parts along the first axis of `out`."""
    axes = {**inner, **out} if transposed else {**out, **inner}
    along = next(iter(out))
    sources = [Part(whole, *part[2:], along) for whole in part[:2]] if part else [None, None]
    weight = g.param(f"{name}.weight", axes, init, sources[0])
    return Dense(weight, g.param(f"{name}.bias", out, ZEROS, sources[1]) if bias else None, inner, out)


def dense(g: Graph, x: Tensor, name: str, inner: Sizes, out: Sizes, init: Init, **options: Any) -> Tensor:
    """Return x W + b, as torch.nn.Linear does, with new weights. Arguments and options are those of dense_weights."""
    return dense_weights(g, name, inner, out, init, **options)(g, x)


class NormWeights(NamedTuple):
    """The declared weights of a LayerNorm over embed."""

    weight: Tensor
    bias: Tensor

    def __call__(self, g: Graph, x: Tensor, eps: float) -> Tensor:
        return layer_norm(g, x, self.weight, self.bias, eps)


def norm_weights(g: Graph, name: str, embed: int) -> NormWeights:
    """Declare the weights NAME.weight and NAME.bias of a LayerNorm over embed. The result is called as `weights(g, x,
    eps)`."""
    weight = g.param(f"{name}.weight", {"embed": embed}, ONES)
    return NormWeights(weight, g.param(f"{name}.bias", {"embed": embed}, ZEROS))


def norm(g: Graph, x: Tensor, name: str, eps: float) -> Tensor:
    """Apply a LayerNorm over embed, with new weights NAME.weight and NAME.bias."""
    return norm_weights(g, name, x.size("embed"))(g, x, eps)


def check_length(batch: Batch, positions: int | None) -> int:
    """Return the number of positions of a model. Raises ConfigError if it is not set or smaller than a sequence's
    length."""
    if positions is None:
        raise ConfigError("model.positions: missing; how many tokens the longest sequence has")
    if batch.length > positions:
        raise ConfigError(f"seq: {batch.length} is longer than the model's {positions} positions")
    return positions


def position_input(g: Graph, batch: Batch, positions: int | None) -> Tensor:
    """Return the position numbers, int64 [seq], which `embedded_positions` looks up in a table of `positions` rows.

    They are 0, 1, ... or the input `positions` of a step. For packed sequences: [batch, seq], beginning with 0 in
    each sequence. Raises ConfigError if a sequence is longer than the table."""
    positions = check_length(batch, positions)
    if batch.packed:
        return _packed_input(g, batch, "positions", lambda found: found, below=positions)
    return g.input("positions", {"seq": batch.seq}, below=positions, default=np.arange(batch.seq))


def _packed_input(
    g: Graph, batch: Batch, name: str, make: Callable[[Array], Array], sizes: Sizes | None = None, **options: Any
) -> Tensor:
    """An input [batch, seq, ...] that is made of each token's position in its sequence."""

    def made(given: Mapping[str, Array]) -> Array:
        return make(packed_inputs.positions_of(given[packed_inputs.SEGMENTS], batch.seq))

    return g.input(name, {"batch": batch.size, "seq": batch.seq} | dict(sizes or {}), default=made, **options)


def embedded_positions(
    g: Graph, x: Tensor, positions: Tensor, table: Tensor, *, padding: int | None = None
) -> Tensor:
    """Add position embeddings to x [batch, seq, embed]: the rows of the table [position, embed] for `positions`.

    The row `padding` gets no gradient.
    """
    y = embedding(g, positions, table, padding=padding)
    return add(g, x, y) if y.axes == x.axes else bias_add(g, x, y)


def rotary_input(g: Graph, batch: Batch, table: Array, name: str = "rotary") -> Tensor:
    """Return the rows of a `rotary_table` [positions, head_dim] for the tokens, as `rotary` needs them."""
    sizes, dtype = {"rotary": table.shape[1]}, accumulation_dtype(g.dtype)
    if batch.packed:
        return _packed_input(g, batch, name, lambda found: table[found], sizes, dtype=dtype)
    return g.input(name, {"seq": batch.seq} | sizes, dtype, default=table)


def first_tokens(g: Graph, x: Tensor) -> Tensor:
    """Return the first position of each sequence of x [batch, seq, embed]: [batch, embed]. For packed sequences the
    result is [batch, sequence, embed], with zeros after the last sequence of a bin."""
    return gather(g, x, packed_inputs.starts(g)) if packed_inputs.SEGMENTS in g.tensors else select(g, x, "seq", 0)


def sequences_apart(g: Graph, batch: Batch, x: Tensor, length: int | None = None) -> Tensor:
    """Return x [batch, seq, ...] as sequences [batch, row, place, ...], padded with zeros.

    For operators along the positions of a sequence in models that can be packed. `row` numbers the sequences of a bin,
    and is 1 without packing; `place` has `length` positions, by default batch.length; neither axis is cut. The inverse
    and the gradient is `sequences_together`. A bin then holds at most `tiles.batch` sequences, and dropout between both
    calls has other random numbers than in a padded batch. Raises ConfigError if sequences may be longer."""
    rows, tokens = packed_inputs.apart(g, batch, None if batch.packed else padding(g, batch), length or batch.length)
    return gather(g, x, rows, inverse=tokens)


def sequences_together(g: Graph, batch: Batch, x: Tensor) -> Tensor:
    """Return padded sequences [batch, row, place, ...] as tokens [batch, seq, ...]: the inverse of sequences_apart,
    with zeros for padding."""
    rows, tokens = packed_inputs.apart(g, batch, None if batch.packed else padding(g, batch), x.size("place"))
    return gather(g, x, tokens, axes=2, inverse=rows)


def of_sequences(batch: Batch) -> dict[str, int]:
    """Return the axes of an input that has one value for each sequence."""
    return {"batch": batch.size} | ({"sequence": batch.seq} if batch.packed else {})


def attention_mask(g: Graph, batch: Batch, *, causal: bool = False, window: int | None = None) -> Mask:
    """Return the mask of attention: it hides padding if steps have an attention_mask, and other packed sequences."""
    if batch.packed:
        return Mask(causal, window, segments=packed_inputs.segments(g), longest=batch.packed)
    return Mask(causal, window, padding=padding(g, batch))


def padding(g: Graph, batch: Batch) -> Tensor | None:
    """Return the input attention_mask (0 for padding, as in transformers), or None if no step has padding."""
    if not batch.has("attention_mask", neutral=1):
        return None
    if "attention_mask" in g.tensors:
        return g.tensors["attention_mask"]
    return g.input("attention_mask", {"batch": batch.size, "seq": batch.seq}, below=2)
