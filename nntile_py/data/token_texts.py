"""Texts and bytes of single tokens."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of a byte, for characters that the vocabulary does not have


class TokenTexts:
    """Returns the text of a single token. A leading space, which Tokenizer.decode may remove, stays.

    Args:
        tokenizer: Has the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, decoder = tokenizer, json.loads(tokenizer.to_str())["decoder"] or {}
        self._kinds = {one["type"] for one in decoder.get("decoders", [decoder]) if one}
        self._added = {number: str(token.content) for number, token in tokenizer.get_added_tokens_decoder().items()}

    def bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token. They may be only a part of a character's bytes."""
        piece = self._tokenizer.id_to_token(token)
        if token in self._added or piece is None:  # a model may have more tokens than the tokenizer
            return self._added.get(token, "").encode()
        if "ByteLevel" in self._kinds:
            return b"".join(bytes([_BYTES[x]]) if x in _BYTES else x.encode() for x in piece)
        if "ByteFallback" in self._kinds and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        if self._kinds & {"ByteFallback", "Metaspace", "Replace"}:
            return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    def text(self, token: int) -> str:
        r"""Return the text of a token. A part of a character is shown as `bytes:\xe2\x82`, as in OpenAI's API."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_characters() -> dict[str, int]:
    """Return {character: byte} of byte-level tokenizers. Source: Radford et al. (2019), encoder.py of GPT-2."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_characters()
