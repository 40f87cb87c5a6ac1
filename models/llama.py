"""Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024) as in transformers' LlamaForCausalLM.

RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU. Axes: batch, seq, embed, heads, kv_heads,
head_dim, ffn, vocab; rotary (cosines and sines of a position).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ONES, Batch, Normal, Traced
from nntile_py.models.base import Model, TokenConfig
from nntile_py.models.hf_config import architecture, check_type, choice
from nntile_py.models.parts import LayerConfig, attention_mask, check_length, dense, rotary_input
from nntile_py.schema import Count, Positive, Switch
from nntile_py.tasks.attention import attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import add, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.gated import gated
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.rms_norm import rms_norm
from nntile_py.tasks.rotary import rotary, rotary_table


class LlamaConfig(LayerConfig, TokenConfig):
    type: str = "llama"
    kv_heads: Count | None = None
    """Number of heads of keys and values. If it is smaller than `heads`, groups of heads share keys and values. Null:
    `heads`."""
    head_dim: Count | None = None
    """Width of a head; null: `embed` divided by `heads`."""
    ffn: Count
    """Width of the feed-forward part."""
    positions: Count | None = None
    """Length of the longest sequence; null: `train.seq`."""
    tie_embeddings: Switch = False
    """Compute the logits with the weights of the embedding; false: with weights of their own."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive = 10000.0
    """Base of the rotary positions' wavelengths."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions for longer sequences, as in transformers: `rope_type` (default, linear, llama3) and its keys."""

    @model_validator(mode="after")
    def _fitting(self) -> LlamaConfig:
        if self.head_dim is None:
            self.check_size("embed", "heads")
        self.fill(kv_heads=self.heads, head_dim=self.embed // self.heads)
        self.check_size("heads", "kv_heads")
        self.check_dropout()
        return self


class Llama(Model):
    """Llama with a language modelling head. Inputs: input_ids, labels; attention_mask if given."""

    Config = LlamaConfig
    objective = "causal"
    prefix = "model."

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        if c.positions:
            check_length(batch, c.positions)
        tokens, embed, ffn = {"batch": batch.size, "seq": batch.seq}, {"embed": c.embed}, {"ffn": c.ffn}
        heads, init = {"heads": c.heads, "head_dim": c.head_dim}, Normal(0.02)
        kv_heads = {"kv_heads": c.kv_heads, "head_dim": c.head_dim} if c.kv_heads < c.heads else heads

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(g, x, g.param(f"{name}.weight", embed, ONES), c.rms_norm_eps)

        def project(x: Tensor, name: str, inner: dict[str, int], out: dict[str, int]) -> Tensor:
            return dense(g, x, name, inner, out, init, bias=False)

        def attend(x: Tensor, name: str) -> Tensor:
            q = rotary(g, project(x, f"{name}.q_proj", embed, heads), table)
            k = rotary(g, project(x, f"{name}.k_proj", embed, kv_heads), table)
            v = project(x, f"{name}.v_proj", embed, kv_heads)
            q, k, v = (transpose(g, t, ["batch", t.axes[2], "seq", "head_dim"]) for t in (q, k, v))
            a = attention(g, q, k, v, mask, c.attention, c.attention_dropout)
            return project(transpose(g, a, ["batch", "seq", *heads]), f"{name}.o_proj", heads, embed)

        def mlp(x: Tensor, name: str) -> Tensor:
            gate, up = (project(x, f"{name}.{part}_proj", embed, ffn) for part in ("gate", "up"))
            return project(gated(g, gate, up, "silu"), f"{name}.down_proj", ffn, embed)

        ids = g.input("input_ids", tokens, below=c.vocab)
        labels = g.input("labels", tokens, below=c.vocab, ignored=IGNORED, shifted=True, scale="loss_scale")
        table = rotary_input(g, batch, rotary_table(c.head_dim, batch.length, c.rope_theta, c.rope_scaling))
        mask = attention_mask(g, batch, causal=True)
        with g.scope("embed"):
            words = g.param("model.embed_tokens.weight", {"vocab": c.vocab} | embed, init)
            x = embedding(g, ids, words)
        for layer in range(c.layers):
            here = f"model.layers.{layer}"
            with g.scope(f"h{layer}.attn"):
                x = add(g, attend(norm(x, f"{here}.input_layernorm"), f"{here}.self_attn"), x)
            with g.scope(f"h{layer}.mlp"):
                x = add(g, mlp(norm(x, f"{here}.post_attention_layernorm"), f"{here}.mlp"), x)
        with g.scope("head"):
            x = norm(x, "model.norm")
            head = words if c.tie_embeddings else g.param("lm_head.weight", {"vocab": c.vocab} | embed, init)
            logits = linear(g, x, head, ["batch", "seq", "vocab"])
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        check_type(raw, "llama")
        architecture(raw, "LlamaForCausalLM", "LlamaModel")
        for key in ("attention_bias", "mlp_bias"):
            choice(raw, key, False, None)
        choice(raw, "hidden_act", "silu")
        choice(raw, "pretraining_tp", 1)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"model: rope_parameters is {rope!r} in the model's config; allowed: an object")
        theta = rope.get("rope_theta") or raw.get("rope_theta", 10000.0)
        rope = {key: value for key, value in rope.items() if key != "rope_theta"}
        sizes = {"kv_heads": raw.get("num_key_value_heads"), "head_dim": raw.get("head_dim")}
        return {
            "layers": raw["num_hidden_layers"], "embed": raw["hidden_size"], "heads": raw["num_attention_heads"],
            "ffn": raw["intermediate_size"], "vocab": raw["vocab_size"],
            "positions": raw.get("max_position_embeddings"),
            "tie_embeddings": raw.get("tie_word_embeddings", False), "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "rope_theta": theta, "rope_scaling": rope or None,
        } | {name: size for name, size in sizes.items() if size is not None}  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        rope = {"rope_type": "default"} | (c.rope_scaling or {}) | {"rope_theta": c.rope_theta}
        return self.merged_hf({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": c.vocab,
            "hidden_size": c.embed, "intermediate_size": c.ffn, "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
            "hidden_act": "silu", "max_position_embeddings": c.positions, "rms_norm_eps": c.rms_norm_eps,
            "tie_word_embeddings": c.tie_embeddings, "rope_parameters": rope, "attention_dropout": c.attention_dropout,
            "bos_token_id": None, "eos_token_id": None,
        })  # fmt: skip
