"""`nntile generate`: read prompts from options, a file or standard input, and print texts or JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console

from nntile_py.data.chat_template import PLAIN, ChatTemplate, Message
from nntile_py.data.tables import check_whole
from nntile_py.data.token_texts import TokenTexts
from nntile_py.errors import ConfigError, NotFinite
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.api_answer import LEAST
from nntile_py.inference.generated_text import MOST_TOKENS, GeneratedPart, GeneratedText, Options
from nntile_py.inference.generator import Generator
from nntile_py.inference.open_model import no_tokenizer, open_model
from nntile_py.inference.texts import placed_texts

USER, ASSISTANT = "User: ", "Assistant: "  # beginnings of a transcript's lines, as in the plain chat template


class Command(NamedTuple):
    """The options of `nntile generate`; see its help.

    Attributes:
        key: Key or column of the prompts in the file `source`; None: the user has given none.
        options: See generated_text.Options.
        how: Arguments of Generator.
        tiles: Tile sizes, as texts AXIS=SIZE.
        workers: Number of CPU workers (None: the default), and number of GPUs.
        fields: Fields of the model's config that replace the folder's, see open_model.
    """

    folder: Path
    prompts: Sequence[str]
    source: Path | None
    key: str | None
    chat: bool
    system: str
    options: Mapping[str, Any]
    how: Mapping[str, Any]
    tiles: Sequence[str]
    workers: tuple[int | None, int]
    as_json: bool
    fields: Mapping[str, Any]


def run(command: Command) -> None:
    """Generate texts and print them.

    Raises:
        ConfigError: An option, a file or the folder is wrong.
    """
    Options(**command.options)
    _check_combination(command)
    if isinstance(sys.stdin, TextIOWrapper):  # check_whole refuses bytes that are not UTF-8, and names their source
        sys.stdin.reconfigure(errors="surrogateescape")
    tiles = _tiles(command.tiles)
    prompts = [] if command.chat else _prompts(command)
    names = ["--chat"] if command.chat else [name for _, name in prompts]
    opened = open_model(command.folder, command.fields, torch_modules=False)
    if opened.tokenizer is None:
        raise no_tokenizer(opened.folder)
    cpus, cuda = command.workers
    with Runtime(cpus=cpus, cuda=cuda), Generator(opened, tiles=tiles, **command.how) as generator, _named(names):
        if command.chat:
            _chat(generator, ChatTemplate(opened.folder), command)
        else:
            _continue(generator, [text for text, _ in prompts], command)


@contextmanager
def _named(names: Sequence[str]) -> Iterator[None]:
    """If the block raises an error about `prompts[N]`, raise it with the name of prompt N: an option, or a line."""
    try:
        yield
    except (ValueError, NotFinite) as error:  # a ValueError: a prompt is too long or empty
        text = re.sub(r"^prompts\[(\d+)\]", lambda match: names[int(match[1])], _of_options(error))
        raise (NotFinite if isinstance(error, NotFinite) else ConfigError)(text) from None


def _of_options(error: Exception) -> str:
    """Return the message of an error of Generator, with the command's name of the option max_tokens."""
    return str(error).replace("max_tokens = ", "--max-tokens ")


def _check_combination(command: Command) -> None:
    """Raise ConfigError for an option that has no effect together with the other options or with standard input."""
    if command.system and not command.chat:
        raise ConfigError("--system: got a text; allowed: only with --chat")
    if command.options.get("logprobs") is not None and not command.as_json:
        raise ConfigError(f"--logprobs: got {command.options['logprobs']}; allowed: only with --json")
    if command.key is not None and (command.source is None or command.source.suffix.lower() == ".txt"):
        raise ConfigError(f"--text: got {command.key!r}; allowed: only with --input of a .jsonl or .csv table")
    check_whole("--system", command.system, ConfigError)
    if command.chat and sys.stdin is None:
        raise ConfigError("--chat: standard input is closed; allowed: a terminal, or standard input with lines")
    excluded = {"--prompt": command.prompts, "--input": command.source, "--json": command.as_json}
    for name in (name for name, value in excluded.items() if command.chat and value):
        raise ConfigError(f"{name}: got --chat too, which reads and answers lines; allowed: one of the two")


def _tiles(texts: Sequence[str]) -> dict[str, int] | None:
    """Return {axis: tile size} from texts AXIS=SIZE; None if there are no texts."""
    tiles = {}
    for text in texts:
        axis, _, size = text.partition("=")
        if not axis or not size.isdecimal() or not int(size):
            raise ConfigError(f"--tiles: got {text!r}; allowed: AXIS=SIZE, such as ffn=1024")
        tiles[axis] = int(size)
    return tiles or None


def _prompts(command: Command) -> list[tuple[str, str]]:
    """Return the prompts of --prompt or --input, each with its name for messages.

    Without these options, standard input is the only prompt.
    """
    if command.prompts and command.source:
        raise ConfigError("--input: got --prompt too; allowed: one of the two")
    if command.prompts:
        several = len(command.prompts) > 1
        return [(text, f"--prompt number {n}" if several else "--prompt") for n, text in enumerate(command.prompts, 1)]
    if command.source:
        return placed_texts(command.source, "text" if command.key is None else command.key)
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("--prompt: missing; allowed: --prompt, --input or --chat, or a prompt on standard input")
    prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        _note("standard input is empty; the text begins without a prompt")
    return [(prompt, "standard input")]


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _continue(generator: Generator, prompts: Sequence[str], command: Command) -> None:
    if command.as_json:
        assert generator.tokenizer
        texts = TokenTexts(generator.tokenizer)
        for prompt, text in zip(prompts, generator(prompts, **command.options), strict=True):
            row = {"prompt": prompt, **_facts(text), **_logprobs(texts, text)}
            print(json.dumps(row, ensure_ascii=False), flush=True)
    elif len(prompts) == 1:
        _type(prompts[0], generator(prompts, stream=True, **command.options), [])
    else:
        _type_several(prompts, generator(prompts, stream=True, **command.options))


def _facts(text: GeneratedText) -> dict[str, Any]:
    return {
        "text": text.text, "reason": text.reason, "prompt_tokens": text.prompt_tokens, "new_tokens": len(text.tokens),
    }  # fmt: skip


def _logprobs(texts: TokenTexts, text: GeneratedText) -> dict[str, Any]:
    """Return the log-probabilities of a text's tokens as JSON; empty if the text has none."""
    if text.logprobs is None:
        return {}

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "id": token, "logprob": max(logprob, LEAST)}

    rows = [entry(row.token, row.logprob) | {"top": [entry(*pair) for pair in row.top]} for row in text.logprobs]
    return {"logprobs": rows}


def _type(prompt: str, parts: Iterator[GeneratedPart], shown: list[str]) -> None:
    """Print a prompt, then each new token as soon as it is drawn, and append the token's text to `shown`.

    The prompt is printed together with the first token. If an error comes earlier, its message begins a line."""
    with closing(cast(Any, parts)):  # an error, or Ctrl-C, ends the generation
        for number, part in enumerate(parts):
            shown.append(part.text)
            if not number:
                print(prompt, end="")
            print(part.text, end="", flush=True)
    print(flush=True)


def _type_several(prompts: Sequence[str], parts: Iterator[GeneratedPart]) -> None:
    """Print the texts in the order of the prompts. A text is printed when it and all texts before it are complete."""
    texts, ended, following = ["" for _ in prompts], set[int](), 0
    console = Console()
    for part in parts:
        texts[part.index] += part.text
        if part.reason:
            ended.add(part.index)
        while following in ended:
            if console.is_terminal and following:
                console.rule()
            elif following:
                print("---")
            print(prompts[following] + texts[following], flush=True)
            following += 1


def _chat(generator: Generator, template: ChatTemplate, command: Command) -> None:
    """Answer each line of standard input, until standard input ends.

    Without a terminal, which shows the lines that the user types, the output is a transcript of both roles.
    """
    if terminal := sys.stdin.isatty():
        keys = "Ctrl-C ends an answer, Ctrl-D the chat"
        print(f"{command.folder} answers each line; {keys}", file=sys.stderr, flush=True)
        with suppress(ImportError):  # a Python may lack it
            import readline  # noqa: F401  # input() then has line editing and a history
    if not template.own:
        _note(f"{command.folder} has no chat template; a plain format is used: {PLAIN}")
    messages: list[Message] = [{"role": "system", "content": command.system}] if command.system else []
    options, shortened = {**command.options, "stop": [*command.options["stop"], *template.stops]}, False
    while (line := _line("> ")) is not None:
        if not line.strip():
            continue
        try:
            check_whole("line", line, ValueError)
            said = [*messages, {"role": "user", "content": line}]
            kept, ids = _fitting(generator, template, said, options["max_tokens"])
            parts = generator([ids], stream=True, **options)
        except ValueError as error:
            _note(f"this line is left out of the chat: {_of_options(error).partition(': ')[2]}")
            continue
        if len(kept) < len(said) and not shortened:  # from now on, this happens before nearly each answer
            limit = f"a prompt and its answer have at most {generator.max_length} tokens"
            _note(f"from now on, the oldest messages are left out of the conversation, as {limit}")
            shortened = True
        if not terminal:
            print(f"{USER}{line}", flush=True)
        messages = [*kept, {"role": "assistant", "content": _answer("" if terminal else ASSISTANT, parts)}]


def _answer(prefix: str, parts: Iterator[GeneratedPart]) -> str:
    """Print an answer after `prefix`, and return it without spaces around it. At a terminal, Ctrl-C ends it early."""
    shown: list[str] = []
    try:
        _type(prefix, parts, shown)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(flush=True)
    return "".join(shown).strip()


def _fitting(
    generator: Generator, template: ChatTemplate, messages: list[Message], max_tokens: int | None
) -> tuple[list[Message], list[int]]:
    """Drop the oldest messages until the answer has room. Return the messages that stay, and their prompt's tokens.

    The system message and the last message stay. The first message after the system message is the user's, because many
    templates require this.
    """
    kept, first, longest = list(messages), int(messages[0]["role"] == "system"), generator.max_length or 2**31
    room = min(MOST_TOKENS, longest // 2) if max_tokens is None else max_tokens
    while len(ids := _tokens(generator, template, kept)) + room > longest and len(kept) > first + 1:
        following = (k for k in range(first + 1, len(kept)) if kept[k]["role"] == "user")
        del kept[first : next(following)]
    return kept, ids


def _tokens(generator: Generator, template: ChatTemplate, messages: list[Message]) -> list[int]:
    """Return the tokens of the prompt. The folder's template writes special tokens itself, so none are added."""
    assert generator.tokenizer
    return list(generator.tokenizer.encode(template.prompt(messages), add_special_tokens=not template.own).ids)


def _line(mark: str) -> str | None:
    """Return the next line of standard input; None at its end. A terminal shows `mark` before the line."""
    if sys.stdin.isatty():
        try:
            return input(mark)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            raise
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
