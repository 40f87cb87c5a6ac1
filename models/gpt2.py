"""GPT-2 (Radford et al. 2019) as in transformers' GPT2LMHeadModel, with the same names of weights.

Axes: batch, seq, embed, heads, head_dim, ffn, vocab, position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import Normal
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.head_config import HeadedModel
from nntile_py.models.heads import decoder_head
from nntile_py.models.hf_config import ACTIVATIONS, choice
from nntile_py.models.parts import (
    DecoderConfig,
    attention_mask,
    dense,
    embedded_positions,
    norm,
    position_input,
)
from nntile_py.schema import BelowOne, Natural, Positive, Switch
from nntile_py.tasks.activation import ActivationName, activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add, dropout, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.op import Tensor


class GPT2Config(DecoderConfig):
    type: str = "gpt2"
    dropout: BelowOne = 0.0
    """Dropout of the embedding and of the residual branches."""
    activation: ActivationName = "gelu_new"
    """Activation function of the feed-forward part."""
    tie_embeddings: Switch = True
    """Compute the logits with the weights of the embedding; false: with weights of their own."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""
    scale_attention: Switch = True
    """Divide attention scores by the square root of a head's width."""
    scale_by_layer: Switch = False
    """Divide attention scores by the number of the layer, from 1."""
    padding_token: Natural | None = None
    """Number of the padding token (transformers' pad_token_id): a classifier reads the last token before padding."""

    @model_validator(mode="after")
    def _fitting(self) -> GPT2Config:
        self.check_size("embed", "heads")
        self.fill(ffn=4 * self.embed)
        self.check_dropout()
        return self


class GPT2(HeadedModel[GPT2Config]):
    """GPT-2 with a language modelling head. Inputs: input_ids, labels; attention_mask if given."""

    Config = GPT2Config
    objective = "causal"
    stem = "GPT2"
    bare = "causal_lm"
    prefix = "transformer."
    head_weights = ("lm_head.weight",)
    fixed: ClassVar = {
        "add_cross_attention": (False, None), "is_encoder_decoder": (False, None),
    }  # fmt: skip

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        embed, tokens = {"embed": c.embed}, {"batch": batch.size, "seq": batch.seq}
        heads, ffn = {"heads": c.heads, "head_dim": c.embed // c.heads}, {"ffn": c.ffn}
        init, residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * c.layers))

        def attend(x: Tensor, name: str, layer: int) -> Tensor:
            parts, packed = [], f"{name}.c_attn"
            for number, one in enumerate("qkv"):
                part = (f"{packed}.weight", f"{packed}.bias", number, 3)
                y = dense(g, x, f"{packed}.{one}", embed, heads, init, transposed=True, part=part)
                parts.append(transpose(g, y, ["batch", "heads", "seq", "head_dim"]))
            q, k, v = parts
            scale = 1 / math.sqrt(c.embed // c.heads) if c.scale_attention else 1.0
            scale /= layer + 1 if c.scale_by_layer else 1
            a = attention(g, q, k, v, mask, c.attention, c.attention_dropout, scale)
            a = transpose(g, a, ["batch", "seq", *heads])
            return dropout(g, dense(g, a, f"{name}.c_proj", heads, embed, residual, transposed=True), c.dropout)

        def mlp(x: Tensor, name: str) -> Tensor:
            y = activation(g, dense(g, x, f"{name}.c_fc", embed, ffn, init, transposed=True), c.activation)
            return dropout(g, dense(g, y, f"{name}.c_proj", ffn, embed, residual, transposed=True), c.dropout)

        ids = g.input("input_ids", tokens, below=c.vocab)
        positions = position_input(g, batch, c.positions)
        mask = attention_mask(g, batch, causal=True)
        with g.scope("embed"):
            wte = g.param("transformer.wte.weight", {"vocab": c.vocab} | embed, init)
            wpe = g.param("transformer.wpe.weight", {"position": c.positions} | embed, init)
            x = dropout(g, embedded_positions(g, embedding(g, ids, wte), positions, wpe), c.dropout)
        for layer in range(c.layers):
            here = f"transformer.h.{layer}"
            with g.scope(f"h{layer}.attn"):
                x = add(g, attend(norm(g, x, f"{here}.ln_1", c.layer_norm_eps), f"{here}.attn", layer), x)
            with g.scope(f"h{layer}.mlp"):
                x = add(g, mlp(norm(g, x, f"{here}.ln_2", c.layer_norm_eps), f"{here}.mlp"), x)
        with g.scope("head"):
            x = norm(g, x, "transformer.ln_f", c.layer_norm_eps)
            return decoder_head(g, batch, c, x, wte, "padding_token")

    # -- transformers

    def copies(self) -> Mapping[str, str]:
        tied = self.config.head == "causal_lm" and self.config.tie_embeddings
        return {"lm_head.weight": "transformer.wte.weight"} if tied else {}

    @classmethod
    def architectures(cls) -> dict[str, str]:
        return super().architectures() | {"causal_lm": "GPT2LMHeadModel"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        act = choice(raw, "activation_function", "gelu_new", *ACTIVATIONS)
        return {
            "layers": raw["n_layer"], "embed": raw["n_embd"], "heads": raw["n_head"], "vocab": raw["vocab_size"],
            "positions": raw["n_positions"], "ffn": raw.get("n_inner") or 4 * raw["n_embd"],
            "activation": ACTIVATIONS[act], "tie_embeddings": raw.get("tie_word_embeddings", True),
            "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5), "padding_token": raw.get("pad_token_id"),
            "scale_attention": raw.get("scale_attn_weights", True),
            "scale_by_layer": raw.get("scale_attn_by_inverse_layer_idx", False),
        } | cls.read_head(raw)  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return self.merged_hf({
            "model_type": "gpt2", **self.hf_head(), "vocab_size": c.vocab, "pad_token_id": c.padding_token,
            "n_positions": c.positions, "n_embd": c.embed, "n_layer": c.layers, "n_head": c.heads, "n_inner": c.ffn,
            "activation_function": c.activation, "layer_norm_epsilon": c.layer_norm_eps,
            "tie_word_embeddings": c.tie_embeddings, "embd_pdrop": c.dropout, "resid_pdrop": c.dropout,
            "scale_attn_weights": c.scale_attention, "scale_attn_by_inverse_layer_idx": c.scale_by_layer,
            "attn_pdrop": c.attention_dropout, "bos_token_id": None, "eos_token_id": None,
        })  # fmt: skip
