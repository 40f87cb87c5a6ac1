"""Conversations, or prompts with responses, as data of `nntile eval`: only the answers count, as in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.config.data_section import check_columns
from nntile_py.config.inference_config import InferenceConfig
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.collators import Array
from nntile_py.data.documents import Documents, Split
from nntile_py.data.instructions import Columns, Instructions
from nntile_py.data.prepare import tokenize_into_memory
from nntile_py.data.rows import is_dataset, is_table
from nntile_py.data.sequences import Answered
from nntile_py.data.special_tokens import special_tokens
from nntile_py.data.token_files import TRAIN
from nntile_py.errors import ConfigError
from nntile_py.inference.open_model import OpenedModel
from nntile_py.tasks.cross_entropy import IGNORED


def instructions_for(opened: OpenedModel, data: Path, config: InferenceConfig, causal: bool) -> Instructions | None:
    """Return Instructions if the data are conversations by the keys of the config; None if the data are text.

    Files that are no tables are always text.

    Raises:
        ConfigError: The keys do not belong together, or the model does not predict the next token.
    """
    keys = config.data.messages, config.data.prompt, config.data.response
    check_columns(*keys)
    if not any(keys):
        return None
    if not causal:
        raise ConfigError(f"data.{'messages' if keys[0] else 'prompt'}: allowed with a causal model")
    files = [data] if is_dataset(data) else Documents(str(data), config.data.extensions).files
    if not any(is_table(file) for file in files) and not is_dataset(data):
        return None
    return Instructions(Columns(*(key or "" for key in keys)), ChatTemplate(opened.folder))


class Conversations:
    """Tokenized conversations. Iteration yields (input_ids, labels) of each; labels outside of the answers are -100.

    As in training, a conversation is cut at `seq` tokens, and left out if it then has no answer.

    Args:
        opened: The model with its tokenizer.
        documents: The conversations.
        seq: Largest number of tokens of a conversation.

    Attributes:
        ids: The tokens of all conversations.
        cut: Number of conversations that were longer than `seq` tokens.
        left_out: Number of conversations that were left out.
        longest: Tokens of the longest conversation.

    Raises:
        ConfigError: A row of the table is wrong, or no conversation has an answer.
    """

    def __init__(self, opened: OpenedModel, documents: Documents, seq: int) -> None:
        assert opened.tokenizer and documents.instructions
        known = special_tokens(opened.tokenizer, str(opened.tokenizer_file), str(opened.folder))
        end = None if documents.instructions.ended else known.end
        tokens = tokenize_into_memory(documents, Split(documents, 0.0), opened.tokenizer, "window", end)[TRAIN]
        answered = Answered(tokens, seq)
        if not len(answered.lengths):
            need = "a larger --seq, or other data"
            raise ConfigError(f"--data: no conversation has an answer in its first {seq} tokens; allowed: {need}")
        self.ids, self.cut, self.left_out = tokens.ids, answered.cut, answered.left_out
        self.longest = int(max(answered.lengths))
        self._tokens, self._answered = tokens, answered

    def __len__(self) -> int:
        return len(self._answered.lengths)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        learned: Any = self._tokens.learned
        for number in range(len(self)):
            (place,) = self._answered.place(0, number)
            ids = self.ids[place].astype(np.int64)
            yield ids, np.where(learned[place], ids, IGNORED)
