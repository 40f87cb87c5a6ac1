"""Tiles that do not fit into memory go to the disk: the same losses, and no run takes space of another run."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import PRELUDE, ends_well

import nntile_py as nt
from nntile_py.execution import memory, memory_checks
from nntile_py.execution.disk import SwapDisk
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.recompute_choice import Room
from nntile_py.graph.step import StepSpec
from nntile_py.testing import error
from nntile_py.tiles import Tiling

MIB = 2**20

TRAIN = """
import sys
from nntile_py.execution import disk
memory, folder, policy, direct, scheduler = sys.argv[1:]
how = {"placement": "planned"} if scheduler == "planned" else {"scheduler": scheduler}
if direct == "False": disk._direct = lambda folder: False
on_disk = {"path": folder, "size": 1 << 30} if folder else None
with nt.Runtime(cpus=2, memory=int(memory) << 20, disk=on_disk, **how):
    big = nt.models.GPT2(nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=1000, positions=64), seed=1)
    trainer = nt.Trainer(big, 8, 64, {"batch": 1, "vocab": 300}, accumulate=policy)
    tokens = np.random.default_rng(0).integers(0, 1000, (8, 64))
    losses = [trainer.step(tokens, tokens) for _ in range(3)]
    print(*losses, float(trainer.state_dict()["transformer.wte.weight"].sum()))
"""


FITS: dict[str, Any] = {}  # by policy: the run that needs no disk


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "direct", "scheduler"),
    [("chain", True, "lws"), ("chain", False, "lws"), ("redux", True, "lws"), ("chain", True, "planned"),
     ("redux", True, "planned"), ("chain", True, "dmdas")],
)  # fmt: skip
def test_a_model_that_does_not_fit_in_memory(
    python: Any, tmp_path: Path, policy: str, direct: bool, scheduler: str
) -> None:
    """Training with the disk gives the same losses."""
    if policy not in FITS:
        FITS[policy] = python(PRELUDE + TRAIN, 1000, "", policy, direct, scheduler)
    fits, rest = FITS[policy], python(PRELUDE + TRAIN, 6, tmp_path, policy, direct, scheduler)
    assert fits.returncode == rest.returncode == 0, (fits.stderr[-2000:], rest.stderr[-2000:])
    if policy == "chain":
        assert fits.stdout == rest.stdout
    assert error([float(x) for x in rest.stdout.split()], [float(x) for x in fits.stdout.split()]) < 1e-4
    assert not list(tmp_path.iterdir())


KINDS = """
import json, sys
folder, kinds = sys.argv[1], json.loads(sys.argv[2])
on_disk = {"path": folder, "size": 1 << 30} | ({} if kinds is None else {"kinds": kinds})
with nt.Runtime(cpus=2, memory=7 << 20, disk=on_disk):
    config = nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=6000, positions=64)
    trainer = nt.Trainer(nt.models.GPT2(config, seed=1), 2, 16, {"batch": 1, "vocab": 300})
    tokens, seen, losses = np.random.default_rng(0).integers(0, 6000, (2, 16)), set(), []
    for _ in range(3):
        losses.append(trainer.step(tokens, tokens))
        seen |= {kind for (kind, *_), handle in trainer._store.handles.items() if handle.on_disk}
    print(json.dumps([losses, sorted(seen)]))
"""


def test_kinds_of_tensors_on_the_disk(python: Any, tmp_path: Path) -> None:
    """Weights, gradients and optimizer states need 7.4 MiB. States leave first; if they may not, weights do."""
    ran = {}
    for kinds in (None, ["optimizer"], ["weights"]):
        done = python(PRELUDE + KINDS, tmp_path, json.dumps(kinds))
        assert done.returncode == 0, done.stderr[-2000:]
        ran[str(kinds)] = json.loads(done.stdout)
    states, others, weights = ran.values()
    assert states[0] == others[0] == weights[0]
    assert "state" in states[1] and "state" in others[1] and not {"param", "grad"} & {*others[1]}
    assert "param" in weights[1] and not {"state", "grad"} & {*weights[1]}
    refused = python(PRELUDE + KINDS, tmp_path, "[]")
    assert "that runtime.disk.kinds keeps off the disk have 8 MiB" in refused.stderr and refused.returncode
    assert "Name more kinds in runtime.disk.kinds" in refused.stderr


def test_what_the_disk_must_be(tmp_path: Path) -> None:
    def refused(text: str, memory: int | str | None = MIB, **disk: Any) -> None:
        with pytest.raises(nt.ConfigError, match=text):
            nt.Runtime(cpus=1, memory=memory, disk=disk)

    refused(r"runtime\.disk\.path: /no/such is not a writable folder", path="/no/such", size=MIB)
    refused(r"runtime\.disk\.size: got 1048576; allowed: .*, of at least 16 MiB$", path=tmp_path, size=MIB)
    refused(r"runtime\.disk\.size: got .*; allowed: ", path=tmp_path, size=2**60)
    refused(r"runtime\.disk: got a disk; allowed: only with runtime\.memory", None, path=tmp_path, size=2**26)
    refused(r"runtime\.disk: got {'path'", path=tmp_path)
    for kinds in (["moments"], "optimizer", 3, [["optimizer"]]):
        refused(r"runtime\.disk\.kinds: got .*; allowed: null, or a list of weights, gradients, optimizer",
                path=tmp_path, size=MIB, kinds=kinds)  # fmt: skip
    refused(r"runtime\.disk\.size: got '1 disk'; allowed: a number of bytes, or", path=tmp_path, size="1 disk")
    refused(r"runtime\.disk\.size: got '1MiB'; allowed: .*, of at least 16 MiB$", "20 MB", path=tmp_path, size="1MiB")
    made = nt.Runtime(cpus=1, memory="20 MB", cuda_memory="2GiB", disk={"path": tmp_path, "size": "16MiB"})
    assert (made.memory, made.cuda_memory, made.disk.size) == (20 * 10**6, 2**31, 2**24)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small(python: Any, tmp_path: Path) -> None:
    code = f"""
big = nt.models.GPT2(nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=1000, positions=64))
with nt.Runtime(cpus=1, memory=6 << 20, disk={{"path": {str(tmp_path)!r}, "size": 16 << 20}}):
    refused(lambda: nt.Trainer(big, 64, 64, {{"batch": 1}}), "runtime.disk")
print("end")
"""
    ends_well(python, code, refused=1)
    assert not list(tmp_path.iterdir())


# -- the size


def test_the_least_disk_that_is_named_is_taken() -> None:
    """Also by `recompute: auto` and `tiles: auto`."""
    model = nt.models.GPT2(nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=1000, positions=64), {})
    built = StepSpec(
        model, 8, 64, Tiling({"batch": 1}), precision="fp32", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate="chain", fusion=Fusion(), grad_accumulation=1,
    ).step()  # fmt: skip
    lists, peak = [low.tasks for low in built.lists], built.peak_bytes()

    def check(size: int) -> bool:
        disk = SimpleNamespace(size=size, kept=frozenset())
        runtime = SimpleNamespace(cpus=2, cuda=0, memory=2 * MIB, cuda_memory=None, ranks=None, disk=disk)
        memory_checks.check_step(built, runtime)  # type: ignore[arg-type]
        return memory.room(runtime).fits(peak, lists)  # type: ignore[arg-type]

    with pytest.raises(nt.TaskError, match=r"runtime\.disk\.size = 1 MiB is too small: .* use a disk of") as refused:
        check(MIB)
    found = re.search(r"use a disk of (\d+) MiB", str(refused.value))
    assert found
    assert check(int(found[1]) * MIB)
    with pytest.raises(nt.TaskError, match="is too small"):
        check((int(found[1]) - 1) * MIB)
    assert not Room(2, False, 2 * MIB, (int(found[1]) - 1) * MIB, disk=(int(found[1]) - 1) * MIB).fits(peak, lists)


def test_room_on_the_disk_is_used_again(python: Any, tmp_path: Path) -> None:
    """Buffers of freed tiles, which have other sizes than later tiles, do not fill the disk."""
    code = f"""
_core.be_patient(1, 5, 10)
with nt.Runtime(cpus=1, memory=4 << 20, disk={{"path": {str(tmp_path)!r}, "size": 16 << 20}}):
    for k in range(6):
        arrays = [nt.array(np.full((1 << 17) + 512 * k, 1.0)) for _ in range(10)]
        for array in arrays: inc(array)
        nt.Runtime.wait()
        del arrays, array
print("end")
"""
    ends_well(python, code)


def test_a_run_that_fills_the_disk(python: Any, tmp_path: Path) -> None:
    """The message says so, and names the key."""
    code = f"""
_core.be_patient(1, 2, 10)
def fill():
    with nt.Runtime(cpus=1, memory=4 << 20, disk={{"path": {str(tmp_path)!r}, "size": 16 << 20}}):
        arrays = [nt.array(np.zeros(1 << 17)) for _ in range(24)]
        for array in arrays: inc(array)
        nt.Runtime.wait()
refused(fill, "The disk is full: use a larger runtime.disk.size")
print("end")
"""
    ends_well(python, code, refused=1)


def test_runs_that_share_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may take only what is free beside the sizes of running runs, also if both start at once."""
    free = 100 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def disk(size: int) -> SwapDisk:
        return SwapDisk({"path": tmp_path, "size": size * MIB}, MIB)

    one, other = disk(60), disk(60)
    one.open()
    for take in (other.open, lambda: disk(41)):
        reserved = (
            r"runtime\.disk\.size: got .*; allowed: 16 MiB to what is free in .*, 100 MiB,"
            " of which other runs have reserved 60"
        )
        with pytest.raises(nt.ConfigError, match=reserved):
            take()
    disk(39)
    (folder,) = tmp_path.iterdir()
    (folder / "deep").mkdir()
    (folder / "deep" / "tile").write_bytes(os.urandom(20 * MIB))  # the file system may store zeros in no blocks
    free = 80 * MIB
    with pytest.raises(nt.ConfigError, match="80 MiB, of which other runs have reserved 40 MiB"):
        disk(60)
    disk(39)
    free = 100 * MIB
    one.close()
    other.open()
    other.close()
    assert not list(tmp_path.iterdir())


# -- killed processes


def test_what_a_killed_process_left_on_the_disk(python: Any, tmp_path: Path) -> None:
    """The folder of a killed run is removed by the next run; folders of running processes and other folders stay."""
    code = """
import os, signal, sys
nt.Runtime(cpus=1, memory=1 << 24, disk={"path": sys.argv[1], "size": 1 << 24}).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python("import nntile_py as nt\n" + code, tmp_path).returncode == -9
    (left,) = tmp_path.iterdir()
    disk = {"path": tmp_path, "size": 2**24}
    with nt.Runtime(cpus=1, memory=2**24, disk=disk):
        (own,) = tmp_path.iterdir()
        assert own != left
        users = {tmp_path / name for name in ("mine", "nntile-results", "nntile-swap-mine", "nntile-swap-link")}
        for path in users:
            path.mkdir() if path.name != "nntile-swap-link" else path.symlink_to(own)
        for path in users - {tmp_path / "nntile-swap-link"}:
            (path / "thesis").touch()
        nt.Runtime(cpus=1, memory=2**24, disk=disk)
        assert set(tmp_path.iterdir()) == {own, *users}
    assert set(tmp_path.iterdir()) == users and (tmp_path / "nntile-swap-mine" / "thesis").exists()
