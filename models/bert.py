"""BERT (Devlin et al. 2019) as in transformers: masked language modelling, pre-training, classification."""

from __future__ import annotations

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_parts import EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig, embedded
from nntile_py.models.heads import bare, classified, classified_tokens, first_token, predicted, token_logits
from nntile_py.models.parts import INIT, PaddedConfig, attention_mask, dense, of_sequences
from nntile_py.schema import Count, Positive
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy

_HEAD = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"


class BERTConfig(TextEncoderConfig, PaddedConfig):
    type: str = "bert"
    kinds: Count = 2
    """Number of token types, such as sentence A and sentence B (transformers' token_type_ids)."""
    layer_norm_eps: Positive = 1e-12
    """Added to the variance in LayerNorm."""


class BERT(TextEncoder):
    """BERT with the head that config.head names. Inputs: input_ids, labels; attention_mask and token_type_ids if given.

    Labels by head. masked_lm and pretraining: the masked token of each position, -100 at unmasked positions;
    classification: a class for each sequence, [batch]; token_classification: a class for each token. pretraining also
    needs next_sentence_label [batch].
    """

    Config = BERTConfig
    prefix = "bert."
    stem = "Bert"
    decoder = "cls.predictions.decoder.weight"

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        x, words = embedded(g, batch, c, "bert.embeddings")
        mask = attention_mask(g, batch)
        for layer in range(c.layers):
            x = EncoderLayer(g, c, f"bert.encoder.layer.{layer}", LayerNames())(g, x, mask, f"h{layer}")
        with g.scope("head"):
            if c.head == "token_classification":
                return classified_tokens(g, batch, c, x)
            if c.head in ("pooler", "none"):
                return bare(g, c, x, "bert.pooler.dense")
            if c.head in ("classification", "regression"):
                return classified(g, batch, c, first_token(g, x, c, "bert.pooler.dense", "tanh"))
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, _HEAD, self.decoder)
            loss = cross_entropy(g, logits, labels)
            if c.head == "masked_lm":
                return Traced(loss, {"logits": logits})
            nexts = g.input("next_sentence_label", of_sequences(batch), below=2, ignored=IGNORED, scale="next_scale")
            pooled = first_token(g, x, c, "bert.pooler.dense", "tanh")
            relation = dense(g, pooled, "cls.seq_relationship", {"hidden": c.embed}, {"classes": 2}, INIT)
            loss = cross_entropy(g, relation, nexts, loss=loss, scale="next_scale")
            return Traced(loss, {"prediction_logits": logits, "seq_relationship_logits": relation})
