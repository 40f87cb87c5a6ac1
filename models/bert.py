"""BERT (Devlin et al. 2019) as in transformers: masked language modelling, pre-training, classification."""

from __future__ import annotations

from functools import partial
from typing import Literal

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_decoder import DecodableConfig, DecodableEncoder
from nntile_py.models.bert_parts import embedded
from nntile_py.models.head_config import EncoderHead
from nntile_py.models.heads import first_token, next_sentence, predicted, sequence_or_token_head, token_logits
from nntile_py.models.parts import PaddedConfig
from nntile_py.schema import Count, Positive
from nntile_py.tasks.cross_entropy import cross_entropy

_HEAD = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"


class BERTConfig(DecodableConfig, PaddedConfig):
    type: str = "bert"
    head: Literal[
        EncoderHead, "causal_lm", "pretraining", "multiple_choice", "next_sentence_prediction", "pooler", "none"
    ] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states, `pooler` also a vector for each
    sequence."""
    kinds: Count = 2
    """Number of token types, such as sentence A and sentence B (transformers' token_type_ids)."""
    layer_norm_eps: Positive = 1e-12
    """Added to the variance in LayerNorm."""


class BERT(DecodableEncoder[BERTConfig]):
    """BERT with the head that config.head names. Inputs: input_ids, labels; attention_mask and token_type_ids if given.

    Labels by head. masked_lm and pretraining: the masked token of each position, -100 at unmasked positions; causal_lm:
    the tokens themselves; classification: a class for each sequence, [batch]; token_classification: a class for each
    token. pretraining also needs next_sentence_label [batch].
    """

    Config = BERTConfig
    prefix = "bert."
    stem = "Bert"
    decoder = "cls.predictions.decoder.weight"

    @classmethod
    def architectures(cls) -> dict[str, str]:
        return super().architectures() | {"causal_lm": "BertLMHeadModel"}

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        x, words = embedded(g, batch, c, "bert.embeddings")
        x = self.encoded(g, batch, x, "bert.encoder.layer")
        with g.scope("head"):
            pooled = partial(first_token, g, x, c, "bert.pooler.dense", "tanh")
            if c.head == "next_sentence_prediction":
                return next_sentence(g, batch, c, pooled(), "labels")
            if traced := sequence_or_token_head(g, batch, c, x, pooled, pooler="bert.pooler.dense"):
                return traced
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, _HEAD, self.decoder)
            loss = cross_entropy(g, logits, labels)
            if c.head in ("masked_lm", "causal_lm"):
                return Traced(loss, {"logits": logits})
            total, relation = next_sentence(g, batch, c, pooled(), "next_sentence_label", loss)
            return Traced(total, {"prediction_logits": logits, "seq_relationship_logits": relation["logits"]})
