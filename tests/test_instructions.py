"""Conversations and prompts with responses: which tokens a model learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data import config

import nntile_py as nt
from nntile_py.config.builders import build_model, step_spec
from nntile_py.data.sequences import Answered
from nntile_py.data.token_files import Tokens
from nntile_py.data.tokenization import train_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.training.datasets import build_dataset
from nntile_py.training.prepare_command import prepare

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OURS = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALKS = [
    [{"role": "system", "content": "be short"}, {"role": "user", "content": f"what is {k}"},
     {"role": "assistant", "content": f"it is number {k}"}, {"role": "user", "content": "and then"},
     {"role": "assistant", "content": f"then {k + 1}, of course"}]
    for k in range(40)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer that has a chat template, and TALKS as JSON lines."""
    text = "what is number, be short and then of course"
    tokenizer = train_tokenizer([text] * 9, 300, ["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": OURS}))
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return tmp_path


def dataset(folder: Path, file: str, *sets: str, tokenizer: bool = True) -> Any:
    own = [f"tokenizer={{path: {folder}/tokenizer.json}}"] if tokenizer else []
    of = config(folder, str(folder / file), "train.seq=96", "train.batch=4", "data.val_fraction=0.2", *own, *sets)
    return build_dataset(of, step_spec(of))


def test_the_answers_alone_are_learned_as_in_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=CHATML)
    made = dataset(folder, "talks.jsonl", "data.messages=messages")
    expected = {}
    for talk in TALKS:
        of = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        labels = np.where(np.array(of["assistant_masks"]) == 1, of["input_ids"], -100)
        expected[tuple(of["input_ids"])] = labels.tolist()
    seen = set()
    for step in range(1, 9):
        batch = made.train(step)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            row = next(row for row in expected if tuple(ids[: len(row)]) == row)
            assert labels == expected[row] + [-100] * (96 - len(row))
            seen.add(row)
    assert len(seen) > 25 and "training sequences (conversations): " in made.describe_lengths()


@pytest.mark.parametrize("pack", [False, True])
def test_training_on_answers(folder: Path, runtime: nt.Runtime, pack: bool) -> None:
    """The loss of a batch is transformers' loss with the same labels, padded and packed."""
    torch = pytest.importorskip("torch")
    sets = "train.seq=96", "train.batch=4", "data.messages=messages", "tiles={batch: 2}"
    own = f"train.pack={str(pack).lower()}", f"tokenizer={{path: {folder}/tokenizer.json}}"
    of = config(folder, str(folder / "talks.jsonl"), *sets, *own)
    spec = step_spec(of, build_model(of))
    made = build_dataset(of, spec)
    trainer = nt.Trainer.of_spec(spec)
    batch = made.train(1)
    loss = trainer.evaluate(batch)
    hf = spec.model.to_hf().eval()
    numbers, _ = made._sampler.step(1)  # type: ignore[attr-defined]
    total = count = 0.0
    for number in numbers:
        ids, learned = made._train.take(number)  # type: ignore[attr-defined]
        labels = np.where(learned == 1, ids, -100)
        n = int((labels[1:] != -100).sum())
        with torch.no_grad():
            one = hf(torch.tensor(ids[None]), labels=torch.tensor(labels[None])).loss.item()
        total, count = total + one * n, count + n
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_prompts_and_responses(folder: Path) -> None:
    """As a conversation with a template, else one behind the other, and the end token is learned."""
    rows = [{"question": f"what is {k}? ", "answer": f"number {k}"} for k in range(30)]
    (folder / "qa.csv").write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    columns = "data.prompt=question", "data.response=answer"
    for own in (True, False):
        made = dataset(folder, "qa.csv", *columns, tokenizer=own)
        batch = made.train(1)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            learned = made.tokenizer.decode(ids[labels != -100].tolist(), skip_special_tokens=False).removeprefix(" ")
            number = int("".join(filter(str.isdigit, learned)))
            assert learned == (f"number {number}<|im_end|>\n" if own else f"number {number}<|endoftext|>")
            text = made.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            if not own:
                assert text.startswith(f"what is {number}? number {number}")
            else:
                assert text.startswith(f"<|im_start|>user\nwhat is {number}? <|im_end|>\n<|im_start|>assistant\n")


def test_other_names_of_roles_and_a_tokenizer_without_a_template(folder: Path) -> None:
    talks = [[{"from": "human", "value": f"what is {k}"}, {"from": "gpt", "value": f"number {k}"}] for k in range(30)]
    (folder / "share.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    made = dataset(folder, "share.jsonl", "data.messages=talk", tokenizer=False)
    batch = made.train(1)
    learned = made.tokenizer.decode(batch["input_ids"][0][batch["labels"][0] != -100].tolist())
    assert learned.startswith(" number ") and learned.endswith("\n")


@pytest.mark.parametrize("columns", [{"messages": "messages"}, {"prompt": "q", "response": "a"}], ids=["talks", "qa"])
def test_prepared_instructions(folder: Path, columns: dict[str, str]) -> None:
    """A prepared folder has the tokens, and the answers to learn, that the table has."""
    rows = [{"messages": talk, "q": talk[1]["content"], "a": talk[2]["content"]} for talk in TALKS]
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, tokenizer = folder / "tokens", str(folder / "tokenizer.json")
    settings = {"source": str(folder / "all.jsonl"), "val_fraction": 0.2, **columns}
    prepare(settings, out, Path(tokenizer), None, False, False, lambda text: None)
    keys = [f"data.{name}={column}" for name, column in columns.items()]
    table, prepared = dataset(folder, "all.jsonl", *keys), dataset(folder, "tokens")
    for step in (1, 2, 9):
        one, other = table.train(step), prepared.train(step)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert (one["labels"] == -100).any()
    with pytest.raises(ConfigError, match=r"data\.concatenate: got true; allowed: false, since the tokens are conv"):
        dataset(folder, "tokens", "data.concatenate=true")


def test_wrong_instructions(folder: Path) -> None:
    def refused(row: Any, message: str, *sets: str) -> None:
        (folder / "x.jsonl").write_text(json.dumps({"messages": TALKS[0]}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ConfigError, match=message):
            dataset(folder, "x.jsonl", *(sets or ("data.messages=messages",)))

    refused({"messages": "hello"}, r"x\.jsonl, line 2: 'messages' is 'hello'; allowed: a list such as")
    refused({"messages": [{"role": "user"}]}, "line 2: message 1 of 'messages' is")
    refused({"messages": TALKS[0][:2]}, "line 2: 'messages' has no message of the role 'assistant'")
    refused({"messages": [{"role": "tool", "content": "x"}, *TALKS[0]]}, "line 2: chat template: no tools here")
    refused({"text": "a"}, "line 2: no 'messages'; it has 'text'")
    refused({}, r"data\.response: missing; allowed with data\.prompt: the column of the responses", "data.prompt=a")
    refused({}, r"data\.prompt: missing; allowed with data\.response: the column of the prompts", "data.response=a")
    both = "data.messages=messages", "data.prompt=a", "data.response=b"
    refused({}, r"data\.prompt: got data\.messages too; allowed: data\.messages, or data\.prompt with", *both)
    refused({}, "data.messages: allowed with a causal model, data.concatenate: false", "data.messages=messages",
            "data.concatenate=true")  # fmt: skip
    refused({}, "data: no training conversation has an answer in 4 tokens", "data.messages=messages", "train.seq=4",
            f"data.source={folder}/talks.jsonl")  # fmt: skip
    last = "{% for m in messages %}{{ m['role'] }}{% if loop.last %}!{% endif %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": last}))
    refused({"messages": TALKS[0]}, "line 1: chat template: message 3 changes the text before it")


def test_answers_behind_the_end_are_left_out() -> None:
    lengths = np.array([6, 1, 9, 4])
    learned = np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0], np.uint8)
    table = Answered(Tokens(np.arange(20), lengths, learned), 5)
    assert table.lengths.tolist() == [5, 5] and [table.place(0, k)[0].start for k in range(2)] == [0, 7]
    assert (table.cut, table.left_out) == (2, 2)
