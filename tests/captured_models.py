"""Architectures of transformers, small and with random weights, that are captured and trained: see test_capture.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCAB, ROWS, SEQ = 99, 2, 16
Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]
MODELS: dict[str, Callable[[], Made]] = {}


def tokens(seq: int = SEQ) -> torch.Tensor:
    return torch.randint(5, VOCAB, (ROWS, seq))


def text(name: str, kind: str, *, target: int = SEQ, config: str = "Config", **options: Any) -> None:
    """Add a model that predicts tokens; kind: the prefix of its classes, which ends in the class's task."""
    stem, _, task = kind.partition(":")

    def make() -> Made:
        made = getattr(hf, f"{stem}{config}")(**{"vocab_size": VOCAB} | options)
        made.use_cache = False
        return getattr(hf, f"{stem}For{task or 'CausalLM'}")(made), {"input_ids": tokens(), "labels": tokens(target)}

    MODELS[name] = make


def picture(name: str, stem: str, **options: Any) -> None:
    """Add a model that classifies pictures."""

    def make() -> Made:
        model = getattr(hf, f"{stem}ForImageClassification")(getattr(hf, f"{stem}Config")(num_labels=5, **options))
        return model, {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 5, (ROWS,))}

    MODELS[name] = make


SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip
LONG: dict[str, Any] = SIZES | {"max_position_embeddings": 64}
GROUPED: dict[str, Any] = LONG | {"num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER: dict[str, Any] = LONG | NO_DROPOUT
VISION: dict[str, Any] = SIZES | NO_DROPOUT | {"image_size": 32, "patch_size": 8}
GPT: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
PAIR: dict[str, Any] = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0,
}  # fmt: skip

MODELS["gpt2"] = lambda: (
    hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, use_cache=False, **GPT)),
    {"input_ids": tokens(), "labels": tokens()},
)
for name, stem, more in (
    ("llama", "Llama", {}), ("mistral", "Mistral", {"sliding_window": 8}), ("qwen2", "Qwen2", {}),
    ("qwen3", "Qwen3", {"head_dim": 16}), ("gemma", "Gemma", {"head_dim": 12}), ("gemma2", "Gemma2", {"head_dim": 12}),
    ("phi3", "Phi3", {"pad_token_id": 0}), ("stablelm", "StableLm", {"partial_rotary_factor": 0.5}),
    ("olmo", "Olmo", {}), ("olmo2", "Olmo2", {}), ("cohere", "Cohere", {}), ("granite", "Granite", {}),
    ("starcoder2", "Starcoder2", {}), ("smollm3", "SmolLM3", {"pad_token_id": 0}), ("nemotron", "Nemotron", {}),
    ("glm", "Glm", {"head_dim": 12, "pad_token_id": 0}), ("mixtral", "Mixtral", {"num_local_experts": 2}),
):  # fmt: skip
    text(name, stem, **GROUPED | more)
text("gemma3", "Gemma3", config="TextConfig", head_dim=12, **GROUPED)
for name, stem in (("phi", "Phi"), ("gptneox", "GPTNeoX"), ("persimmon", "Persimmon")):
    text(name, stem, **LONG)
text(
    "opt", "OPT", hidden_size=48, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    word_embed_proj_dim=48, dropout=0.0,
)  # fmt: skip
text(
    "gptneo", "GPTNeo", hidden_size=48, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
    max_position_embeddings=64, window_size=8, embed_dropout=0.0, resid_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
text("gptj", "GPTJ", rotary_dim=8, **GPT)
text("codegen", "CodeGen", rotary_dim=8, **GPT)
text("bloom", "Bloom", hidden_size=48, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
text("falcon", "Falcon", hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
text("mpt", "Mpt", d_model=48, n_heads=4, n_layers=2, max_seq_len=64)
text("mamba", "Mamba", hidden_size=32, num_hidden_layers=2, state_size=4)
text(
    "xglm", "XGLM", d_model=48, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=64, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip
for name, stem, more in (
    ("bert", "Bert", {}), ("roberta", "Roberta", {}), ("albert", "Albert", {"embedding_size": 16}),
    ("electra", "Electra", {"embedding_size": 16}), ("mpnet", "MPNet", {}),
    ("deberta-v2", "DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("squeezebert", "SqueezeBert", {"embedding_size": 48}),
    ("mobilebert", "MobileBert", {"intra_bottleneck_size": 16, "embedding_size": 16}),
):  # fmt: skip
    text(name, f"{stem}:MaskedLM", **ENCODER | more)
text("modernbert", "ModernBert:MaskedLM", pad_token_id=0, **LONG)
text(
    "distilbert", "DistilBert:MaskedLM", dim=48, n_layers=2, n_heads=4, hidden_dim=96, dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
text(
    "fnet", "FNet:MaskedLM", hidden_size=48, num_hidden_layers=2, intermediate_size=96, max_position_embeddings=64,
    hidden_dropout_prob=0.0,
)  # fmt: skip
text(
    "t5", "T5:ConditionalGeneration", target=8, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
    dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip
text(
    "bart", "Bart:ConditionalGeneration", target=8, max_position_embeddings=64, pad_token_id=1, bos_token_id=0,
    eos_token_id=2, forced_eos_token_id=2, decoder_start_token_id=2, **PAIR,
)  # fmt: skip
picture("vit", "ViT", **VISION)
picture("deit", "DeiT", **VISION)
picture("beit", "Beit", out_indices=[0], drop_path_rate=0.0, **VISION)
picture("dinov2", "Dinov2", image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
picture(
    "swin", "Swin", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4,
    drop_path_rate=0.0, hidden_dropout_prob=0.0,
)  # fmt: skip
picture("resnet", "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
picture("convnext", "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0)
picture("mobilenetv2", "MobileNetV2", image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0)
picture("regnet", "RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4)
picture(
    "segformer", "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32],
    patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0,
    hidden_dropout_prob=0.0, decoder_hidden_size=16, classifier_dropout_prob=0.0,
)  # fmt: skip


def padded_classifier() -> Made:
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=VOCAB, num_labels=3, **ENCODER))
    mask = (torch.arange(SEQ)[None] < torch.tensor([SEQ, 9])[:, None]).long()
    return model, {"input_ids": tokens(), "attention_mask": mask, "labels": torch.tensor([1, 2])}


def token_classifier() -> Made:
    model = hf.XLMRobertaForTokenClassification(hf.XLMRobertaConfig(vocab_size=VOCAB, num_labels=4, **ENCODER))
    return model, {"input_ids": tokens(), "labels": torch.randint(0, 4, (ROWS, SEQ))}


def speech_classifier() -> Made:
    off = "hidden_dropout attention_dropout activation_dropout feat_proj_dropout layerdrop final_dropout mask_time_prob"
    config = hf.Wav2Vec2Config(
        vocab_size=VOCAB, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, num_labels=3,
        classifier_proj_size=16, **SIZES, **dict.fromkeys(off.split(), 0.0),
    )  # fmt: skip
    return hf.Wav2Vec2ForSequenceClassification(config), {
        "input_values": torch.randn(ROWS, 800), "labels": torch.tensor([1, 2]),
    }  # fmt: skip


def transcription() -> Made:
    config = hf.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=16, max_source_positions=20, max_target_positions=32, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
        suppress_tokens=None, **PAIR,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(ROWS, 16, 40), "labels": tokens(8),
    }  # fmt: skip


MODELS |= {
    "bert-classifier": padded_classifier, "xlm-roberta-tokens": token_classifier, "wav2vec2": speech_classifier,
    "whisper": transcription,
}  # fmt: skip
