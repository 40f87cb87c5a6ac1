"""Layers and config fields that several models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ONES, ZEROS, Init, Normal
from nntile_py.graph.params import Array, Batch, Part
from nntile_py.models.head_config import HeadConfig, SequenceHead
from nntile_py.models.model_config import ModelConfig, TokenConfig
from nntile_py.schema import UNFILLED, BelowOne, Count, Filled, Layers, Natural, Switch
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
INIT = Normal(0.02)  # initialisation of most weights
LayerType = Literal["full_attention", "sliding_attention"]  # as transformers' layer_types
LayerTypes = list[LayerType]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)


class PaddedConfig(TokenConfig):
    """Config of a model whose embedding may have a row without a gradient."""

    padding_idx: Natural | None = None
    """Row of the embedding's table that gets no gradient from look-ups, as torch.nn.Embedding's padding_idx
    (transformers' pad_token_id); null: each row gets a gradient."""

    @model_validator(mode="after")
    def _padding_in_vocab(self) -> Self:
        if self.vocab and self.padding_idx is not None and self.padding_idx >= self.vocab:
            need = f"less than model.vocab = {self.vocab}"
            raise ConfigError(f"model.padding_idx: got {self.padding_idx}; allowed: {need}")
        return self


class LayerConfig(ModelConfig):
    """Config of a model whose layers each have an attention part and a feed-forward part."""

    layers: Layers
    """Layers, each of attention and a feed-forward part."""
    embed: Count
    """Width of the model: entries of a token's vector."""
    heads: Count
    """Attention heads."""
    ffn: Filled = UNFILLED
    """Width of the feed-forward part; null: 4 times `embed`."""
    attention: Backend = "vendor"
    """The attention backend. `vendor`: the fastest fused kernel; like `merge` if `tiles.seq` cuts
    sequences. `merge`: tile by tile in one pass, merged by log-sum-exp. `flash`: tile by tile in two passes. `naive`:
    stores all scores in memory. `segments`: kernels for packed sequences (`train.pack`) and for `attention_dropout`;
    like `vendor` without both, like `naive` with dropout and `tiles.seq`. `varlen`, `cudnn`: like `vendor`, but packed
    sequences on CUDA use only ATen's variable-length flash attention, or only cuDNN's ragged kernel."""
    attention_dropout: BelowOne = 0.0
    """Probability with which an attention weight is zero in training. A value above 0 needs `attention: segments` or
    `attention: naive`; these two backends draw the same random numbers. With `train.pack` a value above 0 needs
    `segments`."""

    def check_dropout(self) -> None:
        """Raise ConfigError if the attention backend has no dropout of attention weights."""
        if self.attention_dropout and self.attention not in WITH_DROPOUT:
            raise ConfigError(
                f"model.attention_dropout: got {self.attention_dropout}; allowed: 0 unless model.attention is"
                f" {' or '.join(WITH_DROPOUT)}"
            )


def check_layer_types(c: LayerConfig) -> None:
    """Raise ConfigError unless the config's `layer_types` is null or has a type for each layer."""
    if c.layer_types is not None and len(c.layer_types) != c.layers:
        need = f"one for each of model.layers = {c.layers}"
        raise ConfigError(f"model.layer_types: got {len(c.layer_types)} types; allowed: {need}")


class DecoderConfig(HeadConfig, LayerConfig, TokenConfig):
    """Config of a model that predicts the next token."""

    head: Literal["causal_lm", SequenceHead, "none"] = "causal_lm"
    """What the model predicts. `causal_lm`: the next token. `classification`, `multi_label_classification` and
    `regression`: classes or numbers of a sequence, from its last token that is not padding. `none`: hidden states
    without a loss, for nt.Encoder."""

    positions: Filled = UNFILLED
    """Length of the longest sequence; null: `train.seq`."""
    tie_embeddings: Switch = False
    """Compute the logits with the weights of the embedding; false: with weights of their own."""
    new_head: Switch = False
    """Draw random weights for the head if the checkpoint `from` has no head, such as one of a bare LlamaModel."""


class Dense(NamedTuple):
    """Weight and bias of a dense layer x W + b, made by `dense_weights`. Call it as `weights(g, x)`.

    Attributes:
        weight: The weight W.
        bias: The bias b, or None.
        inner: Axes that the product sums over.
        out: Axes of the result that come from the weight.
    """

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
    """Declare weights for x W + b, as torch.nn.Linear has. Call the result as `weights(g, x)` to compute x W + b.

    The product sums over the axes `inner` of x; its result has the axes `out` after batch and seq. The weight is
    NAME.weight [out, inner], with `transposed` [inner, out] (as GPT-2's Conv1D); the bias is NAME.bias [out]. If the
    checkpoint stores several weights as one, such as queries, keys and values, give `part` = (name of the checkpoint's
    weight, name of its bias, number, count). The checkpoint's weight and bias then have `count` equal parts along the
    first axis of `out`; W and b are part `number`, from 0."""
    axes = {**inner, **out} if transposed else {**out, **inner}
    along = next(iter(out))
    sources = [Part(whole, *part[2:], along) for whole in part[:2]] if part else [None, None]
    weight = g.param(f"{name}.weight", axes, init, sources[0])
    return Dense(weight, g.param(f"{name}.bias", out, ZEROS, sources[1]) if bias else None, inner, out)


def dense(g: Graph, x: Tensor, name: str, inner: Sizes, out: Sizes, init: Init, **options: Any) -> Tensor:
    """Declare weights and return x W + b, as torch.nn.Linear does. Arguments and options are those of dense_weights."""
    return dense_weights(g, name, inner, out, init, **options)(g, x)


class NormWeights(NamedTuple):
    """Weight and bias of a LayerNorm over the axis embed, made by `norm_weights`. Call it as `weights(g, x, eps)`."""

    weight: Tensor
    bias: Tensor

    def __call__(self, g: Graph, x: Tensor, eps: float) -> Tensor:
        return layer_norm(g, x, self.weight, self.bias, eps)


def norm_weights(g: Graph, name: str, embed: int) -> NormWeights:
    """Declare NAME.weight and NAME.bias of a LayerNorm over the axis embed; `weights(g, x, eps)` applies the result."""
    weight = g.param(f"{name}.weight", {"embed": embed}, ONES)
    return NormWeights(weight, g.param(f"{name}.bias", {"embed": embed}, ZEROS))


def norm(g: Graph, x: Tensor, name: str, eps: float) -> Tensor:
    """Declare NAME.weight and NAME.bias of a LayerNorm over the axis embed, and return the LayerNorm of x."""
    return norm_weights(g, name, x.size("embed"))(g, x, eps)


def check_length(batch: Batch, positions: int | None) -> int:
    """Return `positions`, the number of positions of a model.

    Raises ConfigError if `positions` is None or less than the length of the batch's longest sequence.
    """
    if positions is None:
        raise ConfigError("model.positions: missing; how many tokens the longest sequence has")
    if batch.length > positions:
        raise ConfigError(f"seq: {batch.length} is longer than the model's {positions} positions")
    return positions


def given_positions(g: Graph, batch: Batch, below: int) -> Tensor | None:
    """Return the input position_ids [batch, seq], numbers below `below`; None if no step has this input."""
    if batch.packed or not batch.has("position_ids", neutral=-1):
        return None
    if "position_ids" in g.tensors:
        return g.tensors["position_ids"]
    return g.input("position_ids", {"batch": batch.size, "seq": batch.seq}, below=below)


def position_input(g: Graph, batch: Batch, positions: int | None) -> Tensor:
    """Declare an input with each token's position, int64 [seq], for `embedded_positions`.

    The positions are 0, 1, ... unless a step has an input `position_ids` [batch, seq]. For packed sequences the tensor
    is [batch, seq], and each sequence begins with 0.

    `positions` is the number of rows of the table of position embeddings. Raises ConfigError if a sequence is longer.
    """
    positions = check_length(batch, positions)
    if batch.packed:
        return _packed_input(g, batch, "positions", lambda found: found, below=positions)
    if g.cache:
        return g.cache.positions(positions)
    if (given := given_positions(g, batch, positions)) is not None:
        return given
    return g.input("positions", {"seq": batch.seq}, below=positions, default=np.arange(batch.seq))


def _packed_input(
    g: Graph, batch: Batch, name: str, make: Callable[[Array], Array], sizes: Sizes | None = None, **options: Any
) -> Tensor:
    """Declare an input [batch, seq, ...] of packed sequences; `make` computes it from each token's position.

    The position counts from 0 in each packed sequence.
    """

    def made(given: Mapping[str, Array]) -> Array:
        return make(packed_inputs.positions_of(given[packed_inputs.SEGMENTS], batch.seq))

    return g.input(name, {"batch": batch.size, "seq": batch.seq} | dict(sizes or {}), default=made, **options)


def embedded_positions(g: Graph, x: Tensor, positions: Tensor, table: Tensor, *, padding: int | None = None) -> Tensor:
    """Return x [batch, seq, embed] plus position embeddings: the rows `positions` of the table [position, embed].

    The row `padding` of the table gets no gradient.
    """
    y = embedding(g, positions, table, padding=padding)
    return add(g, x, y) if y.axes == x.axes else bias_add(g, x, y)


def rotary_input(g: Graph, batch: Batch, table: Array, name: str = "rotary") -> Tensor:
    """Declare an input with cosines and sines of each token's position, for `rotary`.

    `rotary_table` makes `table` [positions, head_dim]; row p belongs to position p. The positions are 0, 1, ... unless
    a step has an input `position_ids` [batch, seq].
    """
    sizes, dtype = {"rotary": table.shape[1]}, accumulation_dtype(g.dtype)
    if batch.packed:
        return _packed_input(g, batch, name, lambda found: table[found], sizes, dtype=dtype)
    if g.cache:
        rows = {"position": len(table)} | sizes
        return embedding(g, g.cache.positions(len(table)), g.input(name, rows, dtype, default=table))
    if (positions := given_positions(g, batch, len(table))) is not None:
        rows = {"batch": batch.size, "seq": batch.seq} | sizes
        return g.input(name, rows, dtype, default=lambda given: table[given[positions.name]])
    return g.input(name, {"seq": batch.seq} | sizes, dtype, default=table)


def first_tokens(g: Graph, x: Tensor) -> Tensor:
    """Return the vector of each sequence's first token: [batch, embed] of x [batch, seq, embed].

    For packed sequences the result is [batch, sequence, embed], with zeros after the last sequence of a bin.
    """
    return gather(g, x, packed_inputs.starts(g)) if packed_inputs.SEGMENTS in g.tensors else select(g, x, "seq", 0)


def sequences_apart(g: Graph, batch: Batch, x: Tensor, length: int | None = None) -> Tensor:
    """Unpack x [batch, seq, ...] to [batch, row, place, ...]: each sequence gets a row of its own, padded with zeros.

    Packed sequences need this call before each operator that computes along a sequence's positions.
    The axis `row` numbers the sequences of a bin; without packing its size is 1. The axis `place` is the position in
    the sequence; its size is `length`, by default batch.length. Neither axis is cut into tiles. `sequences_together`
    is the inverse and the gradient. With this function a bin holds at most `tiles.batch` sequences. Dropout between
    the calls of these two functions uses other random numbers than in a padded batch. Raises ConfigError if sequences
    may be longer than `length`."""
    rows, tokens = packed_inputs.apart(g, batch, None if batch.packed else padding(g, batch), length or batch.length)
    return gather(g, x, rows, inverse=tokens)


def sequences_together(g: Graph, batch: Batch, x: Tensor) -> Tensor:
    """Pack padded sequences [batch, row, place, ...] again to tokens [batch, seq, ...]: the inverse of sequences_apart.

    Positions that hold no token become zeros.
    """
    rows, tokens = packed_inputs.apart(g, batch, None if batch.packed else padding(g, batch), x.size("place"))
    return gather(g, x, tokens, axes=2, inverse=rows)


def of_sequences(batch: Batch) -> dict[str, int]:
    """Return {axis: size} for an input with a value for each sequence: batch, with packed sequences also sequence."""
    return {"batch": batch.size} | ({"sequence": batch.seq} if batch.packed else {})


def attention_mask(g: Graph, batch: Batch, *, causal: bool = False, window: int | None = None) -> Mask:
    """Return the attention mask of the batch.

    The mask hides padding if steps have an input attention_mask, and with packed sequences the other sequences of a
    bin. `causal`: it also hides later tokens. `window`: a query attends only to this many positions, its own included.
    """
    if batch.packed:
        return Mask(causal, window, segments=packed_inputs.segments(g), longest=batch.packed)
    return Mask(causal, window, padding=padding(g, batch))


def padding(g: Graph, batch: Batch) -> Tensor | None:
    """Return the input attention_mask [batch, seq], 0 for padding as in transformers; None if no step has padding."""
    if not batch.has("attention_mask", neutral=1):
        return None
    if "attention_mask" in g.tensors:
        return g.tensors["attention_mask"]
    return g.input("attention_mask", {"batch": batch.size, "seq": batch.seq}, below=2)
