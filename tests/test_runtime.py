"""StarPU under Python: tasks in Python; every failure ends in an exception, never in a hang."""

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CPUS
from faults import CONFIG, IDS, axpy, ends_well, fail, fill, works

import nntile_py as nt
from nntile_py.execution.starpu_settings import convolutions_in_fp32


@pytest.fixture
def runtime() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=CPUS) as running:
        yield running


# -- tasks in Python


def test_axpy(runtime: nt.Runtime) -> None:
    x, y = nt.array(np.arange(6.0).reshape(2, 3)), nt.array(np.ones((2, 3)))
    for _ in range(50):
        axpy(x, y, alpha=0.5)
    assert np.array_equal(y.numpy(), 1 + 25 * np.arange(6.0).reshape(2, 3))
    assert np.array_equal(x.numpy(), np.arange(6.0).reshape(2, 3))
    assert axpy.__name__ == "axpy"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.bool_, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_arrays(runtime: nt.Runtime, dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    a, strided = nt.array(value), nt.array(value.T)
    assert a.shape == shape and a.dtype == dtype
    got = a.numpy()
    assert got.dtype == dtype and np.array_equal(got, value) and np.array_equal(strided.numpy(), value.T)
    got[...] = 0
    assert np.array_equal(a.numpy(), value)  # a copy


def test_tasks_see_the_tiles_themselves(runtime: nt.Runtime) -> None:
    seen: list[Any] = []

    @nt.task(x="R", y="RW", z="W")
    def look(x: Any, y: Any, z: Any, note: str, *, scale: int = 3) -> None:
        seen.append([(a.flags.writeable, a.flags.owndata, a.__array_interface__["data"][0]) for a in (x, y, z)])
        seen.append((note, scale, threading.current_thread() is threading.main_thread()))
        z[...] = x * scale

    x, y, z = (nt.array(np.full(4, v)) for v in (1.0, 2.0, 3.0))
    look(x, y, z, "a")
    look(x, z=z, y=y, note="b", scale=5)
    assert z.numpy().tolist() == [5] * 4
    nt.Runtime.wait()
    assert [(w, own) for w, own, _ in seen[0]] == [(False, False), (True, False), (True, False)]
    assert seen[0] == seen[2]  # the same memory at both calls: views, no copies
    assert seen[1::2] == [("a", 3, False), ("b", 5, False)]


def test_dependencies_between_tasks(runtime: nt.Runtime) -> None:
    """Ten arrays, each task adds a neighbour: the result is that of the sequential program."""
    arrays, want = [nt.array(np.full(3, float(k))) for k in range(10)], [float(k) for k in range(10)]
    for k in np.random.default_rng(0).integers(0, 10, 300):
        axpy(arrays[k], arrays[(k + 3) % 10], alpha=0.25)
        want[(k + 3) % 10] += 0.25 * want[k]
    assert [a.numpy()[0] for a in arrays] == want


def test_writing_only(runtime: nt.Runtime) -> None:
    x = nt.array(np.zeros(2))
    fill(x)
    assert x.numpy().tolist() == [7, 7]
    fill(x, 8.0)
    assert x.numpy().tolist() == [8, 8]


def test_nothing_is_kept_alive(runtime: nt.Runtime) -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    @nt.task(x="R")
    def use(x: Any, thing: Thing) -> None:
        pass

    use(nt.array(np.ones(2)), thing)
    nt.Runtime.wait()
    del thing
    gc.collect()
    assert gone() is None


def test_wrong_calls(runtime: nt.Runtime) -> None:
    x = nt.array(np.ones(2))
    with pytest.raises(TypeError, match=r"task axpy: y is no nt\.array but ndarray"):
        axpy(x, np.ones(2), alpha=1.0)
    with pytest.raises(ValueError, match="task axpy: two arguments are the same array"):
        axpy(x, x, alpha=1.0)
    with pytest.raises(TypeError, match="missing a required"):
        axpy(x, alpha=1.0)
    with pytest.raises(TypeError, match=r"dtype: got complex128; allowed: float32, .*, float16, bool, int16"):
        nt.array(np.ones(2, complex))
    with pytest.raises(ValueError, match="task: got mode 'X' of x; allowed: R, W, RW, ACC, COMMUTE, REDUX"):
        nt.task(x="X")
    with pytest.raises(ValueError, match="task fail: has no argument y"):
        nt.task(y="R")(fail.__wrapped__)  # type: ignore[attr-defined]
    works()


# -- tasks in Python that fail


@nt.task(x="R")
def write_to_what_is_read(x: Any) -> None:
    x += 1


@nt.task(x="RW")
def mistake_a_shape(x: Any) -> None:
    x += np.ones(5)


@nt.task(x="RW")
def exhaust_memory(x: Any) -> None:
    raise MemoryError("no more")


@nt.task(x="RW")
def allocate_too_much(x: Any) -> None:
    x += np.empty(1 << 45)[:3]


@nt.task(x="RW")
def leave(x: Any) -> None:
    raise SystemExit(3)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor this")


@nt.task(x="RW")
def fail_badly(x: Any) -> None:
    raise Unprintable


FAILURES = [
    (fail, "ValueError: of no use"),
    (write_to_what_is_read, "ValueError: output array is read-only"),
    (mistake_a_shape, "ValueError: .*broadcast"),
    (exhaust_memory, "MemoryError: no more"),
    (allocate_too_much, "MemoryError"),
    (leave, "SystemExit: 3"),
    (fail_badly, "Unprintable"),
]


@pytest.mark.parametrize(("function", "text"), FAILURES)
def test_a_task_that_fails(runtime: nt.Runtime, function: Any, text: str) -> None:
    x = nt.array(np.ones(3))
    call = function(x)
    with pytest.raises(nt.TaskError, match=f"^{function.__name__}: {text}") as caught:
        nt.Runtime.wait()
    cause = caught.value.__cause__
    assert type(cause).__name__ == text.split(":")[0] or isinstance(cause, MemoryError)
    frames = list(traceback.walk_tb(cause.__traceback__))  # from the function on, its arrays gone
    assert frames[0][0].f_code is function.__wrapped__.__code__ and not any(frame.f_locals for frame, _ in frames)
    with pytest.raises(nt.TaskError, match="reported before"):
        call.result()
    fill(x)
    assert x.numpy().tolist() == [7, 7, 7]  # said once
    works()


def test_a_read_reports_the_first_failure(runtime: nt.Runtime) -> None:
    x, y = nt.array(np.ones(3)), nt.array(np.ones(3))
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError: of no use"):  # at the read, or at a submission before
        fail(x)
        mistake_a_shape(x)  # after the failure tasks are drained, not run
        axpy(x, y, alpha=1.0)
        y.numpy()
    assert y.numpy().tolist() == [1, 1, 1]
    works()


def test_a_submission_reports_a_failure(runtime: nt.Runtime) -> None:
    x = nt.array(np.ones(3))
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError"):
        for _ in range(100_000):
            fail(x)
    works()


def test_leaving_reports_a_failure() -> None:
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError: of no use"), nt.Runtime(cpus=CPUS):
        fail(nt.array(np.ones(3)))
    with pytest.raises(KeyError, match="mine"), nt.Runtime(cpus=CPUS):
        fail(nt.array(np.ones(3)))
        raise KeyError("mine")
    with nt.Runtime(cpus=CPUS):
        works()


# -- the runtime


def test_one_runtime_at_a_time(runtime: nt.Runtime) -> None:
    with pytest.raises(nt.TaskError, match="a runtime is running already"), nt.Runtime(cpus=1):
        pass
    works()


def test_options_of_a_runtime() -> None:
    cores = len(os.sched_getaffinity(0))
    for cpus in (0, -1, cores + 1):
        with pytest.raises(
            nt.ConfigError, match=rf"runtime\.cpus: got {cpus}; allowed: 1 to {cores}, the number of cores"
        ):
            nt.Runtime(cpus=cpus)
    with pytest.raises(nt.ConfigError, match=r"runtime\.window: got 0; allowed: "):
        nt.Runtime(window=0)
    with (
        pytest.raises(nt.ConfigError, match=r"policy 'fifo'; .*lws"),
        nt.Runtime(scheduler="fifo"),
    ):
        pass
    with nt.Runtime(cpus=1) as running:
        assert nt.Runtime.current is running
        works()
    assert nt.Runtime.current is None


def test_without_a_runtime() -> None:
    for use in (
        lambda: nt.array(np.ones(2)),
        lambda: nt.Trainer(nt.models.GPT2(CONFIG), 2, 8),
        nt.Runtime.wait,
    ):
        with pytest.raises(nt.TaskError, match="no runtime is running"):
            use()
    with nt.Runtime(cpus=CPUS):
        x = nt.array(np.ones(2))
        trainer = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8)
    for use in (x.numpy, lambda: fill(x), lambda: trainer.step(IDS, IDS), trainer.state_dict):
        with pytest.raises(nt.TaskError, match=r"no runtime is running|the Runtime of this Trainer has stopped"):
            use()


def test_leaving_brings_the_weights_back() -> None:
    model = nt.models.GPT2(CONFIG)
    before = {name: value.copy() for name, value in model.weights.items()}
    with nt.Runtime(cpus=CPUS):
        trainer = nt.Trainer(model, 2, 8, {"embed": 3}, optimizer=nt.SGD(lr=0.1))
        for _ in range(3):
            trainer.submit(IDS, IDS)
    moved = [name for name in before if not np.array_equal(before[name], model.weights[name])]
    assert moved == list(before)
    with nt.Runtime(cpus=1):
        assert nt.Trainer(model, 2, 8).evaluate(IDS, IDS) < np.log(20)


def test_one_trainer_a_model(python: Any) -> None:
    """A second trainer of a model is refused: it would start from old weights, and one result would be lost."""
    code = """
before = model.weights["transformer.wte.weight"].copy()
def expect(text, call):
    try: call()
    except nt.NNTileError as error: assert text in str(error), error
    else: raise SystemExit("not refused")
def twice():
    with nt.Runtime(cpus=1):
        first = nt.Trainer(model, 2, 8, optimizer=nt.AdamW(lr=1.0))
        first.step(ids, ids)
        nt.Trainer(model, 2, 8)
expect("after close() of the other Trainer", twice)
learnt = model.weights["transformer.wte.weight"]
assert abs(learnt - before).max() > 0.5  # the mistake has cost no training
with nt.Runtime(cpus=1):
    nt.Trainer(model, 2, 8).close()
    again, other = nt.Trainer(model, 2, 8), nt.Trainer(model, 2, 8)
    assert again.evaluate(ids, ids) == other.evaluate(ids, ids)
    expect("optimizer.lr: got nan", lambda: again.step(ids, ids, lr=float("nan")))
assert (model.weights["transformer.wte.weight"] == learnt).all()
with nt.Runtime(cpus=1):
    first, second = nt.Trainer(model, 2, 8, optimizer=nt.AdamW(lr=1.0)), nt.Trainer(model, 2, 8)
    first.step(ids, ids)
    expect("after close() of the other Trainer", lambda: second.step(ids, ids))
assert (model.weights["transformer.wte.weight"] != learnt).any()  # what the second one held has not come over it
expect("has stopped", lambda: again.evaluate(ids, ids))
print("end")
"""
    ends_well(python, code)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: nt.Runtime(cpus="2"), "runtime.cpus: got '2'"),
        (lambda: nt.Runtime(cpus=1, memory="1GHz"), "runtime.memory: got '1GHz'; allowed: a number of bytes, or"),
        (lambda: nt.Runtime(cpus=1, memory=True), "runtime.memory: got True"),
        (lambda: nt.Runtime(cpus=1, memory=-5), "runtime.memory: got -5"),
        (lambda: nt.Runtime(cpus=1, window="a"), "runtime.window: got 'a'"),
        (lambda: nt.AdamW(lr="x"), "optimizer.lr: got 'x'"),
        (lambda: nt.Trainer("gpt2", 1, 8), "model: got str"),
        (lambda: nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, fusion="x"), "fusion: got 'x'"),
    ],
)
def test_arguments_of_a_wrong_type(runtime: nt.Runtime, make: Any, named: str) -> None:
    with pytest.raises(nt.ConfigError, match=named):
        make()


def test_convolutions_stay_in_fp32_while_a_gpu_runs() -> None:
    """A runtime with GPUs enters this context. PyTorch's setting comes back."""
    before = torch.backends.cudnn.allow_tf32
    assert before
    with convolutions_in_fp32():
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.conv.fp32_precision != "tf32"
    assert torch.backends.cudnn.allow_tf32 == before
