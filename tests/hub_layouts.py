"""Much downloaded checkpoints on the hub: what their config.json and weight files say beyond sizes.

Each layout is a config.json with tiny sizes. transformers makes the model from it, and its weights are random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from model_cases import EMBED, FFN, HEADS, KV_HEADS, LAYERS, SEQ, VOCAB

Config = Mapping[str, Any]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint.

    Attributes:
        kind: Class of transformers that computes the expected values.
        config: Content of config.json. Without `architectures`, that of `kind` is added; None: none is there.
        bare: The file has the weights of the base model alone, without its prefix. Its head is drawn.
        old: LayerNorms are named gamma and beta.
        drop: Parts of names of weights that the file does not have.
        more: Further tensors of the file.
        dtype: dtype of the weights.
        files: `safetensors` or `bin`.
        parts: The weights are in two files with an index.
        refused: What the message says if the checkpoint cannot be read.
    """

    kind: str
    config: Config
    bare: bool = False
    old: bool = False
    drop: tuple[str, ...] = ()
    more: Tensors = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    files: str = "safetensors"
    parts: bool = False
    refused: str = ""

    @property
    def drawn(self) -> bool:
        """Whether a new classifier of two classes takes the place of the head that the file does not have."""
        return self.bare and "Classification" in self.kind


def labels(*names: str) -> dict[str, Any]:
    """Return the keys of config.json that name the classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def arch(*names: str) -> dict[str, Any]:
    return {"architectures": [*names]}


_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.02}
_ENCODER = _OFF | {
    "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "hidden_act": "gelu",
}  # fmt: skip
_BERT = _ENCODER | {
    "model_type": "bert", "max_position_embeddings": SEQ, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}  # fmt: skip
_NEWER = {"position_embedding_type": "absolute", "use_cache": True, "gradient_checkpointing": False}
_POOLER = {
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
_SENTENCE = _BERT | _NEWER | arch("BertModel") | {"classifier_dropout": None}
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_ROBERTA = _ENCODER | _SPECIAL | {
    "model_type": "roberta", "max_position_embeddings": SEQ + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5
}  # fmt: skip
_XLM = _ROBERTA | {"model_type": "xlm-roberta", "output_past": True}
_CAMEMBERT = _ROBERTA | {"model_type": "camembert", "output_past": True, "bos_token_id": 5, "eos_token_id": 6}
_DISTIL = {
    "model_type": "distilbert", "vocab_size": VOCAB, "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS,
    "hidden_dim": FFN, "max_position_embeddings": SEQ, "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu",
    "initializer_range": 0.02, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.0,
    "sinusoidal_pos_embds": False, "tie_weights_": True,
}  # fmt: skip
_ALBERT = _ENCODER | {
    "model_type": "albert", "max_position_embeddings": SEQ, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "embedding_size": 10, "inner_group_num": 1, "num_hidden_groups": 1, "net_structure_type": 0, "gap_size": 0,
    "num_memory_blocks": 0, "down_scale_factor": 1, "hidden_act": "gelu_new", "classifier_dropout_prob": 0.0,
    "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
_DEBERTA = _ENCODER | {
    "model_type": "deberta", "max_position_embeddings": SEQ, "max_relative_positions": -1, "relative_attention": True,
    "pos_att_type": "c2p|p2c", "position_biased_input": False, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
    "padding_idx": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu", "legacy": False,
}  # fmt: skip
_DEBERTA_V2 = _DEBERTA | {
    "model_type": "deberta-v2", "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p",
}  # fmt: skip
_TUNED = {"pooler_hidden_size": EMBED, "pos_att_type": ["p2c", "c2p"], "legacy": True}
_MODERN = {
    "model_type": "modernbert", "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "intermediate_size": FFN, "max_position_embeddings": SEQ, "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    "pad_token_id": 3, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "local_attention": 6, "local_rope_theta": 10000.0, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False,
    "norm_eps": 1e-5, "position_embedding_type": "absolute", "tie_word_embeddings": True, "torch_dtype": "float32",
    "sparse_prediction": False, "sparse_pred_ignore_index": -100, "reference_compile": None,
    "repad_logits_with_grad": False,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": SEQ, "n_ctx": SEQ, "n_embd": EMBED, "n_layer": LAYERS,
    "n_head": HEADS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "bos_token_id": 50, "eos_token_id": 50,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": FFN,
    "max_position_embeddings": SEQ, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_cache": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1e4,
}  # fmt: skip
_LLAMA3 = _LLAMA | {"rope_theta": 500000.0, "bos_token_id": 50, "eos_token_id": 51, "mlp_bias": False}
_LLAMA31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}  # fmt: skip
_OLD_KEYS = ("pretraining_tp", "rope_scaling", "attention_bias")
_MISTRAL = {key: value for key, value in _LLAMA.items() if key not in _OLD_KEYS} | {"model_type": "mistral"}
_QWEN2 = _MISTRAL | {
    "model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 32768, "use_sliding_window": False,
    "max_window_layers": 21, "rms_norm_eps": 1e-6,
}  # fmt: skip
_QWEN3 = _QWEN2 | {
    "model_type": "qwen3", "head_dim": 8, "attention_bias": False, "rope_scaling": None, "sliding_window": None
}  # fmt: skip

_IDS = {"embeddings.position_ids": torch.arange(SEQ)[None]}
_BERT_IDS = {"bert.embeddings.position_ids": torch.arange(SEQ)[None]}
_ROBERTA_IDS = {"roberta.embeddings.position_ids": torch.arange(SEQ + 2)[None]}
_NEXT = {"cls.seq_relationship.weight": torch.ones(2, EMBED), "cls.seq_relationship.bias": torch.ones(2)}
_POOLED = {
    "roberta.pooler.dense.weight": torch.ones(EMBED, EMBED), "roberta.pooler.dense.bias": torch.ones(EMBED)
}  # fmt: skip
_CAUSAL = {"attn.bias": torch.ones(1, 1, SEQ, SEQ), "attn.masked_bias": torch.tensor(-1e4)}
_GPT2_MASKS = {f"h.{n}.{name}": value.clone() for n in range(LAYERS) for name, value in _CAUSAL.items()}
_INV_FREQ = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(LAYERS)}
_ENTITIES = "O", "B-PER", "I-PER", "B-LOC"
_HALF, _BRAIN = torch.float16, torch.bfloat16


def bert(**more: Any) -> Layout:
    """A BERT of 2018: names gamma and beta, both heads, and no bias of the decoder."""
    return Layout("BertForMaskedLM", _BERT | more, old=True, drop=("predictions.decoder.bias",), more=_NEXT)


def sentences(*, dtype: torch.dtype = torch.float32, files: str = "safetensors", **more: Any) -> Layout:
    """An encoder of sentences: a bare BertModel with its pooler."""
    return Layout(
        "BertForSequenceClassification", _SENTENCE | more, bare=True, more=_IDS, dtype=dtype, files=files
    )


LAYOUTS: dict[str, Layout] = {
    # -- BERT
    "bert-base-uncased": bert(**_NEWER, transformers_version="4.6.0.dev0"),
    "bert-base-cased": bert(**_NEWER),
    "bert-large-uncased": bert(**_NEWER),
    "bert-base-multilingual-cased": bert(**_POOLER),
    "bert-base-multilingual-uncased": bert(**_POOLER, **_NEWER),
    "bert-base-chinese": bert(**_POOLER),
    "bert_uncased_L-2_H-128_A-2": Layout(
        "BertForMaskedLM", {k: v for k, v in _BERT.items() if k not in ("model_type", "pad_token_id")},
        refused="got model_type None",
    ),
    "Bio_ClinicalBERT": Layout("BertForMaskedLM", _BERT | {"architectures": None}, more=_BERT_IDS, files="bin"),
    "PubMedBERT": Layout("BertForMaskedLM", _BERT, more=_BERT_IDS, files="bin"),
    "rubert-tiny2": Layout("BertForPreTraining", _BERT | _NEWER | {"emb_size": EMBED}, more=_BERT_IDS),
    "all-MiniLM-L6-v2": sentences(_name_or_path="nreimers/MiniLM-L6-H384-uncased", transformers_version="4.8.2"),
    "all-MiniLM-L12-v2": sentences(_name_or_path="microsoft/MiniLM-L12-H384-uncased"),
    "paraphrase-MiniLM-L6-v2": sentences(files="bin"),
    "paraphrase-multilingual-MiniLM-L12-v2": sentences(tokenizer_class="XLMRobertaTokenizer"),
    "multi-qa-MiniLM-L6-cos-v1": sentences(),
    "LaBSE": sentences(**_POOLER),
    "bge-small-en-v1.5": sentences(**labels("LABEL_0"), torch_dtype="float32"),
    "bge-base-en-v1.5": sentences(**labels("LABEL_0")),
    "bge-large-en-v1.5": sentences(**labels("LABEL_0"), _name_or_path="sentence_transformers/"),
    "e5-base-v2": sentences(_name_or_path="tmp/", torch_dtype="float32"),
    "e5-small-v2": sentences(),
    "multilingual-e5-small": sentences(tokenizer_class="XLMRobertaTokenizer"),
    "gte-base": sentences(torch_dtype="float16", dtype=_HALF),
    "gte-small": sentences(torch_dtype="float16", dtype=_HALF),
    "ms-marco-MiniLM-L6-v2": Layout(
        "BertForSequenceClassification",
        _BERT | labels("LABEL_0") | {
            "gradient_checkpointing": False, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
        },
        more=_BERT_IDS,
    ),
    "finbert": Layout(
        "BertForSequenceClassification", _BERT | labels("positive", "negative", "neutral"), files="bin"
    ),
    "finbert-tone": Layout("BertForSequenceClassification", _BERT | labels("Neutral", "Positive"), files="bin"),
    "multilingual-uncased-sentiment": Layout(
        "BertForSequenceClassification",
        _BERT | _POOLER | labels("1 star", "2 stars", "3 stars") | {
            "_num_labels": 3, "finetuning_task": "sentiment-analysis", "output_past": True
        },
        more=_BERT_IDS,
    ),
    "bert-base-NER": Layout(
        "BertForTokenClassification",
        _BERT | labels(*_ENTITIES) | {"_num_labels": 4, "output_past": True},
        more=_BERT_IDS | {"bert.pooler.dense.weight": torch.ones(EMBED, EMBED)},
    ),
    "bert-large-NER": Layout("BertForTokenClassification", _BERT | labels(*_ENTITIES) | {"_num_labels": 4}),
    "bert-large-cased-conll03": Layout(
        "BertForTokenClassification", _BERT | _POOLER | labels(*_ENTITIES) | {"_num_labels": 4}, more=_BERT_IDS
    ),
    "bert-large-uncased-squad": Layout("BertForQuestionAnswering", _BERT, old=True, more=_NEXT),
    # -- RoBERTa and its other names
    "roberta-base": Layout("RobertaForMaskedLM", _ROBERTA, drop=("decoder.",), more=_ROBERTA_IDS | _POOLED),
    "roberta-large": Layout("RobertaForMaskedLM", _ROBERTA, more=_ROBERTA_IDS),
    "distilroberta-base": Layout("RobertaForMaskedLM", _ROBERTA, more=_POOLED),
    "twitter-roberta-base-sentiment": Layout(
        "RobertaForSequenceClassification", _ROBERTA | labels("LABEL_0", "LABEL_1", "LABEL_2"),
        more=_POOLED | _ROBERTA_IDS, files="bin",
    ),
    "twitter-roberta-base-sentiment-latest": Layout(
        "RobertaForSequenceClassification",
        _ROBERTA | labels("negative", "neutral", "positive") | {"gradient_checkpointing": False},
    ),
    "emotion-english-distilroberta-base": Layout(
        "RobertaForSequenceClassification", _ROBERTA | _NEWER | labels("anger", "disgust", "fear"),
        more=_ROBERTA_IDS, files="bin",
    ),
    "roberta-large-mnli": Layout(
        "RobertaForSequenceClassification",
        _ROBERTA | labels("CONTRADICTION", "NEUTRAL", "ENTAILMENT") | {"_num_labels": 3}, more=_POOLED,
    ),
    "roberta-base-go_emotions": Layout(
        "RobertaForSequenceClassification",
        _ROBERTA | labels("admiration", "amusement", "anger") | {"problem_type": "multi_label_classification"},
    ),
    "roberta-base-squad2": Layout(
        "RobertaForQuestionAnswering", _ROBERTA | {"language": "english", "name": "Roberta"}, more=_ROBERTA_IDS
    ),
    "all-distilroberta-v1": Layout(
        "RobertaForSequenceClassification", _ROBERTA | arch("RobertaModel"), bare=True,
        more={"embeddings.position_ids": torch.arange(SEQ + 2)[None]},
    ),
    "xlm-roberta-base": Layout("XLMRobertaForMaskedLM", _XLM, more=_ROBERTA_IDS),
    "xlm-roberta-large": Layout("XLMRobertaForMaskedLM", _XLM, parts=True, drop=("decoder.bias",)),
    "multilingual-e5-base": Layout(
        "XLMRobertaForSequenceClassification", _XLM | arch("XLMRobertaModel"), bare=True,
        more={"embeddings.position_ids": torch.arange(SEQ + 2)[None]},
    ),
    "bge-m3": Layout(
        "XLMRobertaForSequenceClassification", _XLM | arch("XLMRobertaModel"), bare=True, files="bin"
    ),
    "bge-reranker-base": Layout("XLMRobertaForSequenceClassification", _XLM | labels("LABEL_0")),
    "camembert-base": Layout("CamembertForMaskedLM", _CAMEMBERT, more=_ROBERTA_IDS),
    "camembert-large": Layout("CamembertForMaskedLM", _CAMEMBERT, files="bin"),
    # -- DistilBERT, ALBERT
    "distilbert-base-uncased": Layout("DistilBertForMaskedLM", _DISTIL, drop=("vocab_projector.weight",)),
    "distilbert-base-cased": Layout("DistilBertForMaskedLM", _DISTIL | {"output_past": True}),
    "distilbert-base-multilingual-cased": Layout("DistilBertForMaskedLM", _DISTIL | {"output_past": True}),
    "distilbert-sst-2": Layout(
        "DistilBertForSequenceClassification",
        _DISTIL | labels("NEGATIVE", "POSITIVE") | {"finetuning_task": "sst-2", "output_past": True},
    ),
    "distilbert-base-cased-distilled-squad": Layout("DistilBertForQuestionAnswering", _DISTIL | {"qa_dropout": 0.0}),
    "msmarco-distilbert-base-v4": Layout(
        "DistilBertForSequenceClassification", _DISTIL | arch("DistilBertModel"), bare=True
    ),
    "albert-base-v2": Layout(
        "AlbertForMaskedLM", _ALBERT, more={"albert.embeddings.position_ids": torch.arange(SEQ)[None]}
    ),
    # -- DeBERTa
    "deberta-base": Layout("DebertaForMaskedLM", _DEBERTA, files="bin"),
    "deberta-v2-xlarge": Layout(
        "DebertaV2ForMaskedLM", _DEBERTA_V2 | {"conv_kernel_size": 3, "conv_act": "gelu", "attention_head_size": 4},
        files="bin",
    ),
    "deberta-v3-base": Layout("DebertaV2ForMaskedLM", _DEBERTA_V2, files="bin"),
    "deberta-v3-small": Layout("DebertaV2ForMaskedLM", _DEBERTA_V2, files="bin"),
    "mdeberta-v3-base": Layout("DebertaV2ForMaskedLM", _DEBERTA_V2 | {"type_vocab_size": 0}, dtype=_HALF, files="bin"),
    "DeBERTa-v3-base-mnli": Layout(
        "DebertaV2ForSequenceClassification",
        _DEBERTA_V2 | _TUNED | labels("entailment", "neutral", "contradiction") | {"torch_dtype": "float16"},
        dtype=_HALF,
    ),
    "nli-deberta-v3-base": Layout(
        "DebertaV2ForSequenceClassification", _DEBERTA_V2 | _TUNED | labels("contradiction", "entailment", "neutral")
    ),
    # -- ModernBERT
    "ModernBERT-base": Layout("ModernBertForMaskedLM", _MODERN),
    "ModernBERT-large": Layout("ModernBertForMaskedLM", _MODERN),
    "gte-reranker-modernbert-base": Layout(
        "ModernBertForSequenceClassification", _MODERN | labels("LABEL_0"), dtype=_HALF
    ),
    # -- GPT-2
    "gpt2": Layout("GPT2LMHeadModel", _GPT2, bare=True, more=_GPT2_MASKS),
    "gpt2-medium": Layout("GPT2LMHeadModel", _GPT2 | {"n_special": 0, "predict_special_tokens": True}, bare=True),
    "gpt2-large": Layout("GPT2LMHeadModel", _GPT2 | {"n_special": 0, "predict_special_tokens": True}, bare=True),
    "gpt2-xl": Layout("GPT2LMHeadModel", _GPT2 | {"output_past": True}, bare=True),
    "distilgpt2": Layout("GPT2LMHeadModel", _GPT2 | labels("LABEL_0") | {"_num_labels": 1}),
    "DialoGPT-medium": Layout(
        "GPT2LMHeadModel", _GPT2 | {"task_specific_params": {"conversational": {"max_length": 1000}}},
        dtype=_HALF, files="bin",
    ),
    # -- Llama, Mistral, Qwen
    "TinyLlama-1.1B-Chat-v1.0": Layout("LlamaForCausalLM", _LLAMA, dtype=_BRAIN),
    "SmolLM-135M": Layout("LlamaForCausalLM", _LLAMA | {"tie_word_embeddings": True}, dtype=_BRAIN),
    "SmolLM2-135M-Instruct": Layout(
        "LlamaForCausalLM",
        _LLAMA | {
            "tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False, "pad_token_id": 2,
            "rope_theta": 100000, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        dtype=_BRAIN,
    ),
    "Llama-2-7b-hf": Layout("LlamaForCausalLM", _LLAMA | {"pad_token_id": 0}, dtype=_HALF, parts=True, more=_INV_FREQ),
    "vicuna-7b-v1.5": Layout("LlamaForCausalLM", _LLAMA | {"pad_token_id": 0}, dtype=_HALF, files="bin", parts=True),
    "Meta-Llama-3-8B": Layout("LlamaForCausalLM", _LLAMA3, dtype=_BRAIN, parts=True),
    "Llama-3.1-8B-Instruct": Layout(
        "LlamaForCausalLM", _LLAMA3 | {"rope_scaling": _LLAMA31, "eos_token_id": [51, 52, 53]}, dtype=_BRAIN
    ),
    "Llama-3.2-1B": Layout(
        "LlamaForCausalLM",
        _LLAMA3 | {"rope_scaling": _LLAMA31 | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 4},
        dtype=_BRAIN,
    ),
    "deepseek-coder-1.3b": Layout(
        "LlamaForCausalLM", _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100000}
    ),
    "Mistral-7B-v0.1": Layout("MistralForCausalLM", _MISTRAL | {"sliding_window": 4}, dtype=_BRAIN),
    "Mistral-7B-v0.3": Layout(
        "MistralForCausalLM", _MISTRAL | {"sliding_window": None, "rope_theta": 1e6}, dtype=_BRAIN
    ),
    "Qwen2-0.5B": Layout("Qwen2ForCausalLM", _QWEN2 | {"tie_word_embeddings": True}, dtype=_BRAIN),
    "Qwen2.5-7B-Instruct": Layout("Qwen2ForCausalLM", _QWEN2 | {"max_window_layers": 28}, dtype=_BRAIN, parts=True),
    "Qwen2.5 with yarn": Layout(
        "Qwen2ForCausalLM",
        _QWEN2 | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8, "type": "yarn"}},
    ),
    "Qwen3-0.6B": Layout("Qwen3ForCausalLM", _QWEN3 | {"tie_word_embeddings": True}, dtype=_BRAIN),
    "Qwen3-8B": Layout("Qwen3ForCausalLM", _QWEN3, dtype=_BRAIN),
    # -- other families, and what no class of ours computes
    "all-mpnet-base-v2": Layout(
        "BertForMaskedLM", _BERT | arch("MPNetModel") | {"model_type": "mpnet"}, refused="got model_type 'mpnet'"
    ),
    "Llama-2-7b-GPTQ": Layout(
        "LlamaForCausalLM", _LLAMA | {"quantization_config": {"bits": 4, "quant_method": "gptq"}},
        refused="quantization_config is",
    ),
    "gte-base-en-v1.5": Layout(
        "BertForMaskedLM", _BERT | {"model_type": "new", "auto_map": {"AutoModel": "modeling.NewModel"}},
        refused="got model_type 'new'",
    ),
}  # fmt: skip
