"""nt.array and @nt.task as a tiled-array library: tilings, modes, lists, results, options, rejected arguments."""

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import CONFIG, IDS, ends_well, fail

import nntile_py as nt

RNG = np.random.default_rng(0)


@nt.task(a="RW")
def factor(a: Any) -> None:
    a[...] = np.linalg.cholesky(a)


@nt.task(a="R", b="RW")
def solve(a: Any, b: Any) -> None:
    b[...] = np.linalg.solve(a, b.T).T


@nt.task(a="R", b="R", c="RW")
def update(a: Any, b: Any, c: Any) -> None:
    c -= a @ b.T


@nt.task(row="R", column="R", c="W")
def dot(row: list[Any], column: list[Any], c: Any) -> None:
    c[...] = sum(a @ b for a, b in zip(row, column, strict=True))


@nt.task(x="RW")
def double(x: Any) -> None:
    x *= 2


@nt.task(x="W")
def fill(x: Any, value: float) -> None:
    x[...] = value


@nt.task(xs="R")
def total(xs: list[Any]) -> float:
    return float(sum(x.sum(dtype=float) for x in xs))


def add(x: Any, y: Any) -> None:
    y += x


# -- algorithms


@pytest.mark.parametrize(("n", "size"), [(96, 32), (100, 32), (33, 40), (20, 1)])
def test_cholesky(runtime: nt.Runtime, n: int, size: int) -> None:
    b = RNG.standard_normal((n, n))
    s = b @ b.T + n * np.eye(n)
    x = nt.array(s)
    A = x.tiles(size, size)
    m = A.grid[0]
    for k in range(m):
        factor.options(priority=2)(A[k, k])
        for i in range(k + 1, m):
            solve.options(priority=1)(A[k, k], A[i, k])
        for i in range(k + 1, m):
            for j in range(k + 1, i + 1):
                update(A[i, k], A[j, k], A[i, j])  # one tile for two arguments where i is j
    np.testing.assert_allclose(np.tril(x.numpy()), np.linalg.cholesky(s), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", [(8, 16, 4), (7, 5, 9), (24, 32, 40), (1, 32, 40)])
def test_matmul(runtime: nt.Runtime, sizes: tuple[int, int, int]) -> None:
    a, b = RNG.standard_normal((24, 32)), RNG.standard_normal((32, 40))
    m, k, n = sizes
    c = nt.empty((24, 40))
    A, B, C = nt.array(a).tiles(m, k), nt.array(b).tiles(k, n), c.tiles(m, n)
    for i in range(C.grid[0]):
        for j in range(C.grid[1]):
            dot(A[i, :], B[:, j], C[i, j])
    np.testing.assert_allclose(np.asarray(c), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["RW", "ACC", "COMMUTE", "REDUX"])
def test_sums_in_any_mode(runtime: nt.Runtime, mode: str) -> None:
    x = RNG.integers(-9, 9, (60, 10)).astype(float)
    y = nt.array(np.full((7, 10), 3.0))
    summing = nt.task(x="R", y=mode)(add)
    for part in nt.array(x[:56]).tiles(rows=7):
        summing(part, y)
    want = 3 + x[:56].reshape(8, 7, 10).sum(0)
    assert np.array_equal(y.numpy(), want)
    double(y)  # and again after another mode
    summing(y, z := nt.zeros((7, 10)))
    assert np.array_equal(z.numpy(), 2 * want)


# -- tilings


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((9, 7), (4, 3)), ((9, 7), (4,)), ((8,), (3,)), ((2, 3, 5), (1, 2, 2)), ((0, 3), (2, 2)), ((), ())],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "int16", "int64"])
def test_tiles_are_parts_of_the_array(runtime: nt.Runtime, shape: Any, cut: Any, dtype: str) -> None:
    value = RNG.integers(0, 2, shape).astype(dtype)
    x = nt.array(value)
    tiles = list(x.tiles(*cut))
    assert len(tiles) == len(x.tiles(*cut))
    assert sum(np.prod(tile.shape, dtype=int) for tile in tiles) == value.size
    for tile in tiles:
        assert np.array_equal(tile.numpy(), value[tile.where]) and tile.shape == value[tile.where].shape
    assert total(tiles).result() == value.sum(dtype=float)  # moved into tiles
    assert np.array_equal(x.numpy(), value) and x.numpy().dtype == dtype
    fill(x, 1)
    assert total(tiles).result() == value.size  # and back, and moved again


def test_all_tilings_are_the_same_elements(runtime: nt.Runtime) -> None:
    """A random walk over tilings against numpy: whatever was submitted before is seen."""
    want = RNG.standard_normal((11, 13))
    x = nt.array(want)
    tilings = [x.tiles(4, 5), x.tiles(columns=6), x.tiles(rows=1), x.tiles()]
    for k in RNG.integers(0, 4, 60):
        tiles = list(tilings[k])
        tile = tiles[RNG.integers(len(tiles))]
        if RNG.random() < 0.5:
            double(tile)
            want[tile.where] *= 2
        else:
            assert total([tile]).result() == pytest.approx(want[tile.where].sum(), rel=1e-12)
            assert np.array_equal(tile.numpy(), want[tile.where])
    double(x)
    assert np.array_equal(x.numpy(), 2 * want) and np.array_equal(tilings[0].numpy(), 2 * want)


def test_rows_of_a_matrix_need_one_index(runtime: nt.Runtime) -> None:
    T = nt.array(np.arange(12.0).reshape(6, 2)).tiles(rows=4)
    assert T.grid == (2, 1) and T[1].shape == (2, 2) and T[-1].where == (slice(4, 6), slice(0, 2))
    assert [tile.index for tile in T[:, 0]] == [(0, 0), (1, 0)]
    assert np.asarray(T).shape == (6, 2)


def test_a_failure_costs_no_elements(runtime: nt.Runtime) -> None:
    """After a failure tasks do not run, except copies between tilings."""
    value = RNG.standard_normal((6, 6))
    x, y = nt.array(value), nt.array(np.ones(2))
    fail(y)
    with pytest.raises(nt.TaskError, match=r"^fail: "):
        for _ in range(1000):
            double(x.tiles(2, 2)[0, 0])
            double(x)
            nt.Runtime.wait()
    got = x.numpy() / value
    assert np.array_equal(got, np.round(got)) and (got >= 1).all()


@nt.task(x="RW")
def late(x: Any) -> None:
    time.sleep(0.5)
    x += 1


def test_a_wait_does_not_poll(runtime: nt.Runtime) -> None:
    """The waiting thread leaves its core to the workers: the end of a task, or of a copy to the program, wakes it."""
    x = nt.zeros(1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    late(x)
    assert x.numpy()[0] == 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 60  # a poll for each ms: 300 and more


def test_made_of_nothing(runtime: nt.Runtime) -> None:
    e, z = nt.empty((5, 4), np.float32), nt.zeros((5, 4), "int32")
    assert repr(e) == "Array(5 x 4 float32, not yet written)" and repr(z) == "Array(5 x 4 int32, all zeros)"
    assert not z.numpy().any() and z.numpy().dtype == np.int32
    E = e.tiles(2, 2)
    fill(E[0, 0], 3.0)
    assert E[0, 0].numpy().tolist() == [[3, 3], [3, 3]]
    with pytest.raises(nt.TaskError, match=r"was read before any task wrote it: tile \[0, 1\] of 2 x 2 is missing"):
        e.numpy()
    with pytest.raises(nt.TaskError, match=r"double: x is read before any task wrote it"):
        double(E[1, 1])
    with pytest.raises(nt.TaskError, match=r"x needs tiles of 5 x 4, but only some of the tiles of 2 x 2 were written"):
        double(e)
    fill(e, 1.0)  # writes all of it: what was there is of no use
    assert e.numpy().sum() == 20


def test_repr(runtime: nt.Runtime) -> None:
    x = nt.array(np.ones((300, 200), np.float32))
    A = x.tiles(64, 64)
    assert repr(x) == "Array(300 x 200 float32)"
    assert repr(A) == "Tiles(5 x 4 tiles of 64 x 64, of 300 x 200 float32)"
    assert repr(A[4, 3]) == "Array(44 x 8 float32, tile [4, 3] of 300 x 200)"
    double(A[0, 0])
    assert repr(x) == "Array(300 x 200 float32, in tiles of 64 x 64)"
    assert repr(nt.array(1.0)) == "Array(scalar float64)"


def test_as_an_array_of_numpy(runtime: nt.Runtime) -> None:
    x = nt.array(np.arange(4))
    assert np.asarray(x, dtype=np.float32).dtype == np.float32 and np.add(x, 1).tolist() == [1, 2, 3, 4]
    assert np.array_equal(nt.array(x).numpy(), x.numpy())
    with pytest.raises(ValueError, match="cannot be viewed, only copied"):
        np.asarray(x, copy=False)


def test_bfloat16(runtime: nt.Runtime) -> None:
    x = nt.array(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.001]]), dtype="bfloat16")
    assert repr(x) == "Array(2 x 3 bfloat16)" and x.dtype == np.float32

    @nt.task("torch", x="RW")
    def twice(x: Any) -> str:
        x *= 2
        return str(x.dtype)

    assert twice(x.tiles(2, 2)[0, 1]).result() == "torch.bfloat16"
    assert x.numpy().tolist() == [[1, 2, 6], [4, 5, 12]]
    with pytest.raises(TypeError, match="task double: x is bfloat16, which numpy and cupy lack"):
        double(x)


# -- calls


def test_results(runtime: nt.Runtime) -> None:
    x = nt.array(np.arange(5.0))
    results = [total([x]) for _ in range(3)]
    assert [result.result() for result in results] == [10, 10, 10]
    assert results[0].done() and repr(results[0]) == "Submitted(total, done)"
    assert double(x).result() is None and total([x]).result() == 20 and total([]).result() == 0


def test_a_view_is_no_result(runtime: nt.Runtime) -> None:
    @nt.task(x="R")
    def first(x: Any) -> Any:
        return x[:1]

    @nt.task("torch", x="R")
    def last(x: Any, copied: bool) -> Any:
        return x[-1:].clone() if copied else x[-1:]

    x = nt.array(np.arange(5.0))
    for call in (first(x), last(x, False)):
        with pytest.raises(TypeError, match="returned a view of one of its arrays; return a copy"):
            call.result()
    assert last(x, True).result().tolist() == [4]


def test_results_after_a_failure(runtime: nt.Runtime) -> None:
    y = nt.array(np.ones(2))
    double(y)
    failing = fail(y)
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError: of no use") as caught:
        failing.result()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError, which was reported before") as caught:
        failing.result()
    assert isinstance(caught.value.__cause__, ValueError)


def test_where_and_priority(runtime: nt.Runtime) -> None:
    import threading

    @nt.task(x="RW")
    def who(x: Any) -> int:
        return threading.get_native_id()

    arrays = [nt.array(np.ones(2)) for _ in range(20)]
    for worker in range(runtime.cpus):
        calls = [who.options(where=f"cpu:{worker}", priority=-worker)(x) for x in arrays]
        assert len({call.result() for call in calls}) == 1
    assert who.options(where="cpu")(arrays[0]).result()
    for where, text in (("gpu", "got where='gpu'; allowed: "), ("cuda", "got where='cuda' without a CUDA variant")):
        with pytest.raises(ValueError, match=text):
            who.options(where=where)
    with pytest.raises(ValueError, match=r"got priority 1\.5; allowed: an integer"):
        who.options(priority=1.5)  # type: ignore[arg-type]
    with pytest.raises(nt.TaskError, match=f"who: no worker of this runtime may run it; it has {runtime.cpus} CPU"):
        who.options(where="cpu:99")(arrays[0])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, A: A[3, 0], IndexError, r"Tiles\(3 x 2 tiles of 4 x 4, of 10 x 8 float64\) has no tile \[3, 0\]"),
        (lambda x, A: A[-4, 0], IndexError, r"has no tile \[-4, 0\]"),
        (lambda x, A: A[0], IndexError, "takes 2 indices, got 1"),
        (lambda x, A: A[0, 0, 0], IndexError, "takes 2 indices, got 3"),
        (lambda x, A: A["a", 0], IndexError, "got index 'a'; allowed: integers and slices"),
        (lambda x, A: A[0, 0].tiles(2), ValueError, "cannot be cut again"),
        (lambda x, A: x.tiles(0), ValueError, "tiles: got size 0; allowed: "),
        (lambda x, A: x.tiles(2.5), ValueError, r"tiles: got size 2\.5; allowed: "),
        (lambda x, A: x.tiles(1, 2, 3), ValueError, "3 sizes are too many for .*, which has 2 axes"),
        (lambda x, A: x.tiles(4, rows=4), ValueError, "tiles: got rows=4; allowed: one size for each axis"),
        (lambda x, A: nt.array([1.0]).tiles(columns=1), ValueError, "got columns=1; allowed: one size for each axis"),
        (lambda x, A: double(A), TypeError, "task double: x is Tiles.*; allowed: one tile, a list, or the whole array"),
        (lambda x, A: update(A[0, 0], A[1, 0], A[0, 0]), ValueError, "two arguments are the same array"),
        (lambda x, A: update(A[0, 0], A[1, 0], x), ValueError, "c, which is written, and a are of one array, but cut"),
        (lambda x, A: total([x, 3]), TypeError, r"xs\[1\] is no nt\.array but int"),
        (lambda x, A: nt.empty((2, -1)), ValueError, r"shape: got \(2, -1\); allowed: "),
        (lambda x, A: nt.empty(2, "complex64"), TypeError, "dtype: got complex64; allowed: float32"),
    ],
)
def test_wrong_use(runtime: nt.Runtime, call: Any, error: Any, text: str) -> None:
    x = nt.array(np.ones((10, 8)))
    with pytest.raises(error, match=text):
        call(x, x.tiles(4, 4))
    assert x.numpy().sum() == 80


def test_tiles_that_outlive_their_runtime(python: Any) -> None:
    code = """
@nt.task(x="RW")
def value(x): return float(x[0, 0])
with nt.Runtime(cpus=1):
    x = nt.array(np.ones((4, 4)))
    A = x.tiles(2, 2)
    inc(A[0, 0])
    seen = value(A[0, 0])
assert seen.result() == 2 and "4 x 4" in repr(x) + repr(A)
for call in (x.numpy, lambda: inc(A[0, 0]), lambda: inc(x), lambda: nt.zeros(3)):
    refused(call, "no runtime is running")
with nt.Runtime(cpus=1):
    for call in (x.numpy, lambda: inc(A[0, 0]), lambda: inc(x), A[1, 1].numpy):
        refused(call, "belongs to a runtime that has stopped")
print("end")
"""
    ends_well(python, code, refused=8)


# -- nt.profile


def test_profile_of_a_block(runtime: nt.Runtime, tmp_path: Path) -> None:
    x, y = nt.array(np.ones((64, 64))), nt.zeros((16, 16))
    adding = nt.task(x="R", y="REDUX")(add)
    double(x)  # before the block: not in it
    with nt.profile(tmp_path / "deep" / "found") as found:
        for tile in x.tiles(16, 16):
            double(tile)
            adding(tile, y)
        nt.Trainer(nt.models.GPT2(CONFIG), 2, 8).step(IDS, IDS)
        double(x)
        assert "has not ended" in str(found)
    assert y.numpy().sum() == 4 * 64 * 64
    tasks = {row["operator"]: row["tasks"] for row in found.summary["operators"]}
    assert (tasks["double"], tasks["add"], tasks["copy_tiles"]) == (17, 16, 17)
    assert found.summary["tasks"] == sum(row["tasks"] for row in found.summary["operators"]) and len(tasks) > 10
    assert found.summary["steps"] == 1
    assert {"report.html", "gantt.png", "gantt.svg", "trace.json", "summary.json"} <= {
        path.name for path in (tmp_path / "deep" / "found").iterdir()
    }
    assert "double: " in str(found) and f"tasks on {runtime.cpus} workers: working" in str(found)


def test_what_waits_for_what_in_a_profile(runtime: nt.Runtime) -> None:
    """The critical path of a chain on one tile has all its tasks; independent tiles form no path."""
    x = nt.array(np.ones((8, 8)))
    with nt.profile() as chain:
        for _ in range(8):
            double(x)
    with nt.profile() as apart:
        for tile in x.tiles(rows=1):
            double(tile)
    assert chain.summary["critical_path"]["tasks"] == 8
    assert apart.summary["critical_path"]["tasks"] == 2  # brought there, doubled


def test_wrong_profiles(runtime: nt.Runtime) -> None:
    x = nt.array(np.ones(2))
    with pytest.raises(nt.TaskError, match="no task ran in the block"), nt.profile():
        pass
    with pytest.raises(nt.TaskError, match="another profile is running"), nt.profile(), nt.profile():
        pass
    with pytest.raises(nt.TaskError, match=r"^fail: ValueError"), nt.profile() as failed:
        fail(x)
    with pytest.raises(KeyError, match="mine"), nt.profile():
        double(x)
        raise KeyError("mine")
    assert not failed.summary
    with nt.profile() as good:
        double(x)
    assert good.summary["tasks"] == 1


def test_profile_without_a_runtime(python: Any) -> None:
    code = """
refused(lambda: nt.profile().__enter__(), "no runtime is running")
import nntile_py.profiling.trace
refused(lambda: nt.profile().__enter__(), "no runtime is running")
print("end")
"""
    ends_well(python, code, refused=2)
