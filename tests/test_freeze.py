"""Frozen weights: the numbers of torch with requires_grad=False, no tasks for their gradients, and what is refused."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_loop import nntile
from test_parity import close_gradients, data, gpt2, torch_loss

import nntile_py as nt

RAGGED = {"batch": 3, "seq": 10, "embed": 20, "heads": 3, "ffn": 50, "vocab": 200}
PATTERNS = {
    "embeddings": ["*.wte.*", "*.wpe.*"],
    "first layer": ["*.h.0.*", "*wte*", "*wpe*"],
    "biases": ["*.bias"],
    "attention": ["*.c_attn.weight", "*.ln_1.weight"],
    "all but one": ["*.ln_*", "*.h.*", "*wpe*"],
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=611, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=37, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(model: Any, patterns: list[str], ids: Any, labels: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of torch, in float64."""
    model = model.double().eval()
    for name, weight in model.named_parameters():
        weight.requires_grad = not any(fnmatch(name, pattern) for pattern in patterns)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, eps=1e-4)
    losses = []
    for step in range(steps):
        loss = torch_loss(model, ids[step], labels[step])
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        adamw.step()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.few(4)
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
@pytest.mark.parametrize("kind", [*PATTERNS, "llama", "llama queries"])
def test_frozen_weights_of_torch(runtime: nt.Runtime, tmp_path: Path, kind: str, tiles: dict[str, int]) -> None:
    """The trainer is saved and loaded after the second step."""
    own = {"llama": ["*.layers.0.*", "*embed*"], "llama queries": ["*.q_proj.*", "*norm*"]}
    patterns = own.get(kind) or PATTERNS[kind]
    theirs, of = (llama(), nt.models.Llama) if kind in own else (gpt2(), nt.models.GPT2)
    ids, labels = data(37, 611)
    trainer = nt.Trainer(
        of.from_hf(theirs), 4, 37, tiles, "fp64", nt.AdamW(lr=0.01, weight_decay=0.1, eps=1e-4, decay="all"), 0.5,
        freeze=patterns,
    )  # fmt: skip
    before = {name: value.copy() for name, value in trainer.state_dict().items()}
    want, weights = trained(theirs, patterns, ids, labels, 4)
    losses = []
    for step in range(4):
        if step == 2:
            trainer.save(tmp_path / "saved")
            trainer = nt.Trainer.load(tmp_path / "saved")
        losses.append(trainer.step(ids[step], labels[step]))
    assert losses == pytest.approx(want, rel=1e-8)
    after = trainer.state_dict()
    close_gradients(after, {name: weights[name] for name in after}, 1e-6)
    for name, value in before.items():
        frozen = any(fnmatch(name, pattern) for pattern in patterns)
        assert np.array_equal(after[name], value) == frozen, name
    assert trainer.gradients().keys() == {n for n in before if not any(fnmatch(n, p) for p in patterns)}


@pytest.mark.parametrize("frozen", ["*rel_embeddings*", "*LayerNorm*", "*word_embeddings*"])
@pytest.mark.parametrize("tiles", [{}, {"batch": 2, "ffn": 24, "heads": 1}], ids=["uncut", "ragged"])
def test_fused_gradients_that_nobody_needs(runtime: nt.Runtime, frozen: str, tiles: dict[str, int]) -> None:
    """A group with dropout computes the gradient of a norm's weight, but not that of a frozen embedding before it."""
    config = nt.models.DeBERTaV2Config(
        layers=1, embed=16, heads=2, vocab=20, positions=16, dropout=0.1, position_buckets=4
    )
    ids, found = np.random.default_rng(0).integers(0, 20, (3, 8)), []
    for fusion in (True, False):
        model = nt.models.DeBERTaV2(config, seed=1)
        trainer = nt.Trainer(model, 3, 8, tiles, "fp64", nt.SGD(lr=0.1), freeze=[frozen], fusion=fusion)
        losses = [trainer.step({"input_ids": ids, "labels": ids}) for _ in range(2)]
        found.append((losses, trainer.state_dict()))
    (fused, weights), (single, expected) = found
    assert fused == pytest.approx(single, rel=1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12)


def test_frozen_weights_save_tasks_and_memory(runtime: nt.Runtime) -> None:
    """Without gradients of the first layers, the backward pass ends where the trained layers begin."""
    model, built = nt.models.GPT2.from_hf(gpt2()), {}
    for patterns in ((), ("*.h.*", "*wpe*")):
        trainer = nt.Trainer(model, 4, 37, RAGGED, optimizer=nt.AdamW(), freeze=patterns)
        step = trainer._built
        tasks = [len(lowering.tasks.tasks) for lowering in (step.first, step.update)]
        built[patterns] = *tasks, sum(step.kept_tiles().values()), step.flop
    whole, frozen = built.values()
    assert all(less < more for less, more in zip(frozen, whole, strict=True)), (frozen, whole)


def test_refused(runtime: nt.Runtime) -> None:
    model = nt.models.GPT2.from_hf(gpt2())
    for patterns, message in (
        (["*wte*", "*wet*"], r"'\*wet\*' matches no weight; allowed: a pattern of names such as .*ln_f"),
        (["*"], "all weights match; allowed: patterns that leave a weight to train"),
        ("*wte*", r"freeze: got '\*wte\*'; allowed: a list of patterns"),
        ([3], r"freeze: got \[3\]; allowed: a list of patterns"),
    ):
        with pytest.raises(nt.ConfigError, match=message):
            nt.Trainer(model, 4, 37, freeze=patterns)


def test_a_run_with_frozen_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    sets = f"out={tmp_path}/run", "train.eval_every=4", "checkpoint.every=2"
    done = nntile(tmp_path, "freeze=['*wte*', '*.h.0.*']", "train.steps=4", *sets)
    assert done.returncode == 0 and " parameters are trained, the others are frozen" in done.stdout, done.stderr
    one, two = (load_file(tmp_path / f"run/checkpoints/step-00000{k}/model.safetensors") for k in (2, 4))
    same = {name for name in one if np.array_equal(one[name], two[name])}
    assert same == {name for name in one if "wte" in name or ".h.0." in name}
    sets = *sets, "train.steps=6"
    done = nntile(tmp_path, "freeze=['*wte*', '*.h.0.*']", *sets, arguments=("--resume", f"{tmp_path}/run"))
    assert done.returncode == 0, done.stderr
    done = nntile(tmp_path, "freeze=[]", *sets, "train.steps=8", arguments=("--resume", f"{tmp_path}/run"))
    assert done.returncode == 2 and "freeze was" in done.stderr, done.stderr
    done = nntile(tmp_path, "freeze=['*wet*']", *sets, arguments=("--overwrite",))
    assert done.returncode == 2 and "freeze: '*wet*' matches no weight" in done.stderr, done.stderr
