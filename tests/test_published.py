"""Checkpoints as they are on the hub: loss and all gradients in fp64 are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import EMBED, SEQ
from published import ABSENT, SIZES, Published, batch, compare, save

import nntile_py as nt

OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
DEBERTA = SIZES | {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "legacy": False,
    "type_vocab_size": 0, "max_relative_positions": -1,
}  # fmt: skip
V3 = DEBERTA | {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
NO_HEAD = {"architectures": ABSENT, "legacy": ABSENT, "pad_token_id": ABSENT, "pos_att_type": "c2p|p2c"}

CASES: dict[str, Published] = {
    "bert-base-uncased": Published(
        "BertForMaskedLM", SIZES, names=OLD_NORMS, drop=("cls.predictions.decoder.bias",),
        more={
            "cls.seq_relationship.weight": torch.ones(2, EMBED), "cls.seq_relationship.bias": torch.ones(2),
            "bert.pooler.dense.weight": torch.ones(EMBED, EMBED), "bert.pooler.dense.bias": torch.ones(EMBED),
            "bert.embeddings.position_ids": torch.arange(SEQ + 3)[None],
        },
    ),
    "bert-base-uncased .bin": Published("BertForMaskedLM", SIZES, names=OLD_NORMS, files="bin"),
    "bert in parts": Published("BertForMaskedLM", SIZES, parts=True),
    "bert in parts .bin": Published("BertForMaskedLM", SIZES, files="bin", parts=True),
    "deberta-base": Published("DebertaForMaskedLM", DEBERTA, NO_HEAD, files="bin", limit=1e-6),
    "deberta-v3-base": Published(
        "DebertaV2ForMaskedLM", V3, NO_HEAD, files="bin", limit=1e-6,
        more={
            "deberta.embeddings.position_embeddings.weight": torch.ones(SEQ + 3, EMBED),
            "mask_predictions.dense.weight": torch.ones(EMBED, EMBED), "mask_predictions.dense.bias": torch.ones(EMBED),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(runtime: nt.Runtime, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    old = {today: name for name, today in ours.old_names.items()}

    def named(weight: str) -> str:
        return next((weight.replace(today, name) for today, name in old.items() if today in weight), weight)

    compare(ours, theirs, batch(causal=ours.objective == "causal"), named=named, limit=case.limit)


def test_files_of_a_bare_model_and_of_old_torch(runtime: nt.Runtime, tmp_path: Path) -> None:
    """The names lack the prefix; torch wrote no zip file before version 1.6."""
    case = Published("BertForMaskedLM", SIZES, {"architectures": ["BertModel"]}, names={"bert.": ""} | OLD_NORMS)
    theirs = case.model()
    folder = case.write(tmp_path, theirs)
    tensors = {case.named(name): value for name, value in theirs.state_dict().items() if not name.startswith("cls.")}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model = nt.models.from_hf(folder)
    assert model.config.head == "none"
    for name, value in model.weights.items():
        assert np.array_equal(value, theirs.state_dict()[name])


class Code:
    """Leaves a mark where pickle runs it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda mark: {"weight": Code(mark)}, "cannot read .*pytorch_model.bin"),
        (lambda mark: {"model": {"weight": torch.ones(2)}}, "does not hold a dict of tensors, as model.state_dict"),
        (lambda mark: [torch.ones(2)], "does not hold a dict of tensors"),
    ],
)
def test_bin_files_that_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    """Code in a file is not run."""
    case = CASES["bert-base-uncased .bin"]
    folder = case.write(tmp_path / "model", case.model())
    torch.save(content(tmp_path / "mark"), folder / "pytorch_model.bin")
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(folder)
    assert not (tmp_path / "mark").exists()


def test_a_folder_without_weights(tmp_path: Path) -> None:
    case = CASES["bert-base-uncased"]
    folder = case.write(tmp_path, case.model())
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(nt.ConfigError, match=r"no model\.safetensors or pytorch_model\.bin in"):
        nt.models.from_hf(folder)
    save(folder, {"bert.x": torch.ones(1)}, "bin", parts=True)
    with pytest.raises(nt.ConfigError, match=r"weight bert\..* is missing"):
        nt.models.from_hf(folder)
