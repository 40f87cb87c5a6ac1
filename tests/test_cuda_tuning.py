"""Fine-tuning on a GPU: steps with adapters, frozen weights and sentence embeddings as on CPU workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

ROWS, SEQ, VOCAB = 8, 32, 97
SIZES: dict[str, Any] = {"layers": 2, "embed": 48, "heads": 4, "vocab": VOCAB, "positions": SEQ}
LORA = {"targets": ["c_attn", "c_proj"], "rank": 4}
DROPPED = {"targets": ["o_proj"], "rank": 4, "dropout": 0.3}
SENTENCES = {"head": "sentence_embedding", "choices": 4}
MODELS: dict[str, Any] = {
    "lora": lambda: nt.models.GPT2(nt.models.GPT2Config(**SIZES, lora=LORA), seed=1),
    "packed": lambda: nt.models.Llama(nt.models.LlamaConfig(**SIZES, ffn=96, lora=DROPPED), seed=1),
    "frozen": lambda: nt.models.GPT2(nt.models.GPT2Config(**SIZES), seed=1),
    "sentences": lambda: nt.models.BERT(nt.models.BERTConfig(**SIZES, **SENTENCES), seed=1),
}
TILES = {"batch": 3, "embed": 20, "heads": 3, "vocab": 40}


def losses(kind: str, precision: str, tiles: dict[str, int]) -> list[float]:
    """The losses of four steps on the running Runtime."""
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {"input_ids": rng.integers(1, VOCAB, (ROWS, SEQ))}
    if kind in ("sentences", "packed"):
        inputs["attention_mask"] = (np.arange(SEQ) < rng.integers(4, SEQ, (ROWS, 1))).astype(np.int64)
    if kind == "packed":
        inputs["labels"] = np.where(inputs["attention_mask"], inputs["input_ids"], -100)
    elif kind != "sentences":
        inputs["labels"] = inputs["input_ids"]
    given: dict[str, Any] = {"freeze": ["*.h.0.*", "*.wpe.*"]} if kind == "frozen" else {"pack": kind == "packed"}
    optimizer = nt.AdamW(lr=0.001)
    trainer = nt.Trainer(MODELS[kind](), ROWS, SEQ, tiles, precision, optimizer, clip_grad_norm=1.0, **given)
    found = [float(trainer.step(inputs)) for _ in range(4)]
    trainer.close()
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tiles", [{}, TILES], ids=["uncut", "cut"])
def test_losses_are_those_of_cpus(kind: str, tiles: dict[str, int]) -> None:
    with nt.Runtime(cpus=2):
        wanted = losses(kind, "fp32", tiles)
    assert wanted[-1] < wanted[0]
    with nt.Runtime(cuda=1):
        np.testing.assert_allclose(losses(kind, "fp32", tiles), wanted, rtol=2e-5)
        low = losses(kind, "bf16", tiles)
    # Cosine similarities / 0.05 amplify what 16 bits round.
    first, later = (0.03, 0.06) if kind == "sentences" else (0.01, 0.03)
    assert low[0] == pytest.approx(wanted[0], rel=first)
    np.testing.assert_allclose(low, wanted, rtol=later)
