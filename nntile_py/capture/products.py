"""Rules for matrix products, embeddings, LayerNorm, RMSNorm, and convolutions whose kernels do not overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import args_of, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, NotSupported, Value, argument, each, rule
from nntile_py.tasks.contract import contract
from nntile_py.tasks.elementwise import bias_add
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.formula import ONE
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.rms_norm import rms_norm


def product(made: GraphBuilder, a: Value, b: Value, dims: list[tuple[str, ...]], scale: float = 1.0) -> Value:
    """Return the product of two values, summed over the axes that they share and that `dims` lacks."""
    out = {axis for dim in dims for axis in dim}
    a, b = (
        made.with_axes(a, {axis for axis in a.axes if axis not in out}),
        made.with_axes(b, {axis for axis in b.axes if axis not in out}),
    )
    axes = [axis for dim in dims for axis in dim if axis in a.tensor.axes or axis in b.tensor.axes]
    return Value(contract(made.g, a.tensor, b.tensor, axes, scale=scale), dims)


def with_bias(made: GraphBuilder, node: Node, x: Value, bias: Any) -> Value:
    """Return x plus a bias, which has some of the axes of x."""
    if bias is None:
        return x
    b: Tensor = made.read(node, bias).tensor
    if [axis for axis in x.tensor.axes if axis in b.axes] != list(b.axes):
        raise NotSupported("a bias with other axes")
    return Value(bias_add(made.g, x.tensor, b), x.dims)


@rule("linear")
class LinearCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, weight = args_of(node)[:2]
        bias = argument(node, 2, "bias")
        find.contracted(node, x, weight, 1)
        out = find.of(weight)[0]
        if bias is not None:
            find.same(node, bias, 0, out)
        return _new_columns(find, node, find.under(node, x)[:-1], weight, 0)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        y = product(made, made.read(node, args_of(node)[0]), made.read(node, args_of(node)[1]), made.dims(node))
        return with_bias(made, node, y, argument(node, 2, "bias"))


def _new_columns(find: AxisFinder, node: Node, rows: list[Dim], weight: Any, at: int) -> list[Dim]:
    """Return the dimensions of a product: `rows`, then dimension `at` of the weight.

    The call reads axes of the weight's dimension that occur among the rows under new names.
    """
    taken = {atom for dim in rows for atom in find.groups.leaves(dim)}
    for atom in find.under(node, weight)[at]:
        if atom in taken:
            find.read_as(node, weight, atom)
    return [*rows, find.under(node, weight)[at]]


@rule("addmm", "mm", "matmul", "bmm", "baddbmm")
class MatrixProductCall:
    """Products of matrices, and of stacks of matrices with equal or broadcast first dimensions."""

    def operands(self, node: Node) -> tuple[Any, Any, Any]:
        """Return the left matrix, the right matrix, and the tensor that is added to the product (None: none)."""
        if name_of(node) in ("addmm", "baddbmm"):
            if node.kwargs.get("beta", 1) != 1:
                raise NotSupported("a factor of what is added to a product")
            return args_of(node)[1], args_of(node)[2], args_of(node)[0]
        return args_of(node)[0], args_of(node)[1], None

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        a, b, bias = self.operands(node)
        if a is b or min(len(shape_of(a)), len(shape_of(b))) < 2:
            raise NotSupported("a product with itself, or of a vector")
        find.contracted(node, a, b, -2)
        first: list[Dim] = [()] * (len(shape_of(node)) - 2)
        for operand in (a, b):
            lead = find.of(operand)[:-2]
            for at, dim in enumerate(lead):
                place = len(first) - len(lead) + at
                if dim and not first[place]:
                    first[place] = dim
                elif dim:
                    find.same(node, operand, at, first[place])
        first = [find.groups.leaves(dim) for dim in first]
        dims = _new_columns(find, node, [*first, find.under(node, a)[-2]], b, -1)
        if bias is not None:
            for at in range(len(shape_of(bias))):
                place = len(dims) - len(shape_of(bias)) + at
                if find.of(bias)[at]:
                    find.same(node, bias, at, dims[place])
        return [find.groups.leaves(dim) for dim in dims]

    def build(self, made: GraphBuilder, node: Node) -> Value:
        a, b, bias = self.operands(node)
        scale = float(dict[str, Any](node.kwargs).get("alpha", 1))
        y = product(made, made.read(node, a), made.read(node, b), made.dims(node), scale)
        if bias is not None and len(shape_of(bias)) > 1:
            return made.combined([y, made.read(node, bias)], lambda a, b: a + b, "add")
        return with_bias(made, node, y, bias)


@rule("embedding")
class EmbeddingCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        table, ids = args_of(node)[:2]
        return [*find.of(ids), find.of(table)[1]]

    def build(self, made: GraphBuilder, node: Node) -> Value:
        table, ids = made.read(node, args_of(node)[0]), made.read(node, args_of(node)[1])
        padding = int(argument(node, 2, "padding_idx", -1))
        if any(len(dim) != 1 for dim in table.dims):
            raise NotSupported("a table with a dimension of several axes")
        if ids.tensor.axes == (ONE,):  # one token for all positions
            ids = made.with_axes(ids, ids.axes[-1:])
        y = embedding(made.g, ids.tensor, table.tensor, padding=padding if padding >= 0 else None)
        return Value(y, made.dims(node))


@rule("layer_norm")
class LayerNormCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, shape, weight, bias = (argument(node, k, name) for k, name in enumerate(("", "", "weight", "bias")))
        if len(shape) != 1:
            raise NotSupported("a norm over several dimensions")
        for one in (weight, bias):
            if one is not None:
                find.same(node, one, 0, find.of(x)[-1])
        return find.of(x)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x, eps = made.read(node, args_of(node)[0]), float(argument(node, 4, "eps", 1e-5))
        if len(x.dims[-1]) != 1:
            raise NotSupported("a norm over several axes")
        x, weights = made.ordered(x), []
        for place, (name, value) in enumerate((("weight", 1.0), ("bias", 0.0)), 2):
            one, axis = argument(node, place, name), x.dims[-1][0]
            constant = np.full(made.size(axis), value)
            weights.append(
                made.shared(f"{name}.{axis}", {axis: len(constant)}, constant)
                if one is None
                else made.read(node, one).tensor
            )
        return Value(layer_norm(made.g, x.tensor, weights[0], weights[1], eps), x.dims)


@rule("rms_norm")
class RMSNormCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, weight, _ = self.parts(node)
        find.same(node, weight, 0, find.of(x)[-1])
        return find.of(x)

    @staticmethod
    def parts(node: Node) -> tuple[Node, Node, float]:
        """Return x, weight and eps, of aten.rms_norm(x, shape, weight, eps) or of the rewritten call without shape."""
        if not isinstance(args_of(node)[1], list | tuple):
            return args_of(node)[0], args_of(node)[1], float(args_of(node)[2])
        x, weight, eps = args_of(node)[0], argument(node, 2, "weight"), argument(node, 3, "eps")
        if len(args_of(node)[1]) != 1 or weight is None:
            raise NotSupported("RMSNorm over several dimensions or without a weight")
        return x, weight, torch.finfo(x.meta["val"].dtype).eps if eps is None else float(eps)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        *operands, eps = self.parts(node)
        x, weight = (made.read(node, one) for one in operands)
        if len(x.dims[-1]) != 1:
            raise NotSupported("a norm over several axes")
        x = made.ordered(x)
        return Value(rms_norm(made.g, x.tensor, weight.tensor, eps), x.dims)


@rule("conv1d", "conv2d", "conv3d")
class PatchCall:
    """A convolution whose kernels do not overlap, as of image patches: a product summed over channels and kernel."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, weight = args_of(node)[:2]
        count = len(shape_of(weight)) - 2
        bias, stride, padding, dilation, groups = (
            argument(node, place, name, default)
            for place, (name, default) in enumerate(
                (("bias", None), ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)), 2
            )
        )
        kernel = list(shape_of(weight)[2:])
        fits = each(stride, count) == kernel and each(padding, count) == [0] * count and groups == 1
        whole = all(n % k == 0 for n, k in zip(shape_of(x)[2:], kernel, strict=True))
        if not fits or each(dilation, count) != [1] * count or not whole or 1 in kernel:
            raise NotSupported("a convolution with kernels that overlap")
        find.same(node, x, 1, find.of(weight)[1])
        out = [find.of(x)[0], find.of(weight)[0]]
        for at in range(2, 2 + count):
            if shape_of(node)[at] == 1:
                find.same(node, x, at, find.of(weight)[at])
                out.append(())
                continue
            cells, size = find.groups.regroup([find.of(x)[at]], [shape_of(node)[at], kernel[at - 2]])
            for a, b in find.groups.align(find.of(weight)[at], size):
                if not find.groups.unite(a, b):
                    raise NotSupported("a kernel with an axis twice")
            out.append(cells)
        if bias is not None:
            find.same(node, bias, 0, out[1])
        return [find.groups.leaves(dim) for dim in out]

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x, weight = (made.read(node, one) for one in args_of(node)[:2])
        dims = made.dims(node)
        bias = argument(node, 2, "bias")
        y = product(made, x, weight, [dims[0], *dims[2:], dims[1]])  # channels last: a bias then adds to rows
        y = with_bias(made, node, y, bias)
        return Value(y.tensor, dims)
