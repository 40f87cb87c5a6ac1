"""Tokenizers as files, and how many tokens they have."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from nntile_py.errors import ConfigError
from nntile_py.system.folders import read

END_OF_TEXT = "<|endoftext|>"
PAD, CLS, SEP, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
MASKED = (PAD, CLS, SEP, MASK)  # special tokens of a masked model besides


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json; ConfigError where it is none."""
    try:
        return Tokenizer.from_buffer(read(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the library's Rust panics are no Exception
        raise ConfigError(f"tokenizer.path: cannot read {path} ({error}); allowed: a tokenizer.json") from None


def frame(tokenizer: Tokenizer) -> None:
    """Have [CLS] put before each text and [SEP] behind, as BERT's template does; it has both tokens."""
    ends = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ends
    )


def token_numbers(tokenizer: Tokenizer) -> int:
    """The largest number of a token, and one: those of its tokens may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_numbers(tokenizer: Tokenizer) -> set[int]:
    """Tokens that stand for no text, and numbers below token_numbers that are no token."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return special | (set(range(token_numbers(tokenizer))) - set(tokenizer.get_vocab().values()))
