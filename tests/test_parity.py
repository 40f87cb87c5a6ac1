"""GPT-2 in tiles against transformers: losses, gradients, training, weights in and out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import nntile_py as nt
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.testing import error

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

BATCH, STEPS, LR = 4, 10, 1e-3
Weights = Mapping[str, Any]


def gpt2(seed: int = 0, **config: Any) -> Any:
    """A small GPT2LMHeadModel whose biases and norms are not at their start values."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 611, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 4}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | off | config)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn_like(param)
    return model


def data(seq: int, vocab: int, rows: int = BATCH, steps: int = STEPS) -> tuple[Any, Any]:
    """input_ids and labels [steps, rows, seq], some of the labels -100, more in the first rows."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, vocab, (steps, rows, seq))
    labels = np.where(rng.random(ids.shape) < 0.2, IGNORED, ids)
    labels[:, 0, : seq // 2] = IGNORED
    return ids, labels


def torch_loss(model: Any, ids: Any, labels: Any) -> torch.Tensor:
    """Cross-entropy in the model's own dtype: transformers computes it in fp32 whatever the model is."""
    logits = model(torch.from_numpy(ids)).logits[:, :-1]
    targets = torch.from_numpy(labels[:, 1:]).reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, ignore_index=IGNORED)


def torch_gradients(model: Any, ids: Any, labels: Any) -> tuple[float, Weights]:
    model.zero_grad()
    loss = torch_loss(model, ids, labels)
    loss.backward()
    return loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def close_gradients(got: Weights, want: Weights, limit: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    wrong = {name: error(got[name], want[name]) for name in want}
    assert max(wrong.values()) < limit, sorted(wrong.items(), key=lambda item: -item[1])[:5]


def over_all(got: Weights, want: Weights) -> float:
    """The norm-wise error over all weights together."""
    assert got.keys() == want.keys()
    return error(*(np.concatenate([np.ravel(weights[name]) for name in want]) for weights in (got, want)))


@dataclass
class Reference:
    """What PyTorch makes of a model and data: losses of STEPS steps, the first gradients, the weights at the end."""

    model: Any  # as it was at the start
    losses: list[float]
    norms: list[float]
    gradients: Weights
    exact: Weights  # the first gradients in float64
    weights: Weights


@functools.cache
def reference(seq: int, vocab: int) -> Reference:
    trained = gpt2(vocab_size=vocab)
    ids, labels = data(seq, vocab)
    _, gradients = torch_gradients(trained, ids[0], labels[0])
    _, exact = torch_gradients(gpt2(vocab_size=vocab).double(), ids[0], labels[0])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for x, y in zip(ids, labels, strict=True):
        optimizer.zero_grad()
        loss = trained(torch.from_numpy(x), labels=torch.from_numpy(y)).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0).item())
        optimizer.step()
    weights = {name: p.detach().numpy() for name, p in trained.named_parameters()}
    return Reference(gpt2(vocab_size=vocab), losses, norms, gradients, exact, weights)


ADAMW = {"optimizer": nt.AdamW(lr=LR, weight_decay=0.1), "clip_grad_norm": 1.0}
RAGGED = {"batch": 3, "seq": 20, "embed": 20, "heads": 3, "ffn": 100, "vocab": 300}
FROM_THE_ISSUE = {"batch": 2, "seq": 16, "embed": 24, "heads": 2, "ffn": 50, "vocab": 300}
EVEN = {"batch": 2, "seq": 12, "embed": 16, "heads": 2, "ffn": 64, "vocab": 204}  # of a sequence of 36, 612 words
SWITCHES = ("bias", "activation", "reshape", "qkv", "residual_norm")

COMBINATIONS: dict[str, dict[str, Any]] = {
    "uncut": {},
    "the issue's tiles": {"tiles": FROM_THE_ISSUE},
    "ragged": {"tiles": RAGGED},
    "even": {"tiles": EVEN, "even": True},
    **{f"ragged {axis}": {"tiles": {axis: tile}} for axis, tile in RAGGED.items()},
    **{f"even {axis}": {"tiles": {axis: tile}, "even": True} for axis, tile in EVEN.items()},
    **{policy: {"tiles": RAGGED, "accumulate": policy} for policy in ("commute", "redux", "tree")},
    "uncut redux": {"accumulate": "redux"},
    "rules": {"tiles": RAGGED, "fusion": {"found": False}},
    "rules uncut": {"fusion": {"found": False}},
    "rules even tree": {"tiles": EVEN, "even": True, "fusion": {"found": False}, "accumulate": "tree"},
    "rules redux": {"tiles": {"batch": 3}, "fusion": {"found": False}, "accumulate": "redux"},
    "unfused": {"tiles": RAGGED, "fusion": False},
    "unfused uncut": {"fusion": False},
    "unfused even tree": {"tiles": EVEN, "even": True, "fusion": False, "accumulate": "tree"},
    "unfused redux": {"tiles": RAGGED, "fusion": False, "accumulate": "redux"},
    **{f"no {switch}": {"tiles": RAGGED, "fusion": {switch: False}} for switch in SWITCHES},
    **{f"no {switch}, uncut": {"fusion": {switch: False}} for switch in ("bias", "qkv")},
    **{form: {"tiles": RAGGED, "attention": form} for form in ("merge", "flash", "naive")},
    **{f"{form} uncut": {"attention": form} for form in ("merge", "flash", "naive")},
    "merge commute, no qkv": {
        "tiles": RAGGED, "attention": "merge", "accumulate": "commute", "fusion": {"qkv": False},
    },
    "flash redux": {"tiles": RAGGED, "attention": "flash", "accumulate": "redux"},
    "flash tree unfused": {"tiles": RAGGED, "attention": "flash", "accumulate": "tree", "fusion": False},
    "naive redux unfused": {"tiles": RAGGED, "attention": "naive", "accumulate": "redux", "fusion": False},
    "naive tree": {"tiles": RAGGED, "attention": "naive", "accumulate": "tree"},
}  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_training(runtime: nt.Runtime, name: str) -> None:
    """Ten steps of AdamW: the first gradients, every loss and norm, the weights at the end."""
    options = dict(COMBINATIONS[name])
    seq, vocab = (36, 612) if options.pop("even", False) else (37, 611)
    want, (ids, labels) = reference(seq, vocab), data(seq, vocab)
    trainer = nt.Trainer(nt.models.GPT2.from_hf(want.model), BATCH, seq, **ADAMW, **options)
    results = [trainer.submit(ids[0], labels[0]).result()]
    close_gradients(trainer.gradients(), want.gradients)
    close_gradients(trainer.gradients(), want.exact)
    results += [p.result() for p in [trainer.submit(x, y) for x, y in zip(ids[1:], labels[1:], strict=True)]]
    assert [r.step for r in results] == list(range(1, STEPS + 1))
    assert abs(results[0].loss / want.losses[0] - 1) < 1e-6
    assert error([r.loss for r in results], want.losses) < 1e-5
    assert error([r.grad_norm for r in results], want.norms) < 1e-4
    assert over_all(trainer.state_dict(), want.weights) < 1e-4


@pytest.mark.few(2)
@pytest.mark.parametrize("attention", ["vendor", "merge", "flash", "naive"])
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
def test_in_float64(runtime: nt.Runtime, tiles: dict[str, int], attention: str) -> None:
    model = gpt2().double()
    ids, labels = data(37, 611)
    loss, want = torch_gradients(model, ids[0], labels[0])
    trainer = nt.Trainer(nt.models.GPT2.from_hf(model, attention=attention), BATCH, 37, tiles, "fp64", **ADAMW)
    assert abs(trainer.step(ids[0], labels[0]) / loss - 1) < 1e-13
    close_gradients(trainer.gradients(), want, 1e-11)
    got, logits = trainer.evaluate(ids[1], labels[1], return_logits=True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1).step()
    assert logits.dtype == np.float64
    # The key biases' gradients are zero but for rounding: AdamW scales even that up, though no output depends on them.
    assert error(logits, model(torch.from_numpy(ids[1])).logits.detach()) < 1e-10
    assert abs(got / torch_loss(model, ids[1], labels[1]).item() - 1) < 1e-11


def test_a_wrong_gradient_is_seen() -> None:
    want = reference(37, 611).gradients
    off = {**want, "transformer.h.1.attn.c_attn.bias": want["transformer.h.1.attn.c_attn.bias"] * (1 + 2e-5)}
    with pytest.raises(AssertionError, match=r"h\.1\.attn\.c_attn\.bias"):
        close_gradients(off, want)


@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False, "n_inner": 100},
        {"activation_function": "relu"},
        {"activation_function": "gelu", "n_layer": 1, "n_head": 3, "layer_norm_epsilon": 1e-3},
    ],
    ids=["untied", "relu", "gelu"],
)
def test_variants(runtime: nt.Runtime, config: dict[str, Any], tiles: dict[str, int]) -> None:
    model = gpt2(**config)
    ids, labels = data(37, 611)
    loss, want = torch_gradients(model, ids[0], labels[0])
    trainer = nt.Trainer(nt.models.GPT2.from_hf(model), BATCH, 37, tiles)
    assert abs(trainer.step(ids[0], labels[0]) / loss - 1) < 1e-6
    close_gradients(trainer.gradients(), want)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["chain", "redux", "tree"])
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
def test_accumulation_of_micro_batches(runtime: nt.Runtime, tiles: dict[str, int], policy: str) -> None:
    """Three micro-batches of two rows, of which the first has fewer labels, are one batch of six."""
    model = gpt2()
    ids, labels = data(37, 611, rows=6, steps=2)
    labels[:, 1, 3:] = IGNORED
    options: dict[str, Any] = {"accumulate": policy, "optimizer": nt.SGD(lr=0.1)}  # AdamW would amplify rounding
    trainer = nt.Trainer(nt.models.GPT2.from_hf(model), 2, 37, tiles, grad_accumulation=3, **options)
    whole = nt.Trainer(nt.models.GPT2.from_hf(model), 6, 37, tiles, **options)
    for step in range(2):  # in the second, nothing of the first must be left
        losses = [t.step(ids[step], labels[step]) for t in (trainer, whole)]
        assert abs(losses[0] / losses[1] - 1) < 1e-6
        close_gradients(trainer.gradients(), whole.gradients())
        if not step:
            loss, want = torch_gradients(model, ids[0], labels[0])
            assert abs(losses[0] / loss - 1) < 1e-6
            close_gradients(trainer.gradients(), want)
    assert over_all(trainer.state_dict(), whole.state_dict()) < 1e-6
    assert trainer.tokens_per_step == whole.tokens_per_step == 6 * 37


@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
def test_evaluation(runtime: nt.Runtime, tiles: dict[str, int]) -> None:
    model = gpt2()
    ids, labels = data(37, 611)
    trainer = nt.Trainer(nt.models.GPT2.from_hf(model), BATCH, 37, tiles, optimizer=nt.AdamW(lr=0.1))
    for x, y in zip(ids[:2], labels[:2], strict=True):
        want = model(torch.from_numpy(x), labels=torch.from_numpy(y))
        assert abs(trainer.evaluate(x, y) / want.loss.item() - 1) < 1e-6
        loss, logits = trainer.evaluate(x, y, return_logits=True)
        assert abs(loss / want.loss.item() - 1) < 1e-6
        assert logits.shape == (BATCH, 37, 611) and logits.dtype == np.float32
        assert error(logits, want.logits.detach()) < 1e-5
    before = trainer.evaluate(ids[0], labels[0])
    trainer.step(ids[0], labels[0])
    assert trainer.evaluate(ids[0], labels[0]) != before  # the weights that it sees are those of training
    assert over_all(trainer.state_dict(), {name: p.detach() for name, p in model.named_parameters()}) > 1e-2


def test_no_label_at_all(runtime: nt.Runtime) -> None:
    ids, labels = data(37, 611)
    trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), BATCH, 37, RAGGED)
    none = np.full_like(labels[0], IGNORED)
    with pytest.warns(UserWarning, match="step 1: no label counts, all are -100; the loss and the gradients are zero"):
        assert trainer.step(ids[0], none) == 0.0
    assert trainer.step(ids[0], none) == 0.0  # said once
    assert all(not grad.any() for grad in trainer.gradients().values())


def test_labels_that_are_shifted_already(runtime: nt.Runtime) -> None:
    ids, labels = data(37, 611)
    targets = np.full_like(labels[0], IGNORED)
    targets[:, :-1] = labels[0][:, 1:]
    model = nt.models.GPT2.from_hf(gpt2())
    shifts = nt.Trainer(model, BATCH, 37).evaluate(ids[0], labels[0])
    assert nt.Trainer(model, BATCH, 37, shift_labels=False).evaluate(ids[0], targets) == shifts


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
def test_sgd_with_a_schedule(runtime: nt.Runtime, tiles: dict[str, int], momentum: float) -> None:
    model = gpt2()
    ids, labels = data(37, 611)
    options = {"momentum": momentum, "weight_decay": 0.01}
    trainer = nt.Trainer(nt.models.GPT2.from_hf(model), BATCH, 37, tiles, optimizer=nt.SGD(lr=1.0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    for x, y, lr in zip(ids, labels, (0.1, 0.3, 0.05, 0.2), strict=False):
        loss, _ = torch_gradients(model, x, y)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert abs(trainer.step(x, y, lr=lr) / loss - 1) < 1e-5
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    close_gradients(trainer.state_dict(), want, 1e-5)


@pytest.mark.parametrize("options", [{}, {"tiles": RAGGED, "fusion": False}], ids=["uncut", "ragged, unfused"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_decay_of_matrices_alone(runtime: nt.Runtime, name: str, options: dict[str, Any]) -> None:
    """As nanoGPT groups PyTorch's parameters: weights with two or more axes decay, biases and norms do not."""
    model = gpt2()
    ids, labels = data(37, 611)
    how: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5} | ({"eps": 1e-4} if name == "AdamW" else {})
    decays, stays = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    optimizer = getattr(torch.optim, name)([{"params": decays}, {"params": stays, "weight_decay": 0.0}], **how)
    weights = {}
    for decay in ("matrices", "all"):
        ours = getattr(nt, name)(**how, decay=decay)
        trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), BATCH, 37, optimizer=ours, **options)
        for x, y in zip(ids[:3], labels[:3], strict=True):
            trainer.step(x, y)
        weights[decay] = trainer.state_dict()
    for x, y in zip(ids[:3], labels[:3], strict=True):
        torch_gradients(model, x, y)
        optimizer.step()
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    close_gradients(weights["matrices"], want, 1e-4)
    assert error(weights["all"]["transformer.ln_f.weight"], want["transformer.ln_f.weight"]) > 1e-2
    with pytest.raises(nt.ConfigError, match=r"optimizer.decay: got 'some'; allowed: 'all' or 'matrices'"):
        getattr(nt, name)(decay="some")


# -- dropout


def dropout_losses(tiles: dict[str, int], rate: float = 0.1, lr: float = 1e-3, steps: int = 4, **options: Any) -> Any:
    ids, labels = data(37, 611)
    naive = options.pop("naive", False)
    model = nt.models.GPT2.from_hf(gpt2(), dropout=rate, attention="naive" if naive else "vendor")
    if naive:
        config = nt.models.GPT2Config(**{**model.config.__dict__, "attention_dropout": rate})
        model = nt.models.GPT2(config, model.weights)
    trainer = nt.Trainer(model, BATCH, 37, tiles, optimizer=nt.AdamW(lr=lr), **options)
    losses = [trainer.step(ids[0], labels[0]) for _ in range(steps)]
    return losses, trainer.gradients(), trainer.evaluate(ids[0], labels[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("naive", [False, True])
def test_dropout_does_not_depend_on_the_tiling(runtime: nt.Runtime, naive: bool) -> None:
    losses, grads, _ = dropout_losses({}, naive=naive)
    for tiles, options in ((RAGGED, {}), (FROM_THE_ISSUE, {"fusion": False, "accumulate": "tree"})):
        other, others, _ = dropout_losses(tiles, naive=naive, **options)
        assert error(other, losses) < 1e-5
        close_gradients(others, grads, 1e-3)  # of the fourth step
    assert dropout_losses({}, naive=naive, seed=1)[0][0] != losses[0]


def test_dropout_keeps_the_mean(runtime: nt.Runtime) -> None:
    losses, _, without = dropout_losses(RAGGED, lr=0.0, steps=16)
    assert len(set(losses)) == 16  # another mask each step
    assert np.std(losses) / without > 1e-4
    assert abs(np.mean(losses) / without - 1) < 0.01
    small, _, same = dropout_losses(RAGGED, rate=1e-9, lr=0.0, steps=1)
    assert same == without and small[0] == pytest.approx(without, rel=1e-6)


# -- weights in and out


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False, "n_inner": 30, "activation_function": "relu"}])
def test_to_hf_and_back(config: dict[str, Any]) -> None:
    hf = gpt2(**config)
    model = nt.models.GPT2.from_hf(hf)
    back = model.to_hf()
    assert same(back.state_dict(), hf.state_dict())
    ids = torch.from_numpy(data(37, 611)[0][0])
    assert torch.equal(back(ids).logits, hf(ids).logits)
    for key in ("tie_word_embeddings", "activation_function", "n_positions", "n_head", "n_layer", "layer_norm_epsilon"):
        assert getattr(back.config, key) == getattr(hf.config, key)
    assert (back.config.n_inner or 4 * 48) == config.get("n_inner", 4 * 48)
    assert same(nt.models.GPT2.from_hf(back).weights, model.weights)


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("shards", [False, True])
def test_a_saved_folder(tmp_path: Path, config: dict[str, Any], shards: bool) -> None:
    hf = gpt2(**config)
    hf.save_pretrained(tmp_path, **({"max_shard_size": "100KB"} if shards else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    for source in (tmp_path, str(tmp_path)):
        model = nt.models.GPT2.from_hf(source)
        assert same(model.weights, nt.models.GPT2.from_hf(hf).weights)
        assert model.config == nt.models.GPT2.from_hf(hf).config
    model = nt.models.GPT2.from_hf(tmp_path, attention="naive", dropout=0.1, attention_dropout=0.2)
    assert (model.config.attention, model.config.dropout, model.config.attention_dropout) == ("naive", 0.1, 0.2)


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    """As the GPT-2 of the hub: names without `transformer.`, head tied."""
    hf = gpt2()
    hf.transformer.save_pretrained(tmp_path)
    assert same(nt.models.GPT2.from_hf(tmp_path).weights, nt.models.GPT2.from_hf(hf).weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_of_half_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    hf = gpt2().to(dtype)
    hf.save_pretrained(tmp_path)
    model = nt.models.GPT2.from_hf(tmp_path)
    assert same(model.weights, nt.models.GPT2.from_hf(hf.float()).weights)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(nt.ConfigError, match=r"config\.json is missing"):
        nt.models.GPT2.from_hf(tmp_path)
    with pytest.raises(nt.ConfigError, match="activation_function is 'laplace'"):
        nt.models.GPT2.from_hf(gpt2(activation_function="laplace"))
    allowed = "allowed: 'vendor', 'merge', 'flash', 'naive', 'segments', 'varlen' or 'cudnn'"
    with pytest.raises(nt.ConfigError, match=allowed):
        nt.models.GPT2.from_hf(gpt2(), attention="linear")
    hf = gpt2()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(nt.ConfigError, match=r"no model\.safetensors"):
        nt.models.GPT2.from_hf(tmp_path)
    hf.config.n_layer = 3
    with pytest.raises(nt.ConfigError, match=r"weight transformer\.h\.2\.ln_1\.weight is missing"):
        nt.models.GPT2.from_hf(hf)


def test_training_goes_into_the_model(runtime: nt.Runtime) -> None:
    ids, labels = data(37, 611)
    model = nt.models.GPT2.from_hf(gpt2())
    trainer = nt.Trainer(model, BATCH, 37, RAGGED, **ADAMW)
    for x, y in zip(ids[:3], labels[:3], strict=True):
        trainer.submit(x, y)
    loss, logits = trainer.evaluate(ids[0], labels[0], return_logits=True)
    trainer.close()
    hf = model.to_hf()
    want = hf(torch.from_numpy(ids[0]), labels=torch.from_numpy(labels[0]))
    assert abs(loss / want.loss.item() - 1) < 1e-6 and error(logits, want.logits.detach()) < 1e-5
    assert same({name: p.detach().numpy() for name, p in hf.named_parameters()}, trainer.state_dict())
    again = nt.Trainer(nt.models.GPT2.from_hf(hf), BATCH, 37)
    assert again.evaluate(ids[0], labels[0]) == pytest.approx(loss, rel=1e-6)


def test_weights_that_were_cut_off(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(nt.ConfigError, match=rf"cannot read {path}"):
        nt.models.GPT2.from_hf(tmp_path)
