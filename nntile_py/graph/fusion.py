"""Passes over the logical graph: fusion of neighbours into one operator, each kind behind a switch of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from nntile_py.errors import ConfigError, say_once
from nntile_py.graph.graph import Graph
from nntile_py.graph.greedy_fusion import find
from nntile_py.graph.norm_rules import norm_bias_grad, norm_grad_add, norm_grad_dropout, norm_residual
from nntile_py.graph.rewriter import Rule, Uses
from nntile_py.schema import Names, Settings, Switch, only
from nntile_py.tasks.activation import Activation, ActivationGrad
from nntile_py.tasks.attention import Attention, AttentionGrad
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.cross_entropy import CrossEntropy, CrossEntropyGrad
from nntile_py.tasks.elementwise import Add, BiasAdd, Sum, Transpose
from nntile_py.tasks.op import Op, Tensor, permutation
from nntile_py.tasks.scalar import native
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_low


class Fusion(Settings):
    """Which neighbouring operators become one task. `fusion: false` switches all off: the naive graph. `fusion: true`
    is the default: all of them. `fusion: {found: false}`: by the rules alone, whose kernels were written by hand."""

    section: ClassVar = "fusion"

    bias: Switch = True
    """A bias with the product before it."""
    activation: Switch = True
    """An activation with the product before it."""
    reshape: Switch = True
    """A change of the axes' order with the product before it; not where the product is summed in parts."""
    qkv: Annotated[
        bool | Literal["qk"],
        *only("true, false or qk", lambda v: v if type(v) is bool or v == "qk" else None, enum=[True, False, "qk"]),
    ] = True
    """The projections to queries, keys and values as one product; `qk`: those to queries and keys."""
    residual_norm: Switch = True
    """A residual with the product before it; where `found` is off, also (with its dropout) with the norm after it."""
    found: Switch = True
    """Neighbouring element-wise operators, sums, norms and softmax become one task wherever one loop over the same axes
    computes all of them; such a group gets a kernel that is generated and compiled for it. Products keep what `bias`,
    `activation`, `reshape` and `residual_norm` give them. Switched off, or without a C++ compiler for CPU workers, a
    few rules with kernels written by hand take its place."""
    exclude: Names = ()
    """With `found`: names of groups not to be made, such as dropout_add_layer_norm; `nntile plan` lists them."""

    @property
    def packed(self) -> int:
        """Number of projections, to queries, keys and values, that one product computes."""
        return 2 if self.qkv == "qk" else 3 if self.qkv else 1

    @staticmethod
    def of(value: Fusion | bool | Mapping[str, Any]) -> Fusion:
        """Return the Fusion of True or False, for all switches, or of {switch: bool}; switches left out are on."""
        if isinstance(value, Fusion):
            return value
        if isinstance(value, bool):
            return Fusion(**every_rule(value))
        if not isinstance(value, Mapping):
            names = ", ".join(Fusion.model_fields)
            raise ConfigError(f"fusion: {value!r} is not allowed; use true, false or a mapping of {names}")
        return Fusion(**value)

    def changed(self, **switches: Any) -> Fusion:
        """Return the same with other values of some switches."""
        return Fusion(**{**dict(self), **switches})


def every_rule(on: bool) -> dict[str, Any]:
    """What `fusion: true` or `false` stands for."""
    return {name: on for name in Fusion.model_fields if name != "exclude"}


def fuse(graph: Graph, fusion: Fusion, tiling: Tiling | None = None) -> Graph:
    """Apply the rules that are switched on until none applies. In place; returns the graph. No tiling: all uncut."""
    tiling = tiling or Tiling()
    for op in graph.ops:
        op.fit(tiling)
    uses = Uses(graph)
    for rule in _found_rules(fusion, tiling) if fusion.found and _generates(graph.dtype) else _rules(fusion, tiling):
        uses.apply(rule) if rule else _find(uses, fusion, tiling)
    graph.ops = list(uses.ops.values())
    return graph


def _rules(fusion: Fusion, tiling: Tiling) -> Iterator[Rule]:
    """Those of operators that have a kernel written by hand."""
    if fusion.reshape:
        yield from (_attention_layout, _transposed_input, partial(_transposed_output, tiling=tiling))
    if fusion.residual_norm:
        yield from (norm_grad_add, norm_grad_dropout)
    if fusion.bias:
        yield from (_bias, norm_bias_grad, _bias_grad)
    if fusion.residual_norm:
        yield from (_residual, partial(norm_residual, tiling=tiling))
    if fusion.activation:
        yield from (_activation, _activation_grad)
    yield partial(_cross_entropy, tiling=tiling)


def _found_rules(fusion: Fusion, tiling: Tiling) -> Iterator[Rule | None]:
    """The rules that make a contraction's epilogue, and None where all else is found."""
    if fusion.reshape:
        yield from (_attention_layout, _transposed_input, partial(_transposed_output, tiling=tiling))
    if fusion.residual_norm:
        yield from (_of_cut_rows(rule, tiling) for rule in (norm_grad_add, norm_grad_dropout))
    yield from [_bias, _of_cut_rows(norm_bias_grad, tiling)] if fusion.bias else []
    yield from [_residual] if fusion.residual_norm else []
    yield from [_of_epilogue(_activation), _activation_grad] if fusion.activation else []
    yield None
    yield from [_activation] if fusion.activation else []  # those that no group has
    yield from [_bias_grad] if fusion.bias else []
    yield partial(_cross_entropy, tiling=tiling)


def _find(uses: Uses, fusion: Fusion, tiling: Tiling) -> None:
    met = find(uses, tiling, fusion.exclude)
    missing = [name for name in fusion.exclude if name not in met]
    if missing and any(op.phase == "backward" for op in uses.order):  # else what is missing may be of that
        known = ", ".join(sorted(met)) or "none, this model has no groups"
        raise ConfigError(f"fusion.exclude: {missing[0]!r} is no group that is found here; allowed: {known}")


def lacking(dtype: str) -> str | None:
    """Why there are no generated kernels here; None: there are. bf16 and fp16 run on GPUs alone, which need no C++."""
    return None if is_low(dtype) else native.why_not()


def _generates(dtype: str) -> bool:
    """Whether generated kernels can be had; says once why not."""
    why = lacking(dtype)
    if why:
        say_once(f"fusion: the rules of `found: false` are used, which are some percent slower, as {why}")
    return why is None


def _plain(op: Op | None) -> bool:
    """A contraction whose result is not yet transformed: more can be added to its epilogue."""
    return isinstance(op, Contract) and op.activation is None and op.aux is None and op.bias_grad is None


def _rebuild(op: Contract, out: Tensor, **changes: Any) -> Contract:
    keep = ("scale", "bias", "residual", "activation", "pre", "aux", "bias_grad")
    options = {name: getattr(op, name) for name in keep} | changes
    a, b = options.pop("a", op.a), options.pop("b", op.b)
    return Contract(a, b, out, **options)


def _attention_layout(uses: Uses, op: Op) -> bool:
    """Attention, or its gradient, between transposes: the kernels read and write any order of axes."""
    if isinstance(op, Attention):
        gradient = next((g for g in uses.readers.get(op.lse, []) if isinstance(g, AttentionGrad)), None)
        before = [uses.maker.get(t) for t in op.operands.tensors]
        users = [r for r in uses.readers.get(op.output, []) if r is not gradient]
        after = users if op.output.kind == "temp" else []
        if _transposes(before):
            op.read([t.inputs[0] for t in before if t])
        elif _transposes(after) and len(after) == 1:
            op.outputs[0] = after[0].output
            uses.remove(after[0])
        else:
            return False
        if gradient:
            gradient.inputs = [*op.inputs, op.output, op.lse, gradient.do]
            uses.changed(gradient)
    elif isinstance(op, AttentionGrad):
        before = [uses.maker.get(op.do)]
        readers = [uses.readers.get(t, []) for t in op.outputs]
        after = [r[0] for r in readers if len(r) == 1]
        if _transposes(before) and before[0]:
            op.do = op.inputs[-1] = before[0].inputs[0]
        elif len(after) == len(op.outputs) and _transposes(after):
            op.write([t.output for t in after])
            for transpose in after:
                uses.remove(transpose)
        else:
            return False
    else:
        return False
    uses.changed(op)
    for maker in before:
        if maker and not uses.readers.get(maker.output) and maker.output.kind == "temp" and maker in uses.order:
            uses.remove(maker)
    return True


def _transposes(ops: Sequence[Op | None]) -> bool:
    """Whether all are transposes that permute alike."""
    kinds = {tuple(permutation(op.inputs[0].axes, op.output.axes)) if isinstance(op, Transpose) else None for op in ops}
    return len(kinds) == 1 and None not in kinds


def _transposed_input(uses: Uses, op: Op) -> bool:
    """Contract(Transpose(x), w), Sum(Transpose(x)): both read any order of axes.

    Not where two products read the same Transpose, and would each have to turn its tiles into a matrix.
    """
    if not isinstance(op, Contract | Sum):
        return False
    for number, tensor in enumerate(op.inputs[:2]):
        maker = uses.maker.get(tensor)
        if not isinstance(maker, Transpose):
            continue
        x = maker.inputs[0]
        products = [reader for reader in uses.readers[tensor] if isinstance(reader, Contract)]
        if len(products) > 1 and not all(_reads_matrix(product, tensor, x) for product in products):
            continue
        if isinstance(op, Contract):
            uses.replace([op], _rebuild(op, op.output, **{"ab"[number]: x}))
        elif [a for a in x.axes if a in op.output.axes] == list(op.output.axes):
            uses.replace([op], Sum(x, op.output))
        else:
            continue
        if not uses.readers.get(maker.output) and maker.output.storage.kind == "temp":
            uses.remove(maker)
        return True
    return False


def _reads_matrix(product: Contract, tensor: Tensor, x: Tensor) -> bool:
    """Whether tiles of x, in the place of the tensor, are matrices or their transposes as they are."""
    side = 0 if product.a is tensor else 1
    made = _rebuild(product, product.output, **{"ab"[side]: x})
    groups = [group for group in (made.batch, made.n if side else made.m, made.k) if group]
    starts = [x.axes.index(group[0]) for group in groups]
    return all(list(x.axes[at : at + len(group)]) == list(group) for at, group in zip(starts, groups, strict=True))


def narrow_gradients(graph: Graph, grads: Iterable[Tensor], tiling: Tiling) -> None:
    """Keep in bf16 or fp16 each gradient of such a weight that one product makes, nothing added to, as autocast does.

    What several tasks add up stays in fp32. (Products are summed in fp32; where cuBLASLt splits one, it may round the
    parts.)"""
    if not is_low(graph.dtype):
        return
    makers: dict[Tensor, list[Op]] = {}  # of each storage
    for op in graph.ops:
        for out in op.outputs:
            makers.setdefault(out.storage, []).append(op)
    for grad in grads:
        product, *others = makers[grad.storage]
        if others or not isinstance(product, Contract) or product.output is not grad:
            continue
        if _plain(product) and not _in_parts(product, tiling):
            grad.dtype = graph.dtype


def _in_parts(op: Contract, tiling: Tiling) -> bool:
    return any(tiling.cut(axis, op.a.size(axis)) for axis in op.k)


def _transposed_output(uses: Uses, op: Op, tiling: Tiling) -> bool:
    """Transpose(Contract) or Transpose(BiasAdd(Contract)): GEMM + reshape, Alg. 4 of the NNTile report.

    Not where the summed axes are cut: each partial product would be scattered, a Transpose does so once for all.
    """
    if not isinstance(op, Transpose):
        return False
    gemm = uses.made_for(op.inputs[0], op, Contract)
    if gemm and _plain(gemm) and not gemm.inputs[2:] and not _in_parts(gemm, tiling):
        uses.replace([gemm, op], _rebuild(gemm, op.output))
        return True
    add = uses.made_for(op.inputs[0], op, BiasAdd)
    inner = uses.made_for(add.inputs[0], add, Contract) if add else None
    if not (add and inner and _plain(inner)) or _in_parts(inner, tiling):
        return False
    bias = add.inputs[1]
    if [a for a in op.output.axes if a in bias.axes] != list(bias.axes):
        return False
    # The transpose goes before the bias: both then fold into the contraction.
    moved = Tensor(add.output.name, op.output.axes, op.output.shape, op.output.dtype)
    uses.replace([inner], _rebuild(inner, moved))
    uses.replace([add, op], BiasAdd(moved, bias, op.output))
    return True


def _bias(uses: Uses, op: Op) -> bool:
    """BiasAdd(Contract)."""
    if not isinstance(op, BiasAdd):
        return False
    gemm = uses.made_for(op.inputs[0], op, Contract)
    if not (gemm and _plain(gemm) and gemm.bias is None and gemm.residual is None):
        return False
    uses.replace([gemm, op], _rebuild(gemm, op.output, bias=op.inputs[1]))
    return True


def _bias_grad(uses: Uses, op: Op) -> bool:
    """Sum(dy) beside the contraction x dy that sums over the same axes: one reading of dy."""
    if not isinstance(op, Sum) or is_low(op.inputs[0].dtype):  # on CUDA cuBLASLt reads dy twice, slower than Sum does
        return False
    dy = op.inputs[0]
    summed = {axis for axis in dy.axes if axis not in op.output.axes}
    for reader in uses.readers[dy]:
        if not (isinstance(reader, Contract) and _plain(reader)) or set(reader.k) != summed or reader.batch:
            continue
        side = 0 if reader.a is dy else 1
        columns = reader.m if side == 0 else reader.n
        if columns == list(op.output.axes):
            return uses.replace([reader, op], _rebuild(reader, reader.output, bias_grad=(side, op.output)))
    return False


def _residual(uses: Uses, op: Op) -> bool:
    """Add(Contract, r): the product is accumulated onto r."""
    if not isinstance(op, Add):
        return False
    for mine, other in ((0, 1), (1, 0)):
        gemm = uses.made_for(op.inputs[mine], op, Contract)
        if gemm and _plain(gemm) and gemm.residual is None and not op.output.band.causal:
            uses.replace([gemm, op], _rebuild(gemm, op.output, residual=op.inputs[other]))
            return True
    return False


def _activation(uses: Uses, op: Op) -> bool:
    """Activation(Contract): the epilogue; what comes before the activation is kept if the gradient reads it."""
    if not isinstance(op, Activation):
        return False
    x = op.inputs[0]
    gemm = uses.maker.get(x)
    readers = [r for r in uses.readers[x] if r is not op]
    if not (isinstance(gemm, Contract) and _plain(gemm)) or any(r.phase == "forward" for r in readers):
        return False
    kept = readers or x.persistent
    uses.replace([gemm, op], _rebuild(gemm, op.output, activation=op.act, pre=x if kept else None))
    return True


def _of_epilogue(rule: Rule) -> Rule:
    """The same of activations that a product is as fast with as without: of bf16 and fp16, on CUDA alone, cuBLASLt's.

    With the others a group can do more in one pass, dropout above all. Around a gradient there is little to add, so it
    is better in the product: a training step of BERT base, 32 768 tokens, takes 45.5 ms instead of 47.4 on an H200."""
    return lambda uses, op: (not is_low(op.output.dtype) or getattr(op, "act", "") == "gelu_new") and rule(uses, op)


def _of_cut_rows(rule: Rule, tiling: Tiling) -> Rule:
    """The same where rows are cut: a norm's gradient is several tasks there, which no group takes in."""

    def tried(uses: Uses, op: Op) -> bool:
        rows = [(x.axes[-1], x.shape[-1]) for x in op.inputs[:1] if x.axes]
        return any(tiling.cut(*row) for row in rows) and rule(uses, op)

    return tried


def _activation_grad(uses: Uses, op: Op) -> bool:
    """ActivationGrad(Contract, x): the gradient GEMM's epilogue (DGELU)."""
    if not isinstance(op, ActivationGrad):
        return False
    gemm = uses.made_for(op.inputs[0], op, Contract)
    if not (gemm and _plain(gemm) and not gemm.inputs[2:]):
        return False
    uses.replace([gemm, op], _rebuild(gemm, op.output, activation=op.act, aux=op.inputs[1]))
    return True


def _cross_entropy(uses: Uses, op: Op, tiling: Tiling) -> bool:
    """CrossEntropy and its gradient over uncut classes: one task, the logits read once, by nobody between the two."""
    if not isinstance(op, CrossEntropyGrad) or op.fused:
        return False
    logits, forward = op.inputs[0], uses.maker[op.inputs[2]]
    assert isinstance(forward, CrossEntropy)
    if tiling.cut(op.classes, logits.size(op.classes)):
        return False
    if any(uses.order[forward] < uses.order[reader] < uses.order[op] for reader in uses.readers[logits]):
        return False
    forward.fused, op.fused = op, True
    return True
