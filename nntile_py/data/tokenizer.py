"""Load tokenizer files; find special tokens and the size of a vocabulary."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from nntile_py.errors import ConfigError
from nntile_py.system.folders import read

END_OF_TEXT = "<|endoftext|>"
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
MASKED = (PAD, CLS, SEP, MASK)  # special tokens of a masked model
ROBERTA = {PAD: "<pad>", CLS: "<s>", SEP: "</s>", MASK: "<mask>"}  # names of the same tokens in RoBERTa


def load_tokenizer(path: Path, key: str = "tokenizer.path") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, without the truncation and padding that the file may ask for.

    Raises ConfigError, which names `key`, if the file is no tokenizer."""
    return without_limits(read_tokenizer(path, key))


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer if it encodes texts whole; else a copy that neither cuts nor pads texts.

    A tokenizer.json stores the last `truncation` and `padding` that transformers' tokenizer was called with."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = Tokenizer.from_str(tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    return whole


def read_tokenizer(path: Path, key: str = "tokenizer.path") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, with the file's truncation and padding; see load_tokenizer."""
    try:
        return Tokenizer.from_buffer(read(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the library's Rust code is not an Exception
        raise ConfigError(f"{key}: cannot read {path} ({error}); allowed: a tokenizer.json") from None


def token_name(tokenizer: Tokenizer, token: str) -> str:
    """Return a tokenizer's name for a token of MASKED: BERT's name if the tokenizer knows it, else RoBERTa's."""
    return token if tokenizer.token_to_id(token) is not None else ROBERTA[token]


def number_of(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the number of a token of MASKED, under BERT's or RoBERTa's name; None if the tokenizer lacks it."""
    number: int | None = tokenizer.token_to_id(token_name(tokenizer, token))
    return number


def lacking(tokenizer: Tokenizer, tokens: Iterable[str] = MASKED) -> list[str]:
    """Return the names in `tokens` that a tokenizer lacks, both under BERT's and under RoBERTa's name."""
    return [token for token in tokens if number_of(tokenizer, token) is None]


def roles(tokenizer: Tokenizer) -> dict[str, str]:
    """Return {transformers' name of a role: special token}, such as {"pad_token": "[PAD]"}.

    GPT-2's only special token has several roles."""
    own = {role: (token, ROBERTA[token]) for role, token in zip(("pad", "cls", "sep", "mask"), MASKED, strict=True)}
    candidates = own | {
        "pad": (*own["pad"], END_OF_TEXT), "unk": ("[UNK]", "<unk>", END_OF_TEXT),
        "bos": (END_OF_TEXT, *own["cls"]), "eos": (END_OF_TEXT, *own["sep"]),
    }  # fmt: skip
    present = {role: [token for token in tokens if tokenizer.token_to_id(token) is not None]
             for role, tokens in candidates.items()}  # fmt: skip
    return {f"{role}_token": tokens[0] for role, tokens in present.items() if tokens}


def frame(tokenizer: Tokenizer, named: Mapping[str, str] | None = None) -> None:
    """Give a tokenizer a template if it has none: [CLS] text [SEP] as in BERT, or <s> text </s> as in RoBERTa.

    A tokenizer without these tokens is left unchanged.

    Args:
        tokenizer: The tokenizer.
        named: {role: special token}. If it has both, its cls_token and sep_token replace [CLS] and [SEP].
    """
    cls, sep = ((named or {}).get(role, "") for role in ("cls_token", "sep_token"))
    if not (cls and sep):
        cls, sep = (token_name(tokenizer, token) for token in (CLS, SEP))
    if tokenizer.num_special_tokens_to_add(False) or None in map(tokenizer.token_to_id, (cls, sep)):
        return
    pair = f"{cls} $A {sep} {sep} $B {sep}" if sep == ROBERTA[SEP] else f"{cls} $A {sep} $B:1 {sep}:1"
    ends = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    tokenizer.post_processor = TemplateProcessing(single=f"{cls} $A {sep}", pair=pair, special_tokens=ends)


def token_numbers(tokenizer: Tokenizer) -> int:
    """Return the largest token number plus 1. Token numbers may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_numbers(tokenizer: Tokenizer) -> set[int]:
    """Return the numbers of special tokens, and all numbers below `token_numbers` that have no token."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return special | (set(range(token_numbers(tokenizer))) - set(tokenizer.get_vocab().values()))
