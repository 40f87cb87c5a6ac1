"""Tokenizers as files, and how many tokens they have."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from nntile_py.errors import ConfigError
from nntile_py.system.folders import read

END_OF_TEXT = "<|endoftext|>"
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
MASKED = (PAD, CLS, SEP, MASK)  # special tokens of a masked model besides
ROBERTA = {PAD: "<pad>", CLS: "<s>", SEP: "</s>", MASK: "<mask>"}  # what others call them


def load_tokenizer(path: Path, key: str = "tokenizer.path") -> Tokenizer:
    """The tokenizer of a tokenizer.json; ConfigError, which names `key`, where it is none."""
    try:
        return Tokenizer.from_buffer(read(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the library's Rust panics are no Exception
        raise ConfigError(f"{key}: cannot read {path} ({error}); allowed: a tokenizer.json") from None


def called(tokenizer: Tokenizer, token: str) -> str:
    """What the tokenizer calls one of MASKED: as BERT does, or else as RoBERTa."""
    return token if tokenizer.token_to_id(token) is not None else ROBERTA[token]


def number_of(tokenizer: Tokenizer, token: str) -> int | None:
    """Of one of MASKED, whatever it is called; None: there is none."""
    number: int | None = tokenizer.token_to_id(called(tokenizer, token))
    return number


def lacking(tokenizer: Tokenizer, tokens: Iterable[str] = MASKED) -> list[str]:
    """Those of MASKED that a tokenizer has under neither name."""
    return [token for token in tokens if number_of(tokenizer, token) is None]


def roles(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a tokenizer has, by what transformers calls them; GPT-2's one is all that it can be."""
    own = {role: (token, ROBERTA[token]) for role, token in zip(("pad", "cls", "sep", "mask"), MASKED, strict=True)}
    may_be = own | {
        "pad": (*own["pad"], END_OF_TEXT), "unk": ("[UNK]", "<unk>", END_OF_TEXT),
        "bos": (END_OF_TEXT, *own["cls"]), "eos": (END_OF_TEXT, *own["sep"]),
    }  # fmt: skip
    there = {role: [token for token in tokens if tokenizer.token_to_id(token) is not None]
             for role, tokens in may_be.items()}  # fmt: skip
    return {f"{role}_token": tokens[0] for role, tokens in there.items() if tokens}


def frame(tokenizer: Tokenizer) -> None:
    """Have [CLS] put before each text and [SEP] behind, as BERT's template does, or <s> and </s> as RoBERTa's; unless
    the tokenizer has a template, or lacks the tokens."""
    if tokenizer.num_special_tokens_to_add(False) or lacking(tokenizer, (CLS, SEP)):
        return
    cls, sep = (called(tokenizer, token) for token in (CLS, SEP))
    pair = f"{cls} $A {sep} $B:1 {sep}:1" if sep == SEP else f"{cls} $A {sep} {sep} $B {sep}"
    ends = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    tokenizer.post_processor = TemplateProcessing(single=f"{cls} $A {sep}", pair=pair, special_tokens=ends)


def token_numbers(tokenizer: Tokenizer) -> int:
    """The largest number of a token, and one: those of its tokens may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_numbers(tokenizer: Tokenizer) -> set[int]:
    """Tokens that stand for no text, and numbers below token_numbers that are no token."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return special | (set(range(token_numbers(tokenizer))) - set(tokenizer.get_vocab().values()))
