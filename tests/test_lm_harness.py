"""Log-likelihoods of tokens, and lm_eval with the model `nntile` beside its own model `hf`."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
import torch
import transformers
from test_eval import POSITIONS, models, nntile, tokenizer, words

import nntile_py as nt
from nntile_py import cli, inference
from nntile_py.inference.open_model import open_model
from nntile_py.inference.token_scorer import TokenScorer

__all__ = ["models", "nntile"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tiles": {"embed": 7, "vocab": 128, "seq": 9, "batch": 3}, "batch_tokens": 70},
    {"precision": "fp64", "accumulate": "tree", "tiles": {"vocab": 100}},
]


# -- the scorer


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("options", OPTIONS)
def test_log_likelihoods_as_transformers(name: str, options: dict[str, Any], models: Any, runtime: Any) -> None:
    folder, model = models(name)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 300, n).tolist() for n in (3, 24, 1, 17, 24, 2, 9, 9, 9, 5)]
    targets = [rng.integers(0, 300, rng.integers(1, len(one) + 1)).tolist() for one in sequences]
    expected = []
    for number, (sequence, wanted) in enumerate(zip(sequences, targets, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, -len(wanted) :].double()
        if number % 2:  # the most likely tokens
            wanted[:] = logits.argmax(-1).tolist()
        likelihood = logits.log_softmax(-1)[range(len(wanted)), wanted].sum()
        expected.append((float(likelihood), bool(number % 2)))
    done: list[int] = []
    scorer = TokenScorer(open_model(folder).model, **options)
    scores = scorer(sequences, targets, done.append)
    scorer.close()
    assert sum(done) == len(sequences)
    np.testing.assert_allclose([s.log_likelihood for s in scores], [e[0] for e in expected], atol=1e-4, rtol=1e-6)
    assert [s.greedy for s in scores] == [e[1] for e in expected]


def test_a_model_without_logits_of_tokens_is_refused(models: Any) -> None:
    with pytest.raises(nt.ConfigError, match=r"has the outputs logits \['batch', 'classes'\]; allowed: a model with"):
        TokenScorer(open_model(models("classifier")[0]).model)


# -- lm_eval

TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generated": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks of TASKS and their data."""
    drawn = random.Random(2)
    rows = [
        {
            "question": words(seed, drawn.randint(0, 30)), "answer": drawn.randint(0, 2), "text": words(seed, seed + 1),
            "choices": [f" {words(seed + 100 * k, drawn.randint(1, 4))}" for k in (1, 2, 3)],
        }
        for seed in range(12)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | data | task))
    return tmp_path


def command(*arguments: Any, cwd: Path) -> Any:
    env = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf")}
    code = "import sys; from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"
    return forks.run(
        [sys.executable, "-c", code, "lm-eval", "run", "--model", "nntile", "--include_path", cwd, *arguments],
        cwd=cwd, env=env, check=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_as_the_model_hf_of_lm_eval(name: str, models: Any, runtime: Any) -> None:
    """Contexts that are empty or too long, texts of several windows; Llama's tokenizer begins a text with a token."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    from nntile_py.inference.lm_harness import HarnessModel

    folder, model = models(name)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(start=name == "llama"), eos_token="<|endoftext|>",
        bos_token="[CLS]" if name == "llama" else "<|endoftext|>",
    )  # fmt: skip
    fast.save_pretrained(folder)
    theirs = HFLM(pretrained=model, tokenizer=fast, batch_size=4, max_length=POSITIONS)
    ours = HarnessModel(path=str(folder), batch_size=4, device="cpu", **{"tiles.vocab": 128})
    assert (ours.max_length, ours.prefix_token_id, ours.eot_token_id) == (
        POSITIONS, theirs.prefix_token_id, theirs.eot_token_id,
    )  # fmt: skip
    pairs = [("", "tile task"), ("the tile ", "of task"), (words(1, 60), " of a worker"), ("a", " " + words(2, 12))]
    asked = [SimpleNamespace(args=pair) for pair in pairs]
    both = [one.loglikelihood(asked, disable_tqdm=True) for one in (ours, theirs)]
    np.testing.assert_allclose([p[0] for p in both[0]], [p[0] for p in both[1]], atol=1e-4)
    assert [p[1] for p in both[0]] == [p[1] for p in both[1]]
    asked = [SimpleNamespace(args=(words(seed, count),)) for seed, count in enumerate((1, 10, 40, 200))]
    rolled = [one.loglikelihood_rolling(asked, disable_tqdm=True) for one in (ours, theirs)]
    np.testing.assert_allclose(*rolled, atol=1e-4, rtol=1e-6)  # hf adds in fp32
    for until in ([], [" t", "e"]):
        how = {"until": until, "max_gen_toks": 8, "do_sample": False}
        asked = [SimpleNamespace(args=(words(seed, count), how)) for seed, count in enumerate((1, 5, 3, 60))]
        written = [one.generate_until(asked, disable_tqdm=True) for one in (ours, theirs)]
        assert written[0] == written[1]


def test_local_tasks_from_the_command_line(models: Any, tasks: Path) -> None:
    pytest.importorskip("lm_eval")
    folder, _ = models("gpt2")
    model = "--model_args", f"path={folder},runtime.cpus=2,batch_tokens=200"
    done = command(*model, "--tasks", "choice,rolling", cwd=tasks)
    assert done.returncode == 0, done.stderr
    assert "bits_per_byte" in done.stdout and "|choice |" in done.stdout


def test_a_wrong_folder_ends_the_command_with_one_message(tasks: Path) -> None:
    pytest.importorskip("lm_eval")
    done = command("--model_args", "path=nowhere", "--tasks", "choice", cwd=tasks)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: nowhere: no such folder; allowed: the folder of a run")
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", {}, "the model is masked; allowed: a model that"),
        ("gpt2", {"max_length": 25}, "max_length=25; allowed: a positive integer of at most 24, the positions"),
        ("gpt2", {"batch_tokens": "x"}, "batch_tokens=x; allowed: a positive integer"),
        ("gpt2", {"layers": 2}, "layers=2: unknown key; allowed: precision"),
        ("gpt2", {"path": None}, "--model_args: path is missing; allowed: path=FOLDER"),
    ],
)
def test_wrong_arguments_are_refused(
    name: str, arguments: dict[str, Any], message: str, models: Any, runtime: Any
) -> None:  # fmt: skip
    pytest.importorskip("lm_eval")
    from nntile_py.inference.lm_harness import HarnessModel

    with pytest.raises(nt.ConfigError) as error:
        HarnessModel(**{"path": str(models(name)[0])} | arguments)
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_what_a_task_may_ask_for(models: Any, runtime: Any) -> None:
    pytest.importorskip("lm_eval")
    from nntile_py.inference.lm_harness import HarnessModel

    model = HarnessModel(path=str(models("gpt2")[0]))
    for how, message in (
        ({"until": ["x"]}, "max_gen_toks=256; allowed: 1 to 23, as a sequence has at most max_length = 24"),
        ({"max_gen_toks": 4, "num_beams": 2}, "--gen_kwargs: num_beams is unknown; allowed: until, max_gen_toks"),
        ({"max_gen_toks": 4, "do_sample": True, "top_p": 0}, "top_p: got 0; allowed: "),
    ):
        with pytest.raises(nt.ConfigError) as error:
            model.generate_until([SimpleNamespace(args=("a", how))], disable_tqdm=True)
        assert message in str(error.value)
    with pytest.raises(nt.ConfigError, match="--apply_chat_template: not supported by the model nntile yet"):
        model.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(nt.ConfigError, match="a continuation of 0 tokens; allowed: 1 to max_length = 24"):
        model._loglikelihood_tokens([(None, [1], [])], disable_tqdm=True)


def test_without_lm_eval_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "nntile_py.inference.lm_harness", raising=False)
    monkeypatch.delattr(inference, "lm_harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["nntile", "lm-eval", "ls", "tasks"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert re.search(r"the package lm_eval\S* is missing; allowed: to install it: pip", capsys.readouterr().err)
