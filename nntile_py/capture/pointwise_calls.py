"""Point-wise ATen operators as formulas, dropout, and sums over dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import Node

from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import args_of, name_of, shape_of
from nntile_py.capture.rewrites import activation_kind
from nntile_py.capture.rules import AxisFinder, NotSupported, Value, argument, rule
from nntile_py.tasks.activation import activation
from nntile_py.tasks.elementwise import add, dropout
from nntile_py.tasks.formula import total_over
from nntile_py.tasks.gated import gated
from nntile_py.tasks.scalar import expression as ex

E = ex.Number
MOST_FACTORS = 64  # largest exponent of a power that is computed by products


def _sigmoid(x: E) -> E:
    return 0.5 * (1 + ex.tanh(0.5 * x))


def _softplus(x: E, beta: float = 1.0, threshold: float = 20.0) -> E:
    y = beta * x
    soft = ex.maximum(y, 0.0) + ex.log(1 + ex.exp(-ex.maximum(y, -y)))
    return ex.select(y > threshold, x, soft / beta)


def _power(x: E, p: float) -> E:
    if p == int(p) and abs(p) <= MOST_FACTORS:
        return _whole_power(x, int(p)) if p >= 0 else 1 / _whole_power(x, int(-p))
    if p in (0.5, -0.5):
        return ex.sqrt(x) if p > 0 else 1 / ex.sqrt(x)
    if p == int(p):
        raise NotSupported("a large whole exponent")
    if p < 1:
        return ex.exp(p * ex.log(x))
    zero = _number(x > 0) + _number(x < 0)  # 0 if x = 0, where log has no finite derivative, else 1
    return ex.select(_true(zero), ex.exp(p * ex.log(ex.select(_true(zero), x, 1.0))), 0 * x)


def _whole_power(x: E, p: int) -> E:
    """Return x to the power p by squares."""
    if p == 0:
        return 0 * x + 1
    half = _whole_power(x, p // 2) if p > 1 else x
    if p == 1:
        return x
    return half * half * x if p % 2 else half * half


def _clamp(x: E, low: Any = None, high: Any = None) -> E:
    """Return x within bounds. The derivative at a bound is 1, as in torch."""
    x = x if low is None else ex.select(x < low, low, x)
    return x if high is None else ex.select(x > high, high, x)


def _inside(x: E, low: Any, high: Any) -> E:
    """Return x within bounds. The derivative at a bound is 0, as in torch."""
    x = ex.select(x > low, x, ex.select(x < low, low, 0 * x + low))  # nan stays nan
    return ex.select(x < high, x, ex.select(x > high, high, 0 * x + high))


def _elu(x: E, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> E:
    negative = alpha * (ex.exp(ex.select(x > 0, 0.0, x * input_scale)) - 1)
    return scale * ex.select(x > 0, x, negative)


# {ATen name: formula of the operands, tensors as expressions and numbers as they are}
FORMULAS: dict[str, Callable[..., E]] = {
    "add": lambda a, b, alpha=1: a + (b if alpha == 1 else alpha * b),
    "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b),
    "rsub": lambda a, b, alpha=1: b - (a if alpha == 1 else alpha * a),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1 / a,
    "pow": _power,
    "square": lambda a: a * a,
    "sqrt": ex.sqrt,
    "rsqrt": lambda a: 1 / ex.sqrt(a),
    "exp": ex.exp,
    "log": ex.log,
    "log1p": lambda a: ex.log(1 + a),
    "sin": ex.sin,
    "cos": ex.cos,
    "tanh": ex.tanh,
    "erf": ex.erf,
    "abs": lambda a: ex.maximum(a, -a),
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "elu": _elu,
    "selu": lambda a: _elu(a, 1.6732632423543772, 1.0507009873554805),
    "celu": lambda a, alpha=1.0: _elu(a, alpha, 1.0, 1 / alpha),
    "leaky_relu": lambda a, slope=0.01: ex.select(a > 0, a, slope * a),
    "clamp": _clamp,
    "clamp_min": lambda a, low: _clamp(a, low),
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "hardtanh": lambda a, low=-1.0, high=1.0: _inside(a, low, high),
    "hardsigmoid": lambda a: _inside(a + 3, 0.0, 6.0) / 6,
    "log_sigmoid": lambda a: -_softplus(-a),
    "maximum": ex.maximum,
    "minimum": lambda a, b: -ex.maximum(-a, -b),
    "where": lambda c, a, b: ex.select(_true(c), a, b),
    "masked_fill": lambda a, mask, value: ex.select(_true(mask), value, a),
    "prelu": lambda a, w: ex.select(a > 0, a, w * a),
    "gt": lambda a, b: _number(a > b),
    "lt": lambda a, b: _number(a < b),
    "addcmul": lambda a, b, c, value=1: a + value * b * c,
    "lerp": lambda a, b, w: a + w * (b - a),
}


def _number(condition: E) -> E:
    return ex.select(condition, 1.0, 0.0)


def _true(mask: E) -> E:
    return ex.Call("unequal", mask, 0.0)


def broadcast_dims(find: AxisFinder, node: Node) -> list[Dim]:
    """Unite the axes of all tensors of a point-wise call, aligned at their last dimensions; return the dimensions."""
    shape = shape_of(node)
    result: list[Dim] = [()] * len(shape)
    for operand in node.all_input_nodes:
        own = shape_of(operand)
        for at, size in enumerate(own):
            place = len(shape) - len(own) + at
            dim = find.of(operand)[at]
            if size != shape[place] or (size == 1 and not dim):
                continue
            if not result[place]:
                result[place] = dim
            else:
                find.same(node, operand, at, result[place])
        _check_distinct(find, result)
    return [find.groups.leaves(dim) for dim in result]


def _check_distinct(find: AxisFinder, dims: list[Dim]) -> None:
    leaves = [atom for dim in dims for atom in find.groups.leaves(dim)]
    if len({*leaves}) < len(leaves):
        raise NotSupported("an axis twice")


@rule(*FORMULAS)
class PointwiseCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        name = name_of(node)
        if name == "div" and node.kwargs.get("rounding_mode"):
            raise NotSupported("division with rounding")
        if name == "pow" and isinstance(args_of(node)[1], Node):
            raise NotSupported("a power that is a tensor")
        return broadcast_dims(find, node)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        name = name_of(node)
        tensors = [arg for arg in node.args if isinstance(arg, Node)]
        if name == "add" and len(tensors) == 2 and not node.kwargs:
            a, b = (made.read(node, one) for one in tensors)
            if a.tensor.axes == b.tensor.axes and {*made.names(node)} == {*a.tensor.axes}:
                return Value(add(made.g, a.tensor, b.tensor), made.dims(node))
        return made.formula(node, FORMULAS[name])


@rule("relu", "gelu", "silu", "relu6", "hardswish", "mish", "gelu_tanh")
class ActivationCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        return find.of(args_of(node)[0])

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.read(node, args_of(node)[0])
        return Value(activation(made.g, x.tensor, activation_kind(node)), x.dims)


@rule("gated")
class GatedCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        return broadcast_dims(find, node)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        gate, up = (made.read(node, one) for one in args_of(node)[:2])
        if gate.tensor.axes != up.tensor.axes:
            raise NotSupported("a gate whose axes have another order")
        return Value(gated(made.g, gate.tensor, up.tensor, args_of(node)[2]), made.dims(node))


@rule("dropout", "native_dropout")
class DropoutCall:
    """Dropout. The second result of native_dropout, the mask, is not computed."""

    def dims(self, find: AxisFinder, node: Node) -> Any:
        dims = find.of(args_of(node)[0])
        return dims if name_of(node) == "dropout" else [dims, dims]

    def build(self, made: GraphBuilder, node: Node) -> Any:
        x, (p, training) = made.read(node, args_of(node)[0]), args_of(node)[1:3]
        if training and p:
            x = made.spread(x)
            x = Value(dropout(made.g, x.tensor, float(p)), x.dims)
        return x if name_of(node) == "dropout" else [x, None]


@rule("sum", "mean")
class SumCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        dims, summed = find.of(args_of(node)[0]), self.places(node)
        keep = bool(argument(node, 2, "keepdim", False))
        return [() if k in summed else dim for k, dim in enumerate(dims) if keep or k not in summed]

    def places(self, node: Node) -> list[int]:
        count = len(shape_of(args_of(node)[0]))
        at = argument(node, 1, "dim")
        if at is None or at == []:
            return list(range(count))
        return [k % count for k in (at if isinstance(at, list | tuple) else [at])]

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.read(node, args_of(node)[0], wide=True)
        axes = [axis for k in self.places(node) for axis in x.dims[k]]
        present = [axis for axis in axes if axis in x.tensor.axes]
        count = math.prod(made.size(axis) for axis in axes if axis not in present)
        total = total_over(made.g, x.tensor, present) if present else x.tensor
        factor = float(count)
        if name_of(node) == "mean":
            factor = 1 / math.prod(x.tensor.size(axis) for axis in present)
        return made.scaled(Value(total, made.dims(node)), factor)


class Normalised(NamedTuple):
    """A value normalised over some of its axes, and the statistics, in which these axes are missing."""

    y: Value
    mean: Value
    variance: Value
    rstd: Value


def normalised(
    made: GraphBuilder, x: Value, over: list[str], dims: list[tuple[str, ...]], eps: float, weights: list[Value]
) -> Normalised:
    """Return (x - mean) / sqrt(variance + eps), times the first of `weights` plus the second, if there are any.

    dims: dimensions of the statistics, as those of x without the axes of `over`.
    """
    share = 1 / math.prod(made.size(axis) for axis in over)

    def mean(value: Value) -> Value:
        return made.scaled(Value(total_over(made.g, value.tensor, over), dims), share)

    def last(centred: Any, rstd: Any, *factors: Any) -> Any:
        return centred * rstd * factors[0] + factors[1] if factors else centred * rstd

    middle = mean(x)
    centred = made.combined([x, middle], lambda a, b: a - b, "centre")
    variance = mean(made.combined([centred], lambda a: a * a, "square"))
    rstd = made.combined([variance], lambda a: 1 / ex.sqrt(a + eps), "rstd")
    y = made.combined([centred, rstd, *weights], last, "norm")
    return Normalised(Value(y.tensor, x.dims), middle, variance, rstd)


@rule("group_norm")
class GroupNormCall:
    """Group norm (Wu and He 2018): each group of channels of a row is normalised over its channels and positions."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, groups = args_of(node)[:2]
        weights = [argument(node, place, name) for place, name in ((2, "weight"), (3, "bias"))]
        if weights.count(None) == 1:
            raise NotSupported("group norm with one of weight and bias")
        dims = find.of(x)
        find.groups.regroup([dims[1]], [groups, shape_of(x)[1] // groups])
        for one in weights:
            if one is not None:
                find.same(node, one, 0, dims[1])
        return [find.groups.leaves(dim) for dim in dims]

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x, count = made.spread(made.read(node, args_of(node)[0])), args_of(node)[1]
        names = [argument(node, place, name) for place, name in ((2, "weight"), (3, "bias"))]
        weights = [made.read(node, one) for one in names if one is not None]
        groups: list[str] = []
        for axis in x.dims[1]:
            if math.prod(made.size(one) for one in groups) < count:
                groups.append(axis)
        over = [axis for at, dim in enumerate(x.dims) if at for axis in dim if axis not in groups]
        if not over:
            raise NotSupported("group norm over one value")
        dims = [x.dims[0], tuple(groups), *([()] * (len(x.dims) - 2))]
        return normalised(made, x, over, dims, float(argument(node, 4, "eps", 1e-5)), weights).y


@rule("batch_norm", "_native_batch_norm_legit_functional")
class BatchNormCall:
    """Batch norm by the statistics of the batch: (x - mean) / sqrt(var + eps) * weight + bias for each channel."""

    def dims(self, find: AxisFinder, node: Node) -> Any:
        x, weight, bias = args_of(node)[:3]
        if not args_of(node)[5] or weight is None or bias is None:
            raise NotSupported("batch norm by running statistics, or without weights")
        dims = find.of(x)
        for one in (weight, bias, *args_of(node)[3:5]):
            if one is not None:
                find.same(node, one, 0, dims[1])
        if name_of(node) == "batch_norm":
            return dims
        return [dims, *([find.groups.leaves(dims[1])] for _ in range(4))]

    def build(self, made: GraphBuilder, node: Node) -> Any:
        x, weight, bias = (made.read(node, one) for one in args_of(node)[:3])
        x, eps = made.spread(x), float(args_of(node)[7])
        over = [axis for at, dim in enumerate(x.dims) if at != 1 for axis in dim]
        channels: list[tuple[str, ...]] = [(), x.dims[1], *([()] * (len(x.dims) - 2))]
        y, mean, variance, rstd = normalised(made, x, over, channels, eps, [weight, bias])
        if name_of(node) == "batch_norm":
            return y
        count = math.prod(made.size(axis) for axis in over)
        unbiased = made.scaled(variance, count / (count - 1)) if count > 1 else variance
        share = float(args_of(node)[6])
        news = []
        for old, value in zip(args_of(node)[3:5], (mean, unbiased), strict=True):
            terms = [value] if old is None else [value, Value(made.read(node, old, wide=True).tensor, channels)]
            news.append(
                made.combined(terms, lambda new, *old: share * new + (1 - share) * old[0] if old else new, "statistics")
            )
        of_channel = [x.dims[1]]
        return [y, *(Value(one.tensor, of_channel) for one in (mean, rstd, *news))]


@rule("_native_batch_norm_legit_no_training")
class FixedBatchNormCall:
    """Batch norm by running statistics: (x - mean) / sqrt(var + eps) * weight + bias for each channel."""

    def dims(self, find: AxisFinder, node: Node) -> list[list[Dim]]:
        x, *others = args_of(node)[:5]
        if any(one is None for one in others):
            raise NotSupported("batch norm without weights or statistics")
        dims = find.of(x)
        for one in others:
            find.same(node, one, 0, dims[1])
        return [dims, [()], [()]]  # the other two results are empty

    def build(self, made: GraphBuilder, node: Node) -> list[Value]:
        x, *others = (made.read(node, one) for one in args_of(node)[:5])
        x, eps = made.spread(x), float(args_of(node)[6])

        def normed(
            x: ex.Expression, weight: ex.Expression, bias: ex.Expression, mean: ex.Expression, variance: ex.Expression
        ) -> ex.Expression:
            scaled: ex.Expression = (x - mean) / ex.sqrt(variance + eps) * weight
            return scaled + bias

        y = Value(made.combined([x, *others], normed, "batch norm").tensor, x.dims)
        return [y, y, y]
