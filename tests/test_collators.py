"""Collators: shapes, padding, what is masked and how often, seeds."""

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.errors import ConfigError

MASK, SPECIAL = 3, (0, 1, 2, 3)


def masked(**changes: object) -> nt.MaskedCollator:
    return nt.MaskedCollator(**({"seq": 50, "vocab": 100, "mask": MASK, "special": SPECIAL} | changes))  # type: ignore[arg-type]


def test_a_causal_batch_is_padded_only_where_it_must_be() -> None:
    batch = nt.CausalCollator(4, pad=9)([[5, 6], np.array([1, 2, 3, 4]), []])
    assert batch["input_ids"].tolist() == [[5, 6, 9, 9], [1, 2, 3, 4], [9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [1, 2, 3, 4], [-100] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    whole = nt.CausalCollator(3)(np.arange(6, dtype=np.uint16).reshape(2, 3))
    assert whole.keys() == {"input_ids", "labels"}
    assert all(array.dtype == np.int64 and array.tolist() == [[0, 1, 2], [3, 4, 5]] for array in whole.values())


@pytest.mark.parametrize("collate", [nt.CausalCollator(50), masked()])
def test_samples_that_are_refused(collate: nt.CausalCollator | nt.MaskedCollator) -> None:
    with pytest.raises(ValueError, match=r"samples\[1\]: 51 tokens; allowed: at most seq = 50"):
        collate([[1], list(range(51))])
    for sample in ([1.5], [[1]]):
        with pytest.raises(ValueError, match=r"samples\[0\]: got .*; allowed: a list of ints"):
            collate([sample])


def test_what_is_masked_and_how_often() -> None:
    ids = np.random.default_rng(0).integers(0, 100, (2000, 50))
    batch = masked()(ids, 7)
    seen, labels = batch["input_ids"], batch["labels"]
    chosen, ordinary = labels != -100, ~np.isin(ids, SPECIAL)
    assert (labels[chosen] == ids[chosen]).all() and (seen[~chosen] == ids[~chosen]).all()
    assert not chosen[~ordinary].any()
    count = chosen.sum()  # 96 000 ordinary ones: four deviations of their share are 0.005, of the parts 0.014
    assert count / ordinary.sum() == pytest.approx(0.15, abs=0.005)
    hidden, stays = chosen & (seen == MASK), chosen & (seen == ids)
    other = chosen & ~hidden & ~stays
    assert hidden.sum() / count == pytest.approx(0.8, abs=0.014)
    assert stays.sum() / count == pytest.approx(0.1 + 0.1 / 96, abs=0.012)  # a random token may be the same one
    assert set(seen[other]) == set(range(4, 100))  # any ordinary token, no special one
    rows = masked(probability=0.5)(ids, 7)["labels"] != -100
    assert rows.sum() / ordinary.sum() == pytest.approx(0.5, abs=0.008)


def test_draws_come_from_seed_and_step_alone() -> None:
    ids = np.random.default_rng(0).integers(4, 100, (8, 50))
    collate = masked(seed=5)
    first = collate(ids, 3)
    collate(ids, 4)  # nothing is remembered
    for one, same in ((collate, True), (masked(seed=5), True), (masked(seed=6), False)):
        assert all((first[name] == one(ids, 3)[name]).all() for name in first) == same
    assert (first["labels"] != collate(ids, 4)["labels"]).any()


def test_padding_is_neither_predicted_nor_read() -> None:
    batch = masked(pad=50, probability=0.9)([[5] * 10, [0, 1, 2], []], 1)  # 50 is an ordinary token elsewhere
    assert (batch["attention_mask"].sum(1) == [10, 3, 0]).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all() and (batch["input_ids"][:, 10:] == 50).all()
    assert (batch["labels"][0, :10] == 5).any() and (batch["labels"][1:] == -100).all()  # nothing to predict is fine


def test_settings_that_are_refused() -> None:
    for changes, told in (({"probability": 1.0}, "probability: got 1.0"), ({"mask": 100}, "mask: got 100"),
                          ({"special": range(100)}, "all 100 tokens")):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            masked(**changes)
