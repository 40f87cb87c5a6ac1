"""The fusion pass: the operators that remain of a GPT-2 of two layers without dropout, and their fused operations.

Of groups that are found see test_found.py."""

from collections import Counter
from typing import Any

import pytest
from pairwise import pairwise

from nntile_py import tasks as ops
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.graph.passes.rewriter import Rewriter, Rule
from nntile_py.graph.step import StepSpec
from nntile_py.models import GPT2, GPT2Config, TransformerDecoder, TransformerDecoderConfig
from nntile_py.tasks import Tensor, activation, add, cross_entropy, dropout, layer_norm, linear, rms_norm, transpose
from nntile_py.tasks.adamw import AdamW
from nntile_py.tiles import Tiling

CONFIG = GPT2Config(layers=2, embed=24, heads=4, vocab=61, positions=32)

RULES = Fusion(found=False)


def kinds(fusion: Any, vocab: int | None = None, form: str = "vendor", **model: Any) -> Counter[str]:
    fusion = Fusion.of(fusion).changed(found=False)
    spec = StepSpec(GPT2(CONFIG.changed(attention=form, **model)), 3, 17, fusion=fusion)
    g, traced, _ = spec.trace()
    g.backward(traced.loss)
    fuse(g, fusion, Tiling({"vocab": vocab} if vocab else {}))
    return Counter(op.kind for op in g.ops)


UNFUSED = {
    "Embedding": 2, "LayerNorm": 5, "CrossEntropy": 1, "CrossEntropyGrad": 1, "LayerNormGrad": 5, "EmbeddingGrad": 2,
    "Attention": 2, "AttentionGrad": 2, "Activation": 2, "ActivationGrad": 2,
    "Contract": 3 * (2 * 6 + 1),  # q, k, v, projection, two of the MLP; the head; each with two gradients
    "BiasAdd": 2 * 6 + 1, "Sum": 2 * 6 + 1,  # and the positions
    "Transpose": 2 * 2 * 4,  # q, k, v and attention's output, and back
    "Add": 4 + 4 + 2 * 2,  # the residual stream, its gradients, those of q, k and v
}  # fmt: skip
FUSED = {
    "Embedding": 2, "LayerNorm": 5, "CrossEntropy": 1, "CrossEntropyGrad": 1, "LayerNormGrad": 5, "EmbeddingGrad": 2,
    "Attention": 2, "AttentionGrad": 2, "Contract": 3 * (2 * 4 + 1), "BiasAdd": 1, "Sum": 1,
}  # fmt: skip

# Operators that remain if only this switch is off.
OFF = {
    "bias": {"BiasAdd": 1 + 2 * 4, "Sum": 1 + 2 * 4, "Activation": 2},  # the bias stands between GEMM and activation
    "activation": {"Activation": 2, "ActivationGrad": 2},
    "reshape": {"Transpose": 2 * 2 * 2},
    "qkv": {"Contract": 3 * (2 * 6 + 1)},  # the gradients of q, k and v are added where the GEMMs make them
    "residual_norm": {"Add": 4 + 4},
}
ONE_OFF = [{name: False} for name in OFF]
# Changes if only this switch is on.
ON = {
    "bias": {"BiasAdd": 1, "Sum": 1},
    "activation": {"ActivationGrad": 0},  # the bias is in the way of the other
    "reshape": {"Transpose": 0},
    "qkv": {"Contract": 3 * (2 * 4 + 1), "BiasAdd": 9, "Sum": 9, "Transpose": 8, "Add": 8},
    "residual_norm": {"Add": 0},
}


def test_fusion_of_everything_and_of_nothing() -> None:
    assert kinds(True) == Counter(FUSED) == kinds(True, vocab=20)
    assert kinds(False) == Counter(UNFUSED)
    naive = {"Rename": 8, "Unpack": 2, "Pack": 2, "Softmax": 2, "SoftmaxGrad": 2, "Contract": 3 * (2 * 6 + 1)}
    naive["Transpose"] = 2  # two products read each: turned once
    assert kinds(True, form="naive") == Counter({**FUSED, **naive, "Attention": 0, "AttentionGrad": 0})
    assert kinds(True, tie_embeddings=False) == Counter(FUSED)


@pytest.mark.parametrize("switch", OFF)
def test_each_switch_alone(switch: str) -> None:
    assert kinds({switch: False}) == Counter({**FUSED, **OFF[switch]})
    alone = {name: name == switch for name in OFF}
    assert kinds(alone) == Counter({**UNFUSED, **ON[switch]})


def epilogues(fusion: Any, **model: Any) -> Counter[str]:
    fusion = Fusion.of(fusion).changed(found=False)
    g, traced, _ = StepSpec(GPT2(CONFIG.changed(**model)), 3, 17, fusion=fusion).trace()
    g.backward(traced.loss)
    fuse(g, fusion)
    names = ("bias", "residual", "pre", "aux", "bias_grad")
    found = Counter(name for op in g.ops if isinstance(op, ops.Contract) for name in names if getattr(op, name))
    found["activation"] = sum(isinstance(op, ops.Contract) and bool(op.activation) and not op.aux for op in g.ops)
    found["norm residual"] = sum(isinstance(op, ops.LayerNorm) and bool(op.residual) for op in g.ops)
    found["norm grad add"] = sum(isinstance(op, ops.LayerNormGrad) and bool(op.extra) for op in g.ops)
    found["norm grad bias"] = sum(isinstance(op, ops.LayerNormGrad) and bool(op.bias) for op in g.ops)
    return +found


def test_epilogues_of_the_fused_model() -> None:
    everything = {"bias": 8, "residual": 4, "pre": 2, "aux": 2, "bias_grad": 4, "activation": 2, "norm grad add": 4}
    assert epilogues(True) == {**everything, "norm grad bias": 4}
    assert epilogues(False) == {}


@pytest.mark.parametrize(("qkv", "products"), [(False, 10), ("qk", 9), (True, 7)])
def test_attention_to_another_sequence_merges_keys_and_values(qkv: Any, products: int) -> None:
    """Two times q, k, v and output, and two of the MLP; queries have another input than keys and values."""
    config, fusion = TransformerDecoderConfig(layers=1, embed=8, heads=2, memory=5), Fusion(qkv=qkv, found=False)
    g, traced, _ = StepSpec(TransformerDecoder(config), 2, 4, fusion=fusion).trace()
    alone = any(tensor.name.endswith("multihead_attn.in_proj.k.weight") for tensor in g.params)
    assert alone == (qkv is not True)
    g.backward(traced.loss)
    assert sum(op.kind == "Contract" for op in g.ops) == 3 * products


def test_dropout_in_the_norms() -> None:
    """The dropout of the embedding stays, as the residual stream reads it too. Its gradient joins the first norm's."""
    left = {on: kinds({"residual_norm": on}, dropout=0.1)["Dropout"] for on in (True, False)}
    assert left == {True: 1, False: 2 * (1 + 4)}
    assert kinds(True, dropout=0.1) == Counter({**FUSED, "Dropout": 1})
    assert epilogues(True, dropout=0.1)["norm grad bias"] == 4


@pytest.mark.parametrize("swapped", [False, True])
def test_dropout_and_add_in_either_order(swapped: bool) -> None:
    """Also an encoder's dropout, the second operand of the add; not if another operator reads it or embed is cut."""
    axes, shape = ["batch", "seq", "embed"], [2, 4, 8]
    for tiles, read_again, left in (({}, False, 0), ({}, True, 1), ({"embed": 4}, False, 1)):
        g = Graph("fp32")
        y, r = g.named("y", axes, shape, "input"), g.named("r", axes, shape, "input")
        gamma, beta = (g.named(name, ["embed"], [8], "param") for name in ("gamma", "beta"))
        x = dropout(g, y, 0.1)
        layer_norm(g, add(g, r, x) if swapped else add(g, x, r), gamma, beta, 1e-5).kind = "scalar"
        if read_again:
            activation(g, x, "relu").kind = "scalar"
        fuse(g, RULES, Tiling(tiles))
        assert sum(op.kind == "Dropout" for op in g.ops) == left and not any(op.kind == "Add" for op in g.ops)
        norm = next(op for op in g.ops if isinstance(op, ops.LayerNorm))
        assert bool(norm.dropout) == (not left)
        if norm.dropout:
            assert norm.inputs[0] is y and norm.residual is r


def rms_norm_of_a_sum(g: Graph, swapped: bool = False) -> None:
    """A loss of the norm of x + r and of the sum itself, with its gradients."""
    axes, shape = ["batch", "seq", "embed"], [2, 4, 8]
    x, r = (dropout(g, g.named(name, axes, shape, "param"), 0.1) for name in "xr")
    gamma, v = g.named("gamma", ["embed"], [8], "param"), g.named("v", ["vocab", "embed"], [5, 8], "param")
    total = add(g, r, x) if swapped else add(g, x, r)
    y = rms_norm(g, total, gamma, 1e-5)
    logits = ops.contract(g, add(g, total, y), v, ["batch", "seq", "vocab"])
    g.backward(cross_entropy(g, logits, g.named("labels", axes[:-1], shape[:-1], "input", "int64")))


@pytest.mark.parametrize("swapped", [False, True])
def test_residual_of_an_rms_norm(swapped: bool) -> None:
    """RMSNorm also adds the residual, its gradient the residual's gradient; it fuses no dropout."""
    g = Graph("fp32")
    rms_norm_of_a_sum(g, swapped)
    count = Counter(op.kind for op in g.ops)
    assert count["Add"] == 3 and count["Dropout"] == 4
    fuse(g, RULES, False)
    assert Counter(op.kind for op in g.ops) == count - Counter(Add=2)
    norm, grad = (next(op for op in g.ops if isinstance(op, kind)) for kind in (ops.RMSNorm, ops.RMSNormGrad))
    assert norm.total and norm.residual and grad.extra and grad.inputs[1] is norm.total
    g = Graph("fp32")
    rms_norm_of_a_sum(g, swapped)
    fuse(g, RULES.changed(residual_norm=False), False)
    assert Counter(op.kind for op in g.ops) == count


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bias_gradient_is_summed_where_dx_is_made(dtype: str) -> None:
    """Though a contraction reads dx before the sum; a sum over fewer axes stays."""
    sizes = {"batch": 2, "seq": 3, "embed": 8, "stat": 2, "ffn": 4}
    g = Graph(dtype)

    def named(axes: str, kind: str = "scalar") -> Tensor:
        return g.named(f"t{len(g.tensors) + len(g.kept)}", axes.split(), [sizes[a] for a in axes.split()], kind)

    dx = g.temp("dx", ["batch", "seq", "embed"], [2, 3, 8], dtype)
    ins = [named(axes, "input") for axes in ("batch seq embed", "batch seq embed", "batch seq stat", "embed")]
    g.add(ops.LayerNormGrad(*ins, dx, named("embed"), named("embed")))
    g.add(ops.Contract(dx, named("embed ffn", "param"), named("batch seq ffn")))
    bias = g.add(ops.Sum(dx, named("embed"))).output
    g.add(ops.Sum(dx, named("seq embed")))
    fuse(g, RULES)
    assert [op.kind for op in g.ops] == ["LayerNormGrad", "Contract", "Sum"]
    assert g.ops[0].outputs[3] is bias and bias not in g.ops[2].outputs


@pytest.mark.parametrize("fusion", [Fusion(), RULES], ids=["found", "rules"])
@pytest.mark.parametrize("axes", [["batch", "heads", "seq", "head_dim"], ["heads", "head_dim", "batch", "seq"]])
def test_tiles_that_two_products_read_are_turned_once(axes: list[str], fusion: Fusion) -> None:
    """dX and dW read dY: with heads before positions dY is a matrix for neither, with columns first for both."""
    g, sizes = Graph("fp32"), {"batch": 2, "seq": 8, "heads": 2, "head_dim": 3}
    dy = g.named("dy", axes, [sizes[axis] for axis in axes], "input")
    x = g.named("x", ["batch", "seq", "embed"], [2, 8, 6], "input")
    w = g.named("w", ["embed", "heads", "head_dim"], [6, 2, 3], "param")
    turned = transpose(g, dy, list(sizes))
    for made in (ops.contract(g, turned, w, x.axes), ops.contract(g, x, turned, w.axes)):
        made.kind = "scalar"
    fuse(g, fusion)
    assert sum(op.kind == "Transpose" for op in g.ops) == (axes[0] == "batch")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("fusion", [Fusion(), RULES], ids=["found", "rules"])
def test_the_last_partial_product_reshapes(fusion: Fusion, bias: bool) -> None:
    """Four output tiles; if embed is cut, each has two partial products, and only the second one reshapes."""
    x, w = ["batch", "seq", "embed"], ["embed", "heads", "head_dim"]
    for tile, parts in ((8, 1), (4, 2)):
        g = Graph("fp32")
        a, b = g.named("x", x, [2, 4, 8], "input"), g.named("q.w", w, [8, 2, 4], "param")
        c = g.named("q.b", w[1:], [2, 4], "param") if bias else None
        y = linear(g, a, b, ["batch", "seq", "heads", "head_dim"], c)
        y = transpose(g, y, ["batch", "heads", "seq", "head_dim"])
        y.kind = "scalar"
        tiling = Tiling({"embed": tile, "batch": 1, "heads": 1})
        tasks = lower(fuse(g, fusion, tiling), tiling).tasks.tasks
        assert [op.kind for op in g.ops] == ["Contract"]
        assert [task.kernel for task in tasks] == ["contract"] * 4 * parts
        order = ("batch", "seq", "heads", "head_dim")
        for first, last in (tasks[at : at + 2] for at in range(0, len(tasks), 2) if parts == 2):
            assert first.accesses[0].tile is last.accesses[0].tile and first.accesses[0].tile.axes == order
            assert last.accesses[3].tile.axes == y.axes and last.accesses[3].mode == "W"
            assert "reshape" in last.args.title and "reshape" not in first.args.title


def test_an_unknown_switch() -> None:
    with pytest.raises(ConfigError, match=r"fusion\.biass: unknown key; did you mean bias"):
        Fusion.of({"biass": True})
    with pytest.raises(ConfigError, match=r"fusion\.bias: got 1; allowed: true or false"):
        Fusion.of({"bias": 1})  # type: ignore[dict-item]


def gradient_dtypes(dtype: str, tiles: dict[str, int], micro: int = 1) -> dict[str, str]:
    step = StepSpec(
        GPT2(CONFIG, {}), 4, 16, Tiling(tiles), precision=dtype, optimizer=AdamW(), clip_grad_norm=1.0,
        accumulate="chain", fusion=Fusion(), grad_accumulation=micro,
    ).step()  # fmt: skip
    return {param.name: grad.dtype for param, grad in step.grads.items()}


def test_gradients_that_one_task_makes_are_narrow() -> None:
    """Weights of the layers' linears, and only where nothing is added to their gradients."""
    whole = gradient_dtypes("bf16", {})
    assert gradient_dtypes("fp16", {}) == {name: dtype.replace("bf16", "fp16") for name, dtype in whole.items()}
    linears = {name for name in whole if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))}
    assert {name for name, dtype in whole.items() if dtype == "bf16"} == linears
    assert set(whole.values()) == {"bf16", "fp32"}
    assert set(gradient_dtypes("bf16", {"batch": 2}).values()) == {"fp32"}
    assert set(gradient_dtypes("bf16", {}, micro=2).values()) == {"fp32"}
    assert set(gradient_dtypes("fp32", {}).values()) == {"fp32"}


def program(fusion: Any, layers: int, form: str = "vendor", tiles: dict[str, int] | None = None) -> str:
    model = GPT2(CONFIG.changed(layers=layers, attention=form, dropout=0.0 if tiles else 0.1))
    return StepSpec(model, 4, 8, Tiling(tiles), fusion=Fusion.of(fusion)).step().first.tasks.digest()


@pairwise(
    fusion=[{**off, "found": on} for on in (True, False) for off in ({}, *ONE_OFF)],
    form=["vendor", "naive"],
    tiles=[{}, {"batch": 3, "embed": 8, "vocab": 20}],
)
def test_the_worklist_misses_nothing(
    fusion: Any, form: str, tiles: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program as where, after each change, a rule is tried on all operators again, from the first."""
    found = program(fusion, 3, form, tiles)

    def everywhere(rewriter: Rewriter, rule: Rule) -> None:
        while any(rule(rewriter, op) for op in list(rewriter.ops.values())):
            pass

    monkeypatch.setattr(Rewriter, "apply", everywhere)
    assert program(fusion, 3, form, tiles) == found


@pytest.mark.parametrize("fusion", [True, {"found": False}], ids=str)
@pytest.mark.parametrize("form", ["vendor", "naive"])
def test_the_work_of_fusing_grows_as_the_model_does(form: str, fusion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    apply, enter = Rewriter.apply, Rewriter._enter

    def counting(rewriter: Rewriter, rule: Rule) -> None:
        def counted(rewriter: Rewriter, op: ops.Op) -> bool:
            counts["tried"] += 1
            return rule(rewriter, op)

        apply(rewriter, counted)

    def entering(rewriter: Rewriter, op: ops.Op, place: int) -> None:
        counts["entered"] += 1
        enter(rewriter, op, place)

    monkeypatch.setattr(Rewriter, "apply", counting)
    monkeypatch.setattr(Rewriter, "_enter", entering)
    works = []
    for layers in (8, 16):
        counts.clear()
        program(fusion, layers, form)
        works.append(dict(counts))
    assert works[0]["tried"] > works[0]["entered"] > 8
    assert all(works[1][name] <= 2.2 * works[0][name] for name in ("tried", "entered")), works
