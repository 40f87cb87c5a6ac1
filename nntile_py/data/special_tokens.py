"""Special tokens of a tokenizer by their roles: as the files of its folder name them, else by well-known names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nntile_py.data.tokenizer import CLS, END_OF_TEXT, MASK, MASKED, PAD, SEP, number_of, roles, token_numbers
from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import read_json

NAMING = ("tokenizer_config.json", "special_tokens_map.json")  # files that name special tokens; the first prevails
CONFIG, GENERATION = "config.json", "generation_config.json"  # files with numbers of special tokens
_ROLE_OF = {PAD: "pad_token", CLS: "cls_token", SEP: "sep_token", MASK: "mask_token"}
_ROLES, _EOS, _PAD = ("bos_token", "eos_token"), "eos_token_id", "pad_token_id"


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a run.

    Attributes:
        tokenizer: The tokenizer.
        roles: {transformers' name of a role: token}, such as {"eos_token": "</s>"}.
        named: {role: token} as files of the tokenizer's folder say; empty if they name no tokens.
        ids: Entries of config.json: bos_token_id, eos_token_id and pad_token_id, if they are known.
        end: Number of the token that ends a document; None: there is no such token.
        stops: Numbers of the tokens that end a generated text.
    """

    tokenizer: Tokenizer
    roles: Mapping[str, str]
    named: Mapping[str, str]
    ids: dict[str, Any]
    end: int | None
    stops: frozenset[int]

    def number(self, token: str) -> int | None:
        """Return the number of a token of MASKED, under the name of its role, else under BERT's or RoBERTa's name."""
        own = self.named.get(_ROLE_OF[token])
        number: int | None = self.tokenizer.token_to_id(own) if own else number_of(self.tokenizer, token)
        return number

    def lacking(self) -> list[str]:
        """Return the tokens of MASKED that the tokenizer does not have."""
        return [token for token in MASKED if self.number(token) is None]


def special_tokens(tokenizer: Tokenizer, path: str | None = None, model: str | None = None) -> SpecialTokens:
    """Return the special tokens of a run.

    Names come from tokenizer_config.json or special_tokens_map.json beside the tokenizer. Numbers come from config.json
    and generation_config.json, if model and tokenizer are of one folder. If no file names special tokens, or the
    tokenizer was trained here, the special tokens are found by well-known names such as [SEP].

    Args:
        tokenizer: The tokenizer.
        path: The tokenizer's file; None: the tokenizer was trained here.
        model: Folder of the model that training starts from.

    Raises:
        ConfigError: One of the files is not JSON, or an entry is no token number.
    """
    named = _named(tokenizer, Path(path).parent) if path else {}
    config, generation = _model_files(path, model)
    roles_of = named or roles(tokenizer)
    known = named if config and named else dict.fromkeys(_ROLES, END_OF_TEXT) if config else roles_of
    ids: dict[str, Any] = {f"{role}_id": tokenizer.token_to_id(known.get(role, "")) for role in _ROLES}
    ends = [_numbers(tokenizer, one) for one in (config.get(_EOS), ids[_EOS], generation.get(_EOS))]
    if config:
        ids |= {key: config[key] for key in ids if _numbers(tokenizer, config.get(key))}
        ids |= {_PAD: config[_PAD]} if _PAD in config else {}
    elif (pad := number_of(tokenizer, PAD)) is not None:
        ids[_PAD] = pad
    if not named and not config:
        ends = [_numbers(tokenizer, tokenizer.token_to_id(END_OF_TEXT))]
    return SpecialTokens(tokenizer, roles_of, named, ids, _document_end(*ends), frozenset().union(*ends))


def same_folder(path: str | None, model: str | None) -> Path | None:
    """Return the folder of the model that training starts from, if the tokenizer is of the same folder; else None."""
    if path and model and Path(path).parent.is_dir() and Path(path).parent.samefile(model):
        return Path(model)
    return None


def _model_files(path: str | None, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json of the model; {} if the tokenizer is not of the model's folder."""
    folder = same_folder(path, model)
    if folder is None:
        return {}, {}
    config, generation = (_with_ids(folder / name) for name in (CONFIG, GENERATION))
    return config, generation


def _with_ids(file: Path) -> dict[str, Any]:
    """Return the JSON object of config.json or generation_config.json; {} if the file does not exist.

    Raises ConfigError if an entry such as `eos_token_id` is no token number. Numbers outside the vocabulary pass."""
    content = read_json(file, "a folder that save_pretrained wrote") if file.exists() else {}
    for key in (f"{role}_id" for role in (*_ROLES, "pad_token")):
        value = content.get(key)
        if any(type(one) is not int for one in (value if isinstance(value, list) else [value])) and value is not None:
            raise ConfigError(f"{file}: {key}: got {value!r:.40}; allowed: a token number, a list of them, or null")
    return content


def _named(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Return {role: token} as the first file of NAMING names them; tokens that the tokenizer lacks are left out."""
    found: dict[str, str] = {}
    for name in reversed(NAMING):
        if (folder / name).is_file():
            for role, token in read_json(folder / name, "a file that save_pretrained wrote", "tokenizer.path").items():
                text = token.get("content") if isinstance(token, dict) else token
                if role.endswith("_token") and isinstance(text, str) and tokenizer.token_to_id(text) is not None:
                    found[role] = text
    return found


def _numbers(tokenizer: Tokenizer, value: Any) -> list[int]:
    """Return the token numbers in an entry of config.json: a number or a list of numbers."""
    values, count = value if isinstance(value, list) else [value], token_numbers(tokenizer)
    return [number for number in values if type(number) is int and 0 <= number < count]


def _document_end(first: list[int], *others: list[int]) -> int | None:
    """Return the first number of `first` that the next list also has; else the first number of all lists, or None."""
    common = [number for number in first if any(number in other for other in others[:1])]
    return next(iter([*common, *first, *(number for other in others for number in other)]), None)
