"""Files of a checkpoint beside the arrays: config.json, the tokenizer's files, files that the source folder has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.run_folder import OWN, SAMPLE
from nntile_py.config.run_config import RunConfig
from nntile_py.config.table_models import CONTRASTIVE
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.special_tokens import GENERATION, SpecialTokens, same_folder, special_tokens
from nntile_py.data.tokenizer import frame, read_tokenizer
from nntile_py.models.hf_config import read_json
from nntile_py.system.folders import MARK, is_name, read

Files = dict[str, str | bytes]
# Suffixes of the small files that a checkpoint copies from the folder of `model.from`: settings, chat templates,
# vocabularies. Weights, code and documentation have other suffixes.
SUFFIXES = (".json", ".jinja", ".txt", ".model")
MODULES = "modules.json"  # lists the modules of a sentence-transformers model with their folders
MODULE_WEIGHTS = (".safetensors", ".bin")
LEFT_OUT = ("_results.json", "trainer_state.json", ".index.json")
RUN_FILES = (*checkpoint.FILES, SAMPLE)  # not copied: a checkpoint or a run writes files of these names itself
TEMPLATES = "additional_chat_templates"  # transformers' folder of further chat templates
MOST_BYTES = 2**25  # larger files are not copied


def companions_note(config: RunConfig) -> str:
    """Return a message if modules.json of the model's folder cannot be copied; "" if it can, or does not exist."""
    folder = same_folder(config.tokenizer.path, config.model.from_) if config.model.from_ else None
    if not folder or not (names := incomplete_modules(folder)):
        return ""
    need = f"needs names that no file of a run has, and weights of at most {MOST_BYTES >> 20} MiB a file"
    return f"note: {MODULES} of {folder} does not go along, nor {', '.join(map(repr, names))}: a module {need}"


def model_files(trainer: Any, tokenizer: Tokenizer, config: RunConfig) -> Files:
    """Return {file name: content} of the files beside the weights, as transformers reads them.

    These are config.json, the tokenizer's files and the files of `companions`."""
    known = _special_tokens(tokenizer, config)
    files = companions(config, known)
    if config.aim == CONTRASTIVE:
        files = {name: content for name, content in files.items() if "/" not in name} | sentence_files(config)
    files |= {checkpoint.CONFIG: json.dumps(trainer.hf_config() | known.ids, indent=2)}
    return files | tokenizer_files(tokenizer, config)


def _special_tokens(tokenizer: Tokenizer, config: RunConfig) -> SpecialTokens:
    return special_tokens(tokenizer, config.tokenizer.path, config.model.from_)


def tokenizer_files(tokenizer: Tokenizer, config: RunConfig) -> Files:
    """Return {file name: content} of tokenizer.json and tokenizer_config.json.

    The tokenizer frames a text like the training sequences, such as by [CLS] and [SEP]. Truncation and padding are as
    in the tokenizer's file. If model and tokenizer come from one folder, tokenizer_config.json is a copy of the file in
    that folder. Otherwise, its chat template is the template of the tokenizer's folder."""
    framed, path = Tokenizer.from_str(tokenizer.to_str()), config.tokenizer.path
    known = _special_tokens(tokenizer, config)
    if config.aim == "masked":
        frame(framed, known.named)
    if path:
        stored = read_tokenizer(Path(path))
        if stored.truncation:
            framed.enable_truncation(**stored.truncation)
        if stored.padding:
            framed.enable_padding(**stored.padding)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= dict(known.roles) | {"model_input_names": ["input_ids", "attention_mask"]}
    if getattr(config.model, "kinds", 0) > 1:
        settings["model_input_names"].append("token_type_ids")
    if positions := getattr(config.model, "positions", None):
        settings["model_max_length"] = positions
    if path and (template := ChatTemplate(Path(path).parent)).own:
        settings["chat_template"] = template.source
    text: str | bytes = json.dumps(settings, indent=2)
    folder = same_folder(path, config.model.from_)
    if folder and (folder / checkpoint.TOKENIZER_CONFIG).is_file():
        text = read(folder / checkpoint.TOKENIZER_CONFIG)
    return {checkpoint.TOKENIZER: framed.to_str(pretty=True), checkpoint.TOKENIZER_CONFIG: text}


def sentence_files(config: RunConfig) -> Files:
    """Return {path in the folder: content} of the files that tell sentence-transformers how texts become vectors."""
    model: Any = config.model
    mean = model.sentence_pooling == "mean"
    pooling = {
        "word_embedding_dimension": model.embed, "pooling_mode_cls_token": not mean, "pooling_mode_mean_tokens": mean,
    }  # fmt: skip
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    contents = {
        MODULES: modules, "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": config.train.seq, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
    }  # fmt: skip
    return {name: json.dumps(content, indent=2) for name, content in contents.items()}


def companions(config: RunConfig, known: SpecialTokens) -> Files:
    """Return {path in the folder: content} of the files that a checkpoint copies from the folder of `model.from`.

    These are the files that companions_of yields. If the tokenizer is of another folder, only generation_config.json
    is copied, with the numbers of the tokenizer's special tokens."""
    if not config.model.from_:
        return {}
    if folder := same_folder(config.tokenizer.path, config.model.from_):
        return {str(file.relative_to(folder)): read(file) for file in companions_of(folder)}
    if not (generation := Path(config.model.from_) / GENERATION).is_file():
        return {}
    return {GENERATION: json.dumps(read_json(generation, "a file that save_pretrained wrote") | known.ids, indent=2)}


def companions_of(folder: Path) -> Iterator[Path]:
    """Yield the files with a suffix of SUFFIXES in a model's folder, in TEMPLATES, and in the folders of its modules.

    In a module's folder, weights are included, such as those of a Dense module, because no run trains them. Left out
    are lists of weight files, files that a checkpoint or a run writes itself, results of another training, and
    modules.json if `incomplete_modules` finds a module."""
    left_out = (*LEFT_OUT, *[MODULES] * bool(incomplete_modules(folder)))
    for place in [folder, folder / TEMPLATES, *_module_folders(folder)]:
        suffixes = SUFFIXES if place == folder else (*SUFFIXES, *MODULE_WEIGHTS)
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            small = file.suffix in suffixes and file.is_file() and file.stat().st_size <= MOST_BYTES
            own = place == folder and file.name in RUN_FILES
            if small and not own and not file.name.endswith(left_out):
                yield file


def incomplete_modules(folder: Path) -> list[str]:
    """Return the folders of modules that cannot be copied, or not with all their weights.

    Such a folder has the name of a run's own file, is not inside `folder`, or has a weight file above MOST_BYTES.
    """
    kept = {place.name: place for place in _module_folders(folder)}
    large = {
        name for name, place in kept.items() for file in (place.iterdir() if place.is_dir() else ())
        if file.suffix in MODULE_WEIGHTS and file.stat().st_size > MOST_BYTES
    }  # fmt: skip
    return [name for name in _module_names(folder) if name not in kept or name in large]


def _module_folders(folder: Path) -> list[Path]:
    """Return the folders inside `folder` that modules.json names, except those with the name of a run's own file."""
    own = {*OWN, *checkpoint.FILES, MARK}
    return [folder / name for name in _module_names(folder) if is_name(name) and name not in own]


def _module_names(folder: Path) -> list[str]:
    """Return the folders that modules.json names; [] if the file is missing or broken."""
    try:
        names = [module["path"] for module in json.loads(read(folder / MODULES)) if module["path"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return names if all(isinstance(name, str) for name in names) else []
