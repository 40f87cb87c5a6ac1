"""DistilBERT (Sanh et al. 2019) as in transformers: BERT without token types. Published models have 6 layers."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_parts import EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig, embedded
from nntile_py.models.head_config import EncoderHead
from nntile_py.models.heads import first_token, predicted, sequence_or_token_head, token_logits
from nntile_py.models.parts import PaddedConfig, attention_mask
from nntile_py.tasks.cross_entropy import cross_entropy

_LAYER = LayerNames(
    query="attention.q_lin", key="attention.k_lin", value="attention.v_lin", attended="attention.out_lin",
    attended_norm="sa_layer_norm", wide="ffn.lin1", narrow="ffn.lin2", narrow_norm="output_layer_norm",
)  # fmt: skip


class DistilBERTConfig(TextEncoderConfig, PaddedConfig):
    type: str = "distilbert"
    head: Literal[EncoderHead, "multiple_choice", "none"] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states."""
    layer_norm_eps: ClassVar[float] = 1e-12  # a constant in transformers


class DistilBERT(TextEncoder[DistilBERTConfig]):
    """DistilBERT with the head that config.head names. Inputs: input_ids, labels; attention_mask if given.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; classification: a class
    for each sequence, [batch]; token_classification: a class for each token.
    """

    Config = DistilBERTConfig
    prefix = "distilbert."
    decoder = "vocab_projector.weight"
    fixed: ClassVar = TextEncoder.fixed | {"sinusoidal_pos_embds": (False,)}
    stem = "DistilBert"
    keys: ClassVar = {
        "layers": "n_layers", "embed": "dim", "heads": "n_heads", "ffn": "hidden_dim", "vocab": "vocab_size",
        "positions": "max_position_embeddings", "activation": "activation", "dropout": "dropout",
        "attention_dropout": "attention_dropout", "padding_idx": "pad_token_id",
        "tie_embeddings": "tie_word_embeddings",
    }  # fmt: skip

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        x, words = embedded(g, batch, c, "distilbert.embeddings", kinds=False)
        mask = attention_mask(g, batch)
        for layer in range(c.layers):
            x = EncoderLayer(g, c, f"distilbert.transformer.layer.{layer}", _LAYER)(g, x, mask, f"h{layer}")
        with g.scope("head"):
            vector = partial(first_token, g, x, c, "pre_classifier", "relu")
            if traced := sequence_or_token_head(g, batch, c, x, vector, answer_dropout=c.dropout):
                return traced
            names = "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, names, self.decoder)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    def hf_config(self) -> dict[str, Any]:
        return dict.fromkeys(("seq_classif_dropout", "qa_dropout"), self.config.dropout) | super().hf_config()
