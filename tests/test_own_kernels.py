"""Kernels in Python: their arguments, rejected arguments, exceptions, no leaks."""

import gc
import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import ends_well, works

import nntile_py as nt
from nntile_py.execution.program import Program, Store, programs
from nntile_py.tiles import ACC, RW, R, Slot, TaskArgs, TaskList, Tile, W
from nntile_py.tiles.tasklist import POLICIES

HERE = Path(__file__).parent


# -- arguments of a kernel


class Group(TaskArgs):
    seed: Slot
    rate: float


class EveryKind(TaskArgs):
    rows: int
    causal: bool
    scale: float
    now: Slot
    group: Group
    dims: tuple[int, ...]


def one_task(kernel: Any, accesses: Any, args: Any, policy: str = "chain", op: str = "my.op") -> TaskList:
    tasks = TaskList(policy)
    tasks.emit(kernel, accesses, args, op=op)
    return tasks.resolve()


def test_arguments(runtime: nt.Runtime) -> None:
    seen: list[Any] = []

    @nt.task(y="W")
    def look(y: Any, **given: Any) -> None:
        seen.append(given)
        y[...] = given["now"]

    args = EveryKind(3, True, 0.5, Slot("t"), Group(Slot("seed"), 0.25), (4, 5, 6))
    (program,) = programs([one_task(look, [W(Tile("y", (0,), (2,), "fp64", persistent=True))], args)], Store())
    program.run({"t": 1.5, "seed": 7.0})
    program.run({"t": 2.5, "seed": 8.0})
    nt.Runtime.wait()
    assert seen == [
        {"rows": 3, "causal": True, "scale": 0.5, "now": t, "group": Group(s, 0.25), "dims": (4, 5, 6)}  # type: ignore[arg-type]
        for t, s in ((1.5, 7.0), (2.5, 8.0))
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_contributions_begin_with_zeros(runtime: nt.Runtime, policy: str, library: str) -> None:
    @nt.task(library, y="ACC", x="R")
    def add(y: Any, x: Any) -> None:
        y += x

    xs = [Tile("x", (k,), (3,), "fp64", persistent=True) for k in range(5)]
    y = Tile("y", (0,), (3,), "fp64", persistent=True)
    tasks, store = TaskList(policy, xs), Store()
    for x in xs:
        tasks.emit(add, [ACC(y), R(x)])
    (program,) = programs([tasks.resolve()], store)
    store.handle(y).write(np.full(3, np.nan))  # of no use: a program's sums begin anew
    for k, x in enumerate(xs):
        store.handle(x).write(np.full(3, 10.0**k))
    for _ in range(3):
        program.run()
        assert store.handle(y).read().tolist() == [11111.0] * 3


def test_closures_are_told_apart(runtime: nt.Runtime) -> None:
    def filling(value: float) -> Any:
        @nt.task(y="W")
        def fill(y: Any) -> None:
            y[...] = value

        return fill

    store = Store()
    tiles = [Tile("y", (k,), (2,), "fp64", persistent=True) for k in range(2)]
    tasks = TaskList()
    for kernel, tile in zip((filling(1.0), filling(2.0)), tiles, strict=True):
        tasks.emit(kernel, [W(tile)])
    programs([tasks.resolve()], store)[0].run()
    assert [store.handle(tile).read().tolist() for tile in tiles] == [[1, 1], [2, 2]]


# -- rejected arguments, and failures


@nt.task(y="W", x="R")
def scaled(y: Any, x: Any, *, beta: float) -> None:
    y[...] = beta * x


class Beta(TaskArgs):
    beta: float


class NoBeta(TaskArgs):
    beta: float
    gamma: int


def tile(dtype: str = "fp32") -> Tile:
    return Tile("t", (0,), (4,), dtype, persistent=True)


@pytest.mark.parametrize(
    ("accesses", "args", "text"),
    [
        ([W, R], TaskArgs(), r"task \S*scaled-\w{8}: missing a required argument: 'beta'; emitted with"),
        ([RW, R], Beta(1.0), r"scaled-\w{8}: is emitted with RW, R, but declared with y W, x R"),
        ([W], Beta(1.0), r"is emitted with W, but declared with y W, x R"),
        ([W, R], NoBeta(1.0, 2), "got an unexpected keyword argument 'gamma'"),
    ],
)
def test_wrong_emits(accesses: Any, args: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TaskList().emit(scaled, [access(tile()) for access in accesses], args)


def test_numpy_has_no_bf16() -> None:
    with pytest.raises(nt.ConfigError, match=r'precision: got bf16 with \S*scaled-.*; allowed: .*@nt\.task\("torch"'):
        TaskList().emit(scaled, [W(tile("bf16")), R(tile("bf16"))], Beta(1.0))


def test_wrong_declarations() -> None:
    with pytest.raises(ValueError, match="task: got library 'jax'; allowed: numpy or torch"):
        nt.task("jax", x="R")
    with pytest.raises(ValueError, match="task kernel: has no argument z"):

        @nt.task(z="R")
        def kernel(x: Any) -> None: ...


FAILURES = {
    "ValueError: of no use": lambda y: exec("raise ValueError('of no use')"),
    "ValueError: assignment destination is read-only": lambda y, x: x.__setitem__(0, 1),
    "SystemExit: 3": lambda y: sys.exit(3),
    "StopIteration": lambda y: next(iter(())),
}


@pytest.mark.parametrize("text", FAILURES)
@pytest.mark.parametrize("policy", ["chain", "redux"])
def test_what_a_kernel_raises_names_the_operator(runtime: nt.Runtime, text: str, policy: str) -> None:
    function = FAILURES[text]
    reads = function.__code__.co_argcount == 2
    kernel = nt.task(**({"y": "ACC", "x": "R"} if reads else {"y": "ACC"}))(function)
    x, y, store = tile(), Tile("y", (0,), (4,), "fp32", persistent=True), Store()
    tasks = TaskList(policy, [x])
    for _ in range(50):
        tasks.emit(kernel, [ACC(y), R(x)] if reads else [ACC(y)], op="block0.mine")
    (program,) = programs([tasks.resolve()], store)
    store.handle(x).write(np.ones(4, np.float32))
    with pytest.raises(nt.TaskError, match=f"^block0.mine: {text}"):
        for _ in range(3):
            program.run()
        nt.Runtime.wait()
    works()


# -- many of them


def test_nothing_leaks(runtime: nt.Runtime) -> None:
    """Neither objects nor references, whether a program runs, fails or goes."""

    class Thing:
        pass

    thing, none = Thing(), None
    gone = weakref.ref(thing)

    @nt.task(y="RW")
    def count(y: Any, *, beta: float, thing: Any = thing) -> None:
        y += beta

    class Own(TaskArgs):
        beta: Slot

    y, store = tile(), Store()
    tasks = TaskList("chain", [y])
    for _ in range(100):
        tasks.emit(count, [RW(y)], Own(Slot("b")))
    program: Program | None = programs([tasks.resolve()], store)[0]
    assert program
    store.handle(y).write(np.zeros(4, np.float32))

    def runs(times: int) -> None:
        for _ in range(times):
            program.run({"b": 1.0})
        nt.Runtime.wait()

    runs(20)
    gc.collect()
    base = sys.getrefcount(none)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    runs(100)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, grown  # 10,000 tasks: less than two bytes a task
    changes = [abs(sys.getrefcount(none) - base)]
    for _ in range(2):  # garbage of other tests, which also refers to None, goes only once
        base = sys.getrefcount(none)
        runs(100)
        gc.collect()
        changes.append(abs(sys.getrefcount(none) - base))
    assert store.handle(y).read().tolist() == [32_000.0] * 4
    assert min(changes) < 1_000, changes
    handlers = weakref.ref(count)
    assert gone() is thing and handlers() is count


def test_a_program_in_flight_may_go(runtime: nt.Runtime) -> None:
    """The tasks of a deleted program end, then their functions are freed."""
    called: list[int] = []

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    @nt.task(y="RW")
    def count(y: Any, *, beta: float) -> None:
        called.append(1)

    tasks = TaskList("chain", [y := tile()])
    for _ in range(200):
        tasks.emit(count, [RW(y)], Beta(1.0))
    store = Store()
    (program,) = programs([tasks.resolve()], store)
    store.handle(y).write(np.zeros(4, np.float32))
    spec = weakref.ref(program)
    program.run()
    del program, thing
    gc.collect()
    assert len(called) == 200 and spec() is None and gone() is None


def test_no_deadlock_with_the_lock_of_the_interpreter(python: Any) -> None:
    """Submission waits for a window while kernels need the lock; kernels wait, collect garbage, start threads."""
    ends_well(
        python,
        f"""
import gc, sys, threading, time
sys.path.insert(0, {str(HERE)!r})
from nntile_py.execution.program import Store, programs
from nntile_py.tiles import RW, R, Tile, TaskList

@nt.task(y="RW", x="R")
def mixed(y, x):
    time.sleep(0.0002)
    ran = []
    thread = threading.Thread(target=lambda: ran.append(1)); thread.start(); thread.join()
    y += x @ np.eye(4, dtype=x.dtype)
    y /= 2
    calls.append(1)
    if len(calls) % 100 == 0: gc.collect()

@nt.task(y="RW")
def waits(y):
    nt.Runtime.wait()

calls = []
sys.setswitchinterval(1e-5)
with nt.Runtime(cpus=2, window=8):
    ys = [Tile("y", (k,), (4,), "fp32", persistent=True) for k in range(5)]
    tasks, store = TaskList("chain", ys), Store()
    for k in range(300):
        tasks.emit(mixed, [RW(ys[k % 5]), R(ys[(k + 1) % 5])])
    (program,) = programs([tasks.resolve()], store)
    want = list(np.arange(5, dtype=np.float32))
    for y, value in zip(ys, want): store.handle(y).write(np.full(4, value))
    stop = []
    busy = threading.Thread(target=lambda: [None for _ in iter(lambda: bool(stop), True)], daemon=True)
    busy.start()
    for _ in range(2): program.run()
    for k in range(600): want[k % 300 % 5] = (want[k % 300 % 5] + want[(k % 300 + 1) % 5]) / 2
    assert [store.handle(y).read()[0] for y in ys] == want
    stop.append(1); busy.join()
    wrong = TaskList("chain", ys)
    wrong.emit(waits, [RW(ys[0])], op="it")
    (second,) = programs([wrong.resolve()], store)
    second.run()
    refused(nt.Runtime.wait, "it: TaskError: a task must not wait for tasks")
print("end")
""",
        refused=1,
    )
