"""Tasks of StarPU's own Python package and of nntile_py on the same tiles, in one StarPU with the same workers.

python examples/starpu_python.py          # the result of both packages' tasks
python examples/starpu_python.py --time   # microseconds a task, and the gain of a second worker
"""

import sys
import time

import numpy as np

import nntile_py as nt

try:
    import starpu
except ImportError:
    sys.exit("StarPU's Python package is not compiled: make setup")


@nt.task("numpy", x="RW")
def add_one(x):
    x += 1


@starpu.access(x="RW")
def double(x):
    x *= 2


def both() -> None:
    """Let tasks of both packages change one array, in the order of their submission."""
    x = nt.array(np.ones((4, 4)))
    handle = nt.starpu_handle(x)
    for _ in range(3):
        add_one(x)
        starpu.task_submit(ret_fut=False)(double, handle)
    print("three times (x + 1) * 2, from 1:", np.asarray(x)[0, 0])


def seconds(submit, count: int) -> float:
    """Return the seconds that `count` tasks take."""
    start = time.perf_counter()
    for number in range(count):
        submit(number)
    nt.Runtime.wait()
    return time.perf_counter() - start


def loop() -> None:
    """Compute in Python for some milliseconds."""
    sum(range(200_000))


def multiply() -> None:
    """Compute in a library that releases Python's global lock."""
    np.sort(np.random.default_rng(0).random(200_000))


def times(cpus: int) -> dict[str, float]:
    """Return {row: seconds of a task} on a number of workers."""
    small = [nt.array(np.zeros(1)) for _ in range(64)]
    handles = [nt.starpu_handle(x) for x in small]
    submit, native = starpu.task_submit(ret_fut=False), nt.task("numpy", x="RW")(lambda x: None)
    nothing = starpu.access(x="RW")(lambda x: None)
    rows = {
        "starpu.task_submit, no argument": (lambda _: submit(lambda: None), 5000),
        "starpu.task_submit, a tile": (lambda k: submit(nothing, handles[k % 64]), 5000),
        "nt.task, a tile": (lambda k: native(small[k % 64]), 5000),
        "a loop in Python": (lambda _: submit(loop), 200),
        "a sort in numpy": (lambda _: submit(multiply), 200),
    }
    result = {}
    for name, (call, count) in rows.items():
        seconds(call, count // 10)
        result[name] = min(seconds(call, count) for _ in range(5)) / count
    return result


def main() -> None:
    if "--time" not in sys.argv:
        with nt.Runtime(cpus=1):
            starpu.init()
            both()
            starpu.shutdown()
        return
    measured = {}
    for cpus in (1, 2):
        with nt.Runtime(cpus=cpus):
            starpu.init()
            measured[cpus] = times(cpus)
            starpu.shutdown()
    for name, one in measured[1].items():
        print(f"{name:32} {1e6 * one:9.1f} us a task, with two workers {one / measured[2][name]:.2f} times as fast")


if __name__ == "__main__":
    main()
