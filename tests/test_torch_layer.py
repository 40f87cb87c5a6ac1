"""PyTorch's layers as sweeps time them: one written with stacked products is torch.nn's, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nntile_py.analysis.workloads import preset
from nntile_py.errors import ConfigError
from nntile_py.measure.sweep_spec import Measure
from nntile_py.measure.torch_layer import torch_layer, torch_module

TINY = ["model.embed=16", "model.heads=2", "train.batch=3", "train.seq=8", "runtime.cpus=1"]


@pytest.mark.parametrize("work", ["encoder", "mha"])
def test_every_phase_runs(work: str) -> None:
    for phase in ("forward", "backward", "all"):
        torch_layer(preset(work, TINY), work, phase, "torch_eager", stacked=True)(2)


def test_a_stacked_layer_is_torchs() -> None:
    config = preset("encoder", [*TINY, "model.dropout=0", "model.attention_dropout=0"]).model
    ours, theirs = (torch_module(config, "encoder", stacked) for stacked in (True, False))
    names = {
        "attention.project": "self_attn.in_proj_", "attention.out": "self_attn.out_proj.", "up": "linear1.",
        "down": "linear2.", "norms.0": "norm1.", "norms.1": "norm2.",
    }  # fmt: skip
    parts = ((*name.rpartition(".")[::2], value) for name, value in ours.state_dict().items())
    theirs.load_state_dict({names[part] + kind: value for part, kind, value in parts})
    x = torch.randn(2, 8, config.embed)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"work": "train", "stacked": True}, r"measure\.stacked: got true; allowed: false where PyTorch runs no enc"),
        ({"work": "mha", "contestant": "torch_eager", "autotune": True}, r"measure\.autotune: got true; allowed: fal"),
        ({"work": "mha", "contestant": "torch_eager", "captured": True}, r"measure\.captured: got true; allowed: null"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Measure(**asked)


def test_no_graph_on_cpu_workers() -> None:
    with pytest.raises(ConfigError, match=r"measure\.captured: got true; allowed for PyTorch on CPU workers: null"):
        torch_layer(preset("mha", TINY), "mha", "forward", "torch_compile", captured=True)
