"""The GPU parts of the experiments, as far as a machine without GPUs can tell: they lower, are placed, have kernels."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nntile_py.analysis.workloads import build
from nntile_py.config.run_config import RunConfig
from nntile_py.graph.estimate import estimate
from nntile_py.measure import experiment, experiments
from nntile_py.measure import sweep_points as sweep
from nntile_py.tasks import launch, launch_binary
from nntile_py.tiles import device_model
from nntile_py.tiles.placement import Residency, place
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped

if not importlib.util.find_spec("triton"):  # not imported here: test_triton.py has to be the first to do so
    pytest.skip("triton is there on Linux only", allow_module_level=True)
ROOT = Path(__file__).parents[1]
NAMES = ("fig09", "fig14", "fig15", "fig16", "fig17", "fig18")
GPU_BYTES = 0.85 * 140e9  # what tiles may take of an H200


def in_cpp() -> set[str]:
    """Kernels that C++ has for CUDA workers."""
    sources = (path.read_text() for path in (ROOT / "tasks").glob("*.cpp"))
    return {name for text in sources for name in re.findall(r"^NNTILE_CUDA_KERNEL\((\w+),", text, re.M)}


def check(config: RunConfig, work: Any, phase: Any) -> None:
    """One layer of the point: what every kernel of it would launch is described, for the dtypes of its tiles."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"layers": 1})})
    assert config.precision == "bf16" and config.runtime.cpus == 0
    built, residency, cpp = build(config, work, phase), Residency(), in_cpp()
    speed = device_model.speed(built.lists, gpu=True)
    for low in built.lists:
        tasks = place(low, config.workers, speed, residency) if config.workers > 1 else low
        one_worker = config.workers == 1
        groups = grouped(tasks, speed.flop_s, speed.bytes_s, GROUP_SECONDS, GPU_BYTES / 3, one_worker)
        parts = [part for task in groups.tasks for part in task.parts or [task]]
        # Placement adds what adds sums up; see tiles/placement.py.
        before, after = (sum(task.kernel != "combine" for task in of) for of in (low.tasks, parts))
        assert before == after and {p.worker for p in parts} <= set(range(-1, config.workers))
        for run in (run for task in groups.tasks for run in launch.together(task.parts or [task])):
            task = run[0]
            described = launch.describer(task.kernel)
            if not (described and described(run).launches):  # or some of its tasks alone are launched, as of attention
                assert task.kernel in cpp, f"{task.op}: no kernel {task.kernel} on CUDA"
                assert {a.tile.dtype for a in task.accesses} <= {"bf16", "fp32", "fp64", "int64"}, task.kernel


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, mode: Any) -> None:
    made = experiments.load_experiment(name)
    seen: set[str] = set()
    for _, config, work, phase, _ in experiment._planned(made.part("gpu", mode), made.kind):
        key = repr((config.fusion, config.model, config.tiles, config.workers > 1))
        if key not in seen and config.workers in (1, 2):  # more GPUs run the same tasks
            seen.add(key)
            check(config, work, phase)
    assert seen


@pytest.mark.parametrize("name", ["bt-fig11", "bt-fig12", "bt-fig13", "bt-fig14", "bt-fig15", "bt-fig16"])
def test_kernels_of_packed_sequences(name: str) -> None:
    made, seen = experiments.load_experiment(name), set[str]()
    for _, config, work, phase, _ in experiment._planned(made.part("gpu"), made.kind):
        model = (config.model.type, config.model.attention)
        if (key := repr((model, config.fusion, config.tiles, config.train.pack))) not in seen:
            seen.add(key)
            check(config, work, phase)


def test_kernels_of_the_policies() -> None:
    found = sweep.load_sweep(ROOT / "experiments/policies.yaml")
    for point in sweep.points(found):
        if point.config and point.config.runtime.scheduler == "lws":
            check(point.config, point.measure.work, point.measure.phase)


@pytest.mark.parametrize("name", ["fig15", "fig17"])
def test_one_gpu_holds_the_largest(name: str) -> None:
    made = experiments.load_experiment(name)
    for told, config, work, phase, _ in experiment._planned(made.part("gpu", "training"), made.kind):
        if config.workers == 1:
            assert estimate(build(config, work, phase).lists, 1, gpu=True).peak_bytes < GPU_BYTES, told


def test_kernels_are_launched_as_they_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels.py, with a driver that only takes note."""
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "experiments/kernels.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels", module)  # dataclasses look there
    spec.loader.exec_module(module)
    calls: dict[str, tuple[Any, ...]] = {}
    names = "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"
    driver = {name: lambda *args, name=name: calls.update({name: args}) for name in names}
    stream = SimpleNamespace(cuda_stream=0)
    clock = module.Clock.__new__(module.Clock)
    clock.driver = SimpleNamespace(**driver)
    clock.torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: stream))
    one = launch.Launch(None, (3, 1, 1), (launch.TileAddress(0, "fp32"), launch.Int(5)), ())
    clock._launch(launch_binary.encode(one, launch_binary.Binary(b"cubin", "made", 0, 8, overlaps=True)), [4096])()
    assert calls["cuModuleLoadData"][1] == b"cubin" and calls["cuModuleGetFunction"][2] == b"made"
    assert calls["cuLaunchKernel"][1:7] == (3, 1, 1, 8 * 32, 1, 1)
