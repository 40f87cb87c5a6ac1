"""Times of kernels on one GPU, as tables on the terminal.

    python experiments/kernels.py step experiments/gpt2_124m.yaml [--set KEY=VALUE] [--alpha 0.6] [--inference]
    python experiments/kernels.py layer [--work encoder] [--phase backward] [--set train.batch=96 --set train.seq=128]
    python experiments/kernels.py found [--only gpt2] [--search]
    python experiments/kernels.py single [--only gpt2]

step: the kernels of a config's step, and the gaps between the kernels, by torch.profiler.
layer: the kernels and gaps of one pass of BERT-large's encoder layer, with fused attention and fusion groups.
found: for each fusion group that `fusion: true` forms in three models, the time of the group's generated kernel, of a
    copy of as many bytes, and of the kernels that run without the group (column "rules"). --search also times the
    generated kernel with other block sizes, and lists the fastest sizes.
single: for each operator of four models without fusion, the times of its generated kernel and of its handwritten
    kernel (column "rules").
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nntile_py.analysis.counts import lower_single
from nntile_py.analysis.workloads import Work, build, logical, preset
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.graph.fusion import Fusion
from nntile_py.profiling.operator_timer import small_program
from nntile_py.system.clock import clocked
from nntile_py.system.folders import installed
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.generated import KERNELS, Generated, NotFusible
from nntile_py.tasks.launch import Launches, describer, shape
from nntile_py.tasks.launch_binary import compile_launch, encode
from nntile_py.tasks.scalar.tl import BlockSizes, Writer
from nntile_py.tiles.task import Task

# -- a step

STEPS = 3
GPU = ["precision=bf16", "runtime.cpus=0", "runtime.cuda=1"]
LAYER = (
    "tiles={}", "runtime.memory=null", "model.embed=1024", "model.heads=16", "train.batch=8", "train.seq=512",
    "fusion.found=true",
)  # fmt: skip


def step(o: dict[str, Any]) -> None:
    """Time training steps of a config, or forward passes with --inference, and print the steps' kernels."""
    from contextlib import ExitStack

    from nntile_py.measure.sweep_spec import Measure
    from nntile_py.measure.worker import Session

    measure = Measure(work="inference" if o["inference"] else "train", alpha=o["alpha"], warmup=5)
    with ExitStack() as running:
        session = Session({"config": o["config"], "sets": o["sets"], "measure": measure.model_dump()}, running)
        assert session.run and session.config.runtime.cuda, "runtime.cuda: allowed: at least 1"
        times = [1e3 * seconds for seconds in clocked(session.run, 7, 10)]
        print(f"{statistics.median(times):.3f} ms ({min(times):.3f} to {max(times):.3f})")
        traced(session.run)


def layer(o: dict[str, Any]) -> None:
    """Time passes of an encoder layer, and print the kernels of a pass."""
    from nntile_py.execution.runtime import Runtime

    config = load(Path(__file__).with_name("encoder_layer.yaml"), [*GPU, *LAYER, *o["sets"]])
    with Runtime(**runtime_options(config.runtime.model_dump())):
        run = small_program(build(config, o["work"], o["phase"]).graphs[0], config)
        run(10)
        times = [1e3 * seconds for seconds in clocked(run, 15, 20)]
        print(f"{statistics.median(times):.4f} ms ({min(times):.4f} to {max(times):.4f})")
        traced(run)


def traced(run: Callable[[int], Any]) -> None:
    """Print the kernels of STEPS runs, and the gaps between the kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run(STEPS)
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for device in sorted({e.device_index for e in events}):
        kernels = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in events
            if e.device_index == device and not e.name.startswith("Memcpy")
        )  # fmt: skip
        busy, count, gaps = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
        end, last = kernels[0][1], kernels[0][2]
        for start, stop, name in kernels:
            busy[name] += stop - start
            count[name] += 1
            gaps[last, name] += max(start - end, 0)
            if stop > end:
                end, last = stop, name
        total, idle = sum(busy.values()) / 1e3 / STEPS, sum(gaps.values()) / 1e3 / STEPS
        print(f"GPU {device}: {total:.2f} ms of kernels a step, {idle:.2f} ms between them")
        for name, us in busy.most_common(30):
            print(f"{us / 1e3 / STEPS:9.3f} ms {count[name] / STEPS:7.1f}  {name[:110]}")
        for (before, after), us in gaps.most_common(10):
            print(f"{us / 1e3 / STEPS:9.3f} ms between {before[:45]} and {after[:45]}")


# -- fusion groups

COLD = 500e6  # bytes that a kernel accesses before it reuses tiles: ten times an H200's L2 cache
LAUNCHED = 24  # least number of launches in a CUDA graph


@dataclass
class Case:
    """A fusion group with its task.

    Attributes:
        rules: tasks that compute the same without the group.
        within: names of matrix products whose epilogues compute a part of the group's work if there is no group.
    """

    name: str
    task: Task
    rules: list[Task]
    within: list[str]

    @property
    def bytes(self) -> int:
        return sum(a.tile.bytes * len(a.mode) for a in self.task.accesses)


@dataclass
class Compiled:
    """Compiled launches of tasks.

    Attributes:
        launches: (index of the task, encoded launch).
        scratch: bytes of scratch memory that the largest launch needs.
        tiles: for each task (key, bytes) of its tiles.
    """

    launches: list[tuple[int, Any]]
    scratch: int
    tiles: list[list[tuple[Any, int]]]


def models() -> Iterator[tuple[str, RunConfig, Work]]:
    yield "encoder", preset("encoder", GPU), "encoder"
    yield "encoder, fused attention", preset("encoder", [*GPU, *FUSED]), "encoder"
    bert = [*GPU, "train.batch=154", "train.seq=128", "model.layers=2"]
    yield "bert", load(installed("experiments") / "bert_base.yaml", bert), "train"
    gpt2 = [*GPU, "train.batch=32", "model.layers=2"]
    yield "gpt2", load(installed("experiments") / "gpt2_124m.yaml", gpt2), "train"


FUSED = ["model.attention=vendor", "model.attention_dropout=0"]


def cases() -> Iterator[Case]:
    """Yield each distinct fusion group of the models once."""
    seen = set()
    for model, config, work in models():
        cuts = step_spec(config).cuts
        fused, rules = (logical(config, work, Fusion.of(how))[0] for how in (True, {"found": False}))
        for op in fused.ops:
            if not isinstance(op, Generated):
                continue
            sizes = "x".join(map(str, op.definition.sizes.values()))
            if (key := (op.kernel.source, sizes)) in seen:
                continue
            seen.add(key)
            outputs = {(t.name, tuple(t.shape)) for member in op.members for t in member.outputs}
            others = [other for other in rules.ops if any((t.name, tuple(t.shape)) in outputs for t in other.outputs)]
            products = [other.name for other in others if isinstance(other, Contract)]
            single = [lower_single(other, cuts, "chain").tasks.tasks for other in others if other.name not in products]
            tasks = [task for tasks in single for task in tasks]
            (task,) = lower_single(op, cuts, "chain").tasks.tasks
            yield Case(f"{model} {op.group} {sizes}", task, tasks, products)


def single_cases() -> Iterator[Case]:
    """Yield, for each operator with a scalar form, a group of only this operator, beside its handwritten kernel."""
    llama = [*GPU, "train.batch=8", "train.seq=1024", "model.layers=2"]
    every = [*models(), ("llama", load(installed("experiments") / "llama_1b.yaml", llama), "train")]
    seen = set()
    for model, config, work in every:
        cuts = step_spec(config).cuts
        for op in logical(config, work, Fusion.of(False))[0].ops:
            try:
                group = Generated([op], op.outputs)
            except NotFusible:
                continue
            key = group.kernel.source, tuple(group.definition.sizes.values())
            tasks = lower_single(op, cuts, "chain").tasks.tasks
            if key in seen or not tasks or describer(tasks[0].kernel) is None:
                continue
            seen.add(key)
            sizes, (task,) = "x".join(map(str, key[1])), lower_single(group, cuts, "chain").tasks.tasks
            act = getattr(op, "act", "")
            yield Case(f"{model} {group.group} {act} {sizes}", task, tasks, [])


def other_cuts(task: Task) -> list[BlockSizes]:
    """Return block sizes for the task's generated kernel that may be fast, as candidates of --search."""
    kernel = KERNELS[task.kernel]
    shapes = [shape(task, number) for number in range(len(task.accesses))]
    writer = Writer(kernel.definition, kernel.tiles, shapes, kernel.outputs, [a.accumulate for a in task.accesses])
    usual, n, cuts = writer.usual_cut(), writer.sizes[writer.column], []
    blocks = [usual.block] if writer.whole_rows else [block for block in (256, 512, 1024, 2048) if n % block == 0]
    for block, rows, each in itertools.product(blocks, (1, 2, 4, 8), (8, 16, 32, 64)):
        warps = rows * block // (32 * each)
        if not 1 <= warps <= 16 or rows * block > 8192:
            continue
        if not writer.sums and each < 64:
            cuts.append(BlockSizes(rows, block, warps))
        for programs, stages in itertools.product((2, 3, 4, 6), (2, 3, 4)):
            if writer.sums and 2048 <= rows * block <= 4096 and each > 8:
                cuts.append(BlockSizes(rows, block, warps, max(16, 132 * programs // -(-n // block)), stages))
    return cuts


def compiled(job: tuple[list[Task], BlockSizes | None]) -> Compiled | str:
    """Compile a job: tasks, and block sizes for them (None: the usual). Return a text if a task cannot be compiled."""
    from nntile_py.tasks.generated_triton import in_cut

    tasks, cut = job
    result = Compiled([], 0, [[(a.tile.key, a.tile.bytes) for a in task.accesses] for task in tasks])
    for number, task in enumerate(tasks):
        known = describer(task.kernel)
        if known is None:
            return f"{task.kernel} is in C++"
        try:
            launches: Launches = in_cut(task, cut) if cut else known([task])
            result.launches += [(number, encode(one, compile_launch(one))) for one in launches.launches]
        except Exception as error:  # any error of Triton's compiler
            return f"{type(error).__name__}: {str(error)[:80]}"
        result.scratch = max(result.scratch, launches.scratch)
    return result


class Clock:
    """Times kernels on tiles that are not in a cache: a CUDA graph launches a kernel on several sets of tiles.

    Kernels are launched through CUDA's driver API, as in nntile_py/execution/csrc/runtime_cuda.cpp."""

    def __init__(self) -> None:
        import torch

        self.torch, self.driver = torch, ctypes.CDLL("libcuda.so.1")
        self.pool = torch.randn(1 << 31, device="cuda", dtype=torch.bfloat16)  # room for two sets of the largest tiles
        self.scratch = torch.zeros(64 << 20, device="cuda", dtype=torch.uint8)
        self._known: dict[int, float] = {}

    def sets(self, size: int) -> int:
        return max(2, math.ceil(COLD / size))

    def seconds(self, runs: Sequence[Callable[[], None]]) -> float:
        """Return the median seconds of one of the runs, measured with all runs in one CUDA graph."""
        torch, times = self.torch, math.ceil(LAUNCHED / len(runs))
        for run in runs:
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in times * list(runs):
                run()
        measured = []
        for _ in range(11):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end) / 1e3 / times / len(runs))
        return statistics.median(measured[2:])

    def copy(self, size: int) -> float:
        """Return the seconds of a copy, read and written bytes together `size`: the faster of copy_ and torch.add."""
        if size not in self._known:
            half = size // 4
            parts = [self.pool[2 * k * half : 2 * (k + 1) * half].view(2, half) for k in range(self.sets(size))]
            ways = [[lambda x=x: x[0].copy_(x[1]) for x in parts],
                    [lambda x=x: self.torch.add(x[1], 0, out=x[0]) for x in parts]]  # fmt: skip
            self._known[size] = min(map(self.seconds, ways))
        return self._known[size]

    def kernels(self, compiled: Compiled) -> float:
        """Return the seconds of all launches of the compiled tasks together."""
        assert compiled.scratch <= self.scratch.numel(), compiled.scratch
        at, runs = self.pool.data_ptr(), []
        own = sum(dict(itertools.chain(*compiled.tiles)).values())  # intermediate tiles included
        for _ in range(self.sets(own)):
            places: dict[Any, int] = {}
            for key, count in itertools.chain(*compiled.tiles):
                if key not in places:
                    places[key], at = at, at + -(-count // 512) * 512
            assert at < self.pool.data_ptr() + 2 * self.pool.numel()
            tiles = [[places[key] for key, _ in task] for task in compiled.tiles]
            runs.append([self._launch(encoded, tiles[number]) for number, encoded in compiled.launches])
        return self.seconds([lambda one=one: [launch() for launch in one] for one in runs])  # type: ignore[misc]

    def _launch(self, encoded: Any, tiles: list[int]) -> Callable[[], None]:
        cubin, name, shared, warps, _, grid, parameters = encoded
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._need(self.driver.cuModuleLoadData(ctypes.byref(module), cubin))
        self._need(self.driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        if shared > 48 << 10:
            self._need(self.driver.cuFuncSetAttribute(function, 8, shared))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        values = [self._value(kind, value, tiles) for kind, value in parameters]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [size for _, size in grid]

        def run(_: Any = values) -> None:
            stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
            self._need(self.driver.cuLaunchKernel(function, *sizes, 32 * warps, 1, 1, shared, stream, pointers, None))

        return run

    def _value(self, kind: int, value: Any, tiles: list[int]) -> Any:
        """Return the C value of a parameter of an encoded launch; `encode` defines the kinds. Slots are 1."""
        kinds = {2: ctypes.c_int32, 3: ctypes.c_int64, 4: ctypes.c_float}
        if kind in kinds:
            return kinds[kind](value)
        if kind in (0, 1):
            return ctypes.c_uint64(tiles[value] if kind == 0 else self.scratch.data_ptr() + value)
        return ctypes.c_float(1) if kind == 5 else ctypes.c_int64(1)

    @staticmethod
    def _need(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver error {code}")


def compare(every: Iterator[Case], only: str, search: bool = False) -> None:
    """Print the times of the cases whose names contain `only`. search: also time other block sizes."""
    some = [case for case in every if only in case.name]
    jobs: list[tuple[list[Task], BlockSizes | None]] = []
    for case in some:
        jobs += [([case.task], None), (case.rules, None)]
        jobs += [([case.task], cut) for cut in other_cuts(case.task)] if search else []
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # before this process uses the GPU
        results = iter(list(pool.map(compiled, jobs, chunksize=2)))
    clock = Clock()
    print(clock.torch.cuda.get_device_name(0))
    print(f"{'group':74}      MB  copy us  generated  GB/s  share  rules us  share")
    for case in some:
        size, copy, ours, rules = case.bytes, clock.copy(case.bytes), next(results), next(results)
        assert isinstance(ours, Compiled), ours
        seconds = clock.kernels(ours)
        print(f"{case.name:74} {size / 1e6:7.1f} {copy * 1e6:8.1f} {seconds * 1e6:10.1f} {size / seconds / 1e9:5.0f}"
              f" {copy / seconds:6.2f}", end=" ")  # fmt: skip
        text = f"{rules}"
        if isinstance(rules, Compiled):
            other = clock.kernels(rules)
            text = f"{other * 1e6:9.1f} {copy / other:6.2f}  {' + '.join(task.kernel for task in case.rules)}"
        print(text, *(f"and in {name}" for name in case.within))
        if search:
            timed = [(clock.kernels(result), cut) for cut in other_cuts(case.task)
                     if isinstance(result := next(results), Compiled)]  # fmt: skip
            for seconds, cut in sorted(timed, key=lambda of: of[0])[:8]:
                print(f"    {seconds * 1e6:8.2f} us, share {copy / seconds:.3f}: {cut}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    one = parts.add_parser("step")
    one.add_argument("config")
    one.add_argument("--alpha", type=float, default=1.0)
    one.add_argument("--inference", action="store_true")
    one.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    of_layer = parts.add_parser("layer")
    of_layer.add_argument("--work", default="encoder", choices=("encoder", "decoder", "mha"))
    of_layer.add_argument("--phase", default="forward", choices=("forward", "backward"))
    of_layer.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    two = parts.add_parser("found")
    two.add_argument("--only", default="", help="groups with this in their names, such as gpt2")
    two.add_argument("--search", action="store_true", help="try other block sizes")
    three = parts.add_parser("single")
    three.add_argument("--only", default="", help="operators with this in their names, such as layer_norm")
    o = vars(parser.parse_args())
    what = o.pop("what")
    if what == "found":
        return compare(cases(), o["only"], o["search"])
    if what == "single":
        return compare(single_cases(), o["only"])
    return (step if what == "step" else layer)(o)


if __name__ == "__main__":
    main()
