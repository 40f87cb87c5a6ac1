"""On a CUDA device: forward passes and training steps as CUDA graphs give the results of their separate tasks."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt
from nntile_py import _core
from nntile_py.analysis.workloads import Phase, build
from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.host_copy import HostCopy
from nntile_py.execution.program import Store
from nntile_py.graph.step import StepSpec
from nntile_py.profiling.operator_timer import write_random
from nntile_py.profiling.recorder import run_steps
from nntile_py.system.folders import installed
from nntile_py.testing import error
from nntile_py.training.repeated_steps import forward_passes

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

CONFIG = nt.models.BERTConfig(layers=3, embed=128, heads=4, vocab=500, positions=256, head="pooler")
BARE = CONFIG.model_copy(update={"head": "none"})
# Of bits that differ where products have other numbers of rows; but for fp32 that may round an operand elsewhere
# (tf32 on an H200: 2.1e-5 and 5.7e-5; tf32 rounds to 4.9e-4).
LIMIT = {"fp32": 1e-5, "tf32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
Texts = list[list[int]]
Array = np.ndarray[Any, Any]


@pytest.fixture
def cuda() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=0, cuda=1) as running:
        yield running


def texts(*lengths: int, seed: int = 0) -> Texts:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, n).tolist() for n in lengths]


# The first two texts have a bin each, of 64 and 256; then two bins of 512 with several texts, less and more filled.
PASSES = [texts(38), texts(150, seed=1), texts(200, 130, 9, seed=2), texts(256, 200, 1, 40, seed=3)]


def served(encoder: nt.Encoder) -> list[Served]:
    assert encoder._bound_model
    return [program.served for program in encoder._bound_model.programs.values()]


def same(got: Any, want: Any, dtype: str) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        assert error(a, b) <= LIMIT[dtype]


@pytest.mark.parametrize("output", ["hidden", "pooled"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_as_the_tasks_one_by_one(cuda: nt.Runtime, dtype: str, output: str, folder: Path) -> None:
    as_one_by_one(CONFIG, output, dtype, folder)


@pytest.mark.parametrize("form", ["varlen", "cudnn"])
def test_ragged_kernels(cuda: nt.Runtime, form: str, folder: Path) -> None:
    as_one_by_one(CONFIG.changed(attention=form), "hidden", "bf16", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For choices of kernels."""
    return tmp_path_factory.mktemp("choices")


def choose_alike(folder: Path) -> None:
    """Graphs use the kernels that were chosen for launches; other tf32 kernels would differ by rounding."""
    for file in folder.iterdir():
        lines = [line for line in file.read_text().splitlines() if not line.startswith("in a graph, ")]
        file.write_text("".join(f"{line}\nin a graph, {line}\n" for line in lines))


def as_one_by_one(config: Any, output: str, dtype: str, folder: Path) -> None:
    """Launched, captured, replayed; bins of several sizes, more and less filled, in turns."""
    _core.keep_choices(str(folder))  # until the next runtime starts
    model = nt.models.BERT(config, seed=1)
    options: dict[str, Any] = {"precision": dtype, "batch_tokens": 512}
    many = [row for given in PASSES for row in given] * 3  # passes in flight together
    with nt.Encoder(model, output, captured=False, **options) as encoder:
        want, want_many = [encoder(given) for given in PASSES], encoder(many)
        assert all(one.graphs == 0 and one.reason == "captured: false" for one in served(encoder))
    choose_alike(folder)
    with nt.Encoder(model, output, captured=True, **options) as encoder:
        for _ in range(4):
            for given, expected in zip(PASSES, want, strict=True):
                same(encoder(given), expected, dtype)
        found = served(encoder)
        assert len(found) == 3 and all(one.captured and one.graphs for one in found)
        got = encoder(many)
        same(got, want_many, dtype)
        if dtype != "tf32":  # whose kernels may round operands otherwise in bins of another size
            same(got, [row for given in want for row in given] * 3, dtype)


@pytest.mark.parametrize("output", ["hidden", "pooled"])
@pytest.mark.parametrize(("dtype", "limit"), [("tf32", 4e-3), ("bf16", 3e-2), ("fp16", 4e-3)])
def test_as_in_fp32(cuda: nt.Runtime, dtype: str, limit: float, output: str) -> None:
    """With the kernels that graphs choose. What is served in 16 bits comes as float32."""
    model = nt.models.BERT(CONFIG, seed=1)
    with nt.Encoder(model, output) as exact, nt.Encoder(model, output, precision=dtype) as encoder:
        for given in (*PASSES, [row for one in PASSES for row in one] * 3):  # the last in several bins
            for got, want in zip(encoder(given), exact(given), strict=True):
                assert got.dtype == np.float32 and error(got, want) < limit


def test_one_graph_serves_all_fillings(cuda: nt.Runtime) -> None:
    """Bins of 64 with any number of tokens: one graph, captured once."""
    model = nt.models.BERT(CONFIG, seed=1)
    with nt.Encoder(model, captured=True) as encoder:
        for n in range(33, 65):
            encoder(texts(n))
        assert [one.graphs for one in served(encoder)] == [1]


def test_what_is_faster_is_chosen(cuda: nt.Runtime) -> None:
    model = nt.models.BERT(CONFIG, seed=1)
    with nt.Encoder(model, captured=False) as one, nt.Encoder(model) as other:
        same(other(PASSES[0]), one(PASSES[0]), "fp32")
        (chosen,) = served(other)
        assert chosen.captured is not None and chosen.graphs
        assert chosen.captured is (chosen.reason == ""), chosen.reason


def test_two_encoders_and_a_trainer(cuda: nt.Runtime) -> None:
    """Weights that stay on the device do not prevent other work."""
    models = [nt.models.BERT(CONFIG, seed=seed) for seed in (1, 2)]
    want = []
    for model in models:
        with nt.Encoder(model, captured=False) as encoder:
            want.append([encoder(given) for given in PASSES])
    trained = nt.models.BERT(CONFIG.model_copy(update={"head": "masked_lm"}), seed=3)
    trainer = nt.Trainer(trained, 2, 64, precision="fp32")
    ids = np.array(texts(64, 64))
    with nt.Encoder(models[0], captured=True) as one, nt.Encoder(models[1], captured=True) as other:
        for _ in range(3):
            pending = trainer.submit(ids, ids)
            for given, *expected in zip(PASSES, *want, strict=True):
                same(one(given), expected[0], "fp32")
                same(other(given), expected[1], "fp32")
            assert np.isfinite(pending.result().loss)
        one.close()
        same(other(PASSES[0]), want[1][0], "fp32")
    trainer.close()


def forward(store: Store, captured: bool) -> ForwardProgram:
    made = StepSpec(nt.models.BERT(BARE), 2, 64).outputs("hidden")
    give(made, store, 1)
    return ForwardProgram(made, store, captured=captured)


def start(program: ForwardProgram, given: Mapping[str, Any]) -> HostCopy:
    """Submit a pass; returns the copy of its output that is under way."""
    program.write(program.check(given))
    program.run({})
    return program.start_copy("hidden")


def give(made: Any, store: Store, seed: int) -> None:
    weights = nt.models.BERT(BARE, seed=seed).weights
    for param in made.params:
        store.write(made.forward, param.tensor, param.value(weights))


@pytest.mark.parametrize("rounds", [1, 3])
def test_weights_that_change(cuda: nt.Runtime, rounds: int) -> None:
    """A write of weights waits for earlier passes, and later passes read the new values; padded sequences."""
    made, given = StepSpec(nt.models.BERT(BARE), 2, 64).outputs("hidden"), {"input_ids": np.array(texts(64, 64))}
    stores = Store(), Store()
    ways = [forward(store, captured) for store, captured in zip(stores, (False, True), strict=True)]
    for seed in (1, 2, 3):
        found = []
        for store, way in zip(stores, ways, strict=True):
            give(made, store, seed)
            copies = [start(way, given) for _ in range(rounds)]
            found.append([way.finish_copy("hidden", copied) for copied in copies][-1])
        same([found[1]], [found[0]], "fp32")
    assert ways[1].served.captured and ways[1].served.graphs == (3 if rounds > 1 else 0)


def test_weights_that_are_zeroed(cuda: nt.Runtime) -> None:
    """Tasks that write them run, though their graph let go of them while nothing else was submitted."""
    given, store = {"input_ids": np.array(texts(64, 64))}, Store()
    way = forward(store, True)
    for _ in range(3):
        way.finish_copy("hidden", start(way, given))
    assert way.served.graphs == 1
    made = StepSpec(nt.models.BERT(BARE), 2, 64).outputs("hidden")
    for param in made.params:
        store.zero(made.forward, param.tensor)
        nt.Runtime.wait()
    assert not way.finish_copy("hidden", start(way, given)).any()


def outputs_of(phase: Phase, seeds: list[int], *, captured: bool) -> list[list[Array]]:
    """What a layer with dropout makes, on the same inputs, for each seed."""
    gpu, attention = ["precision=bf16", "scheduler=gpu"], ["model.attention=segments", "model.attention_dropout=0.1"]
    options = [*gpu, *attention, "tiles={}", "train.seq=64"]
    config = load(installed("experiments") / "encoder_layer.yaml", options)
    ((graph, low),) = build(config, "encoder", phase).graphs
    store, made = Store(), [tensor for op in graph.ops for tensor in op.outputs if tensor.kind != "temp"]
    write_random(low, store, [t for t in graph.tensors.values() if t.kind in ("input", "param")])
    program, found = Served(low.tasks, store, captured=captured), []
    for seed in seeds:
        program.run({slot: float(seed) for slot in program.slots})
        found.append([store.read(low, tensor) for tensor in made])
    assert program.graphs == captured and not (captured and program.reason), program.reason
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_numbers_that_differ_from_run_to_run(cuda: nt.Runtime, phase: Phase) -> None:
    """One graph serves all seeds of dropout."""
    seeds = [1, 1, 2, 3, 1, 2**31 - 1, 3]
    got = outputs_of(phase, seeds, captured=True)
    for ours, want in zip(got, outputs_of(phase, seeds, captured=False), strict=True):
        same(ours, want, "bf16")
    for others in ([1, 4], [3, 6]):  # of the same seed
        same(got[others[0]], got[others[1]], "fp32")
    assert max(error(a, b) for a, b in zip(got[1], got[2], strict=True)) > 0.01


def losses_of(factors: list[float], *, captured: bool) -> list[float]:
    """Return the results of a pass with a factor of the loss that changes from run to run, for these factors."""
    spec = StepSpec(nt.models.BERT(CONFIG.model_copy(update={"head": "masked_lm"}), seed=1), 2, 64)
    inputs, found = spec.random_inputs(2, 0, 1.0, 10, training=False), list[float]()
    submit = Served.run
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel in C++ that takes the number there is no graph
        _, run = forward_passes(spec, inputs, captured)
        for factor in factors:
            given = lambda self, slots, by=factor: submit(self, {name: by * value for name, value in slots.items()})  # noqa: E731
            patch.setattr(Served, "run", given)
            found += run(1)
    return found


def test_a_pass_with_means(cuda: nt.Runtime) -> None:
    """As a graph or as separate tasks, each run uses its own factor."""
    factors = [1.0, 1.0, 1.0, 2.0, 1.0, 0.5, 2.0]
    want = losses_of(factors, captured=False)
    assert want == pytest.approx([factor * want[0] for factor in factors], rel=1e-5)
    assert losses_of(factors, captured=True) == pytest.approx(want, rel=1e-3)


def test_too_little_memory() -> None:
    """Graphs may take a quarter of the memory for tiles."""
    model = nt.models.BERT(CONFIG, seed=1)
    with nt.Runtime(cpus=0, cuda=1, cuda_memory=8 << 20):
        with nt.Encoder(model, captured=False, batch_tokens=64) as encoder:
            want = encoder(PASSES[0])
        with nt.Encoder(model, batch_tokens=64) as encoder:
            same(encoder(PASSES[0]), want, "fp32")
            assert "no room in 2 MiB" in served(encoder)[0].reason or "makes room" in served(encoder)[0].reason
        with nt.Encoder(model, captured=True, batch_tokens=64) as encoder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                same(encoder(PASSES[0]), want, "fp32")
            except ConfigError as refused:  # seen before it runs
                assert "makes room" in str(refused)


def test_runtimes_that_stop() -> None:
    """An encoder outlives the runtime that holds its weights, and continues with the next runtime."""
    model = nt.models.BERT(CONFIG, seed=1)
    with nt.Runtime(cpus=0, cuda=1), nt.Encoder(model, captured=False) as encoder:
        want = encoder(PASSES[0])
    encoder = nt.Encoder(model, captured=True)
    for _ in range(2):
        with nt.Runtime(cpus=0, cuda=1):
            for _ in range(3):
                same(encoder(PASSES[0]), want, "fp32")
    encoder.close()


STEPS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "micro-batches": {"tiles": {"batch": 2, "seq": 100, "embed": 100}, "grad_accumulation": 2},
    "fp8": {"precision": "fp8", "tiles": {"batch": 4}},
    "fp16": {"precision": "fp16", "clip_grad_norm": 0.5},
    "tf32": {"precision": "tf32", "attention": "naive"},
    "SGD": {"precision": "bf16", "optimizer": nt.SGD(lr=0.1, momentum=0.9)},
    "Muon": {"precision": "bf16", "optimizer": nt.Muon(lr=0.01)},
    "tree": {"precision": "bf16", "tiles": {"batch": 2}, "accumulate": "tree"},
}


@pytest.mark.parametrize("how", STEPS)
def test_training_steps_have_the_same_bits(cuda: nt.Runtime, how: str) -> None:
    """Dropout, a new learning rate at each step, and evaluations between steps."""
    config = nt.models.GPT2Config(layers=4, embed=256, heads=8, vocab=1000, positions=256, dropout=0.1)
    ids = np.random.default_rng(0).integers(0, 1000, (8, 256))
    found = []
    for captured in (False, True):
        micro = STEPS[how].get("grad_accumulation", 1)
        trainer = nt.Trainer(nt.models.GPT2(config, seed=0), 8 // micro, 256, captured=captured, **STEPS[how])
        losses = []
        for k in range(6):
            rows = np.roll(ids, k, 1)
            losses.append(trainer.step(rows, rows, lr=1e-3 / (k + 1)))
            if k % 2:
                losses.append(trainer.evaluate(ids[: 8 // micro], ids[: 8 // micro]))
        found.append([losses, {name: weight.tobytes() for name, weight in trainer.state_dict().items()}])
        (step,) = trainer._programs.steps.values()
        made = [one for one in (step.first, step.more, step.update) if one]
        assert [(one.graphs, one.reason) for one in made] == len(made) * [
            (1, "") if captured else (0, "captured: false")
        ]
        trainer.close()
    assert found[0] == found[1]


def test_a_profile_has_the_times_of_the_stream(cuda: nt.Runtime) -> None:
    """Tasks of a GPU do not overlap, although StarPU regards a task as ended before its kernels end."""
    model = nt.models.GPT2(nt.models.GPT2Config(layers=4, embed=512, heads=8, vocab=2048, positions=256), seed=0)
    trainer = nt.Trainer(model, 8, 256, precision="bf16", captured=False)
    trace = run_steps(trainer, 5, 3)
    trainer.close()
    order = np.argsort(trace.start)
    start, end = trace.start[order], trace.end[order]
    assert len(trace) >= 10 and (end > start).all() and (start[1:] >= end[:-1] - 1000).all()  # ns
    assert (trace.start >= trace.fetched).all() and (trace.released >= trace.end).all()
    flop = sum(trace.info_of(task).flop for task in range(len(trace)))
    assert 0.02 < flop / ((end - start).sum() * 1e-9) / 1e15 < 2
    assert (trace.submit[order][1:] < end[:-1]).any()  # submitted while an earlier task ran
