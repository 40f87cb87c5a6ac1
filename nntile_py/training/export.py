"""What a run's checkpoints hold beside the arrays, as transformers reads it: config.json, the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nntile_py.config.run_config import RunConfig
from nntile_py.data.tokenizer import PAD, frame, number_of, roles
from nntile_py.system.folders import read
from nntile_py.training import checkpoint
from nntile_py.training.run_folder import GENERATION
from nntile_py.training.trainer import Trainer

Files = dict[str, str | bytes]


def beside_arrays(trainer: Trainer, tokenizer: Tokenizer, config: RunConfig) -> Files:
    """By name."""
    known = roles(tokenizer)
    saved = trainer.hf_config()
    for role in ("bos_token", "eos_token"):
        saved[f"{role}_id"] = tokenizer.token_to_id(known[role]) if role in known else None
    if (pad := number_of(tokenizer, PAD)) is not None:
        saved["pad_token_id"] = pad
    files = {checkpoint.CONFIG: json.dumps(saved, indent=2)} | tokenizer_files(tokenizer, config)
    if config.model.from_ and (kept := Path(config.model.from_) / GENERATION).is_file():
        files[GENERATION] = read(kept)
    return files


def tokenizer_files(tokenizer: Tokenizer, config: RunConfig) -> Files:
    """The tokenizer, which frames a text as the sequences are that the model is trained on, and how transformers' class
    for any tokenizer.json reads it; one of the folder that both model and tokenizer come from stays as it is."""
    framed = Tokenizer.from_str(tokenizer.to_str())
    if config.aim == "masked":
        frame(framed)
    how: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    how |= roles(tokenizer) | {"model_input_names": ["input_ids", "attention_mask"]}
    if getattr(config.model, "kinds", 0) > 1:
        how["model_input_names"].append("token_type_ids")
    if positions := getattr(config.model, "positions", None):
        how["model_max_length"] = positions
    text: str | bytes = json.dumps(how, indent=2)
    source, path = config.model.from_, config.tokenizer.path
    if source and path and (kept := Path(source) / checkpoint.TOKENIZER_CONFIG).is_file():
        text = read(kept) if kept.parent.samefile(Path(path).parent) else text
    return {checkpoint.TOKENIZER: framed.to_str(pretty=True), checkpoint.TOKENIZER_CONFIG: text}
