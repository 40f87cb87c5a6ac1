"""Tiles that a program holds for their only task between runs: same bits, other uses, another runtime, interrupts."""

import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.execution import memory

SIZES = {"layers": 2, "embed": 32, "heads": 2, "vocab": 64, "positions": 16}
STEPS = 14  # more than the runs without residents after another use of one


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of residents of each step that is built."""
    found: list[int] = []
    original = memory.residents

    def counted(*args: Any) -> Any:
        result = original(*args)
        found.append(len(result))
        return result

    monkeypatch.setattr(memory, "residents", counted)
    return found


def batches() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    draw = np.random.default_rng(0)
    while True:
        tokens = draw.integers(0, SIZES["vocab"], (4, 9))
        yield tokens[:, :-1].copy(), tokens[:, 1:].copy()


def trained(reads: Sequence[int] = (), saves: Sequence[int] = (), folder: Any = None) -> list[Any]:
    """Return losses, states that were read after the steps `reads`, and the last state."""
    model = nt.models.GPT2(nt.models.GPT2Config(**SIZES))
    trainer = nt.Trainer(model, batch=4, seq=8, tiles={"batch": 2}, optimizer=nt.AdamW(lr=1e-2), seed=3)
    results: list[Any] = []
    for step, batch in zip(range(STEPS), batches(), strict=False):
        results.append(trainer.step(*batch))
        if step in reads:
            results.append(trainer.state_dict())
        if step in saves:
            trainer.save(folder / "saved")
    results.append(trainer.state_dict())
    trainer.close()
    return results


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.few(2)
@pytest.mark.parametrize("reads", [(), (0, 1, 2, 11)])
def test_same_bits(reads: Sequence[int], counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with nt.Runtime(cpus=2, placement="planned"):
        held = trained(reads)
    assert counts and counts[0] > 40  # two states of each weight
    with nt.Runtime(cpus=2, placement="scheduler"):
        free = trained(reads)
    monkeypatch.setattr(memory, "residents", lambda *_: frozenset())
    with nt.Runtime(cpus=2, placement="planned"):
        planned = trained(reads)
    assert all(same(a, b) and same(a, c) for a, b, c in zip(held, free, planned, strict=True))


def test_a_saved_run_goes_on(counts: list[int], tmp_path: Any) -> None:
    """A checkpoint of held states, loaded while the first trainer still holds its own states."""
    with nt.Runtime(cpus=2, placement="planned"):
        *_, last = trained(saves=[6], folder=tmp_path)
        other = nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(**SIZES)), batch=4, seq=8, tiles={"batch": 2})
        other.step(*next(batches()))
        loaded = nt.Trainer.load(
            tmp_path / "saved", tiles={"batch": 2}, batch=4, seq=8, optimizer=nt.AdamW(lr=1e-2), seed=3
        )
        for step, batch in zip(range(STEPS), batches(), strict=False):
            if step > 6:
                loaded.step(*batch)
                other.step(*batch)
        assert same(loaded.state_dict(), last) and min(counts) > 40


def test_a_runtime_may_stop_first(counts: list[int]) -> None:
    """Held states do not outlive their runtime, and a failed task leaves a runtime that can stop."""
    with nt.Runtime(cpus=2, placement="planned"):
        trainer = nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(**SIZES)), batch=4, seq=8, tiles={"batch": 2})
        for _ in range(3):
            trainer.step(*next(batches()))
    with pytest.raises(nt.TaskError, match="has stopped"):
        trainer.step(*next(batches()))
    with nt.Runtime(cpus=2, placement="planned"):
        assert np.isfinite(trained()[0])
    assert min(counts) > 40


@nt.task(x="RW")
def slow(x: Any) -> None:
    time.sleep(1)
    x += 1


def masked_and_not(interrupted: bool) -> list[Any]:
    """Return losses and the last state of a trainer whose two programs take the states from each other.

    interrupted: Ctrl-C ends the wait of a program that takes the states, before the same step begins again.
    """
    optimizer = nt.SGD(lr=0.1, momentum=0.9)  # unlike AdamW's, its updates do not depend on the number of steps
    model = nt.models.GPT2(nt.models.GPT2Config(**SIZES))
    trainer = nt.Trainer(model, batch=4, seq=8, tiles={"batch": 2}, optimizer=optimizer)
    mask = np.arange(8) < np.array([[8], [6], [8], [5]])
    (ids, labels), results = next(batches()), []

    def step(masked: bool) -> None:
        given = {"input_ids": ids, "labels": labels, **({"attention_mask": mask.astype(int)} if masked else {})}
        results.append(trainer.step(given))

    # Each program holds the states, loses them to the other, and runs without them until it may hold them again.
    for masked, count in ((False, 2), (True, 1), (False, 9), (True, 8), (False, 9)):
        for _ in range(count):
            step(masked)
    if interrupted:
        slow(nt.array(np.zeros(3)))  # the release of the states waits for all tasks
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            step(True)
    for masked in (True, False, True):
        step(masked)
    return [*results, trainer.state_dict()]


def test_an_interrupt_while_a_program_takes_states_from_another(counts: list[int]) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with nt.Runtime(cpus=2, placement="planned"):
            results = masked_and_not(interrupted=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    with nt.Runtime(cpus=2, placement="scheduler"):
        expected = masked_and_not(interrupted=False)
    assert min(counts) > 20 and all(same(a, b) for a, b in zip(results, expected, strict=True))
