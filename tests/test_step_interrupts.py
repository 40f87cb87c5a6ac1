"""Ctrl-C while a training step is submitted: the step has changed nothing, or it counts."""

import math
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.errors import NotFinite
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime
from nntile_py.system.interrupts import uninterrupted
from nntile_py.training.programs import Programs
from nntile_py.training.step_handle import Pending, StepsInFlight

ROOT = str(Path(nt.__file__).parent)
CONFIG = nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8, dropout=0.1)
IDS = np.random.default_rng(0).integers(0, 20, (4, 8))


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a user's program. After the test, other threads can use the runtime."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(Runtime.turn.acquire, blocking=False).result()
        other.submit(Runtime.turn.release).result()


@contextmanager
def lines(interrupted: int = 0) -> Iterator[list[int]]:
    """Count the lines of nntile_py that the block runs, and send SIGINT before the line with this number, from 1.

    Lines of in_turns do not count: Python traces the end of a `with` block before it releases the lock. A real signal
    is not handled there.
    """
    count, before = [0], sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_qualname.startswith("in_turns."):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == interrupted:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def trainer() -> nt.Trainer:
    model = nt.models.GPT2(CONFIG, seed=0)
    return nt.Trainer(model, 2, 8, {"embed": 4}, grad_accumulation=2, clip_grad_norm=0.5, seed=1)


def submit(one: nt.Trainer, step: int) -> Pending:
    ids = np.roll(IDS, step, 1)
    return one.submit(ids, ids, lr=1e-2 / step)


def test_a_step_that_is_interrupted_at_any_line(runtime: nt.Runtime) -> None:
    """If the step does not count, a second call gives the bits of a step without an interrupt."""
    one, other = trainer(), trainer()
    for step in (1, 2, 3):  # the third step is the first that waits for another step
        submit(one, step)
        with lines() as count:
            submit(other, step)
    retried, last = 0, 3 + count[0]
    for step in range(4, last + 1):
        expected = submit(one, step)
        with pytest.raises(KeyboardInterrupt), lines(step - 3):
            submit(other, step)
        if other.steps < step:
            retried += 1
            assert submit(other, step).result() == expected.result()
        assert one.steps == other.steps == step
    assert 50 < retried < count[0]
    assert one.step(IDS, IDS) == other.step(IDS, IDS)
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value, other.state_dict()[name])


def test_a_second_ctrl_c_while_the_update_is_submitted(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process at once: tasks that stall would delay the first one for minutes."""
    one, fetch, ended = trainer(), Store.fetch, list[int]()

    def interrupted(*args: Any) -> Any:
        assert not ended
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return fetch(*args)

    monkeypatch.setattr(runtime, "end_process", ended.append)
    monkeypatch.setattr(Store, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(one, 1)
    assert ended == [signal.SIGINT]
    assert one.steps == 1


def test_gradients_are_those_of_a_step(runtime: nt.Runtime, tmp_path: Path) -> None:
    """Not the values that the passes of an interrupted step have left, and not the empty tiles of a loaded trainer."""
    one = trainer()
    submit(one, 1)
    assert one.gradients()
    with lines() as count:
        submit(one, 2)
    for line in range(count[0], 0, -1):
        before = one.steps
        with pytest.raises(KeyboardInterrupt), lines(line):
            submit(one, 3)
        if one.steps == before:
            break
    with pytest.raises(nt.TaskError, match="its last step was interrupted"):
        one.gradients()
    one.save(tmp_path / "saved")
    with pytest.raises(nt.TaskError, match="no step has run yet in this trainer"):
        nt.Trainer.load(tmp_path / "saved").gradients()
    submit(one, 3)
    assert one.gradients()


def test_the_warning_about_ignored_labels(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(warnings, "warn", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        one.submit(IDS, np.full_like(IDS, -100))
    with pytest.warns(UserWarning, match="step 1: no label counts"):
        one.submit(IDS, np.full_like(IDS, -100))


@pytest.mark.parametrize("method", ["submit", "evaluate"])
def test_default_values_of_inputs_are_written(
    method: str, runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Default values are written even if an interrupted call has built the program that reads them."""
    one, writes, write = trainer(), deque([signal.SIGINT]), Programs._write_defaults
    rows = 4 if method == "submit" else 2
    inputs = {"input_ids": IDS[:rows], "labels": IDS[:rows], "attention_mask": np.tri(rows, 8, 4, int)}

    def interrupted(*given: Any) -> None:
        if writes:
            signal.raise_signal(writes.popleft())
        write(*given)
        written.append(given)

    written: list[Any] = []
    monkeypatch.setattr(Programs, "_write_defaults", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(one, method)(inputs)
    assert not written
    getattr(one, method)(inputs)
    assert len(written) == 1 + (method == "evaluate")


def pending(step: int, wait: Callable[[], tuple[float, float]], scale: float | None) -> Pending:
    def end(message: str) -> None:
        raise NotFinite(message)

    check: Any = SimpleNamespace(forget=lambda: None, end=end)
    return Pending(step, SimpleNamespace(wait=wait), 1, 1.0, check, None, scale)  # type: ignore[arg-type]


def in_flight(scale: float | None, *waits: Callable[[], tuple[float, float]]) -> StepsInFlight:
    steps = StepsInFlight(SimpleNamespace(scale=scale))  # type: ignore[arg-type]
    for step, wait in enumerate(waits, 1):
        steps.add(pending(step, wait, scale))
    return steps


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_the_loss_scale_counts_each_step_once(norm: float) -> None:
    expected = in_flight(1024.0, lambda: (1.0, norm))
    with lines() as count:
        expected.settle()
    for line in range(1, count[0] + 1):
        steps = in_flight(1024.0, lambda: (1.0, norm))
        with pytest.raises(KeyboardInterrupt), lines(line):
            steps.settle()
        steps.settle()
        assert steps.scale == expected.scale, line
    assert expected.scale and expected.scale.state == {"value": 1024 if norm == 1 else 512, "good": int(norm == 1)}


def test_an_interrupted_wait_hides_no_error() -> None:
    signals = deque([signal.SIGINT])

    def wait() -> tuple[float, float]:
        if signals:
            signal.raise_signal(signals.popleft())
        return math.nan, 1.0

    steps = in_flight(None, wait, lambda: (1.0, 1.0))
    with pytest.raises(KeyboardInterrupt):
        steps.settle()
    with pytest.raises(NotFinite, match="step 1: the loss is nan"):
        steps.settle()
    steps.settle()


def test_a_handler_that_is_set_in_an_uninterrupted_block_stays() -> None:
    """As in a training run after SIGTERM: the next SIGINT ends the run at once."""
    handled: list[int] = []
    with uninterrupted():
        signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
