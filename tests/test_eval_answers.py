"""`nntile eval` on conversations, and on prompts with responses: the loss of the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import nntile
from test_instructions import OURS, TALKS, folder

from nntile_py.inference import evaluation
from nntile_py.inference.evaluation_losses import causal_sums

__all__ = ["folder"]  # a fixture


def measured(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    capsys.readouterr()
    assert nntile("eval", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)[0]


@pytest.mark.parametrize("own", [True, False])  # whether the tokenizer's folder has a chat template
def test_eval_measures_the_held_out_loss_of_the_answers(
    folder: Path, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    """The keys of the run, or of --set, decide; a file that is no table, and data.messages=null, are texts."""
    rows = [{"messages": talk, "q": f"what is {k}", "a": f"it is {k}", "text": "a b"} for k, talk in enumerate(TALKS)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    (folder / "plain.txt").write_text("what is number")
    tree = {
        "model": {"layers": 1, "embed": 8, "heads": 2}, "sample": {"tokens": 0}, "runtime": {"cpus": 1},
        "data": {"source": f"{folder}/talks.jsonl", "held_out": f"{folder}/held.jsonl", "messages": "messages"},
        "tokenizer": {"path": f"{folder}/tokenizer.json"} if own else {"vocab_size": 300},
        "train": {"steps": 2, "batch": 6, "seq": 96, "eval_batches": 1},
    }  # fmt: skip
    (folder / "chat.yaml").write_text(json.dumps(tree))
    run, held = folder / "run", ("--data", folder / "held.jsonl")
    assert nntile("train", folder / "chat.yaml", "--out", run) == 0
    loss = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["held_out_loss"]
    found = measured(capsys, run, *held)
    assert found["loss"] == pytest.approx(loss, abs=1e-6) and found["texts"] == 6 and "bits_per_byte" not in found
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "causal_sums", lambda *given: sizes.append(given[3]) or causal_sums(*given))
        in_batches = measured(capsys, run, *held, "--batch", 4)
    assert sizes[0][1] < 96  # the longest conversation
    assert in_batches["loss"] == pytest.approx(loss, abs=1e-6) and in_batches["tokens"] == found["tokens"]
    prompts = measured(capsys, run, *held, "--set", "data.prompt=q", "--set", "data.response=a")
    assert prompts["texts"] == 6 and prompts["tokens"] < found["tokens"]
    assert "bits_per_byte" in measured(capsys, run, *held, "--set", "data.messages=null")
    assert "bits_per_byte" in measured(capsys, run, "--data", folder / "plain.txt")
    template = json.loads((run / "tokenizer_config.json").read_text()).get("chat_template")
    assert template == (OURS if own else None)
    for more, message in (
        (("--stride", 4), "--stride: got 4 for conversations; allowed: no --stride"),
        (("--seq", 4), "--data: no conversation has an answer in its first 4 tokens; allowed: a larger --seq"),
        (("--set", "data.messages=talk"), "no 'talk'; it has 'messages', 'q', 'a', 'text'; allowed: a table with 'ta"),
        (("--set", "data.prompt=q"), "data.response: missing; allowed with data.prompt"),
    ):
        assert nntile("eval", run, *held, *more) == 2 and message in capsys.readouterr().err
    both = folder / "both"
    both.mkdir()
    for name in ("held.jsonl", "plain.txt"):
        (folder / name).rename(both / name)
    assert nntile("eval", run, "--data", both) == 2
    told = capsys.readouterr().err
    assert "plain.txt is no table; allowed for instructions" in told and "texts: --set data.messages=null\n" in told
    assert measured(capsys, run, "--data", both, "--set", "data.messages=null")["bits_per_byte"] > 0
