"""In processes of their own: what might hang or abort."""

from typing import Any

import pytest
from faults import ends_well


def test_what_belongs_to_a_runtime_that_has_stopped(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1):
    x, trainer = nt.array(np.ones(3)), nt.Trainer(model, 2, 8)
    program = trainer._programs.of(frozenset()).first
with nt.Runtime(cpus=1):
    for call in (x.numpy, lambda: inc(x), lambda: x.tile.write(np.ones(3)), lambda: trainer.step(ids, ids),
                 lambda: trainer.evaluate(ids, ids), trainer.state_dict, lambda: program.program.native.run([0.0] * 9)):
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
