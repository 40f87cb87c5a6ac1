"""`nntile generate`: prompts from options, files and a conversation; messages name the options."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
from command import nntile
from test_generate import folder

import nntile_py as nt
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.inference import generate_command as gc

__all__ = ["folder"]


def command(*arguments: Any, **options: Any) -> Any:
    return forks.run([sys.executable, "-m", "nntile_py.cli", "generate", *map(str, arguments)], **options)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    common = [folder, "--max-tokens", 8, "--temperature", 0, "--cpus", 1]
    one = command(*common, "--prompt", "tiles ")
    assert one.returncode == 0 and one.stdout.startswith("tiles ") and not one.stderr, one.stderr
    (tmp_path / "prompts.txt").write_text("tiles \nand tasks\n")
    lines = command(*common, "--input", tmp_path / "prompts.txt", "--json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["prompt"] for row in rows] == ["tiles ", "and tasks"]
    assert one.stdout == f"tiles {rows[0]['text']}\n" and rows[0]["new_tokens"] <= 8
    both = command(*common, "--prompt", "tiles ", "--prompt", "and tasks").stdout
    assert both == f"tiles {rows[0]['text']}\n---\nand tasks{rows[1]['text']}\n"


def test_log_probabilities(folder: Path) -> None:
    common = [folder, "--max-tokens", 6, "--temperature", 0, "--cpus", 1, "--prompt", "tiles ", "--json"]
    (row,) = (json.loads(line) for line in command(*common, "--logprobs", 3).stdout.splitlines())
    assert len(row["logprobs"]) == row["new_tokens"] and [*row["logprobs"][0]] == ["token", "id", "logprob", "top"]
    for entry in row["logprobs"]:
        assert len(entry["top"]) == 3 and entry["top"][0] == {name: entry[name] for name in ("token", "id", "logprob")}
        assert entry["logprob"] < 0 and entry["top"][1]["logprob"] <= entry["logprob"]
    plain = json.loads(command(*common).stdout)
    assert plain == {name: value for name, value in row.items() if name != "logprobs"}


REASON = "as the prompt and --max-tokens 8 together have at most 96 tokens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--input", "b"], "error: --input: got --prompt too; allowed: one of the two"),
        (["--prompt", "a", "--system", "b"], "error: --system: got a text; allowed: only with --chat"),
        (["--prompt", "a", "--chat"], "error: --prompt: got --chat too, which reads and answers lines; allowed: one"),
        (["--prompt", "a", "--precision", "bf16"], "error: --precision: bf16 needs GPUs (--cuda)"),
        (["--prompt", "a", "--top-p", 0], "error: --top-p: got 0.0; allowed: "),
        (["--prompt", "a", "--top-k", -2], "error: --top-k: got -2; allowed: "),
        (["--prompt", "a", "--logprobs", 2], "error: --logprobs: got 2; allowed: only with --json"),
        (["--prompt", "a", "--json", "--logprobs", -1], "error: --logprobs: got -1; allowed: an integer of at"),
        (["--prompt", "a", "--json", "--logprobs", 21], "error: --logprobs: got 21; allowed: an integer of at"),
        (["--prompt", "a", "--cache", "much"], "error: --cache: got 'much'; allowed: "),
        (["--prompt", "a", "--tiles", "foo=3"], "error: --tiles: foo: unknown axis; allowed: batch"),
        (["--prompt", "a", "--tiles", "ffn"], "error: --tiles: got 'ffn'; allowed: AXIS=SIZE"),
        (["--prompt", "a", "--stop", "b", "--stop", "\udcff"], "error: --stop: half of a character"),
        (["--chat", "--system", "\udcff"], "error: --system: half of a character"),
        (["--prompt", "a", "--text", "text"], "error: --text: got 'text'; allowed: only with --input of a .jsonl"),
        (["--chat", "--text", "text"], "error: --text: got 'text'; allowed: only with --input of a .jsonl"),
        (["--input", "missing.txt", "--text", "text"], "error: --text: got 'text'; allowed: only with --input"),
        (["--prompt", "a" * 96], f"error: --prompt: 96 tokens; allowed: 1 to 88, {REASON}"),
        (["--prompt", "a", "--prompt", "a" * 96], "error: --prompt number 2: 96 tokens; allowed: 1 to 88"),
        (["--input", "missing.txt"], "error: --input: cannot read missing.txt"),
    ],
)
def test_wrong_commands(folder: Path, arguments: list[Any], message: str) -> None:
    ended = command(folder, *arguments, "--max-tokens", 8, "--cpus", 1)
    assert ended.returncode == 2 and ended.stderr.startswith(message) and not ended.stdout, ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_without_a_tokenizer_says_how_to_make_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    ended = command(tmp_path / "bare", "--prompt", "a")
    how = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {tmp_path / 'bare'} has no tokenizer.json, which")
    assert how in ended.stderr


def read_stdin(folder: Path, monkeypatch: pytest.MonkeyPatch, stdin: Any, **fields: Any) -> None:
    """Run `nntile generate` with another standard input."""
    options = {"max_tokens": 3, "temperature": 0, "stop": []}
    given = gc.Command(folder, [], None, None, False, "", options, {}, [], (1, 0), False, {})._replace(**fields)
    monkeypatch.setattr(sys, "stdin", stdin)
    gc.run(given)


def test_an_empty_standard_input_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for text in ("", "\n"):
        read_stdin(folder, monkeypatch, io.StringIO(text))
        note = "note: standard input is empty; the text begins without a prompt\n"
        assert capsys.readouterr().err == note
    read_stdin(folder, monkeypatch, io.StringIO("a\n\nb\n"))
    out, err = capsys.readouterr()
    assert out.startswith("a\n\nb") and "---" not in out and not err, "several lines are one prompt"


def test_errors_name_the_source_of_a_prompt(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("a\n\n" + "b" * 96)
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b" * 96}))
    not_utf8 = io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8")
    for stdin, fields, message in [
        (io.StringIO("b" * 96), {}, "standard input: 96 tokens; allowed: 1 to 93"),
        (not_utf8, {}, "standard input: half of a character"),
        (None, {"chat": True}, "--chat: standard input is closed; allowed: a terminal, or standard input with lines"),
        (None, {}, "--prompt: missing; allowed: --prompt, --input or --chat"),
        (None, {"source": tmp_path / "p.txt"}, f"--input: {tmp_path}/p.txt, line 3: 96 tokens"),
        (None, {"source": tmp_path / "p.jsonl"}, f"--input: {tmp_path}/p.jsonl, line 2: 96 tokens"),
    ]:
        with pytest.raises(nt.ConfigError) as refused:
            read_stdin(folder, monkeypatch, stdin, **fields)
        assert str(refused.value).startswith(message)


def test_an_empty_line_of_a_file_is_a_prompt(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n\nb\n")
    rows = command(folder, "--input", tmp_path / "p.txt", "--max-tokens", 2, "--cpus", 1, "--json").stdout.splitlines()
    assert [json.loads(row)["prompt"] for row in rows] == ["a", "", "b"]


def talk(
    generator: nt.Generator, template: ChatTemplate, lines: str, most: int | None, system: str = "",
    stdin: type[io.StringIO] = io.StringIO,
) -> list[str]:  # fmt: skip
    """Answer lines as `nntile generate --chat` does, greedily, and return the prompts."""
    seen: list[str] = []
    prompt = template.prompt
    template.prompt = lambda messages: seen.append(prompt(messages)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    options = {"max_tokens": most, "temperature": 0, "stop": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin(lines))
        given = gc.Command(Path("my_run"), [], None, None, True, system, options, {}, [], (1, 0), False, {})
        gc._chat(generator, template, given)
    return seen


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_chat(folder: Path, tmp_path: Path, capsys: Any, template: str | None) -> None:
    """A conversation of two lines; the second prompt has the first answer."""
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    with nt.Generator(folder, max_length=96) as generator:
        seen = talk(generator, ChatTemplate(tmp_path), "hello\n\nagain\n", 4)
    out, err = capsys.readouterr()
    start = "[user]hello[assistant]" if template else "User: hello\nAssistant:"
    note = "note: my_run has no chat template; a plain format is used: `User: ...`, `Assistant: ...`\n"
    assert seen[0] == start and len(seen) == 2 and err == ("" if template else note)
    assert seen[1].startswith(start if template else "User: hello\nAssistant: ")
    lines = out.splitlines()  # a transcript, as there is no terminal
    assert [line.partition(": ")[0] for line in lines if ": " in line] == ["User", "Assistant"] * 2
    assert lines[0] == "User: hello" and "User: again" in lines
    assert out.partition("Assistant: ")[2].partition("\nUser: ")[0].strip() in seen[1]


@pytest.mark.parametrize("readline", [True, False])
def test_a_chat_at_a_terminal(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, readline: bool
) -> None:
    """Says how to end, and has line editing if this Python has the module `readline`."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    if not readline:
        monkeypatch.setitem(sys.modules, "readline", None)  # its import raises ImportError
    with nt.Generator(folder) as generator:
        talk(generator, ChatTemplate(tmp_path), "hello\nagain\n", 4, stdin=terminal)
    out, err = capsys.readouterr()
    assert err == "my_run answers each line; Ctrl-C ends an answer, Ctrl-D the chat\n"
    assert "User" not in out and "Assistant" not in out
    assert bool(sys.modules["readline"]) == readline


def test_ctrl_c_at_the_prompt_ends_the_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(mark: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert nntile("generate", folder, "--chat", "--cpus", 1) == 130
    out, err = capsys.readouterr()
    assert out == "\n" and err.endswith("\ninterrupted; the chat ends\n")


@pytest.mark.parametrize("most", [5, None])
def test_a_long_conversation_loses_its_oldest_messages(
    folder: Path, tmp_path: Path, capsys: Any, most: int | None
) -> None:
    """96 tokens of one byte: the system message and the last line stay; the answer has room."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    lines = [letter * 15 for letter in "abcd"]
    with nt.Generator(folder) as generator:
        seen = talk(generator, ChatTemplate(tmp_path), "\n".join(lines), most, "be short")
        err = capsys.readouterr().err.splitlines()
    assert all(text.startswith("[system]be short[user]") for text in seen)
    used = [text for text in seen if len(text.encode()) + (most or 48) <= 96]
    assert [any(text.endswith(f"[user]{line}[assistant]") for text in used) for line in lines] == [True] * 4
    assert used[-1].count("[user]") < 4 and lines[0] not in used[-1]
    reason = "as a prompt and its answer have at most 96 tokens"
    assert err == [f"note: from now on, the oldest messages are left out of the conversation, {reason}"]


def test_a_chat_goes_on_after_a_line_that_cannot_be_answered(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with nt.Generator(folder) as generator:
        seen = talk(generator, ChatTemplate(tmp_path), f"{'x' * 100}\nb\udcff\nc", 5)
        assert seen[-1] == "[user]c[assistant]"
    note = "note: this line is left out of the chat: "
    reason = "as the prompt and --max-tokens 5 together have at most 96 tokens"
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{note}117 tokens; allowed: 1 to 91, {reason}"
    assert second.startswith(f"{note}half of a character")


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_during_an_answer(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """At a terminal, the shown part stays in the conversation. A pipe's further lines are not answered."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    stdin = type("Input", (io.StringIO,), {"isatty": lambda self: terminal})
    shown: list[str] = []

    def interrupted(*texts: str, **options: Any) -> None:
        print(*texts, **options)
        if options.get("end") == "":
            shown.extend(texts)
            if len(shown) == 3:  # the prompt, which is empty, and two tokens
                raise KeyboardInterrupt

    monkeypatch.setattr(gc, "print", interrupted, raising=False)
    with nt.Generator(folder) as generator:
        if terminal:
            seen = talk(generator, ChatTemplate(tmp_path), "a\nb", 9, stdin=stdin)
            answer = "".join(shown[:3]).strip()
            assert seen == ["[user]a[assistant]", f"[user]a[assistant]{answer}[user]b[assistant]"]
        else:
            with pytest.raises(KeyboardInterrupt):
                talk(generator, ChatTemplate(tmp_path), "a\nb", 9, stdin=stdin)
        assert generator._engine and not generator._engine.busy
