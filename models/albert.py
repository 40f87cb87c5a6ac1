"""ALBERT (Lan et al. 2020) as in transformers: BERT whose layers share their weights, with a narrower embedding."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_parts import PADDED_KEYS, EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig, embedded
from nntile_py.models.head_config import EncoderHead
from nntile_py.models.heads import first_token, predicted, sequence_or_token_head, token_logits
from nntile_py.models.parts import INIT, PaddedConfig, attention_mask, dense, of_sequences
from nntile_py.schema import Count, Positive
from nntile_py.tasks.activation import ActivationName
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import dropout, rename

_LAYER = LayerNames(
    query="attention.query", key="attention.key", value="attention.value", attended="attention.dense",
    attended_norm="attention.LayerNorm", wide="ffn", narrow="ffn_output", narrow_norm="full_layer_layer_norm",
)  # fmt: skip
_HEAD = "predictions.dense", "predictions.LayerNorm", "predictions.bias"


class ALBERTConfig(TextEncoderConfig, PaddedConfig):
    type: str = "albert"
    head: Literal[EncoderHead, "pretraining", "multiple_choice", "pooler", "none"] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states, `pooler` also a vector for each
    sequence."""
    groups: Count = 1
    """Number of groups of consecutive layers. The layers of a group share one set of weights."""
    inner: Count = 1
    """Number of different layers that a group applies in sequence each time; the model applies `layers` times `inner`
    layers in all."""
    kinds: Count = 2
    """Number of token types, such as sentence A and sentence B (transformers' token_type_ids)."""
    embedding: Count = 128
    """Width of the embedding. A product expands it to `embed`."""
    activation: ActivationName = "gelu_new"
    """Activation function of the feed-forward part."""
    layer_norm_eps: Positive = 1e-12
    """Added to the variance in LayerNorm."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.groups > self.layers:
            raise ConfigError(f"model.groups: got {self.groups}; allowed: 1 to model.layers = {self.layers}")
        if self.head == "pretraining" and self.classes != 2:
            need = "2 with head: pretraining, the orders that two sentences have"
            raise ConfigError(f"model.classes: got {self.classes}; allowed: {need}")
        return self


class ALBERT(TextEncoder[ALBERTConfig]):
    """ALBERT with the head that config.head names. Inputs: input_ids, labels; attention_mask, token_type_ids if given.

    Labels by head. masked_lm and pretraining: the masked token of each position, -100 at unmasked positions;
    classification: a class for each sequence, [batch]; token_classification: a class for each token. pretraining also
    needs sentence_order_label [batch].
    """

    Config = ALBERTConfig
    prefix = "albert."
    stem = "Albert"
    decoder = "predictions.decoder.weight"
    absent: ClassVar = TextEncoder.absent | {"hidden_act": "gelu_new"}
    keys: ClassVar = PADDED_KEYS | {
        "embedding": "embedding_size", "groups": "num_hidden_groups", "inner": "inner_group_num"
    }  # fmt: skip

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        x, words = embedded(g, batch, c, "albert.embeddings", width=c.embedding)
        mask, here = attention_mask(g, batch), "albert.encoder"
        with g.scope("embed"):
            narrow, wide = {"embed": c.embedding}, {"hidden": c.embed}
            x = rename(g, dense(g, x, f"{here}.embedding_hidden_mapping_in", narrow, wide, INIT), hidden="embed")
        layers = [
            [EncoderLayer(g, c, f"{here}.albert_layer_groups.{k}.albert_layers.{n}", _LAYER) for n in range(c.inner)]
            for k in range(c.groups)
        ]
        for number in range(c.layers):
            for inner, layer in enumerate(layers[int(number / (c.layers / c.groups))]):
                x = layer(g, x, mask, f"h{number * c.inner + inner}")
        with g.scope("head"):
            pooled = partial(first_token, g, x, c, "albert.pooler", "tanh")
            if traced := sequence_or_token_head(g, batch, c, x, pooled, pooler="albert.pooler"):
                return traced
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, _HEAD, self.decoder)
            loss = cross_entropy(g, logits, labels)
            if c.head == "masked_lm":
                return Traced(loss, {"logits": logits})
            orders = g.input("sentence_order_label", of_sequences(batch), below=2, ignored=IGNORED, scale="order_scale")
            vector = dropout(g, pooled(), c.dropout)
            order = dense(g, vector, "sop_classifier.classifier", {"hidden": c.embed}, {"classes": 2}, INIT)
            loss = cross_entropy(g, order, orders, loss=loss, scale="order_scale")
            return Traced(loss, {"prediction_logits": logits, "sop_logits": order})

    # -- transformers

    def hf_config(self) -> dict[str, Any]:
        return {"classifier_dropout_prob": self.config.dropout} | super().hf_config()
