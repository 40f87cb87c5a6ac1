"""Detects keys of transformers' config.json that a model ignores although they could change loss or gradients."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.schema import short

# {reason: patterns of keys of config.json that for this reason do not change loss and gradients}
HARMLESS: dict[str, str] = {
    "the run's config sets dropout": "*dropout* *_pdrop",
    "special tokens are part of a step's input": "*_token_id *_token_ids",
    "start values of weights that the checkpoint already has": "initializer_* init_std",
    "generation of text": "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups"
    " diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size"
    " encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens num_return_sequences"
    " remove_invalid_values exponential_decay_length_penalty generation_config",
    "form of transformers' outputs": "output_* return_dict* use_return_dict torchscript keys_to_ignore_at_inference",
    "another computation of the same values": "use_cache attn_implementation chunk_size_feed_forward use_bfloat16"
    " reference_compile deterministic_flash_attn reorder_and_upcast_attn gradient_checkpointing repad_logits_with_grad"
    " sparse_prediction sparse_pred_ignore_index tf_legacy_loss",
    "names and history of the checkpoint": "_* model_type architectures dtype torch_dtype transformers_version"
    " transformers.js_config tokenizer_class prefix finetuning_task task_specific_params language name model_max_length"
    " sbert_ce_default_activation_function sentence_transformers num_labels id2label label2id is_llama_config",
    "heads and modules that transformers' class of the model does not have": "summary_* pooler_fc_size"
    " pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type pooler_hidden_size"
    " directionality net_structure_type down_scale_factor num_memory_blocks gap_size layers_to_keep n_ctx"
    " padding_idx tie_weights_ rope_interleaved cross_attention_hidden_size emb_size n_special predict_special_tokens"
    " layer_norm_eps",
}
_PATTERNS = [pattern for patterns in HARMLESS.values() for pattern in patterns.split()]


class Keys(dict[str, Any]):
    """The content of config.json as a dict that records in `used` which keys were read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.used.add(str(key))
        return super().__contains__(key)

    def check_used(self, model: str) -> None:
        """Raise ConfigError for a key that the model has not read and that HARMLESS does not list.

        Keys whose value is null, false, 0 or empty count as absent.
        """
        for key, value in self.items():
            if value and key not in self.used and not harmless(key):
                raise ConfigError(
                    f"model: {key} is {short(value)} in the model's config, and {model} does not know this key;"
                    " remove it from config.json if the model computes the same without it"
                )


def harmless(key: str) -> bool:
    """Return whether the key of config.json matches a pattern of HARMLESS, so it cannot change loss or gradients."""
    return any(fnmatchcase(key, pattern) for pattern in _PATTERNS)
