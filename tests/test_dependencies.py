"""Text as lines or paragraphs, and which of them each step takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import metrics, nntile

import nntile_py as nt
from nntile_py.data.documents import TextPart
from nntile_py.data.sampler import Sampler
from nntile_py.data.sequences import Pieces
from nntile_py.data.tokenization import split_into_sequences
from nntile_py.graph.bin_packing import Bins, best_fit
from nntile_py.graph.step import StepSpec

PACKED = "train.pack=true", "data.sequences=lines", "tiles={batch: 2, embed: 7, heads: 1}", "sample.tokens=0"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 60), st.integers(0, 5))
def test_best_fit(lengths: list[int], capacity: int, seed: int) -> None:
    """Each sequence is in one bin, no bin is too full, and no two could be one."""
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    bins = best_fit(lengths, order, capacity)
    assert sorted(one for of in bins for one in of) == [*range(len(lengths))]
    used = [sum(lengths[one] for one in of) for of in bins]
    assert max(used) <= capacity
    assert sum(2 * u <= capacity for u in used) <= 1
    assert bins[0][0] == order[0]


@pytest.mark.parametrize("capacity", [4, 16])
def test_bins_are_filled(capacity: int) -> None:
    """Of lengths as texts have them, in bins of some of the longest: at least 0.98."""
    rng = np.random.default_rng(0)
    for lengths in (rng.integers(26, 129, 20_000), np.clip(rng.lognormal(3.5, 0.8, 20_000), 3, 128).astype(int)):
        bins = Bins(2, capacity * 128, 128)
        order = Sampler(lengths, 0, 64, bins)
        assert order.fill() >= 0.98
        works = []
        for step in range(1, 20):
            sequences, places = order.step(step)
            assert len(sequences) == len(set(sequences)) == len(places)
            works.append([sum(bins.work(p.length) for p in places if p.bin == number) for number in (0, 1)])
        assert np.mean([min(w) / max(w) for w in works]) > 0.98  # those of one step have equal work


def test_lengths_stay_mixed() -> None:
    """Of a small table whose lengths go with its labels: each step has both, where bins look a few sequences ahead."""
    lengths = np.repeat([8, 24], 200)
    order = Sampler(lengths, 0, 16, Bins(2, 8 * 24, 24), lookahead=64)
    steps = [[lengths[one % 400] for one in order.step(step)[0]] for step in range(1, 18)]
    assert all(0.25 < np.mean(np.array(of) == 8) < 0.8 for of in steps) and order.fill() > 0.97


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 7), st.booleans(), st.integers(1, 2))
def test_every_sequence_once_in_an_epoch(count: int, rows: int, packed: bool, passes: int) -> None:
    """Across the ends of epochs, and asked for in any order."""
    lengths = np.random.default_rng(count).integers(1, 9, count)
    bins = Bins(rows, 16, 8) if packed else None
    order = Sampler(lengths, 3, rows * passes, bins, passes)
    taken = [order.step(step) for step in range(1, 40)]
    again = Sampler(lengths, 3, rows * passes, bins, passes)
    assert [again.step(step) for step in (30, 2, 39)] == [taken[k - 1] for k in (30, 2, 39)]
    flat = [one for sequences, _ in taken for one in sequences]
    for first in range(0, len(flat) - count, count):
        assert sorted(flat[first : first + count]) == [*range(first, first + count)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_parts(lengths: list[int], most: int) -> None:
    tokens = np.arange(sum(lengths))
    parts = Pieces(np.array(lengths), most)
    cut = [tokens[place] for k in range(len(parts.lengths)) for place in parts.place(0, k)]
    assert (np.concatenate(cut) == tokens).all() and max(map(len, cut)) <= most
    assert parts.cut == sum(n > most for n in lengths)
    ends = set(np.cumsum(lengths).tolist())
    assert ends <= {int(part[-1]) + 1 for part in cut}  # no part has tokens of two


def test_units_of_a_text() -> None:
    texts = ["one\ntwo\n\n\nthree\n", "  \nfour"]

    def units(unit: str) -> list[str]:
        return [part.text for text in texts for part in split_into_sequences(TextPart(text), unit)]

    assert units("lines") == ["one", "two", "three", "four"]
    assert units("paragraphs") == ["one\ntwo", "three", "  \nfour"]
    assert units("documents") == units("window") == texts


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_a_packed_run_stopped_and_gone_on_with(model: str, tmp_path: Path) -> None:
    sets: tuple[Any, ...] = (*PACKED, f"model.type={model}", "model.dropout=0.1", "train.grad_accumulation=2")
    sets = (*sets, "optimizer.schedule=constant")
    done = nntile(tmp_path, *sets, arguments=("--out", "whole"))
    assert done.returncode == 0, done.stderr
    assert " training sequences (lines): " in done.stdout and "of the bins' 24 tokens filled" in done.stdout
    assert nntile(tmp_path, *sets, "checkpoint.every=5", "train.steps=7").returncode == 0
    done = nntile(tmp_path, *sets, "train.steps=12", arguments=("--resume",))
    assert done.returncode == 0 and "going on after step 7" in done.stdout, done.stderr
    whole, run = metrics(tmp_path / "whole"), metrics(tmp_path / "runs" / "tiny")
    assert [line["step"] for line in run] == [*range(1, 13)]
    both = [[(line["loss"], line["grad_norm"], line["lr"]) for line in lines] for lines in (whole, run)]
    assert both[0] == both[1]
    assert 0.9 * 96 < round(whole[0]["tokens_per_s"] * whole[0]["step_time_s"]) <= 96


def test_what_packing_needs(tmp_path: Path) -> None:
    for sets, told in (
        (("train.pack=true",), "error: tiny.yaml: tiles.seq: got 5; allowed with pack: none, a bin is not cut"),
        (("data.sequences=words",), "data.sequences: got 'words'; allowed: 'window', 'lines'"),
    ):
        done = nntile(tmp_path, *sets)
        assert done.returncode == 2 and told in done.stderr, done.stderr


@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9, 1.0])
def test_random_inputs_of_a_mean_length(alpha: float) -> None:
    spec = StepSpec(nt.models.BERT(nt.models.BERTConfig(layers=1, embed=8, heads=2, vocab=20, positions=64)), 7, 64)
    made = spec.random_inputs(7, 0, alpha, predicted=0.5)
    assert ("attention_mask" in made) == (alpha < 1)
    mask = made.get("attention_mask", np.ones((7, 64), np.int64))
    assert mask.sum() == round(alpha * 64 * 7) and mask[:, 0].all() and not (np.diff(mask, axis=1) > 0).any()
    assert ((made["labels"] == -100) | (mask == 1)).all() and 0.2 < (made["labels"] >= 0).sum() / mask.sum() < 0.8


@pytest.mark.parametrize("bins", [None, Bins(2, 8 * 24, 24)])
def test_an_epoch_is_packed_in_parts(bins: Bins | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch has each sequence once, in parts of 300 sequences, and steps can be read in any order."""
    lengths = np.random.default_rng(0).integers(1, 25, 1000)

    def read(*steps: int) -> dict[int, list[int]]:
        sampler = Sampler(lengths, 0, 16, bins)
        return {step: [number for number in sampler.step(step)[0]] for step in steps}

    whole = read(*range(1, 200))
    monkeypatch.setattr("nntile_py.data.sampler.PART", 300)
    parts = read(*range(1, 200))
    assert read(150, 3, 40, 41, 3)[3] == parts[3] and read(150, 3)[150] == parts[150]
    for steps in (whole, parts):
        order = [number for step in range(1, 200) for number in steps[step]]
        for epoch in (0, 1):
            assert sorted(order[epoch * 1000 : epoch * 1000 + 1000]) == list(range(epoch * 1000, epoch * 1000 + 1000))
    assert bins or whole == parts
