"""The Gantt: its area is work, its colours are of kinds."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from traces import US, independent, info, scheduled

from nntile_py.profiling import gantt
from nntile_py.tiles.dependencies import TileUse


@pytest.mark.parametrize("count", [1_000, 1_500, 20_000])
def test_the_area_of_a_gantts_row_is_its_busy_share(count: int) -> None:
    """Many short tasks that fill 30 % of the time: no column is more than half full, and the row is not blank."""
    rng = np.random.default_rng(0)
    infos = [info(f"h0.{('Contract', 'LayerNorm', 'Attention')[k % 3]}", [TileUse(k, "W")]) for k in range(count)]
    trace = scheduled(infos, rng.uniform(5, 15, count).tolist(), workers=1, overhead=23.3)
    drawn = gantt.gantt(trace)
    (bars,) = drawn.rows
    t0, t1 = trace.window
    assert 0.28 < (trace.end - trace.start).sum() / (t1 - t0) < 0.32
    for kind, name in enumerate(drawn.kinds):
        mine = [k for k in range(count) if gantt._kind(trace.info_of(k)) == name]
        true = (trace.end - trace.start)[mine].sum() / (t1 - t0)
        assert sum(bar.right - bar.left for bar in bars if bar.kind == kind) == pytest.approx(true, abs=3e-3)
    area = sum(bar.right - bar.left for bar in bars)
    assert area == pytest.approx((trace.end - trace.start).sum() / (t1 - t0), abs=0.01 * 0.3)
    assert all(a.right <= b.left + 1e-9 for a, b in pairwise(bars)) and gantt.gantt(trace) == drawn


def test_an_idle_stretch_of_a_gantt_stays_white() -> None:
    trace = scheduled(independent(4_000), [10] * 4_000, workers=1, overhead=10)
    for column in ("pop", "fetch", "fetched", "start", "end", "released"):
        getattr(trace, column)[2_000:] += 40_000 * US
    (bars,) = gantt.gantt(trace).rows
    assert not any(bar.right > 0.34 and bar.left < 0.66 for bar in bars)


def test_a_kind_has_one_colour_in_all_gantts() -> None:
    """Whatever its rank; and no two kinds of a picture have the same."""
    kinds = ["Contract", "LayerNorm", "Attention", "Mine", "Own", "Activation", "BiasAdd", "CrossEntropy", "Transpose"]
    of = []
    for order in (kinds, kinds[::-1]):
        work = [info(f"h0.{kind}", [TileUse(k, "W")]) for k, kind in enumerate(order)]
        drawn = gantt.gantt(scheduled(work, [100 - k for k in range(len(work))]))
        assert drawn.kinds == [f"{kind} forward" for kind in order]
        assert len(set(drawn.colours)) == len(kinds)
        of.append(dict(zip(drawn.kinds, drawn.colours, strict=True)))
    assert of[0] == of[1] and of[0]["Contract forward"] == gantt.fixed_colours()["Contract forward"]
    work = [info(f"h0.{kind}", [TileUse(k, "W")]) for k, kind in enumerate([*kinds, "Add", "Softmax"])]
    drawn = gantt.gantt(scheduled(work, [100 - k for k in range(len(work))]))
    assert drawn.kinds[-1] == "other" and drawn.colours[-1] == gantt.OTHER and len(drawn.kinds) == 9
    assert {"AdamW", "SGD"} < gantt.fixed_colours().keys()
    every = [*gantt.fixed_colours().values(), *gantt.SPARE, gantt.OTHER]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("own", [["Rotary backward"], ["Rotary backward", "Rotary forward", "RMSNorm forward"]])
def test_kinds_of_a_step_have_different_colours(own: list[str]) -> None:
    """Kinds with a spare colour differ from all others, as do those of a usual step from each other."""
    kinds = [f"{name} backward" for name in ("AttentionGrad", "Contract", "Generated", "LayerNormGrad")]
    kinds += [f"{name} forward" for name in ("Attention", "Contract", "Generated", "LayerNorm")]
    colours = gantt._colours([*kinds, *own, "AdamW"])
    assert min(gantt.difference(a, b) for a, b in combinations(colours, 2)) > 100
    assert gantt.difference("#000000", "#ffffff") > 700 and gantt.difference("#112233", "#112233") == 0
