"""Several threads use one encoder, one trainer, and start and stop runtimes: calls take turns, results are right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import nntile_py as nt

VOCAB, SEQ = 50, 16
CONFIG = nt.models.BERTConfig(layers=1, embed=16, heads=2, vocab=VOCAB, positions=64)
GPT = nt.models.GPT2Config(layers=1, embed=16, heads=2, vocab=VOCAB, positions=SEQ)


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Return the results of `function(number)`, each in a thread of its own; raise the first error."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, range(count)))


def test_runtimes_started_by_several_threads() -> None:
    """One of them runs at a time; the other threads are told so."""

    def start(number: int) -> int:
        started = 0
        for _ in range(5):
            try:
                with nt.Runtime(cpus=1) as runtime:
                    started += nt.Runtime.current is runtime
            except nt.TaskError as error:
                assert "a runtime is running already" in str(error)
        return started

    assert sum(in_threads(4, start)) >= 1 and nt.Runtime.current is None


def test_encoders_that_start_a_runtime_in_several_threads() -> None:
    model = nt.models.BERT(CONFIG)
    encoders = [nt.Encoder(model) for _ in range(4)]
    first, *others = in_threads(4, lambda number: encoders[number]([[1, 2, 3]])[0])
    assert all(np.array_equal(first, other) for other in others)
    for encoder in encoders:
        encoder.close()
    assert nt.Runtime.current is None


def test_a_runtime_that_is_stopped_in_its_block() -> None:
    with nt.Runtime(cpus=1) as runtime:
        runtime.stop()
    assert nt.Runtime.current is None


def test_a_runtime_that_stops_while_threads_train() -> None:
    runtime = nt.Runtime(cpus=1).start()
    trainer = nt.Trainer(nt.models.GPT2(GPT), 2, SEQ)
    ids = np.zeros((2, SEQ), int)

    def train(number: int) -> None:
        if number == 0:
            while trainer.steps < 6:
                trainer.step(ids, ids)
            runtime.stop()
        with pytest.raises(nt.TaskError, match="the Runtime of this Trainer has stopped"):
            while True:
                trainer.step(ids, ids)

    in_threads(3, train)


def test_an_encoder_of_several_threads(runtime: nt.Runtime) -> None:
    """Each gets the vectors of its own texts."""
    rng = np.random.default_rng(0)
    texts = [[rng.integers(0, VOCAB, rng.integers(1, 60)).tolist() for _ in range(12)] for _ in range(4)]
    encoder = nt.Encoder(nt.models.BERT(CONFIG), batch_tokens=128)
    want = [encoder(of) for of in texts]

    def check(number: int) -> None:
        for _ in range(8):
            got = encoder(texts[number])
            assert all(np.array_equal(a, b) for a, b in zip(got, want[number], strict=True))

    in_threads(4, check)


def test_a_trainer_of_several_threads(runtime: nt.Runtime) -> None:
    """With one batch, the order of steps does not matter: the losses are those of one thread."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))
    alone = nt.Trainer(nt.models.GPT2(GPT), 2, SEQ)
    want = [alone.step(ids, ids) for _ in range(24)]
    model = nt.models.GPT2(GPT)
    trainer = nt.Trainer(model, 2, SEQ)

    def train(number: int) -> list[float]:
        losses = []
        for _ in range(4):
            losses.append(trainer.step(ids, ids))
            assert np.isfinite(trainer.evaluate(ids, ids))
            assert trainer.state_dict().keys() == model.weights.keys()
        return losses

    losses = [loss for of_thread in in_threads(6, train) for loss in of_thread]
    assert sorted(losses, reverse=True) == sorted(want, reverse=True)
    assert trainer.steps == 24 and len({*want}) == 24
    for key, value in trainer.state_dict().items():
        assert np.array_equal(value, alone.state_dict()[key])
