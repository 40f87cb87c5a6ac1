"""Folders of adapters whose files do not fit each other are refused; a full disk leaves no part of a folder."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
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
    original = adapters.replace_file

    def full(path: Path, content: str | bytes) -> None:
        if path.name == adapters.ADAPTER_CONFIG:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(path, content)

    monkeypatch.setattr(adapters, "replace_file", full)
    with pytest.raises(OSError, match="No space left"):
        nt.save_adapter(model, tmp_path / "adapter")
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == kept
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        merge(tmp_path / "base", tmp_path / "out", tmp_path / "adapter", adapter_only=True)
    assert sorted(tmp_path.iterdir()) == before
