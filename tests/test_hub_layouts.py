"""Files as they are on the hub: loss and all gradients in fp64 are those of transformers, or the key is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hub_layouts import LAYOUTS, Layout
from model_cases import BATCH, SEQ
from published import batch, compare, save
from test_published import OLD_NORMS, SINGLE

import nntile_py as nt
from nntile_py.tasks.cross_entropy import IGNORED


def made(layout: Layout) -> Any:
    """Return transformers' model in fp64 for a layout's config.json. Its weights are random, of the file's dtype."""
    torch.manual_seed(0)
    cls, raw = getattr(transformers, layout.kind), dict(layout.config)
    model = cls(cls.config_class(**raw | ({"id2label": None, "num_labels": 2} if layout.drawn else {})))
    with torch.no_grad():
        for param in model.parameters():
            param.data = (param + 0.1 * torch.randn_like(param)).to(layout.dtype)
    return model.double().train()


def write(folder: Path, layout: Layout, model: Any) -> None:
    """Write config.json and the weights."""
    raw = {"architectures": [layout.kind]} | dict(layout.config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v or k != "architectures"}))
    prefix, tensors = f"{model.base_model_prefix}." if layout.bare else "", {}
    for name, value in model.state_dict().items():
        if name.startswith(prefix) and not any(part in name for part in layout.drop):
            for today, old in OLD_NORMS.items() if layout.old else ():
                name = name.replace(today, old)
            tensors[name.removeprefix(prefix)] = value.to(layout.dtype)
    save(folder, tensors | dict(layout.more), layout.files, layout.parts)


def mean_squares(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(logits.squeeze(-1), numbers)


LOSSES = {
    "regression": mean_squares,
    "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
}  # fmt: skip


def inputs_of(ours: Any) -> dict[str, Any]:
    """Return random inputs for the model's head: ids from all of the vocabulary, padding left, right and between."""
    given, rng, c = batch(2, causal=ours.objective == "causal"), np.random.default_rng(1), ours.config
    head = getattr(c, "head", "")
    if head == "classification":
        given["labels"] = rng.integers(0, c.classes, BATCH)
    elif head == "regression":
        given["labels"] = rng.standard_normal(BATCH)
    elif head == "token_classification":
        given["labels"] = np.where(given["labels"] == IGNORED, IGNORED, rng.integers(0, c.classes, (BATCH, SEQ)))
    elif head == "multi_label_classification":
        given["labels"] = rng.integers(0, 2, (BATCH, c.classes)).astype(float)
    elif head == "question_answering":
        del given["labels"]
        given |= {f"{end}_positions": rng.integers(0, SEQ, BATCH) for end in ("start", "end")}
    elif head == "pretraining":
        given["next_sentence_label"] = rng.integers(0, 2, BATCH)
    return given


@pytest.mark.few(30)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(runtime: nt.Runtime, tmp_path: Path, name: str) -> None:
    """From a folder. The head of a bare model is drawn, and put into transformers' model."""
    layout = LAYOUTS[name]
    theirs = made(layout)
    write(tmp_path, layout, theirs)
    if layout.refused:
        with pytest.raises(nt.ConfigError, match=layout.refused):
            nt.models.from_hf(tmp_path)
        return
    ours = nt.models.from_hf(tmp_path, **({"head": "classification", "classes": 2} if layout.drawn else {}))
    if layout.drawn:
        drawn = {weight: value for weight, value in ours.weights.items() if "classifier" in weight}
        theirs.load_state_dict({weight: torch.from_numpy(value) for weight, value in drawn.items()}, strict=False)
    loss = LOSSES.get(getattr(ours.config, "head", ""))
    compare(ours, theirs, inputs_of(ours), limit=SINGLE, fusion=False, loss=loss)
