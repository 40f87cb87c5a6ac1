"""The strongest BERT in PyTorch (measure/torch_bert.py) and ours: equal losses, and its rows in `nntile bench step`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

with suppress(pytest.skip.Exception):
    import test_triton  # noqa: F401  it tells triton to interpret, which has to be before torch imports it

import nntile_py as nt
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig, resolve
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import bins_of
from nntile_py.measure.commands import load_contest
from nntile_py.measure.contest import measure_in_turns, point_with_peers
from nntile_py.measure.sweep_points import load_sweep, points
from nntile_py.measure.sweep_spec import Measure
from nntile_py.measure.torch_bert import TorchBERT, TorchBERTLayer, batch_of, loaded, shares, torch_bert
from nntile_py.measure.worker import tight_bins
from nntile_py.measure.workload_inputs import inputs_of
from nntile_py.training.repeated_steps import same_steps

TREE = {
    "model": {"type": "bert", "layers": 2, "embed": 16, "heads": 2}, "tokenizer": {"vocab_size": 300},
    "train": {"steps": 1, "batch": 6, "seq": 12, "pack": True}, "tiles": {"batch": 3},
    "optimizer": {"name": "adamw", "lr": 1e-3, "clip_grad_norm": 1.0, "weight_decay": 0.1},
}  # fmt: skip
PEERS = ["torch_packed", "torch_padded"]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo itself
EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def config(*sets: str) -> RunConfig:
    return resolve(json.loads(json.dumps(TREE)), sets, "tests")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled; compiling them to kernels takes longer than all of the rest."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **how: compiled(part, **how | {"backend": backend}))
    torch._dynamo.reset()
    return made


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # in the contestants' processes


# -- the same values


@pytest.mark.few(2)
@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.parametrize("sets", [(), ("model.activation=gelu_new", "train.pack=false"), ("model.activation=relu",)])
def test_losses_are_ours(runtime: nt.Runtime, graphs: list[Any], alpha: float, sets: tuple[str, ...]) -> None:
    """Of the first step, and of those after it: gradients, clipping and AdamW are the same too."""
    made = config(*sets)
    inputs = inputs_of(made, "train", alpha)
    trainer = nt.Trainer.of_spec(step_spec(made, build_model(made)))
    losses = same_steps(trainer, inputs)(3)
    assert losses[2] < losses[0]
    for name in PEERS:
        assert torch_bert(made, inputs, name, "train")[0](3) == pytest.approx(losses, rel=1e-6)
    trainer.close()


def test_no_token_is_to_be_predicted(runtime: nt.Runtime, graphs: list[Any]) -> None:
    """As it happens to a few short sequences: a loss of zero on both sides."""
    made = config()
    inputs = inputs_of(made, "train", 0.6)
    inputs |= {name: np.full_like(inputs[name], -100) for name in ("labels", "masked_labels") if name in inputs}
    trainer = nt.Trainer.of_spec(step_spec(made, build_model(made)))
    with pytest.warns(UserWarning, match="no label counts"):
        assert trainer.step({name: inputs[name] for name in ("input_ids", "labels", "attention_mask")}) == 0
    for name in PEERS:
        assert torch_bert(made, inputs, name, "train")[0](1) == [0.0]
    trainer.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_hidden_states_are_those_of_transformers(graphs: list[Any], packed: bool, alpha: float) -> None:
    made = config("model.head=none", "model.dropout=0.5")
    inputs = inputs_of(made, "inference", alpha)
    device = torch.device("cpu")
    with torch.no_grad():
        given = {name: torch.from_numpy(value) for name, value in inputs.items()}
        expected = build_model(made).to_hf().eval()(**given).last_hidden_state
        batch = batch_of(inputs, np.arange(6), packed=packed, device=device)
        found = loaded(made, device).eval().hidden(batch)
    real = given.get("attention_mask", torch.ones(6, 12)) > 0
    torch.testing.assert_close(found if packed else found[real], expected[real], rtol=1e-5, atol=1e-5)
    assert torch_bert(made, inputs, PEERS[1 - packed], "inference")[0](2) == [0.0, 0.0]


def test_one_graph_serves_all_layers(graphs: list[Any]) -> None:
    made = config("model.layers=5")
    torch_bert(made, inputs_of(made, "train", 0.6), "torch_packed", "train")[0](2)
    assert len(graphs) == 3  # embeddings, a layer, the head


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("part", ["dropout", "attention_dropout", None])
def test_dropout_of_the_config(packed: bool, part: str | None) -> None:
    made = config("model.attention=segments", *([f"model.{part}=0.5"] if part else []))
    batch = batch_of(inputs_of(made, "train", 0.6), np.arange(6), packed=packed, device=torch.device("cpu"))
    layer = TorchBERTLayer(made.model)
    for value in layer.parameters():
        torch.nn.init.normal_(value)
    x = torch.randn(*batch.ids.shape, 16)

    def apart() -> float:
        return float((layer(x, batch.sequences) - layer(x, batch.sequences)).abs().max().detach())

    assert (apart() > 0.1) == (part is not None)
    layer.eval()
    assert apart() == 0


def test_no_other_weights() -> None:
    """All that the model has is loaded: nothing keeps what PyTorch had drawn."""
    made = config("model.layers=1")
    weights = {name: np.full_like(value, 0.25) for name, value in build_model(made).weights.items()}
    model = TorchBERT(made.model)
    model.load(weights)
    for name, value in model.named_parameters():
        own = value[:300] if name in ("words.weight", "bias") else value
        assert (own == 0.25).all(), name
    del weights["cls.predictions.bias"]
    with pytest.raises(KeyError, match=r"cls\.predictions\.bias"):
        model.load(weights)


# -- what the two sides are given


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("batch", [3, 4, 12])
def test_bins_without_room_to_spare(batch: int, accumulation: int) -> None:
    made = config("train.batch=12", f"tiles.batch={batch}", f"train.grad_accumulation={accumulation}")
    spec, inputs = step_spec(made), inputs_of(made, "train", 0.5)
    narrow = tight_bins(spec, inputs)
    real, bins = int(inputs["attention_mask"].sum()), spec.rows * accumulation
    assert narrow.rows == spec.rows == 12 // batch and narrow.capacity < spec.capacity
    assert narrow.capacity % 12 == 0 and real <= narrow.capacity * bins
    assert narrow.capacity * bins < real + 2 * 12 * bins  # a sequence's room, and what bins are apart
    assert len(bins_of(narrow).fill(inputs, accumulation, narrow.batch, shift=True).places) == 12 * accumulation
    assert tight_bins(spec, inputs_of(made, "train", 1.0)) == spec


def test_shares_of_ranks() -> None:
    made = config("train.batch=32")
    inputs = inputs_of(made, "train", 0.6)
    parts = shares(made, inputs, 4)
    assert sorted(np.concatenate(parts)) == list(range(32))
    tokens = [int(inputs["attention_mask"][part].sum()) for part in parts]
    assert max(tokens) - min(tokens) <= 0.05 * max(tokens)
    assert [len(part) for part in shares(config("train.batch=32", "train.pack=false"), inputs, 4)] == [8] * 4


# -- as contestants


def contest(path: Path, names: list[str], *sets: str, **how: Any) -> tuple[RunConfig, Measure]:
    path.write_text(yaml.safe_dump(TREE))
    return load_contest(str(path), list(sets), names, 0.6, **how)


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed")
@pytest.mark.parametrize("pack", ["true", "false"])
def test_ranks_train_as_we_do(tmp_path: Path, eager: None, pack: str) -> None:
    """Ranks have unequal numbers of masked tokens, ours as many bins as there are ranks."""
    of = contest(tmp_path / "c.yaml", ["ddp"], f"train.pack={pack}", steps=1)
    result = measure_in_turns(*of, ["nntile", "ddp"], 1, losses=3, time_limit=120.0)
    assert result["ddp"].get("losses") == pytest.approx(result["nntile"]["losses"], rel=1e-5), result
    assert result["ddp"]["processes"] == 2
    assert result["ratios"]["ddp"] == result["ratio_to_fastest_peer"]


@pytest.mark.long
def test_forward_passes_in_turns(tmp_path: Path, eager: None) -> None:
    of = contest(tmp_path / "c.yaml", ["torch_packed"], "model.head=none", inference=True, steps=3)
    started: list[str] = []
    result = measure_in_turns(*of, ["nntile", "torch_packed"], 2, time_limit=120.0, tell=started.append)
    assert started == ["nntile is ready", "torch_packed is ready"]
    assert result["torch_packed"]["tokens_per_s"] > 0, result
    ratios = result["ratios"]["torch_packed"]
    assert 0 < ratios["min"] <= ratios["median"] <= ratios["max"]


@pytest.mark.parametrize(
    ("name", "inference", "sets", "told"),
    [
        ("torch_packed", False, ["model.type=roberta"], "model.type: got roberta; .*torch_packed: bert"),
        ("torch_packed", True, [], "model.head: got masked_lm; .* in a forward pass: none"),
        ("torch_padded", False, ["model.head=pretraining"], "in training: masked_lm"),
        ("ddp", False, ["train.grad_accumulation=2"], "train.grad_accumulation: got 2; allowed with --peer ddp: 1"),
        ("torch_packed", False, ["precision=fp64"], "precision: got fp64; allowed with --peer torch_packed: fp32"),
        ("torch_packed", False, ["precision=tf32", "runtime.cuda=1"], "precision: got tf32; .*: bf16 or fp16"),
        ("ddp", False, ["train.batch=1"], "train.batch: got 1; allowed with --peer ddp: at least 2"),
        ("torch_packed", False, ["precision=bf16", "runtime.cuda=2"], "runtime.cuda: got 2; .*: 0 or 1; several"),
        ("torch_compile", False, ["runtime.cuda=2"], "runtime.cuda: got 2; allowed with --peer torch_compile: 0 or 1"),
        ("ddp", True, ["model.head=none"], "--peer: got 'ddp' with --inference; allowed: torch, torch_eager"),
        ("fsdp2", False, [], "model.type: got bert; allowed with --peer fsdp2: gpt2"),
        ("ddp", False, ["precision=bf16", "train.batch=99", "runtime.cuda=99"], "runtime.cuda: got 99; allowed: "),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, name: str, inference: bool, sets: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        contest(tmp_path / "c.yaml", [name], *sets, inference=inference)


# -- as points of a sweep


@pytest.mark.long
def test_a_point_with_peers(tmp_path: Path, eager: None) -> None:
    run, how = contest(tmp_path / "c.yaml", ["torch_packed"], steps=1)
    how = how.model_copy(update={"peers": ["torch_packed", "torch_padded"], "repeats": 2})
    row = point_with_peers(run, how, 120.0)
    assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"] and row["tokens"] > 0
    for peer in how.peers:
        assert row[f"{peer} ratio_min"] <= row[f"{peer} ratio"] <= row[f"{peer} ratio_max"], row
        assert row[f"{peer} ms"] == pytest.approx(1e3 * row[f"{peer} seconds"])


@pytest.mark.parametrize(("name", "count"), [("bert_inference", 15), ("bert_training", 9), ("cuda_graph", 32)])
def test_the_sweeps_of_packed_bert(name: str, count: int) -> None:
    """Every point of the tables is a config that loads, and that its peers can run."""
    found = points(load_sweep(EXPERIMENTS / f"{name}.yaml"))
    assert len(found) == count and not any(point.error for point in found), found[0].error
    assert all(point.measure.peers for point in found) == (name != "cuda_graph")


def test_peers_that_a_point_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        f"config: {EXPERIMENTS / 'gpt2_tiny.yaml'}\ngrid: {{tiles.batch: [2]}}\nmeasure: {{peers: [torch_packed]}}\n"
    )
    with pytest.raises(ConfigError, match=r"model.type: got gpt2; allowed with --peer torch_packed: bert"):
        points(load_sweep(tmp_path / "s.yaml"))
    with pytest.raises(ConfigError, match=r"measure.peers: got ddp; allowed: none where measure.how is not run"):
        Measure(how="plan", peers=["ddp"])
