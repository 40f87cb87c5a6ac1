"""Every public name is given arguments of wrong types: an error that names the argument, or nothing wrong with it."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt

WRONG: list[Any] = [
    None, True, "x", "3", b"x", -1, 0, 1.5, float("nan"), float("inf"), 2**70, [], [1], ["x"], [None],
         {}, {"a": 1}, {1: "a"},
    object(), print, int, np.zeros(3), np.int8(3), 1j, Path("nowhere"), nt.Normal(1.0), {"x"}, ("a", "b", "c"),
]  # fmt: skip
IDS = np.zeros((2, 8), int)
CONFIG = nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8)
# Made by others, for a user to hold: arrays, what a submission gives back, errors. And modules and constants.
NOT_CALLED = {
    "Array", "Tiles", "Submitted", "Pending", "StepResult", "Traced", "ConfigError", "NNTileError", "NotFinite",
    "TaskError", "GeneratedPart", "GeneratedText",
    "starpu_array",  # takes a handle of StarPU's Python package: test_starpupy.py
    "models", "tasks", "testing", "tiles", "ONES", "ZEROS",
}  # fmt: skip


@nt.task(x="R", y="RW")
def _axpy(x: Any, y: Any, *, alpha: float) -> None:
    """Does nothing, whatever it is given."""


def _graph() -> nt.Graph:
    return nt.Graph()


def _calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Calls that are right, by name: each is repeated with one argument that is not."""
    model = nt.models.GPT2(CONFIG)
    trainer = nt.Trainer(model, 2, 8)
    trainer.step(IDS, IDS)
    trainer.save(folder / "saved")
    kept = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8)  # not trained with wrong values
    bert = nt.models.BERT(nt.models.BERTConfig(layers=1, embed=8, heads=2, vocab=20, positions=8))
    adapted = nt.models.GPT2(CONFIG.changed(lora={"targets": ["c_attn"]}))
    x = nt.array(np.ones((4, 4)))
    graph = nt.Graph()
    h = graph.input("h", {"batch": 2, "embed": 4}, "fp32")

    def profile(**how: Any) -> None:
        with nt.profile(**how):
            _axpy(x, nt.array(np.ones(3)), alpha=1.0)

    def scope(**how: Any) -> None:
        with _graph().scope(**how):
            pass

    def made_task(**how: Any) -> Any:
        return nt.task(how.pop("library"), **how)(lambda x: None)

    def named_task(**how: Any) -> Any:
        return _axpy.options(**how)(nt.array(np.ones(3)), nt.array(np.ones(3)), alpha=1.0)

    def of_numbers(**how: Any) -> Any:
        return _axpy(alpha=1.0, **how)

    tokens = {"batch": 2, "seq": 8}
    return {
        "array": (nt.array, {"value": [1.0], "dtype": "float32"}),
        "empty": (nt.empty, {"shape": (2, 3), "dtype": "float32"}),
        "zeros": (nt.zeros, {"shape": (2, 3), "dtype": "float32"}),
        "from_torch": (nt.from_torch, {"module": torch.nn.Linear(4, 2), "example": {"input": torch.ones(2, 4)}}),
        "to_torch": (nt.to_torch, {"model": nt.from_torch(torch.nn.Linear(4, 2), {"input": torch.ones(2, 4)})}),
        "Array.tiles": (x.tiles, {"rows": 2, "columns": 2}),
        "starpu_handle": (nt.starpu_handle, {"array": x}),
        "task": (made_task, {"library": "numpy", "x": "R"}),
        "task.options": (named_task, {"priority": 0, "where": "cpu"}),
        "task()": (of_numbers, {"x": x, "y": nt.array(np.ones((4, 4)))}),
        "Runtime": (nt.Runtime,
         {"cpus": 1, "scheduler": "lws", "cuda": 0, "memory": 10**9, "cuda_memory": None, "disk": None,
                                 "window": None, "calibrate": False, "placement": None}),
        "Runtime.disk": (lambda **disk: nt.Runtime(1, memory=10**9, disk=disk),
         {"path": str(folder), "size": 32 << 20}),
        "Batch": (nt.Batch, {"size": 2, "seq": 8, "given": frozenset(), "optional": {}}),
        "Constant": (nt.Constant, {"value": 1.0}),
        "Normal": (nt.Normal, {"std": 1.0}),
        "Joined": (nt.Joined, {"axis": "embed", "weights": ("a", "b")}),
        "Part": (nt.Part, {"weight": "a", "number": 0, "of": 2, "axis": "embed"}),
        "Fusion": (nt.Fusion, {name: True for name in ("bias", "activation", "reshape", "qkv", "residual_norm")}),
        "Fusion.of": (nt.Fusion.of, {"value": True}),
        "FP8": (nt.FP8, {"gradients": "e5m2", "exclude": ("h0.*",)}),
        "Graph": (nt.Graph, {"dtype": "fp32", "training": True}),
        "Graph.scope": (scope, {"name": "a"}),
        "Graph.param": (lambda **how: _graph().param(**how),
                        {"name": "w", "axes": {"embed": 4}, "init": nt.ZEROS, "sources": None}),
        "Graph.input": (lambda **how: _graph().input(**how),
                        {"name": "i", "axes": tokens, "dtype": "int64", "below": 9, "ignored": -1, "default": None,
                         "shifted": False, "scale": None}),
        "Graph.backward": (lambda **how: _graph().backward(**how), {"loss": h}),
        "SGD": (nt.SGD, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "decay": "all"}),
        "AdamW": (nt.AdamW, {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "decay": "all"}),
        "Lion": (nt.Lion, {"lr": 0.1, "betas": (0.9, 0.9), "weight_decay": 0.0, "decay": "all"}),
        "Muon": (nt.Muon, {"lr": 0.1, "momentum": 0.9, "ns_steps": 2, "adamw_lr": 0.1, "adjust_lr_fn": "original"}),
        "Model": (nt.models.GPT2, {"config": CONFIG, "weights": None, "seed": 0, "hf": None}),
        "Model.changed": (model.changed, {"attention": "merge", "dropout": 0.0}),
        "Model.from_hf": (nt.models.GPT2.from_hf, {"source": str(folder / "saved"), "dropout": 0.0}),
        "save_adapter": (nt.save_adapter, {"model": adapted, "folder": folder / "adapter", "base": "mine"}),
        "load_adapter": (nt.load_adapter, {"model": model, "folder": folder / "adapter"}),
        "ModelConfig": (nt.models.GPT2Config,
         {"layers": 1, "embed": 8, "heads": 2, "vocab": 20, "positions": 8, "dropout": 0.0}),
        "ModelConfig.changed": (CONFIG.changed, {"layers": 1, "attention": "merge"}),
        "profile": (profile, {"folder": None}),
        "Mask": (nt.Mask, {"causal": True, "window": 3, "padding": None, "segments": None}),
        "CausalCollator": (nt.CausalCollator, {"seq": 8, "pad": 0}),
        "CausalCollator()": (nt.CausalCollator(8), {"samples": [[1, 2, 3]]}),
        "LabelledCollator": (nt.LabelledCollator, {"seq": 8, "pad": 0}),
        "LabelledCollator()": (nt.LabelledCollator(8), {"samples": [([1, 2, 3], 1)]}),
        "Encoder": (nt.Encoder,
         {"model": bert, "output": "hidden", "tokenizer": None, "tiles": None, "precision": "fp32", "batch_tokens": 64,
          "max_length": 8}),
        "Encoder()": (nt.Encoder(bert), {"texts": [[1, 2, 3]]}),
        "Generator": (nt.Generator,
         {"model": model, "tokenizer": None, "tiles": None, "precision": "fp32", "batch": 2, "max_length": 8,
          "cache": None}),
        "Generator()": (nt.Generator(model, max_length=8),
         {"prompts": [[1, 2]], "max_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
          "repetition_penalty": 1.1, "seed": 1, "stop": ()}),
        "MaskedCollator": (nt.MaskedCollator,
         {"seq": 8, "vocab": 20, "mask": 3, "special": (), "pad": 0, "probability": 0.1, "seed": 0}),
        "Trainer": (nt.Trainer, {"model": nt.models.GPT2(CONFIG), "batch": 2, "seq": 8, "tiles": None,
                                 "precision": "fp32",
                                 "optimizer": None, "clip_grad_norm": None, "accumulate": "chain", "fusion": True,
                                 "attention": None, "grad_accumulation": 1, "seed": 0, "shift_labels": True,
                                 "pack": False}),
        "Trainer.step": (trainer.step, {"inputs": IDS, "labels": IDS, "lr": 0.1}),
        "Trainer.submit": (trainer.submit, {"inputs": IDS, "labels": IDS, "lr": 0.1}),
        "Trainer.evaluate": (kept.evaluate,
         {"inputs": IDS, "labels": IDS, "return_logits": False, "return_outputs": False}),
        "Trainer.save": (kept.save, {"folder": folder / "new"}),
        "Trainer.load": (nt.Trainer.load, {"folder": folder / "saved", "model": None, "seed": 0}),
    }  # fmt: skip


# What a message may call an argument instead.
ALSO = {"inputs": "input_ids", "config": "model", "source": "model", "value": "fusion|Constant", "init": "start values",
        "rows": "size", "columns": "size", "std": "Normal", "axes": "axis"}  # fmt: skip


def wrong(call: Callable[..., Any], how: dict[str, Any]) -> Iterator[tuple[str, Any, BaseException | None]]:
    """Each argument in turn with each value: what it raised."""
    for name in how:
        for value in WRONG:
            try:
                call(**how | {name: value})
            except Exception as error:
                yield name, value, error
            else:
                yield name, value, None


def test_every_public_name_is_called() -> None:
    names = {name.partition(".")[0].removesuffix("()") for name in _names()}
    assert names | NOT_CALLED == set(nt.__all__), names ^ (set(nt.__all__) - NOT_CALLED)


def _names() -> list[str]:
    """Read off the source, as the calls need a runtime."""
    return re.findall(r'^        "([\w.()]+)": \(', inspect.getsource(_calls), re.MULTILINE)


def test_wrong_types_are_named(runtime: nt.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = []
    for of, (call, how) in _calls(tmp_path).items():
        call(**how)
        for name, value, error in wrong(call, how):
            good = error is None or isinstance(error, nt.NNTileError | ValueError | TypeError)
            if not good or (error is not None and not re.search(rf"\b({name}|{ALSO.get(name, name)})\b", str(error))):
                bad.append(f"{of}({name}={value!r}): {type(error).__name__}: {error}")
    assert not bad, "\n".join([f"{len(bad)}:", *bad])
