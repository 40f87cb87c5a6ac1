"""Greedy fusion: its groups, unchanged results of training, and training without a compiler."""

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from pairwise import pairwise

import nntile_py as nt
from nntile_py import models
from nntile_py.errors import ConfigError, TaskError, say_once
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.greedy_fusion import groups
from nntile_py.graph.step import StepSpec
from nntile_py.tasks import LayerNormGrad, Tensor, activation, add, dropout, layer_norm, linear, multiply
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.scalar import native
from nntile_py.testing import SIZES, Case
from nntile_py.tiles import Tiling

FOUND, RULES = Fusion(), Fusion(found=False)
HEADS = {"layers": 2, "embed": 24, "heads": 4}
WORDS = {**HEADS, "vocab": 61, "positions": 32}
NAIVE = {"attention": "naive", "attention_dropout": 0.1}
MODELS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: models.TransformerEncoder(models.TransformerEncoderConfig(**HEADS, dropout=0.1, **NAIVE)),
    "gpt2": lambda: models.GPT2(models.GPT2Config(**WORDS, dropout=0.1)),
    "bert": lambda: models.BERT(models.BERTConfig(**WORDS, dropout=0.1, **NAIVE)),
    "albert": lambda: models.ALBERT(models.ALBERTConfig(**WORDS, dropout=0.1)),
    "llama": lambda: models.Llama(models.LlamaConfig(**WORDS, kv_heads=2, ffn=40)),
}


def found(model: Any, fusion: Fusion = FOUND, **tiles: int) -> Counter[str]:
    graph = StepSpec(model, 4, 16, Tiling(tiles), fusion=fusion).graphs.graph
    return Counter(op.kind for op in groups(graph))


PAPER = {  # of a layer; see docs/how/fusion.md
    "softmax_dropout": 1,  # SM
    "dropout_add_layer_norm": 2,  # DRLN, BDRLN
    "layer_norm_grad_dropout_sum": 2,  # BSB, BLNRD, EBSB, BAOB
    "dropout_activation_grad_sum": 1,  # BDRB
    "dropout_softmax_grad": 1,  # BS
}


def test_groups_of_the_paper() -> None:
    """On the encoder layer of Ivanov et al. 2021, two of them here."""
    assert found(MODELS["encoder"]()) == {name: 2 * count for name, count in PAPER.items()}


def test_groups_where_rows_are_cut() -> None:
    """A norm over a cut axis is several tasks and in no group; rules fuse operators into its gradient."""
    graph = StepSpec(MODELS["encoder"](), 4, 16, Tiling({"embed": 10, "seq": 5})).graphs.graph
    assert Counter(op.kind for op in groups(graph)) == {"dropout_activation_grad_sum": 2, "dropout_add": 4}
    norms = [op for op in graph.ops if isinstance(op, LayerNormGrad)]
    assert len(norms) == 4 and all(norm.dropout and norm.bias for norm in norms)


@pairwise(
    name=list(MODELS),
    tiles=[{}, {"batch": 2, "seq": 8}, {"batch": 3, "embed": 10, "ffn": 20}],
    dtype=["fp32", "bf16"],
)
def test_no_more_tasks_than_the_rules(name: str, tiles: dict[str, int], dtype: str) -> None:
    """In fp32 no more bytes either; in bf16 a product's task may have two kernels with a tensor between them."""
    counts = []
    for fusion in (FOUND, RULES):
        spec = StepSpec(MODELS[name](), 4, 16, Tiling(tiles), precision=dtype, fusion=fusion, optimizer=nt.AdamW())
        lists = spec.step()
        tasks = lists.first.tasks.tasks
        counts.append((len(tasks), sum(a.tile.bytes * len(a.mode) for task in tasks for a in task.accesses)))
    assert counts[0][0] <= counts[1][0] and (dtype == "bf16" or counts[0][1] <= counts[1][1]), counts


def test_activations_that_no_group_has() -> None:
    """In bf16 groups come first; an activation in no group becomes part of the product before it."""
    for dropped, titles in ((0.0, ["Contract + bias + gelu"]), (0.1, ["Contract + bias", "Activation + Dropout"])):
        g = Graph("bf16")
        x = g.named("x", ["batch", "seq", "embed"], [2, 4, 8], "input")
        w, b = g.named("w", ["embed", "ffn"], [8, 16], "param"), g.named("b", ["ffn"], [16], "param")
        y = activation(g, linear(g, x, w, ["batch", "seq", "ffn"], b), "gelu")
        (dropout(g, y, dropped) if dropped else y).kind = "scalar"
        assert [op.title for op in fuse(g, FOUND).ops] == titles


def test_groups_of_other_models() -> None:
    assert found(MODELS["gpt2"]()) == {
        "bias_add_dropout_layer_norm": 1, "dropout_add_layer_norm": 4,  # the positions are a bias
        "layer_norm_grad_add_dropout_sum": 4, "layer_norm_grad_dropout_sum": 1,
    }  # fmt: skip
    assert found(MODELS["llama"]()).keys() >= {"rms_norm_grad_add"}


def chain() -> Graph:
    """A product that is stored and read twice, its activation dropped, added to the product, normalized twice."""
    g = Graph("fp32")
    axes, shape = ["batch", "seq", "embed"], [2, 4, 8]
    a, b = g.named("a", axes, shape, "input"), g.named("b", axes, shape, "input")
    weights = [g.named(f"w{k}", ["embed"], [8], "param") for k in range(4)]
    x = multiply(g, a, b)
    y = add(g, dropout(g, activation(g, x, "gelu"), 0.1), x)
    z = layer_norm(g, layer_norm(g, y, *weights[:2], 1e-5), *weights[2:], 1e-5)
    z.kind = "scalar"
    return g


def test_one_normalization_a_group() -> None:
    g = fuse(chain(), FOUND)
    first, second = g.ops
    assert first.title == "Multiply + Activation + Dropout + Add + LayerNorm" and second.title == "LayerNorm"
    assert [t.axes for t in first.outputs] == [("batch", "seq", "embed")]  # nobody reads the statistics
    naive = fuse(chain(), Fusion.of(False))
    members = naive.ops[:5]
    assert first.elements() == 3 * 64 + 2 * 8 < sum(op.elements() for op in members)
    assert first.flop() == sum(op.flop() for op in members)


@pytest.mark.parametrize(("seq", "expected"), [(16, {"softmax": 2, "softmax_grad": 2}), (8, {})])
def test_a_softmax_without_neighbours(seq: int, expected: dict[str, int]) -> None:
    """A softmax that merges with no neighbour is a group, unless its axis is cut."""
    model = models.TransformerEncoder(models.TransformerEncoderConfig(**HEADS, attention="naive"))
    softmax = {name: count for name, count in found(model, seq=seq).items() if "softmax" in name}
    assert softmax == expected


def test_excluded_groups() -> None:
    without = found(MODELS["encoder"](), Fusion(exclude=("dropout_add_layer_norm",)))
    assert without["dropout_add_layer_norm"] == 0 and without["dropout_add"] == 4
    assert without["softmax_dropout"] == 2
    with pytest.raises(ConfigError, match=r"fusion.exclude: 'softmax' is no group .* allowed: .*softmax_dropout"):
        found(MODELS["encoder"](), Fusion(exclude=("softmax",)))


@pytest.mark.parametrize("wrong", ["softmax_dropout", [1], {"a": 1}, None])
def test_what_is_no_list_of_groups(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"fusion.exclude: got .*; allowed: a list of names"):
        Fusion.of({"exclude": wrong})


def test_all_and_none_are_of_found_too() -> None:
    assert Fusion.of(True).found and Fusion.of(True) == Fusion() and not Fusion.of(False).found
    assert Fusion.of({"exclude": ["a"]}) == Fusion(found=True, exclude=("a",)) == Fusion(exclude=("a",))
    assert Fusion.of({"found": False}) == RULES == Fusion().changed(found=False)


def losses(model: Any, fusion: Any, tiles: dict[str, int], policy: str, steps: int = 3) -> list[float]:
    trainer = nt.Trainer(model, batch=4, seq=16, tiles=tiles, fusion=fusion, accumulate=policy, seed=3)
    return [float(trainer.step(trainer.spec.random_inputs(4, step))) for step in range(steps)]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("tiles", "policy"),
    [({}, "chain"), ({"batch": 2, "heads": 2, "ffn": 20}, "redux"), ({"batch": 3, "seq": 5, "embed": 10}, "tree")],
)
@pytest.mark.parametrize("name", MODELS)
def test_training_stays_the_same(runtime: nt.Runtime, name: str, tiles: dict[str, int], policy: str) -> None:
    """Dropout has the same random numbers: losses of three steps differ only by rounding."""
    if name == "llama" and "heads" in tiles:
        tiles = {**tiles, "heads": 4}
    naive = losses(MODELS[name](), False, tiles, policy)
    for fusion in (True, {"found": False}):
        assert losses(MODELS[name](), fusion, tiles, policy) == pytest.approx(naive, rel=2e-6)
    assert len(set(naive)) == 3


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that fails, and nothing compiled before."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (native.command, native.why_not, native.address, native._version)
    for cached in caches:
        cached.cache_clear()
        monkeypatch.setattr(native, cached.__name__, cached)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the rules apply, and one note says why; bf16 runs on GPUs, which need no compiler."""
    say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"the rules of `found: false` are used, .* false failed on a generated"):
        left = fuse(chain(), FOUND)
    assert [op.title for op in left.ops] == [op.title for op in fuse(chain(), RULES).ops]
    assert not groups(left)
    half = Graph("bf16")
    x = half.named("x", ["batch", "embed"], [2, 8], "input")
    activation(half, add(half, x, x), "relu").kind = "scalar"
    assert [op.title for op in fuse(half, FOUND).ops] == ["Add + Activation"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.command.cache_clear()
    with pytest.raises(native.NoCompiler, match="there is no C\\+\\+ compiler no-such-compiler"):
        native.address("")
    native.command.cache_clear()
    native.why_not.cache_clear()
    native._version.cache_clear()


def test_kernels_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a cache folder on a file system that is mounted noexec."""

    def fails(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    for cached in (native.why_not, native.address):
        cached.cache_clear()
    monkeypatch.setattr(native.ctypes, "CDLL", fails)
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="the rules of .* are used, .* could not be compiled or loaded: .*map segment"):
        assert not groups(fuse(chain(), FOUND))
    native.why_not.cache_clear()


@pytest.mark.parametrize("wanted", [True, False])
def test_the_command_line_without_a_compiler(wanted: bool, tmp_path: Path) -> None:
    """One line on stderr, and none where the rules are asked for."""
    config = Path(__file__).parents[1] / "experiments" / "bert_tiny.yaml"
    command = [sys.executable, "-m", "nntile_py.cli", "plan", config, "--set", f"fusion.found={str(wanted).lower()}"]
    done = forks.run(
        command, env=os.environ | {"CXX": "no-such-compiler"}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    told = (
        "fusion: the rules of `found: false` are used, which are some percent slower, as there is no C++ compiler "
        "no-such-compiler; get one (Debian: apt-get install g++), or set CXX\n"
    )
    assert done.stderr == (told if wanted else "") and "LayerNorm" in done.stdout


def group_of(name: str, dtype: str = "fp32") -> Generated:
    from operators import ROWS

    case = Case(SIZES, dtype)
    ROWS[name](case)
    (made,) = case.graph.ops
    assert isinstance(made, Generated)
    return made


def test_a_kernel_that_does_not_compile(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str) -> int:
        raise native.NoCompiler("c++ failed")

    assert native.why_not() is None  # the small one that is asked first
    monkeypatch.setattr(native, "address", fails)
    with pytest.raises(TaskError, match=r"c\+\+ failed; allowed without a compiler: fusion.found: false"):
        losses(MODELS["encoder"](), True, {}, "chain")


def compile_it(source: str, folder: str, results: Any) -> None:
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    results.put((str(native.path_of(source)), native.address(source) > 0))


@pytest.mark.long
def test_two_processes_compile_the_same(tmp_path: Path) -> None:
    """One library stays, and nothing else."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    source = group_of("Generated RMSNorm").kernel.source
    both = [context.Process(target=compile_it, args=(source, str(tmp_path), results)) for _ in range(2)]
    for process in both:
        process.start()
    told = {results.get(timeout=120) for _ in both}
    for process in both:
        process.join()
    ((path, works),) = told
    assert works and [Path(path)] == [*(tmp_path / "nntile_py" / "kernels").iterdir()]


def test_layers_share_a_kernel() -> None:
    """The kernel's name depends on dtypes, but not on sizes and keys of dropout."""
    spec = StepSpec(MODELS["encoder"](), 4, 16, fusion=FOUND)
    made = Counter(op.kernel.name for op in groups(spec.graphs.graph))
    assert sorted(made.values()) == [2, 2, 2, 4, 4]
    assert group_of("Generated RMSNorm").kernel.source != group_of("Generated RMSNorm", "fp64").kernel.source


def test_operators_that_cannot_be_one() -> None:
    from nntile_py.tasks import Activation, Softmax
    from nntile_py.tasks.generated import NotFusible
    from nntile_py.tasks.mask import Mask

    x, y = (Tensor(name, ["seq", "key"], [4, 4], "fp32") for name in "xy")
    z = Tensor("z", ["key", "seq"], [4, 4], "fp32")
    first, second = Softmax(x, y, Mask()), Softmax(y, x, Mask())
    with pytest.raises(NotFusible, match="only one may reduce within rows"):
        Generated([first, second], [x])
    with pytest.raises(NotFusible, match="their spaces differ"):
        Generated([Activation(x, y, "relu"), Activation(z, z, "relu")], [y, z])
    assert np.isfinite(Generated([Activation(x, y, "relu"), second], [x]).flop())
