"""Groups of parameters: the numbers of torch.optim's groups, and what is refused."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_parity import close_gradients, data, gpt2, torch_gradients

import nntile_py as nt
from nntile_py.config.optimizer_section import optimizer_section
from nntile_py.schema import validated

RAGGED = {"batch": 3, "seq": 10, "embed": 20, "heads": 3, "ffn": 50, "vocab": 200}
GROUPS = [
    {"match": ["*.bias", "*ln_?.weight"], "lr": 0.02, "weight_decay": 0.25},
    {"match": ["*.h.0.*"], "lr_scale": 0.25},
    {"match": ["*wte*"], "weight_decay": 0.0},
    {"match": ["*.h.*"], "lr_scale": 2},  # its patterns match weights of earlier groups too
]
HOW: dict[str, dict[str, Any]] = {"AdamW": {"eps": 1e-4}, "SGD": {"momentum": 0.9}}


def grouped(model: Any, lr: float, decay: float) -> list[dict[str, Any]]:
    """The parameters in the form of torch.optim; of GPT-2 those with two axes decay."""
    settings = []
    for name, param in model.named_parameters():
        group: dict[str, Any] = next((one for one in GROUPS if any(fnmatch(name, p) for p in one["match"])), {})
        rate = group.get("lr", lr * group.get("lr_scale", 1))
        usual = decay if param.dim() > 1 else 0.0
        settings.append({"params": [param], "lr": rate, "weight_decay": group.get("weight_decay", usual)})
    return settings


@pytest.mark.few(3)
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
@pytest.mark.parametrize("name", HOW)
def test_groups_of_torch(runtime: nt.Runtime, tmp_path: Path, name: str, tiles: dict[str, int]) -> None:
    """With a schedule; the trainer is saved and loaded after the second step."""
    model, (ids, labels) = gpt2().double(), data(37, 611)
    theirs = getattr(torch.optim, name)(grouped(model, 0.05, 0.5), **HOW[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1 / (step + 1))
    ours = getattr(nt, name)(lr=0.05, weight_decay=0.5, decay="matrices", groups=GROUPS, **HOW[name])
    trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), 4, 37, tiles, "fp64", ours)
    for step in range(4):
        if step == 2:
            trainer.save(tmp_path / "saved")
            trainer = nt.Trainer.load(tmp_path / "saved")
        torch_gradients(model, ids[step], labels[step])
        theirs.step()
        trainer.step(ids[step], labels[step], lr=0.05 / (step + 1))
        schedule.step()
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    close_gradients(trainer.state_dict(), want, 1e-9)


def test_refused(runtime: nt.Runtime) -> None:
    model = nt.models.GPT2.from_hf(gpt2())
    for match, message in (
        (
            ["*.bias", "*bais"],
            r"groups\[1\]\.match: '\*bais' matches no weight; allowed: a pattern of names such as .*",
        ),
        ([], r"groups\[1\]\.match: got \[\]; allowed: at least one pattern"),
    ):
        with pytest.raises(nt.ConfigError, match=rf"optimizer\.{message}"):
            groups = [{"match": ["*"]}, {"match": match, "lr_scale": 0}]
            nt.Trainer(model, 4, 37, optimizer=nt.SGD(groups=groups))
    for group, message in (
        ({"match": ["*"], "lr": 1.0, "lr_scale": 2}, r"groups\[0\]\.lr: got 1.0; allowed with lr_scale: null"),
        (
            {"match": ["*"], "rate": 1.0},
            r"groups\[0\]\.rate: unknown key; .*allowed: match, lr_scale, lr, weight_decay",
        ),
        ({"lr": 1.0}, r"groups\[0\]\.match: not given, but required"),
        ({"match": ["*"], "lr": 1.0}, "groups: got lr with optimizer.lr = 0; allowed: lr_scale"),
        ("*.bias", "groups: got .*allowed: a list of sections with match, lr_scale, lr, weight_decay"),
    ):
        for call in (lambda **how: nt.SGD(**how), lambda **how: validated(optimizer_section("sgd"), how, "optimizer.")):
            with pytest.raises(nt.ConfigError, match=rf"optimizer\.{message}"):
                call(lr=0.0, groups=[group])


def test_weights_of_one_parameter(runtime: nt.Runtime) -> None:
    """Queries, keys and values are one parameter, unless fusion.qkv is off: patterns must match all or none."""
    config = nt.models.BERT.Config(layers=1, embed=24, heads=4, ffn=60, vocab=101, positions=19)
    ids = np.arange(38).reshape(2, 19)

    def unchanged(pattern: str, fusion: Any = True) -> set[str]:
        model = nt.models.BERT(config)
        optimizer = nt.SGD(lr=0.1, groups=[{"match": [pattern], "lr_scale": 0}])
        trainer = nt.Trainer(model, 2, 19, optimizer=optimizer, fusion=fusion)
        before = trainer.state_dict()
        trainer.step({"input_ids": ids, "labels": ids})
        return {name.split(".")[-2] for name, value in trainer.state_dict().items() if (value == before[name]).all()}

    message = r"optimizer\.groups: .*query.weight and .*key.weight are in different groups, .*allowed: patterns that"
    with pytest.raises(nt.ConfigError, match=message):
        unchanged("*query*")
    assert unchanged("*query*", {"qkv": False}) == {"query"}
    assert unchanged("*.self.*") == {"query", "key", "value"}
