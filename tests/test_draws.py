"""Random arrays: the same numbers for any number of cores; GPT-2's weights as they should be spread."""

import os

import numpy as np
import pytest

from nntile_py.graph import initial_weights as draws
from nntile_py.models.gpt2 import GPT2, GPT2Config


def test_the_same_for_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "BLOCK", 100)
    config = GPT2Config(layers=2, embed=16, heads=2, vocab=300, positions=12)
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        found.append(GPT2(config, seed=7).weights)
    one, three = found
    assert list(one) == list(three) and all(np.array_equal(one[name], three[name]) for name in one)
    table, other = one["transformer.wte.weight"].ravel(), GPT2(config, seed=8).weights["transformer.wte.weight"].ravel()
    blocks = {tuple(block) for of in (table, other) for block in of[:4800].reshape(-1, 100)}
    assert len(blocks) == 96, "two blocks have the same numbers"


def test_weights_of_gpt2() -> None:
    weights = GPT2(GPT2Config(layers=8, embed=128, heads=2, vocab=2000, positions=12)).weights
    for name, std in (
        ("transformer.wte", 0.02),
        ("transformer.h.3.attn.c_attn", 0.02),
        ("transformer.h.3.mlp.c_proj", 0.005),
    ):
        value = weights[f"{name}.weight"]
        assert value.dtype == np.float32 and value.std() == pytest.approx(std, rel=0.02), name
        assert abs(value.mean()) < 0.02 * std + 3 * std / value.size**0.5
    assert (weights["transformer.ln_f.weight"] == 1).all() and not weights["transformer.h.0.mlp.c_fc.bias"].any()
