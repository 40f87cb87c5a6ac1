"""Models in tiles that several programs share, and models from the folders of runs, checkpoints and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.open_model import open_model

SIZES = {"vocab": 37, "positions": 16, "layers": 1, "embed": 12, "heads": 3}


def gpt2(seed: int = 1) -> Any:
    return nt.models.GPT2(nt.models.GPT2Config(**SIZES), seed=seed)


def logits(bound: BoundModel, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    batch, seq = ids.shape
    with Runtime.turn:
        program = bound.program((batch, seq), lambda: bound.spec(batch, seq).outputs("logits"))
        program.write(program.check({"input_ids": ids}))
        program.run({})
        return program.read("logits")


def of_torch(model: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        out: np.ndarray[Any, Any] = model.to_hf()(torch.from_numpy(ids)).logits.numpy()
    return out


@pytest.mark.parametrize("tiles", [{}, {"embed": 5, "vocab": 16, "heads": 2, "seq": 4}])
def test_programs_of_several_sizes_share_the_weights(runtime: Any, tiles: dict[str, int]) -> None:
    model, rng = gpt2(), np.random.default_rng(0)
    with BoundModel(model, tiles=tiles) as bound:
        for shape in ((2, 7), (1, 16), (2, 7)):
            ids = rng.integers(0, 37, shape)
            np.testing.assert_allclose(logits(bound, ids), of_torch(model, ids), atol=2e-5)
        assert len(bound.programs) == 2
        one, other = (program.store.handles for program in bound.programs.values())
        assert {key for key in one if one[key] is other.get(key)} == {key for key in one if key[0] == "param"} != set()


def test_replaced_weights_are_written_anew(runtime: Any) -> None:
    model, ids = gpt2(), np.arange(6)[None]
    with BoundModel(model) as bound:
        assert bound.stale
        before = logits(bound, ids)
        assert not bound.stale
        model.weights["transformer.ln_f.bias"] = model.weights["transformer.ln_f.bias"] + 1
        assert bound.stale
        after = logits(bound, ids)
        assert np.abs(after - before).max() > 0.1
        np.testing.assert_allclose(after, of_torch(model, ids), atol=2e-5)
        model.weights = gpt2(seed=2).weights
        np.testing.assert_allclose(logits(bound, ids), of_torch(model, ids), atol=2e-5)


def test_folders_of_transformers_and_of_trainers_open(tmp_path: Path, runtime: Any) -> None:
    model = gpt2()
    model.to_hf().save_pretrained(tmp_path / "hf")
    trainer = nt.Trainer(model, batch=2, seq=8)
    ids = np.random.default_rng(0).integers(0, 37, (2, 8))
    trainer.step(ids, ids, lr=1e-2)
    trainer.save(tmp_path / "saved")
    opened = open_model(tmp_path / "hf", {"attention": "naive"})
    assert opened.model.config.attention == "naive"
    assert (opened.step, opened.config, opened.tokenizer, opened.folder) == (None, {}, None, tmp_path / "hf")
    opened = open_model(tmp_path / "saved")
    assert opened.step == 1
    for name, value in trainer.state_dict().items():
        np.testing.assert_array_equal(opened.model.weights[name], value)
    trainer.close()
    (tmp_path / "saved" / "config.json").write_text("{}")
    with pytest.raises(nt.ConfigError, match="the content is not what was written"):
        open_model(tmp_path / "saved")


OWN = """
import nntile_py as nt
from nntile_py.models.gpt2 import GPT2, GPT2Config

class MineConfig(GPT2Config):
    pass

class Mine(GPT2):
    Config = MineConfig
"""


def test_code_runs_only_if_the_caller_names_it(tmp_path: Path) -> None:
    file = tmp_path / "mine_of_bound.py"
    file.write_text(OWN)
    model = gpt2()
    model.to_hf().save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{type: '{file}:Mine'}}\n")
    with pytest.raises(nt.ConfigError, match=r"whose code would run; allowed: --set model\.type="):
        open_model(tmp_path / "run")
    assert type(open_model(tmp_path / "run", {"type": f"{file}:Mine"}).model).__name__ == "Mine"


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    for name, message in (("none", "no such folder"), ("empty", "no model.safetensors or pytorch_model.bin")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(nt.ConfigError, match=f"{message}; allowed: the folder of a run"):
            open_model(tmp_path / name)
    (tmp_path / "empty" / "config.yaml").write_text("{}\n")
    with pytest.raises(nt.ConfigError, match="no checkpoint yet; allowed"):
        open_model(tmp_path / "empty")
