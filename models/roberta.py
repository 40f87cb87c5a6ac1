"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT: BERT with one token type and another numbering of positions.

Positions count only tokens that are not padding, and begin with padding_token + 1. The table of position embeddings
therefore has padding_token + 1 rows more than the longest sequence has tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_decoder import DecodableConfig, DecodableEncoder
from nntile_py.models.bert_parts import KEYS, embedded
from nntile_py.models.head_config import SEQUENCE_HEADS, EncoderHead
from nntile_py.models.heads import first_token, predicted, sequence_or_token_head, token_logits
from nntile_py.schema import Count, Positive, integer, short
from nntile_py.tasks.cross_entropy import cross_entropy

_HEAD = "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"


class RoBERTaConfig(DecodableConfig):
    type: str = "roberta"
    head: Literal[EncoderHead, "causal_lm", "multiple_choice", "pooler", "none"] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states, `pooler` also a vector for each
    sequence."""
    kinds: Count = 1
    """Number of token types (transformers' token_type_ids)."""
    padding_token: Annotated[int, *integer(0)] = 1
    """Number of the padding token. Positions count the other tokens, beginning with this number plus 1."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""

    @model_validator(mode="after")
    def _padding(self) -> Self:
        if self.vocab and self.padding_token >= self.vocab:
            need = f"less than model.vocab = {self.vocab}"
            raise ConfigError(f"model.padding_token: got {self.padding_token}; allowed: {need}")
        return self


class RoBERTa(DecodableEncoder[RoBERTaConfig]):
    """RoBERTa with the head that config.head names. Inputs: input_ids, labels; attention_mask, token_type_ids if given.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; causal_lm: the tokens
    themselves; classification: a class for each sequence, [batch]; token_classification: a class for each token.
    """

    Config = RoBERTaConfig
    prefix = "roberta."
    stem = "Roberta"
    decoder = "lm_head.decoder.weight"
    absent: ClassVar = {"pad_token_id": 1, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    keys: ClassVar = KEYS | {"padding_token": "pad_token_id"}

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        x, words = embedded(g, batch, c, "roberta.embeddings", padding=c.padding_token)
        x = self.encoded(g, batch, x, "roberta.encoder.layer")
        with g.scope("head"):
            pooler, dropped = "roberta.pooler.dense", 0.0
            if c.head in SEQUENCE_HEADS:
                pooler, dropped = "classifier.dense", c.dropout
            pooled = partial(first_token, g, x, c, pooler, "tanh", dropped)
            if traced := sequence_or_token_head(g, batch, c, x, pooled, name="classifier.out_proj", pooler=pooler):
                return traced
            y, labels = predicted(g, batch, c, x)
            # The head has gelu even if the layers have another activation.
            logits = token_logits(g, y, c, words, "gelu", _HEAD, self.decoder)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().read_config(raw)
        first = _at_least(raw, "pad_token_id", 0) + 1
        return fields | {"positions": _at_least(raw, "max_position_embeddings", first + 1) - first}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return super().hf_config() | {"max_position_embeddings": c.positions + c.padding_token + 1}


class XLMRoBERTaConfig(RoBERTaConfig):
    type: str = "xlm-roberta"


class XLMRoBERTa(RoBERTa):
    """XLM-RoBERTa (Conneau et al. 2020): RoBERTa with another vocabulary."""

    Config = XLMRoBERTaConfig
    stem = "XLMRoberta"


class CamemBERTConfig(RoBERTaConfig):
    type: str = "camembert"


class CamemBERT(RoBERTa):
    """CamemBERT (Martin et al. 2020): RoBERTa with another vocabulary."""

    Config = CamemBERTConfig
    stem = "Camembert"


def _at_least(raw: Mapping[str, Any], key: str, least: int) -> int:
    """Return the value of a key in config.json. Raises ConfigError unless it is an integer of at least `least`."""
    value = raw[key]
    if not isinstance(value, int) or value < least:
        need = f"an integer of at least {least}"
        raise ConfigError(f"model: {key} is {short(value)} in the model's config; allowed: {need}")
    return value
