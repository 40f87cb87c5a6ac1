"""A process that is forked while a runtime runs: it has no workers, and the disk is its parent's."""

from pathlib import Path
from typing import Any

from faults import PRELUDE

FORK = """
import os, pathlib
from contextlib import suppress

def child(work):
    number = os.fork()
    if not number:
        work()
        print("child", flush=True)
        sys.exit(0)  # out of the block, past what is to be done at the end
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0

disk = pathlib.Path(sys.argv[1])

def held():
    return sorted(str(p) for p in disk.rglob("*") if p.is_file())

with nt.Runtime(cpus=1, memory=64 << 20, disk={"path": str(disk), "size": 256 << 20}):
    trainer = nt.Trainer(model, 2, 8)
    trainer.step(ids, ids)
    large = [nt.array(np.full((1024, 1024), k, "float32")) for k in range(24)]  # 96 MiB: some are on the disk
    for x in large: inc(x)
    nt.Runtime.wait()
    pending = trainer.submit(ids, ids)
    before = held()
    assert before, "nothing is on the disk"

    def uses():
        for number, call in enumerate((large[0].numpy, lambda: inc(large[1]),
                     lambda: large[2].tile.write(np.ones(1024 * 1024)), nt.Runtime.wait,
                     lambda: trainer.step(ids, ids), lambda: trainer.evaluate(ids, ids),
                     trainer.state_dict, lambda: trainer.save(disk.parent / "saved"),
                     lambda: nt.Runtime(cpus=1).__enter__())):
            try:
                call()
            except nt.TaskError as error:
                assert "forked" in str(error) or "has stopped" in str(error), (number, error)
            else:
                raise SystemExit(f"not refused: {number}")
        with suppress(nt.TaskError):  # what was there before the fork may be read
            pending.result()
        large.clear()

    child(uses)
    child(lambda: None)
    child(lambda: large.clear())
    pid = os.fork()
    if not pid:  # as multiprocessing ends its processes
        os._exit(0)
    os.waitpid(pid, 0)
    assert held() == before
    for k, x in enumerate(large):
        assert (x.numpy() == k + 1).all()
    assert pending.result().loss > 0
    trainer.step(ids, ids)
assert not any(disk.iterdir())
print("end")
"""


def test_a_fork_while_a_runtime_with_a_disk_is_open(python: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    done = python(PRELUDE + FORK, tmp_path / "disk", timeout=120, fresh=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
    assert done.stdout.split() == ["child"] * 3 + ["end"]


def test_a_fork_leaves_the_block_with_an_error(python: Any) -> None:
    code = """
import os
child = None
try:
    with nt.Runtime(cpus=1):
        child = os.fork()
except nt.TaskError as error:
    assert child == 0 and "forked" in str(error), error
    os._exit(3)
assert child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
number = os.fork()  # nothing runs: a child may have a runtime of its own
with nt.Runtime(cpus=1):
    x = nt.array(np.ones(3)); inc(x)
    assert x.numpy().tolist() == [2, 2, 2]
if not number:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
print("end")
"""
    done = python(PRELUDE + code, timeout=120, fresh=True)
    assert done.returncode == 0 and done.stdout.split() == ["end"], (done.returncode, done.stderr)
