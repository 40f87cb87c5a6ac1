"""BERT (Devlin et al. 2019) as in transformers: masked language modelling, pre-training, classification of sequences.

Axes: batch, seq, embed, heads, head_dim, ffn, vocab, position, kind (of token), classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.declared import ZEROS, Batch, Normal, Traced
from nntile_py.graph.graph import Graph
from nntile_py.models.base import Model, TokenConfig
from nntile_py.models.checkpoint import architecture, check_type, choice
from nntile_py.models.parts import LayerConfig, dense, norm, padding, position_input
from nntile_py.schema import BelowOne, Count, Positive
from nntile_py.tasks.activation import activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import add, bias_add, dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.select import select

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}
_ARCHITECTURES = {
    "masked_lm": "BertForMaskedLM", "pretraining": "BertForPreTraining",
    "classification": "BertForSequenceClassification",
}  # fmt: skip


class BERTConfig(LayerConfig, TokenConfig):
    type: str = "bert"
    positions: Count | None = None
    """Length of the longest sequence; null: `train.seq`."""
    kinds: Count = 2
    """Kinds of tokens: of sentence A, of sentence B (transformers' token_type_ids)."""
    head: Literal["masked_lm", "pretraining", "classification"] = "masked_lm"
    """What the model is to predict. `nntile train` trains masked_lm; the others are trained from Python."""
    classes: Count = 2
    """Of classification: how many classes."""
    dropout: BelowOne = 0.0
    """Dropout of the embedding, of the residual branches and before a classifier."""
    activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
    """Between the two products of the feed-forward part."""
    layer_norm_eps: Positive = 1e-12
    """Added to the variance in LayerNorm."""

    @model_validator(mode="after")
    def _fitting(self) -> BERTConfig:
        self.check_size("embed", "heads")
        self.check_dropout()
        self.fill(ffn=4 * self.embed)
        return self


class BERT(Model):
    """BERT with the head that config.head names. Inputs: input_ids, labels; attention_mask and token_type_ids if given.

    labels: of masked_lm and pretraining the token of each position, -100 elsewhere; of classification [batch] classes.
    pretraining has next_sentence_label [batch] besides.
    """

    Config = BERTConfig
    objective = "masked"
    prefix = "bert."

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        tokens, embed, hidden = {"batch": batch.size, "seq": batch.seq}, {"embed": c.embed}, {"hidden": c.embed}
        heads, ffn, init = {"heads": c.heads, "head_dim": c.embed // c.heads}, {"ffn": c.ffn}, Normal(0.02)
        ids, positions = g.input("input_ids", tokens, below=c.vocab), position_input(g, batch, c.positions)
        mask = Mask(padding=padding(g, batch))
        kinds = g.input("token_type_ids", tokens, below=c.kinds, default=0)

        def attend(x: Tensor, name: str) -> Tensor:
            projected = [dense(g, x, f"{name}.self.{part}", embed, heads, init) for part in ("query", "key", "value")]
            q, k, v = (transpose(g, y, ["batch", "heads", "seq", "head_dim"]) for y in projected)
            a = attention(g, q, k, v, mask, c.attention, c.attention_dropout)
            return dense(g, transpose(g, a, ["batch", "seq", *heads]), f"{name}.output.dense", heads, embed, init)

        def block(x: Tensor, name: str) -> Tensor:
            with g.scope(f"{name}.attn"):
                y = dropout(g, attend(x, f"{here}.attention"), c.dropout)
                x = norm(g, add(g, y, x), f"{here}.attention.output.LayerNorm", c.layer_norm_eps)
            with g.scope(f"{name}.mlp"):
                y = activation(g, dense(g, x, f"{here}.intermediate.dense", embed, ffn, init), c.activation)
                y = dropout(g, dense(g, y, f"{here}.output.dense", ffn, embed, init), c.dropout)
                return norm(g, add(g, y, x), f"{here}.output.LayerNorm", c.layer_norm_eps)

        def pooled(x: Tensor) -> Tensor:
            first = dense(g, select(g, x, "seq", 0), "bert.pooler.dense", embed, hidden, init)
            return activation(g, first, "tanh")

        with g.scope("embed"):
            table = "bert.embeddings.{}_embeddings.weight"
            words = g.param(table.format("word"), {"vocab": c.vocab} | embed, init)
            places = g.param(table.format("position"), {"position": c.positions} | embed, init)
            types = g.param(table.format("token_type"), {"kind": c.kinds} | embed, init)
            x = bias_add(g, embedding(g, ids, words), embedding(g, positions, places))
            x = norm(g, add(g, x, embedding(g, kinds, types)), "bert.embeddings.LayerNorm", c.layer_norm_eps)
            x = dropout(g, x, c.dropout)
        for layer in range(c.layers):
            here = f"bert.encoder.layer.{layer}"
            x = block(x, f"h{layer}")
        with g.scope("head"):
            if c.head == "classification":
                labels = g.input("labels", {"batch": batch.size}, below=c.classes, ignored=IGNORED, scale="loss_scale")
                logits = dense(g, dropout(g, pooled(x), c.dropout), "classifier", hidden, {"classes": c.classes}, init)
                return Traced(cross_entropy(g, logits, labels), {"logits": logits})
            labels = g.input("labels", tokens, below=c.vocab, ignored=IGNORED, scale="loss_scale")
            y = dense(g, x, "cls.predictions.transform.dense", embed, hidden, init)
            y = rename(g, activation(g, y, c.activation), hidden="embed")
            y = norm(g, y, "cls.predictions.transform.LayerNorm", c.layer_norm_eps)
            bias = g.param("cls.predictions.bias", {"vocab": c.vocab}, ZEROS)
            logits = linear(g, y, words, ["batch", "seq", "vocab"], bias)
            loss = cross_entropy(g, logits, labels)
            if c.head == "masked_lm":
                return Traced(loss, {"logits": logits})
            nexts = g.input("next_sentence_label", {"batch": batch.size}, below=2, ignored=IGNORED, scale="next_scale")
            relation = dense(g, pooled(x), "cls.seq_relationship", hidden, {"classes": 2}, init)
            loss = cross_entropy(g, relation, nexts, loss=loss, scale="next_scale")
            return Traced(loss, {"prediction_logits": logits, "seq_relationship_logits": relation})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        check_type(raw, "bert")
        heads = {name: head for head, name in _ARCHITECTURES.items()}
        head = heads[architecture(raw, *heads)]
        for key in ("is_decoder", "add_cross_attention"):
            choice(raw, key, False, None)
        choice(raw, "position_embedding_type", "absolute")
        choice(raw, "tie_word_embeddings", True)
        choice(raw, "problem_type", None, "single_label_classification")
        act, names = choice(raw, "hidden_act", *_ACTIVATIONS), raw.get("id2label") or {}
        if not isinstance(names, dict):
            raise ConfigError(f"model: id2label is {names!r} in the model's config; allowed: an object")
        return {
            "layers": raw["num_hidden_layers"], "embed": raw["hidden_size"], "heads": raw["num_attention_heads"],
            "ffn": raw["intermediate_size"], "vocab": raw["vocab_size"], "positions": raw["max_position_embeddings"],
            "kinds": raw.get("type_vocab_size", 2), "activation": _ACTIVATIONS[act], "head": head,
            "layer_norm_eps": raw.get("layer_norm_eps", 1e-12),
            "classes": len(names) or raw.get("num_labels", 2),
        }  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return self.merged_hf({
            "model_type": "bert", "architectures": [_ARCHITECTURES[c.head]], "vocab_size": c.vocab,
            "hidden_size": c.embed, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
            "intermediate_size": c.ffn, "hidden_act": c.activation, "hidden_dropout_prob": c.dropout,
            "attention_probs_dropout_prob": c.attention_dropout, "max_position_embeddings": c.positions,
            "type_vocab_size": c.kinds, "layer_norm_eps": c.layer_norm_eps, "num_labels": c.classes,
        })  # fmt: skip
