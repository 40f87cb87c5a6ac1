"""Folders of adapters whose files do not fit each other are refused; a full disk leaves no part of a folder."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.graph.lora import LoRA
from nntile_py.inference.merge_command import merge
from nntile_py.models import adapters

A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.fixture
def model() -> nt.models.GPT2:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    lora = {"targets": ["c_attn"], "rank": 2}
    return nt.models.GPT2.from_hf(transformers.GPT2LMHeadModel(config), lora=lora)


def test_files_that_do_not_fit_each_other(model: nt.models.GPT2, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    plain = model.merged()
    nt.save_adapter(model, tmp_path)
    weights = load_file(tmp_path / adapters.ADAPTER)
    facts = json.loads((tmp_path / adapters.ADAPTER_CONFIG).read_text())
    B = A.replace("lora_A", "lora_B")
    cases: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: weights.pop(B), r"has .*lora_A\.weight and no .*lora_B\.weight; allowed: both of each module"),
        (lambda: weights.pop(A), "has no LoRA of one rank"),
        (lambda: facts.update(r=3), r"adapter_config\.json: r: got 3; allowed: 2, the rank of the weights"),
        (lambda: facts.pop("r"), "r: got None; allowed: 2"),
        (lambda: weights.update({A: weights[A][:, :8].copy()}), r"shape \(2, 8\), expected .*adapter_model\.saf"),
    )
    for damage, message in cases:
        kept = dict(weights), dict(facts)
        damage()
        save_file(weights, tmp_path / adapters.ADAPTER)
        (tmp_path / adapters.ADAPTER_CONFIG).write_text(json.dumps(facts))
        with pytest.raises(nt.ConfigError, match=message):
            nt.load_adapter(plain, tmp_path)
        weights, facts = kept
    facts["lora_alpha"] = 1e6
    weights[B] = np.full_like(weights[B], 3e38)
    save_file(weights, tmp_path / adapters.ADAPTER)
    (tmp_path / adapters.ADAPTER_CONFIG).write_text(json.dumps(facts))
    with pytest.raises(nt.ConfigError, match=r"c_attn\.weight with its adapter is not finite in float32; allowed"):
        nt.load_adapter(plain, tmp_path).merged()


def test_a_full_disk_leaves_no_part_of_a_folder(
    model: nt.models.GPT2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nt.save_adapter(model, tmp_path / "adapter")
    model.merged().to_hf().save_pretrained(tmp_path / "base")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    original = adapters.replaced

    def full(path: Path) -> AbstractContextManager[IO[bytes]]:
        if path.name == full_for:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path)

    monkeypatch.setattr(adapters, "replaced", full)
    weights = {name: value + 1 for name, value in model.weights.items()}
    changed = type(model)(model.config.changed(lora=LoRA(targets=["c_attn"], rank=2, alpha=5)), weights)
    for full_for in (adapters.ADAPTER, adapters.ADAPTER_CONFIG):  # noqa: B007 (read by `full`)
        with pytest.raises(OSError, match="No space left"):
            nt.save_adapter(changed, tmp_path / "adapter")
        assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == kept
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        merge(tmp_path / "base", tmp_path / "out", tmp_path / "adapter", adapter_only=True, fields={})
    assert sorted(tmp_path.iterdir()) == before


def test_a_kill_leaves_no_new_file_beside_an_old_one(tmp_path: Path) -> None:
    """At any operation of a save on a file of the folder: it has two old files, two new ones, or is refused."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=True)
    states = json.loads(done.stdout)
    assert len(states) > 4
    old, new = ["old", "old config"], ["new", "new config"]
    assert states[0] == old and states[-1] == new
    assert all(state in (old, new) or state[1] is None for state in states), states


KILLED = """
import json, os, signal, sys
from pathlib import Path
from nntile_py.models import adapters

folder, left, states, killed = Path(sys.argv[1]), None, [], True

def count(event, args):
    global left
    if left is not None and event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(sys.argv[1]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
while killed:
    adapters.replace_both(folder, b"old", b"old config")
    child = os.fork()
    if not child:
        left = len(states)
        adapters.replace_both(folder, b"new", b"new config")
        os._exit(0)
    killed = os.waitpid(child, 0)[1] != 0
    files = folder / adapters.ADAPTER, folder / adapters.ADAPTER_CONFIG
    states += [[path.read_text() if path.exists() else None for path in files]]
print(json.dumps(states))
"""
