"""Programs of test_starpupy.py, each in a process of its own: `python starpupy_script.py NAME`."""

import sys
import time

import numpy as np
import starpu

import nntile_py as nt


@nt.task("numpy", x="RW")
def add_one(x):
    x += 1


@nt.task("numpy", x="R", y="W")
def copy(x, y):
    y[...] = x


def slowly(change):
    """Return a task of starpupy that writes its argument after 10 ms: later tasks must wait for it."""

    @starpu.access(x="RW")
    def function(x):
        time.sleep(0.01)
        change(x)

    return lambda handle: starpu.task_submit(ret_fut=False)(function, handle)


def total(a, b):
    return starpu.task_submit()(lambda u, v: u + v, a, b).result()


def body():
    """Run tasks of both packages on the same tiles, and return a handle."""
    x, y = nt.array(np.ones((3, 4), np.float32)), nt.empty((3, 4), "float32")
    handle = nt.starpu_handle(x)
    double = slowly(lambda x: np.multiply(x, 2, out=x))
    for _ in range(3):
        add_one(x)
        double(handle)
    copy(x, y)
    assert (np.asarray(y) == 22).all()
    slowly(lambda x: np.negative(x, out=x))(nt.starpu_handle(x.tiles(2, 4)[1, 0]))
    assert (np.asarray(x)[:2] == 22).all() and (np.asarray(x)[2] == -22).all()
    double(handle)  # the array was written in tiles since
    assert (np.asarray(x)[:2] == 44).all() and (np.asarray(x)[2] == -44).all()

    own = np.arange(12.0).reshape(3, 4)
    handle_of_own = starpu.Handle(own)
    z, increase = nt.starpu_array(handle_of_own), slowly(lambda x: np.add(x, 1, out=x))
    increase(handle_of_own)
    add_one(z)
    increase(handle_of_own)
    assert (np.asarray(z) == np.arange(12.0).reshape(3, 4) + 3).all()
    assert handle_of_own.acquire()[2, 3] == own[2, 3] == 14  # the same memory
    handle_of_own.release()
    time.sleep(0.05)  # idle workers of a runtime sleep
    assert total(3, 4) == 7
    nt.Runtime.wait()
    assert total(5, 6) == 11
    del z
    handle_of_own.unregister()
    return handle


def runtime_first():
    with nt.Runtime(cpus=2):
        starpu.init()
        body()
        starpu.shutdown()


def starpupy_first():
    starpu.init()
    with nt.Runtime() as runtime:
        assert runtime.cpus >= 1
        handle = body()
    assert total(3, 4) == 7
    try:
        slowly(lambda x: None)(handle)
    except Exception as error:
        assert "unregistered" in str(error)
    else:
        raise AssertionError("the handle of a stopped runtime was taken")
    with nt.Runtime():
        body()
    starpu.shutdown()


def crossed():
    starpu.init()
    runtime = nt.Runtime().start()
    body()
    starpu.shutdown()
    x = nt.array(np.ones(3))
    add_one(x)
    assert (np.asarray(x) == 2).all()
    runtime.stop()


def runtime_ends_first():
    with nt.Runtime(cpus=2):
        starpu.init()
        body()
    assert total(3, 4) == 7
    starpu.shutdown()


def no_shutdown():
    with nt.Runtime(cpus=2):
        starpu.init()
        body()


def several_times():
    for _ in range(3):
        runtime_first()


def exception():
    """An exception in a task's function is printed; the task returns None, and later tasks run."""
    with nt.Runtime(cpus=2):
        starpu.init()
        assert total("a", 1) is None
        assert total(1, 1) == 2
        starpu.shutdown()


def refused():
    def message(call, *arguments, **options):
        try:
            call(*arguments, **options)
        except (nt.NNTileError, TypeError) as error:
            return str(error)
        raise AssertionError("not refused")

    numbers = np.ones((2, 3))
    starpu.init()
    handle = starpu.Handle(numbers)
    print(message(nt.starpu_array, handle))
    for options in ({"cpus": 1}, {"scheduler": "dmda"}, {"memory": "16MiB"}):
        print(message(nt.Runtime(**options).start))
    with nt.Runtime():
        print(message(nt.starpu_handle, nt.array(numbers, "bfloat16")))
        print(message(nt.starpu_handle, nt.empty(3)))
        print(message(nt.starpu_array, numbers))
        print(message(nt.starpu_array, starpu.Handle(numbers.T)))
        print(message(nt.starpu_array, starpu.Handle([1, 2])))
        shared = nt.starpu_array(handle)
        print(message(add_one, shared.tiles(1)[0]))
        handle.unregister()
        print(message(nt.starpu_array, handle))
    starpu.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
