"""Checkpoints as files: whole or not there, whatever happens while they are written."""

import json
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint import reader, run_folder
from nntile_py.checkpoint.format import DamagedCheckpoint, StoredArray, TrainerState
from nntile_py.checkpoint.resume import candidates_in, newest_checkpoint
from nntile_py.checkpoint.run_folder import Metrics, RunFolder, check_replaced, check_unlocked
from nntile_py.checkpoint.writer import error_text
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system.folders import exchange, mark, replace_file
from nntile_py.training.run_start import check_folders

FACTS: dict[str, Any] = {"model": None, "trainer": {}}


def state(step: int = 3, seed: int = 0) -> TrainerState:
    rng = np.random.default_rng(seed)
    weights = {"a.weight": rng.standard_normal((5, 7)).astype(np.float32), "b": rng.standard_normal(3)}
    averages = {name: {weight: rng.standard_normal(x.shape).astype(np.float32) for weight, x in weights.items()}
                for name in ("m", "v")}  # fmt: skip
    return TrainerState(step, stored(weights), {name: stored(of) for name, of in averages.items()})


def stored(arrays: dict[str, Any]) -> dict[str, StoredArray]:
    return {name: StoredArray(x.dtype.name, x.shape, partial(np.asarray, x)) for name, x in arrays.items()}


def write(run: Path, step: int, seed: int = 0, more: tuple[str, ...] = ()) -> Path:
    folder = checkpoint.checkpoint_folder(run, step)
    facts = FACTS | {"data": {"seed": str(seed)}}
    files = dict.fromkeys(("tokenizer.json", "config.json", *more), "{}")
    checkpoint.write_checkpoint(folder, state(step, seed), files, facts)
    return folder


POOLING = ("1_Pooling/config.json",)  # a file in a folder, as a model of sentence embeddings has it


@pytest.mark.parametrize("removed", range(7))
def test_a_killed_removal_is_finished_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int) -> None:
    """Whichever files of a checkpoint are gone at the kill, nothing is taken for a user's files."""
    folder, unlink, count = write(tmp_path, 3, more=POOLING), Path.unlink, 0

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal count
        if count == removed:
            raise KeyboardInterrupt
        count += 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt) if removed < 6 else nullcontext():
            checkpoint.remove_checkpoint(folder)
    checkpoint.remove_leftovers(tmp_path)
    assert not [*folder.parent.iterdir()]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder, made = write(tmp_path, 3), state()
    read = load_file(folder / "model.safetensors")
    assert read.keys() == made.weights.keys() and all((read[n] == made.weights[n].read()).all() for n in read)
    averages = reader.read_averages(folder)
    assert averages.keys() == {"m", "v"} and (averages["v"]["a.weight"] == made.averages["v"]["a.weight"].read()).all()
    facts = reader.read_facts(folder)
    assert facts["step"] == 3 and facts["data"] == {"seed": "0"} and set(facts["sha256"]) == {
        "model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.json",
    }  # fmt: skip


def test_an_optimizer_without_averages(tmp_path: Path) -> None:
    saved = TrainerState(1, stored({"a": np.ones((0, 2)), "b": np.float64([2.0])}), {})
    checkpoint.write_checkpoint(tmp_path / "one", saved, {}, FACTS)
    assert reader.read_averages(tmp_path / "one") == {} and reader.read_facts(tmp_path / "one")["step"] == 1
    assert load_file(tmp_path / "one" / "model.safetensors")["a"].shape == (0, 2)


def test_weights_that_are_no_numbers_replace_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    before = reader.read_facts(folder)
    bad = TrainerState(3, stored({"a": np.array([1.0, np.inf])}), {})
    with pytest.raises(NNTileError, match="weight a has values that are no finite numbers after step 3"):
        checkpoint.write_checkpoint(folder, bad, {}, {})
    assert reader.read_facts(folder) == before


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "thesis", tmp_path / "file", tmp_path / "thesis" / "..", tmp_path):
        with pytest.raises(ConfigError, match="allowed: a new or empty folder, or a checkpoint"):
            checkpoint.write_checkpoint(folder, state(), {}, {})
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    checkpoint.write_checkpoint(tmp_path / "empty", state(), {}, FACTS)
    assert reader.read_facts(tmp_path / "empty")["step"] == 3
    foreign = tmp_path / "dataset"  # as a data set of transformers has it
    foreign.mkdir()
    for content in ('{"_data_files": []}', '{"format": 1, "step": 1, "sha256": {}}', "[", "3"):
        (foreign / "state.json").write_text(content)
        with pytest.raises(ConfigError, match="allowed: a new or empty folder, or a checkpoint"):
            checkpoint.write_checkpoint(foreign, state(), {}, FACTS)
        assert [path.name for path in foreign.iterdir()] == ["state.json"]


def users_files(folder: Path) -> list[Path]:
    """Put a note and a folder beside a checkpoint. Return their paths."""
    (folder / "eval").mkdir(parents=True)
    names = [folder / "notes.md", folder / "eval" / "scores"]
    for path in names:
        path.write_text("mine")
    return names


def test_what_a_user_put_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    """When it is saved again; when it is removed, in a folder beside."""
    for run in (tmp_path / "one", tmp_path / "other"):
        mine = users_files(write(run, 3))
    folder = write(tmp_path / "other", 3, seed=1)
    assert reader.read_facts(folder)["data"] == {"seed": "1"}
    assert all(path.read_text() == "mine" for path in mine) and len([*folder.parent.iterdir()]) == 1
    (folder / "optimizer.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"optimizer\.json is of no checkpoint; allowed: a folder without it"):
        checkpoint.write_checkpoint(folder, state(), {"optimizer.json": "{}"}, FACTS)
    assert (folder / "optimizer.json").read_text() == "mine" and reader.read_facts(folder)["step"] == 3
    write(tmp_path / "one", 4)
    write(tmp_path / "one", 5)
    foreign = tmp_path / "one" / "checkpoints" / "step-000001"
    users_files(foreign)
    checkpoint.prune(tmp_path / "one", 1, None)
    left = sorted(path.name for path in foreign.parent.iterdir())
    assert left == ["step-000001", "step-000003.old1", "step-000005"]
    assert sorted(path.name for path in (foreign.parent / "step-000003.old1").iterdir()) == ["eval", "notes.md"]
    assert checkpoint.removable(tmp_path / "one", 5, None) == []


def test_hidden_folders_that_are_not_ours_stay(tmp_path: Path) -> None:
    """An unfinished checkpoint has a mark; what a kill left of one that was replaced has its state.json."""
    write(tmp_path, 3)
    hidden = [tmp_path / "checkpoints" / f".step-000003.{n * 16}.tmp" for n in "0123"]
    users_files(hidden[0])
    shutil.copytree(tmp_path / "checkpoints" / "step-000003", hidden[1])
    users_files(hidden[1])
    users_files(hidden[2])
    mark(hidden[2], checkpoint._UNFINISHED)
    users_files(tmp_path / "elsewhere")
    hidden[3].symlink_to(tmp_path / "elsewhere")
    write(tmp_path, 3)
    assert not hidden[2].exists() and all(path.exists() for path in hidden[:2])
    checkpoint.remove_leftovers(tmp_path)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()} - {"step-000003", hidden[3].name}
    assert names == {"step-000003.old1", "step-000003.old2"}
    for name in names:
        assert {one.name for one in (tmp_path / "checkpoints" / name).iterdir()} == {"eval", "notes.md"}
    assert (tmp_path / "elsewhere" / "notes.md").exists()


def test_a_damaged_one_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    good, bad = write(tmp_path, 9), write(tmp_path, 10)
    data = bytearray((bad / "optimizer.safetensors").read_bytes())
    data[-3] ^= 1
    (bad / "optimizer.safetensors").write_bytes(data)
    assert newest_checkpoint(tmp_path, said.append).folder == good
    assert len(said) == 1 and "step-000010/optimizer.safetensors" in said[0] and "trying the one before" in said[0]
    with pytest.raises(ConfigError, match=r"no checkpoint that is whole in .*step-000010"):
        newest_checkpoint(bad, said.append)
    right = json.loads((good / "state.json").read_text())
    wrong: list[Any] = [{}, [], 3, {"format": 1}, right | {"format": 2}]
    wrong += [right | {"step": step} for step in (None, -1, 2.5, "9", True, [9], 10**30, 8)]
    wrong += [right | {"sha256": hashes} for hashes in (3, {}, {"model.safetensors": ""})]
    wrong += [right | {"sha256": right["sha256"] | {name: "0"}} for name in ("/dev/zero", "../x", "state.json", "a")]
    wrong += [right | {key: 3} for key in ("model", "trainer", "config", "data")]
    for content in ["", "{", "[" * 10**5, *map(json.dumps, wrong)]:
        (good / "state.json").write_text(content)
        with pytest.raises(DamagedCheckpoint):
            reader.read_facts(good)
    shutil.rmtree(good)
    (bad / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no checkpoint that is whole"):
        newest_checkpoint(tmp_path, said.append)


def test_which_stay(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        write(tmp_path, step)
        checkpoint.prune(tmp_path, 2, 4)
    assert [step for step, _ in checkpoint.checkpoints_in(tmp_path)] == [10, 8, 4]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_checkpoint import POOLING, write
from nntile_py.checkpoint import format as checkpoint
at, count = int(sys.argv[2]), 0

def watch(event, arguments):
    global count
    if on and (event == "open" or event.startswith(("os.", "shutil."))):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

on = False
sys.addaudithook(watch)
real = os.fsync
os.fsync = lambda number: (watch("os.fsync", ()), real(number))
on = True
run = Path(sys.argv[1])
checkpoint.remove_leftovers(run)
write(run, 5, seed=1, more=POOLING)
checkpoint.prune(run, 1, None)
print(count)
"""


def killed_at(run: Path, at: int) -> subprocess.CompletedProcess[str]:
    """A process that replaces the checkpoint of step 5, and is killed at its operation `at` on files."""
    code = KILLED.format(tests=str(Path(__file__).parent))
    return forks.run([sys.executable, "-c", code, str(run), str(at)], capture_output=True, text=True, check=False)


def test_a_kill_at_any_operation_of_a_save_loses_nothing(tmp_path: Path) -> None:
    """Whole before, or whole after; what is left of the attempt is no checkpoint, and goes."""
    old, new = (write(tmp_path / "before", 4, more=POOLING), write(tmp_path / "before", 5, seed=7))
    whole = killed_at(shutil.copytree(tmp_path / "before", tmp_path / "all"), 0)
    assert whole.returncode == 0, whole.stderr
    operations = int(whole.stdout)
    assert operations > 15
    seeds = {"1", "7", "0"}
    for at in range(1, operations + 1):
        run = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        assert killed_at(run, at).returncode == -9
        found = checkpoint.checkpoints_in(run)
        assert found and all(reader.read_facts(folder)["data"]["seed"] in seeds for _, folder in found)
        assert newest_checkpoint(run, pytest.fail).step == 5
        checkpoint.remove_leftovers(run)
        assert {path.name for path in (run / "checkpoints").iterdir()} <= {"step-000004", "step-000005"}, at
    assert old.exists() and new.exists()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 3)
    monkeypatch.setattr(checkpoint, "write_tensors", _full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    with pytest.raises(OSError, match=r"free, .* MiB needed") as error:
        checkpoint.check_free_space(tmp_path, 1 << 60)
    assert str(tmp_path) in error_text(error.value)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=512))
    for need, told in ((30 * 2**10, "30.0 KiB"), (2**17, "0.1 MiB"), (3 * 2**30, "3,072.0 MiB")):
        with pytest.raises(OSError, match=f"0.5 KiB free, {told} needed"):
            checkpoint.check_free_space(tmp_path, need)


def _full(*_: Any) -> str:
    raise OSError(28, "No space left on device", "x")


def test_folders_that_take_each_others_names(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    exchange(one, other)
    assert (one / "other").exists() and (other / "one").exists()


def test_later_checkpoints_are_set_aside(tmp_path: Path) -> None:
    """Those of a run that goes on from an older one: its own are not pruned for them."""
    for step in (2, 4, 6):
        write(tmp_path, step)
    assert [path.name for path in checkpoint.set_aside(tmp_path, 2)] == ["step-000006.old1", "step-000004.old1"]
    for step in (3, 4):
        write(tmp_path, step, seed=1)
        checkpoint.prune(tmp_path, 1, None)
    assert [step for step, _ in checkpoint.checkpoints_in(tmp_path)] == [4]
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 3


def test_one_process_in_a_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="another process is training into"):
        RunFolder(tmp_path / "run")
    run.close()
    RunFolder(tmp_path / "run").close()


def test_what_a_run_may_not_take_the_place_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = yaml.safe_dump({key: {} for key in ("model", "data", "tiles", "train", "runtime")})
    texts = {
        "file": "", "mine/config.json": "", "run/metrics.jsonl": "", "run.new/thesis.tex": "", "good/metrics.jsonl": "",
        "whole/config.yaml": ours, "whole/metrics.jsonl": '{"step": 1}', "begun/config.yaml": ours,
        "begun/metrics.jsonl": "", "other/metrics.jsonl": '{"step": 1}', "other/config.yaml": "model: {}\ntrain: {}",
        "theirs/metrics.jsonl": '{"loss": 1}', "theirs/config.yaml": ours, "alone/config.yaml": ours,
        "models/metrics.jsonl": "", "models/model.safetensors": "", "new/metrics.jsonl": "", "new.new/config.json": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("good", "whole", "begun"):
        check_replaced(tmp_path / name)
    for name, why in {
        "file": "is no folder", "mine": "is no run, but has config.json", "run": "something else is",
        ".": "is the current folder", "/proc": "is where a disk is mounted", "other": "is no run",
        "theirs": "is no run", "alone": "is no run", "models": "is no run", "new": "needs .*, where something else is",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            check_replaced(Path(name))


@pytest.mark.parametrize("at_once", [True, False])
def test_the_place_of_an_earlier_run(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:  # as on a file system that cannot exchange
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    out = tmp_path / "out"
    write(out, 8)
    for name in ("model.safetensors", "note.txt", "metrics.jsonl"):
        (out / name).write_text("old")
    users_files(out / "checkpoints" / "step-000008")
    users_files(out / "checkpoints" / "mine")
    run = RunFolder(out, replaces=True)
    write(run.path, 2)
    assert (out / "model.safetensors").read_text() == "old"
    run.settle()
    run.publish(2)
    run.close()
    assert run.path == out and [step for step, _ in checkpoint.checkpoints_in(out)] == [2]
    assert (out / "note.txt").read_text() == "old" and load_file(out / "model.safetensors").keys() == {"a.weight", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {
        "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "note.txt", "tokenizer.json"
    }  # fmt: skip
    for name in ("step-000008.old1", "mine"):
        assert {one.name for one in (out / "checkpoints" / name).iterdir()} == {"eval", "notes.md"}


def test_files_that_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are a link and take no room; other files are copies, and links only on a full disk."""
    folder = write(tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    for full in (False, True):
        if full:
            monkeypatch.setattr(run_folder, "replace_file", _full)
        for _ in range(2):
            run.publish(3)
        linked = {name for name in ("model.safetensors", "config.json") if (run.path / name).samefile(folder / name)}
        assert linked == {"model.safetensors", *(["config.json"] if full else [])}
    names = {"checkpoints", "config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in run.path.iterdir()} == names
    checkpoint.write_checkpoint(checkpoint.checkpoint_folder(run.path, 4), state(4), {"1_Pooling/x.json": ""}, FACTS)
    run.publish(4)
    assert (run.path / "1_Pooling" / "x.json").is_file()
    run.close()


ALONG = {"config.json": "{}", "notes.txt": "theirs", "1_Pooling/config.json": "[]"}


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("mine", ["files", "link", "file", "folder", "copies"])
def test_users_files_with_names_of_published_ones(mine: str, replaces: bool, tmp_path: Path) -> None:
    """They are renamed, and nothing is written through a link; copies that a run has published are replaced."""
    out, victim = tmp_path / "run", tmp_path / "victim"
    checkpoint.write_checkpoint(checkpoint.checkpoint_folder(out, 3), state(), ALONG | {"notes.txt": "before"}, FACTS)
    run = RunFolder(out)
    run.publish(3)
    run.close()
    replace_file(victim / "config.json", "kept")
    pooling, notes = out / "1_Pooling", out / "notes.txt"
    kept = {"notes.txt.old1": "mine"}
    if mine == "files":
        notes.write_text("mine"), (pooling / "config.json").write_text("mine")
        kept |= {"1_Pooling/config.json.old1": "mine"}
    elif mine != "copies":
        shutil.rmtree(pooling)
        notes.unlink()
    if mine == "link":
        pooling.symlink_to(victim), notes.symlink_to(victim / "config.json")
        kept = {"1_Pooling.old1/config.json": "kept", "notes.txt.old1": "kept"}
    elif mine == "file":
        notes.write_text("mine"), pooling.write_text("mine")
        kept |= {"1_Pooling.old1": "mine"}
    elif mine == "folder":
        replace_file(notes / "x", "mine")
        kept = {"notes.txt.old1/x": "mine"}
    elif mine == "copies":
        kept = {}
    run = RunFolder(out, replaces)
    checkpoint.write_checkpoint(checkpoint.checkpoint_folder(run.path, 4), state(4), ALONG, FACTS)
    run.settle()
    for _ in range(2):
        run.publish(4)
    run.close()
    assert (victim / "config.json").read_text() == "kept" and len([*victim.iterdir()]) == 1
    assert {name: (out / name).read_text() for name in ALONG | kept} == ALONG | kept
    assert len([*out.rglob("*.old*")]) == len(kept) and not [*tmp_path.glob("run.*")]


def test_a_published_file_never_takes_a_name_of_the_run(tmp_path: Path) -> None:
    """Checkpoints of earlier versions may have a folder of such a name."""
    files = {f"{name}/x.json": "{}" for name in ("metrics.jsonl", "checkpoints")}
    checkpoint.write_checkpoint(checkpoint.checkpoint_folder(tmp_path, 3), state(), files, FACTS)
    (tmp_path / "metrics.jsonl").write_text("lines")
    run = RunFolder(tmp_path)
    run.publish(3)
    run.close()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "metrics.jsonl", "model.safetensors"}
    assert (tmp_path / "metrics.jsonl").read_text() == "lines" and not (tmp_path / "checkpoints/x.json").exists()


def test_a_run_that_cannot_begin_leaves_the_users_files(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", new=True)
    users_files(run.path)
    run.give_up()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"eval", "notes.md"}
    RunFolder(tmp_path / "other", new=True).give_up()
    assert not (tmp_path / "other").exists()


def test_a_run_that_was_killed_while_it_began(tmp_path: Path) -> None:
    """Its folder is known as a run's from the first file on, and what it left beside the run goes."""
    run = RunFolder(tmp_path / "run", new=True)
    run.close()
    check_replaced(tmp_path / "run")
    again = RunFolder(tmp_path / "run", replaces=True)
    again.close()
    assert [*again.path.glob("metrics.jsonl")]
    check_replaced(tmp_path / "run")
    users_files(again.path)
    with pytest.raises(ConfigError, match="something else"):
        check_replaced(tmp_path / "run")


def test_metrics_wait_for_room(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = Metrics(tmp_path, 0, said.append)
    metrics.write({"step": 1})
    disk = metrics._file
    with Path("/dev/full").open("ab", buffering=0) as metrics._file:
        metrics.write({"step": 2})
        metrics.write({"step": 3})
    assert len(said) == 1 and "No space left" in said[0]
    metrics._file = disk
    metrics.write({"step": 4})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4] and len(said) == 1


def test_metrics_that_move(tmp_path: Path) -> None:
    """With the lines that had no room; from a folder that is gone those that were not written yet, and later ones."""
    for name, kept in {"there": [1, 2, 3], "gone": [2, 3]}.items():
        old, new = tmp_path / name, tmp_path / f"{name}-new"
        old.mkdir(), new.mkdir()
        metrics = Metrics(old, 0, lambda told: None)
        metrics.write({"step": 1})
        disk = metrics._file
        with Path("/dev/full").open("ab", buffering=0) as metrics._file:
            metrics.write({"step": 2})
        metrics._file = disk
        if name == "gone":
            shutil.rmtree(old)
        with pytest.raises(OSError, match="nowhere"):
            metrics.move(tmp_path / "nowhere")
        metrics.move(new)
        metrics.write({"step": 3})
        metrics.close()
        lines = (new / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == kept


def test_folders_that_others_train_into(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for wanted in ({"replaces": True}, {"new": True}):
        with pytest.raises(ConfigError, match="another process is training into"):
            RunFolder(tmp_path / "run", **wanted)
    with pytest.raises(ConfigError, match="--out: another process is training into"):
        check_unlocked(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--resume: another process is training into .*; allowed: to wait until"):
        RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume: another process is training into"):
        check_folders(tmp_path / "run", None, False, tmp_path / "run")
    with pytest.raises(ConfigError, match="--out: another process is training into"):
        check_folders(tmp_path / "run", None, False, tmp_path / "other")
    with pytest.raises(ConfigError, match="--resume: another process is training into"):
        candidates_in(tmp_path / "run")
    run.close()
    with pytest.raises(ConfigError, match="--resume: no checkpoint in"):
        candidates_in(tmp_path / "run")
    check_unlocked(tmp_path / "run")
    with pytest.raises(ConfigError, match="another process has begun to train into"):
        RunFolder(tmp_path / "run", new=True)
    RunFolder(tmp_path / "run", replaces=True).close()


def test_a_folder_that_is_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        RunFolder(tmp_path / "loop")


def test_threads_that_write_one_checkpoint(tmp_path: Path) -> None:
    made = [threading.Thread(target=write, args=(tmp_path, 3, seed)) for seed in range(6)]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    assert reader.read_facts(checkpoint.checkpoint_folder(tmp_path, 3))["data"]["seed"] in "012345"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_metrics_of_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\nnull\n{"step": 3}\n{"st')
    metrics = Metrics(tmp_path, 2, pytest.fail)
    metrics.write({"step": 3, "again": True})
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
