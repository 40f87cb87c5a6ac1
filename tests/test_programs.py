"""Programs and trainers that are wrong or fail: an exception that names the operator, and the runtime goes on."""

import ctypes
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CPUS
from faults import CONFIG, IDS, fail, fill, works

import nntile_py as nt
from nntile_py import _core
from nntile_py.execution.task_payload import body


@pytest.fixture
def runtime() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=CPUS) as running:
        yield running


# -- programs of kernels that fail


def program(kernel: str, tiles: list[_core.Tile], modes: str, ints: Any = ()) -> _core.Program:
    native = _core.Program()
    name = f"h0.attn.{kernel.title()}"
    native.add(
        bodies=[body(kernel, name, range(len(tiles)), ints)],
        codelet=kernel, name=name, tiles=tiles, modes=modes.split(),
    )
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
    with pytest.raises(nt.TaskError, match="fail: x is read before any task wrote it"):
        fail(array)
    fill(array)
    assert array.numpy().tolist() == [7] * 4


def test_a_program_that_reads_what_it_has_freed(runtime: nt.Runtime) -> None:
    a, b = tile(4), tile(4, write=False)
    native = program("transpose", [b, a], "W R", [0])
    native.add_invalidate(b)
    late = body("transpose", "late", [0, 1], [0])
    native.add(bodies=[late], codelet="transpose", name="late", tiles=[a, b], modes=["W", "R"])
    with pytest.raises(nt.TaskError, match="late: reads a tile before any task wrote it"):
        native.run([])


def test_a_window_bounds_the_tasks_in_flight(runtime: nt.Runtime) -> None:
    in_flight = ctypes.CDLL(_core.__file__).starpu_task_nsubmitted
    a, b = tile(2000, 2000), tile(2000, 2000)
    for window in (0, 3):
        native = _core.Program(window=window)
        for _ in range(30):  # they write the same tile, so they run one after the other, in milliseconds each
            turned = body("transpose", "turned", [0, 1], [1, 0])
            native.add(bodies=[turned], codelet="transpose", name="turned", tiles=[b, a], modes=["W", "R"])
        native.run([])
        assert (in_flight() > 3) == (window == 0), window
        nt.Runtime.wait()


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
        ("labels", r"head\.CrossEntropy: label 99 is not one of"),
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
    refused("batch: got 0; allowed: ", batch=0)
    refused("grad_accumulation: got 0; allowed: ", grad_accumulation=0)
    refused("precision: got 'fp4'; allowed: fp32, fp64, bf16, fp16, tf32, fp8", precision="fp4")
    refused("precision: bf16 needs GPUs", precision="bf16")
    refused("precision: fp16 needs GPUs", precision="fp16")
    refused("loss_scale: got 0.5; allowed: a number of at least 1", loss_scale=0.5)
    refused("loss_scale: got 1000.*; allowed: a number of at least 1 and at most 3e", loss_scale=10**400)
    refused("accumulate: got 'rings'; allowed: ", accumulate="rings")
    refused("clip_grad_norm: got -1.0; allowed: ", clip_grad_norm=-1.0)
    refused("fusion.everything: unknown key", fusion={"everything": True})
    refused("tiles.key: unknown axis", tiles={"key": 2})
    refused("'linear'; allowed: 'vendor', .*'segments', 'varlen' or 'cudnn'", attention="linear")
    for changed, text in (({"dropout": 1.5}, "dropout: got 1.5"), ({"activation": "elu"}, "activation: got 'elu'")):
        with pytest.raises(nt.ConfigError, match=text):
            nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(**{**CONFIG.__dict__, **changed})), 2, 8)


def test_numbers_of_numpy_are_saved(runtime: nt.Runtime, tmp_path: Path) -> None:
    counts = {"batch": np.int64(2), "seq": np.int32(8), "grad_accumulation": np.int8(1), "seed": np.uint64(3)}
    floats = {"clip_grad_norm": np.float32(1), "skip_above_norm": np.float64(9), "loss_scale": np.float32(8)}
    switches = {name: np.bool_(name == "shift_labels") for name in ("shift_labels", "pack", "check_finite")}
    how: dict[str, Any] = {**counts, **floats, **switches, "tiles": {"vocab": np.int64(7)}}
    trainer = nt.Trainer(nt.models.GPT2(CONFIG), **how)
    trainer.step(IDS, IDS)
    trainer.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "state.json").read_text())["trainer"]
    assert {name: saved[name] for name in how} == how
    assert nt.Trainer.load(tmp_path / "saved").step(IDS, IDS) == trainer.step(IDS, IDS)


def test_arguments_of_a_step(runtime: nt.Runtime) -> None:
    trainer = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8)
    with pytest.raises(nt.TaskError, match="no step has run yet"):
        trainer.gradients()
    for ids, labels, text in (
        (IDS[:1], IDS, r"input_ids: got int64 \(1, 8\); allowed: ints \(2, 8\)"),
        (IDS, IDS[:, :4], r"labels: got int64 \(2, 4\); allowed: "),
        (IDS.astype(float), IDS, "input_ids: got float64"),
        (IDS + 5, IDS, "input_ids: values go from 5 to 20; allowed: 0 to 19"),
        (IDS - 1, IDS, "input_ids: values go from -1 to 14"),
        (IDS, IDS + 5, "labels: values go from 5 to 20; allowed: 0 to 19 and -100"),
        (IDS, IDS - 3, "labels: values go from -3 to 12"),
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
