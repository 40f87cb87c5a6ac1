"""What a wait does where nothing moves: an error after a while, unless other work has the cores."""

from typing import Any

import pytest
from faults import PRELUDE

# Workers that are paused, as if they never got a core, while tasks are left.
PAUSED = """
import ctypes, hashlib, os, threading, time
starpu = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libstarpu-1" in line))
STILL, IN_VAIN, busy, seconds = map(int, sys.argv[1:])
_core.be_patient(1, STILL, IN_VAIN)

@nt.task(y="RW")
def hold(y):
    held.set(); free.wait()
    y += 1

def compute(data=bytes(1 << 22)):
    while not done.is_set(): hashlib.sha256(data)  # without the lock of the interpreter

held, free, done = threading.Event(), threading.Event(), threading.Event()
with nt.Runtime(cpus=1):
    y = nt.array(np.zeros(3))
    for _ in range(3): hold(y)
    held.wait()
    starpu.starpu_pause()
    free.set()
    threads = [threading.Thread(target=compute, daemon=True) for _ in range(busy * (len(os.sched_getaffinity(0)) + 3))]
    for thread in threads: thread.start()
    threading.Thread(target=lambda: (time.sleep(seconds), starpu.starpu_resume()), daemon=True).start()
    begin = time.monotonic()
    try:
        nt.Runtime.wait()
        print("waited", time.monotonic() - begin >= seconds - 0.5, y.numpy().tolist())
    except nt.TaskError as error:
        print(error)
    finally:
        done.set(); starpu.starpu_resume()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("still", "in_vain", "busy", "seconds", "told"),
    [
        (3, 100, 1, 8, "waited True [3.0, 3.0, 3.0]"),  # others have the cores: no error
        (3, 6, 1, 100, "no progress: no task ended for 6 s although 2 are left."),  # but not for ever
        (3, 6, 0, 100, "no progress: no task ended"),
    ],
)
def test_workers_that_get_no_processor_time(
    python: Any, still: int, in_vain: int, busy: int, seconds: int, told: str
) -> None:
    done = python(PRELUDE + PAUSED, still, in_vain, busy, seconds, timeout=120)
    assert done.stdout.startswith(told), (done.stdout, done.stderr)
