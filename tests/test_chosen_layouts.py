"""The search of layouts as pure data: copies that several read, gains within noise, weights, one who measures."""

import threading
from pathlib import Path

import numpy as np
import pytest
from test_layouts import MODELS, OF, chain, measured

from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import arrange, search
from nntile_py.graph.step import StepSpec
from nntile_py.graph.timings import Timing, opened
from nntile_py.tasks import contract
from nntile_py.tasks.contract import Contract
from nntile_py.tiles import Tiling


@pytest.mark.parametrize(("readers", "transposes"), [(1, 0), (2, 1), (3, 1)])
def test_a_copy_is_paid_once(readers: int, transposes: int) -> None:
    """Each product gains 3 where x is turned, which takes 5: too much for one of them."""
    g = Graph()
    x = g.named("x", ["batch", "seq", "embed"], [2, 4, 6], "input")
    for k in range(readers):
        weight = g.named(f"w{k}", ["embed", "ffn"], [6, 8], "param")
        contract(g, x, weight, ["batch", "seq", "ffn"]).kind = "scalar"

    def of(operator: str, layout: str) -> float:
        return 5.0 if operator.startswith("Transpose") else 7.0 if layout.startswith("K M") else 10.0

    chosen = arrange(g, measured(g, of), Tiling())
    assert [op.kind for op in g.ops].count("Transpose") == transposes
    assert (chosen.seconds, chosen.default) == (5 * transposes + (7 if transposes else 10) * readers, 10 * readers)


@pytest.mark.parametrize(("gain", "noise", "changes"), [(0.05, 0.1, False), (0.3, 0.1, True), (0.05, 0.0, True)])
def test_a_gain_within_noise_is_none(gain: float, noise: float, changes: bool) -> None:
    g = chain()

    def of(operator: str, layout: str) -> float:
        return 1.0 if layout.endswith("M N") or "Contract" not in operator else 1.0 - gain

    timings = measured(g, of, noise)
    before = [op.output.axes for op in g.ops]
    least = search(g, timings, Tiling(), careful=False)
    chosen = arrange(g, timings, Tiling())
    assert least.seconds < chosen.default and ([op.output.axes for op in g.ops] != before) == changes
    assert chosen.seconds == (least.seconds if changes else chosen.default)


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.2)])
def test_searched_is_never_slower(seed: int, noise: float) -> None:
    """By any times that there may be, of a step forward and backward."""
    spec = StepSpec(MODELS["encoder"](), 2, 8, fusion=Fusion(qkv=False))
    rng, g = np.random.default_rng(seed), spec.graphs.graph
    timings = measured(g, lambda operator, layout: 1e-3 * float(rng.random()), noise)
    chosen, least = (search(g, timings, Tiling(), careful=careful) for careful in (True, False))
    assert least.seconds <= chosen.seconds <= chosen.default
    changed = [row for row in chosen.rows if row.layout and row.layout != row.default]
    gain = sum(row.default_seconds - row.seconds - row.transposes for row in chosen.rows)
    assert changed and gain >= noise * sum(row.seconds for row in changed)


def test_weights_are_kept_as_products_want_them() -> None:
    """Forward and dX want the weight turned; its gradient is made in the same order, and nothing is transposed."""
    spec = StepSpec(MODELS["gpt2"](), 2, 8)

    def of(operator: str, layout: str) -> float:
        if operator.startswith("Transpose"):
            return 9.0
        forward = "+ bias" in operator and "gradient" not in operator
        fits = "Contract" in operator and layout.split(" -> ")[0].split(", ")[1] == ("N K" if forward else "K N")
        return 1.0 if fits else 2.0

    g = spec.graphs.graph
    timings = measured(g, of)
    turned = arrange(g, timings, Tiling())
    params = [param for param in g.params.values() if param.order]
    assert params and turned.seconds < turned.default and not any(op.kind == "Transpose" for op in g.ops)
    for param in params:
        assert g.tensors[param.tensor.name] is param.tensor and g.grads[param.tensor].axes == param.tensor.axes
        readers = [op for op in g.ops if param.tensor in op.inputs]
        assert len(readers) == 2 and all(isinstance(op, Contract) for op in readers)
    tied = g.tensors["transformer.wte.weight"]  # the embedding reads it, too
    assert tied.axes == ("vocab", "embed") and not g.params[tied].order


@pytest.mark.filterwarnings("ignore:.*waiting for another process that measures into it")
def test_one_measures_at_a_time(tmp_path: Path) -> None:
    """Who waits finds what the other has measured."""
    path = tmp_path / "timings.jsonl"
    first, second = (opened(OF, path, new=True) for _ in range(2))
    found: list[float] = []

    def wait() -> None:
        with second.exclusive():
            found.append(second.least("a"))

    with first.exclusive():
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not found
        first.add(Timing("a", "M N", 2.0))
    thread.join(10)
    assert found == [2.0] and len(path.read_text().splitlines()) == 2
