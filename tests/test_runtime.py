"""StarPU under Python: tasks in Python, and what comes of everything that can go wrong: an exception, never a hang."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CPUS

import nntile_py as nt
from nntile_py import _core

CONFIG = nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8)
IDS = np.arange(16).reshape(2, 8)


@pytest.fixture
def runtime() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=CPUS) as running:
        yield running


@nt.task(x="R", y="RW")
def axpy(x: Any, y: Any, *, alpha: float) -> None:
    y += alpha * x


@nt.task(x="RW")
def fail(x: Any) -> None:
    raise ValueError("of no use")


@nt.task(x="W")
def fill(x: Any, value: float = 7.0) -> None:
    x[...] = value


def works() -> None:
    """The runtime does what it is told: a task in Python and a step of training."""
    y = nt.array(np.ones(3))
    axpy(nt.array([1.0, 2.0, 3.0]), y, alpha=2.0)
    assert y.numpy().tolist() == [3, 5, 7]
    loss = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, {"vocab": 7}).step(IDS, IDS)
    assert loss == pytest.approx(np.log(20), rel=0.05)


# -- tasks in Python


def test_axpy(runtime: nt.Runtime) -> None:
    x, y = nt.array(np.arange(6.0).reshape(2, 3)), nt.array(np.ones((2, 3)))
    for _ in range(50):
        axpy(x, y, alpha=0.5)
    assert np.array_equal(y.numpy(), 1 + 25 * np.arange(6.0).reshape(2, 3))
    assert np.array_equal(x.numpy(), np.arange(6.0).reshape(2, 3))
    assert axpy.__name__ == "axpy"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_arrays(runtime: nt.Runtime, dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    a, strided = nt.array(value), nt.array(value.T)
    assert a.shape == shape and a.dtype == dtype
    got = a.numpy()
    assert got.dtype == dtype and np.array_equal(got, value) and np.array_equal(strided.numpy(), value.T)
    got += 1
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
    with pytest.raises(ValueError, match="task axpy: one array was given for two arguments"):
        axpy(x, x, alpha=1.0)
    with pytest.raises(TypeError, match="missing a required"):
        axpy(x, alpha=1.0)
    with pytest.raises(TypeError, match="float16 is not allowed"):
        nt.array(np.ones(2, np.float16))
    with pytest.raises(ValueError, match="mode 'REDUX' of x is not allowed; use R, W or RW"):
        nt.task(x="REDUX")
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
    function(x)
    with pytest.raises(nt.TaskError, match=f"^{function.__name__}: {text}"):
        nt.Runtime.wait()
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


# -- programs of kernels that fail


def program(
    kernel: str, tiles: list[_core.Tile], modes: str, ints: Any = (), floats: Any = (), slots: Any = ()
) -> _core.Program:
    native = _core.Program()
    native.add(
        kernel=kernel, codelet=f"{kernel}_fp32", name=f"h0.attn.{kernel.title()}", tiles=tiles, modes=modes.split(),
        ints=list(ints), floats=list(floats), slots=list(slots), accumulates=0, footprint=1, priority=0, flop=0.0,
    )  # fmt: skip
    return native


def tile(*shape: int, dtype: str = "fp32", write: bool = True) -> _core.Tile:
    made = _core.Tile(list(shape), dtype)
    if write:
        made.write(np.ones(shape))
    return made


@pytest.mark.parametrize(
    ("kernel", "shapes", "ints", "text"),
    [
        ("transpose", [(4,), (5,)], [0], "size of tensor"),  # a shape mistake
        ("transpose", [(4,), (4,)], [3], "permute|out of range|Dimension"),
        ("contract", [(4, 4), (4, 4), (4, 4)], [], "range"),  # arguments that are missing
        ("sum", [(4,), (1 << 45, 0)], [1], "can't allocate memory"),  # 128 TiB of workspace
    ],
)
def test_a_kernel_that_throws(runtime: nt.Runtime, kernel: str, shapes: Any, ints: Any, text: str) -> None:
    out, *inputs = [tile(*shape) for shape in shapes]
    native = program(kernel, [out, *inputs], "W" + " R" * len(inputs), ints)
    for wait in (nt.Runtime.wait, out.read, _core.check):
        native.run([])
        with pytest.raises(nt.TaskError, match=rf"^h0\.attn\.{kernel.title()}: .*({text})"):
            for _ in range(10**6 if wait is _core.check else 1):
                wait()
    out.write(np.ones(shapes[0]))
    assert (out.read() == 1).all()
    works()


def test_a_dtype_that_a_kernel_does_not_take(runtime: nt.Runtime) -> None:
    words = tile(4, dtype="int64")
    program("activation", [words, words], "W R", [0])
    native = program("activation", [tile(4, dtype="int64"), words], "W R", [0])
    native.run([])
    with pytest.raises(nt.TaskError, match=r"^h0\.attn\.Activation: this kernel takes fp32 and fp64 tiles"):
        nt.Runtime.wait()


def test_unknown_kernels_and_modes(runtime: nt.Runtime) -> None:
    with pytest.raises(ValueError, match="no kernel is called juggle"):
        program("juggle", [tile(4)], "W")
    with pytest.raises(ValueError, match="no access mode is called Q"):
        program("transpose", [tile(4), tile(4)], "W Q", [0])


def test_reading_what_nobody_wrote(runtime: nt.Runtime) -> None:
    empty, out = tile(4, write=False), tile(4, write=False)
    with pytest.raises(nt.TaskError, match="a tile was read before any task wrote it"):
        empty.read()
    for modes in ("W R", "RW R", "W RW"):
        with pytest.raises(nt.TaskError, match="before its inputs were written"):
            program("transpose", [out, empty], modes, [0]).run([])
    with pytest.raises(nt.TaskError, match="fetched before any task wrote it"):
        _core.Fetch([tile(1, dtype="fp64", write=False)])
    native = program("transpose", [out, empty], "W R", [0])
    empty.write(np.arange(4))
    native.run([])
    assert out.read().tolist() == [0, 1, 2, 3]
    empty.invalidate()
    with pytest.raises(nt.TaskError, match="before its inputs were written"):
        native.run([])
    array = nt.array(np.ones(4))
    array.tile.invalidate()
    with pytest.raises(nt.TaskError, match="fail: argument 0 is read before any task wrote it"):
        fail(array)
    fill(array)
    assert array.numpy().tolist() == [7] * 4


def test_a_program_that_reads_what_it_has_freed(runtime: nt.Runtime) -> None:
    a, b = tile(4), tile(4, write=False)
    native = program("transpose", [b, a], "W R", [0])
    native.add_invalidate(b)
    native.add(
        kernel="transpose", codelet="transpose_fp32", name="late", tiles=[a, b], modes=["W", "R"], ints=[0], floats=[],
        slots=[], accumulates=0, footprint=1, priority=0, flop=0.0,
    )  # fmt: skip
    with pytest.raises(nt.TaskError, match="late: reads a tile before any task wrote it"):
        native.run([])


# -- trainers that fail


def poisoned(trainer: nt.Trainer, name: str) -> None:
    """Put an id that is out of range straight into the tiles of an input, from the next step on."""
    write = trainer._store.write

    def evil(low: Any, tensor: Any, value: Any) -> None:
        value = np.array(value)
        if tensor.name == name:
            value[1, 3] = 99
        write(low, tensor, value)

    trainer._store.write = evil  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["chain", "redux"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("input_ids", r"embed\.Embedding: id 99 is not in the table"),
        ("labels", r"head\.CrossEntropy: label 99 is not in the vocabulary"),
    ],
)
def test_a_step_that_fails(runtime: nt.Runtime, name: str, text: str, policy: str) -> None:
    tiles = {"batch": 1, "seq": 3, "vocab": 7}
    trainer = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, tiles, accumulate=policy)
    start = trainer.step(IDS, IDS)
    trainer.state_dict()
    poisoned(trainer, name)
    with pytest.raises(nt.TaskError, match=f"^{text}"):
        trainer.step(IDS, IDS)
    with pytest.raises(nt.TaskError, match=f"^{text}"):
        trainer.submit(IDS, IDS).result()
    with pytest.raises(nt.TaskError, match=f"^{text}"):
        trainer.evaluate(IDS, IDS)
    assert nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, tiles, accumulate=policy).step(IDS, IDS) == pytest.approx(start)
    works()


def test_arguments_of_a_trainer(runtime: nt.Runtime) -> None:
    model = nt.models.GPT2(CONFIG)

    def refused(text: str, batch: int = 2, seq: int = 8, **options: Any) -> None:
        with pytest.raises(nt.ConfigError, match=text):
            nt.Trainer(model, batch, seq, **options)

    refused("seq: 9 is longer than the model's 8 positions", seq=9)
    refused("batch: 0 is not allowed", batch=0)
    refused("grad_accumulation: 0 is not allowed", grad_accumulation=0)
    refused("dtype: 'fp16' is not allowed; use one of fp32, fp64, bf16, tf32", dtype="fp16")
    refused("dtype: bf16 needs CUDA workers", dtype="bf16")
    refused("accumulate: 'rings' is not allowed", accumulate="rings")
    refused("clip_grad_norm: -1.0 is not allowed", clip_grad_norm=-1.0)
    refused("fusion.everything: unknown switch", fusion={"everything": True})
    refused("tiles.key: unknown axis", tiles={"key": 2})
    refused("'linear'; use vendor, merge, flash or naive", attention="linear")
    for changed, text in (({"dropout": 1.5}, "dropout: 1.5"), ({"activation": "silu"}, "activation: 'silu'")):
        with pytest.raises(nt.ConfigError, match=text):
            nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(**{**CONFIG.__dict__, **changed})), 2, 8)


def test_arguments_of_a_step(runtime: nt.Runtime) -> None:
    trainer = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8)
    with pytest.raises(nt.TaskError, match="no step has been made yet"):
        trainer.gradients()
    for ids, labels, text in (
        (IDS[:1], IDS, r"input_ids: int64 \(1, 8\) is not allowed; expected ints \(2, 8\)"),
        (IDS, IDS[:, :4], r"labels: int64 \(2, 4\) is not allowed"),
        (IDS.astype(float), IDS, "input_ids: float64"),
        (IDS + 5, IDS, "input_ids: ids go from 5 to 20; allowed are 0 to 19"),
        (IDS - 1, IDS, "input_ids: ids go from -1 to 14"),
        (IDS, IDS + 5, "labels: go from 5 to 20; allowed are 0 to 19 and -100"),
        (IDS, IDS - 3, "labels: go from -3 to 12"),
    ):
        with pytest.raises(ValueError, match=text):
            trainer.step(ids, labels)
        with pytest.raises(ValueError, match=text):
            trainer.evaluate(ids, labels)
    assert trainer.step(IDS.astype(np.int32), IDS.astype(np.uint8)) > 0


def test_a_trainer_that_goes_while_its_steps_run(runtime: nt.Runtime) -> None:
    for _ in range(3):
        trainer = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, {"embed": 3, "seq": 2})
        pending = [trainer.submit(IDS, IDS) for _ in range(2)]
        del trainer
        gc.collect()
        assert pending[1].result().loss < pending[0].result().loss
    works()


# -- the runtime


def test_one_runtime_at_a_time(runtime: nt.Runtime) -> None:
    with pytest.raises(nt.TaskError, match="a runtime is running already"), nt.Runtime(cpus=1):
        pass
    works()


def test_options_of_a_runtime() -> None:
    cores = len(os.sched_getaffinity(0))
    for cpus in (0, -1, cores + 1):
        with pytest.raises(nt.ConfigError, match=rf"runtime\.cpus: {cpus} is not .* machine has 1 to {cores}"):
            nt.Runtime(cpus=cpus)
    with pytest.raises(nt.ConfigError, match=r"runtime\.window: 0 is not allowed"):
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
        with pytest.raises(nt.TaskError, match="no runtime is running"):
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


# -- in processes of their own: what might hang or abort

PRELUDE = """
import sys
import numpy as np
import nntile_py as nt
from nntile_py import _core

def refused(call, text):
    try:
        call()
    except (nt.TaskError, MemoryError) as error:
        assert text in str(error), error
        print("refused")
    else:
        raise SystemExit("not refused")

@nt.task(x="RW")
def inc(x): x += 1

model = nt.models.GPT2(nt.models.GPT2Config(1, 8, 2, 20, 8))
ids = np.zeros((2, 8), int)
"""


def ends_well(python: Any, code: str, refused: int = 0, timeout: float = 120) -> None:
    done = python(PRELUDE + code, timeout=timeout)
    assert done.returncode == 0 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
    assert done.stdout.split() == ["refused"] * refused + ["end"]


def test_what_belongs_to_a_runtime_that_has_stopped(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1):
    x, trainer = nt.array(np.ones(3)), nt.Trainer(model, 2, 8)
    program = trainer._first
with nt.Runtime(cpus=1):
    for call in (x.numpy, lambda: inc(x), lambda: x.tile.write(np.ones(3)), lambda: trainer.step(ids, ids),
                 lambda: trainer.evaluate(ids, ids), trainer.state_dict, lambda: program._native.run([0.0] * 9)):
        refused(call, "stopped")
    y = nt.array(np.ones(3)); inc(y)
    assert y.numpy().tolist() == [2, 2, 2]
print("end")
"""
    ends_well(python, code, refused=7)


@pytest.mark.parametrize("call", ["nt.Runtime.wait()", "y.numpy()", "pending.result()"])
def test_a_task_that_waits(python: Any, call: str) -> None:
    code = f"""
with nt.Runtime(cpus=1):
    y = nt.array(np.ones(3))
    pending = nt.Trainer(model, 2, 8).submit(ids, ids)
    @nt.task(x="RW")
    def wait(x): {call}
    wait(nt.array(np.ones(3)))
    refused(nt.Runtime.wait, "wait: ")
    inc(y)
    assert y.numpy().tolist() == [2, 2, 2]
print("end")
"""
    ends_well(python, code, refused=1)


def test_a_task_that_submits(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1):
    x, y = nt.array(np.ones(3)), nt.array(np.ones(3))
    @nt.task(x="RW")
    def more(x): inc(y)
    more(x)
    nt.Runtime.wait()
    assert y.numpy().tolist() == [2, 2, 2]
print("end")
"""
    ends_well(python, code)


def test_an_array_larger_than_the_memory(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1, memory=1 << 20):
    refused(lambda: nt.array(np.zeros(1 << 20)).numpy(), "memory")
    y = nt.array(np.ones(3)); inc(y)
    assert y.numpy().tolist() == [2, 2, 2]
print("end")
"""
    ends_well(python, code, refused=1)


def test_a_model_larger_than_the_memory(python: Any) -> None:
    code = """
big = nt.models.GPT2(nt.models.GPT2Config(2, 64, 2, 1000, 64))
many = np.zeros((4, 64), int)
def train():
    trainer = nt.Trainer(big, 4, 64)
    for _ in range(3): trainer.step(many, many)
with nt.Runtime(cpus=2, memory=1 << 20):
    refused(train, "memory")
print("end")
"""
    ends_well(python, code, refused=1)


def test_a_tile_larger_than_the_machine(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1):
    def run():
        source, huge = _core.Tile([4], "fp32"), _core.Tile([1 << 45], "fp32")
        source.write(np.ones(4))
        program = _core.Program()
        program.add(kernel="transpose", codelet="transpose_fp32", name="h0.Transpose", tiles=[huge, source],
                    modes=["W", "R"], ints=[0], floats=[], slots=[], accumulates=0, footprint=1, priority=0, flop=0.0)
        program.run([])
        nt.Runtime.wait()
    refused(run, "memory")
print("end")
"""
    ends_well(python, code, refused=1)


def test_the_process_may_end_at_any_time(python: Any) -> None:
    code = """
nt.Runtime(cpus=2).__enter__()
trainer = nt.Trainer(model, 2, 8, {"embed": 3, "seq": 2})
pending = [trainer.submit(ids, ids) for _ in range(2)]
x = nt.array(np.ones(3)); inc(x)
print("end")
"""
    ends_well(python, code)


def test_an_exception_in_the_middle_of_training(python: Any) -> None:
    code = """
try:
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer(model, 2, 8, {"embed": 3, "seq": 2})
        for _ in range(5): trainer.submit(ids, ids)
        raise KeyError("mine")
except KeyError as error:
    assert error.args == ("mine",)
with nt.Runtime(cpus=2):
    assert nt.Trainer(model, 2, 8).step(ids, ids) > 0
print("end")
"""
    ends_well(python, code)
