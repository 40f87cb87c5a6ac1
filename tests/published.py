"""Small random checkpoints with the names, files and configs of published ones, and their comparison in fp64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from model_cases import BATCH, EMBED, FFN, HEADS, KV_HEADS, LAYERS, SEQ, VOCAB
from safetensors.torch import save_file

import nntile_py as nt
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.testing import error

transformers.logging.set_verbosity_error()

Tensors = dict[str, torch.Tensor]
ABSENT = "absent"  # no such key in config.json
SIZES = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "max_position_embeddings": SEQ + 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "max_position_embeddings": SEQ + 3,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A checkpoint as it is on the hub.

    Attributes:
        kind: Class of transformers that computes the expected values.
        config: Sizes of that class.
        raw: Keys of config.json that differ from what save_pretrained writes; ABSENT removes a key.
        names: First or last parts of the weights' names in the file, by transformers' parts.
        drop: Parts of names of weights that the file does not have.
        more: Further tensors of the file.
        files: `safetensors` or `bin`; with `parts` in two files and an index.
        limit: Largest relative error.
    """

    kind: str
    config: Mapping[str, Any]
    raw: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    files: str = "safetensors"
    parts: bool = False
    limit: float = 1e-9  # relative error

    def model(self) -> Any:
        """Return transformers' model in fp64, with biases and norms that are not zero and one."""
        torch.manual_seed(0)
        cls = getattr(transformers, self.kind)
        model = cls(cls.config_class(**self.config)).double().train()
        with torch.no_grad():
            for param in model.parameters():
                param += 0.1 * torch.randn_like(param)
        return model

    def named(self, name: str) -> str:
        """Return the name of a weight in the file."""
        for theirs, published in self.names.items():
            name = name.replace(theirs, published)
        return name

    def write(self, folder: Path, model: Any) -> Path:
        """Write the files of the checkpoint."""
        folder.mkdir(exist_ok=True)
        raw = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [self.kind]} | dict(self.raw)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ABSENT}))
        kept = {name: value for name, value in model.state_dict().items() if not any(d in name for d in self.drop)}
        tensors = {self.named(name): value.detach().clone() for name, value in kept.items()} | dict(self.more)
        save(folder, tensors, self.files, self.parts)
        return folder


def save(folder: Path, tensors: Tensors, files: str = "safetensors", parts: bool = False) -> None:
    """Write tensors as transformers does: in one file, or in two with an index."""
    stem, ending = ("model", "safetensors") if files == "safetensors" else ("pytorch_model", "bin")
    names = list(tensors)
    shards = [names[::2], names[1::2]] if parts else [names]
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-00002.{ending}" if parts else f"{stem}.{ending}"
        places |= dict.fromkeys(shard, file)
        content = {name: tensors[name] for name in shard}
        if files == "safetensors":
            save_file(content, folder / file, {"format": "pt"})
        else:
            torch.save(content, folder / file)
    if parts:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": places}))


def batch(seed: int = 0, *, causal: bool = False, low: int = 0, classes: int = 0) -> dict[str, Any]:
    """Return random inputs from the vocabulary, from `low` on, padded at the right, at the left and with a hole."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(low, VOCAB, (BATCH, SEQ))
    mask = np.ones_like(ids)
    mask[1, 7:] = mask[2, :3] = mask[3, 4:6] = 0
    labels = np.where(causal | (rng.random(ids.shape) < 0.4), ids, IGNORED)
    labels = np.where(mask == 1, labels, IGNORED)
    if classes:
        labels = rng.integers(0, classes, BATCH)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the cross-entropy in fp64; transformers computes it in fp32."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED
    )


def gradients(
    model: Any, inputs: Mapping[str, Any], loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """Return transformers' loss and gradients. Without labels, as for question answering, the loss is the model's."""
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    labels, pairs = given.pop("labels", None), given.pop("next_sentence_label", None)
    out = model(**given)
    value = out.loss if labels is None else loss(out.logits if pairs is None else out.prediction_logits, labels)
    if pairs is not None:
        value = value + torch.nn.functional.cross_entropy(out.seq_relationship_logits, pairs)
    value.backward()
    named = model.named_parameters(remove_duplicate=False)  # a tied weight has two names
    return value.item(), {name: p.grad.numpy().copy() for name, p in named if p.grad is not None}


def compare(
    ours: Any, theirs: Any, inputs: Mapping[str, Any], *, tiles: Mapping[str, int] | None = None,
    named: Callable[[str], str] = str, policy: str = "chain", limit: float = 1e-9, fusion: bool = True,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Compare loss and all gradients of a step in fp64."""
    causal = ours.objective == "causal"
    want_loss, want = gradients(theirs, inputs, loss or (lambda logits, labels: loss_of(logits, labels, causal)))
    trainer = nt.Trainer(ours, BATCH, SEQ, dict(tiles or {}), "fp64", accumulate=policy, fusion=fusion)
    got_loss, got = trainer.step(inputs), {named(name): value for name, value in trainer.gradients().items()}
    trainer.close()
    assert abs(got_loss / want_loss - 1) < limit, (got_loss, want_loss)
    assert got.keys() <= want.keys(), got.keys() - want.keys()
    lost = {name for name in want if name not in got and not any(np.array_equal(want[name], want[n]) for n in got)}
    assert not any(np.any(want[name]) for name in lost), lost
    largest = max(np.linalg.norm(value) for value in want.values())
    wrong = {
        name: error(value, want[name]) for name, value in got.items() if np.linalg.norm(want[name]) > 1e-9 * largest
    }
    assert max(wrong.values()) < limit, sorted(wrong.items(), key=lambda item: -item[1])[:5]
    assert len(wrong) > len(got) // 2
