"""Views: other dimensions of the same elements, without a task."""

from __future__ import annotations

from torch.fx import Node

from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import args_of, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, NotSupported, Value, argument, rule
from nntile_py.tasks.select import select


class _View:
    """The result is the operand's tensor, with the dimensions that the first pass has found."""

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.read(node, args_of(node)[0], wide=True)
        return Value(x.tensor, made.dims(node))


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
class Regrouped(_View):
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        return find.groups.regroup(find.of(args_of(node)[0]), shape_of(node))


@rule("alias", "contiguous", "clone", "lift_fresh_copy", "positive", "_to_copy", "to", "type_as", "float", "view_dtype")
class Unchanged(_View):
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        old, new = (one.meta["val"].dtype for one in (args_of(node)[0], node))
        if old.is_floating_point and not new.is_floating_point:
            raise NotSupported("numbers as integers")
        return find.of(args_of(node)[0])


@rule("permute", "movedim", "transpose", "t", "numpy_T", "swapaxes", "swapdims")
class Permuted(_View):
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        dims = find.of(args_of(node)[0])
        return [dims[k] for k in self.order(node, len(dims))]

    def order(self, node: Node, count: int) -> list[int]:
        name = name_of(node)
        order = list(range(count))
        if name == "permute":
            return [k % count for k in argument(node, 1, "dims")]
        if name in ("t", "numpy_T"):
            return order[::-1]
        if name == "movedim":
            source, target = (value if isinstance(value, list) else [value] for value in args_of(node)[1:3])
            rest = [k for k in order if k not in {one % count for one in source}]
            for at, k in sorted(zip((one % count for one in target), source, strict=True)):
                rest.insert(at, k % count)
            return rest
        a, b = (int(k) % count for k in args_of(node)[1:3])
        order[a], order[b] = b, a
        return order


@rule("unsqueeze", "squeeze")
class Resized(_View):
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        old, new = find.of(args_of(node)[0]), shape_of(node)
        at = argument(node, 1, "dim")
        if len(new) > len(old):
            old.insert(at % len(new), ())
            return old
        places = range(len(old)) if at is None else [k % len(old) for k in (at if isinstance(at, list) else [at])]
        sizes = shape_of(args_of(node)[0])
        return [dim for k, dim in enumerate(old) if not (k in places and sizes[k] == 1)]


@rule("expand", "expand_as", "broadcast_to")
class Expanded(_View):
    """The tensor lacks the axes along which the value is repeated; operators that need these axes repeat the tensor."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        new, old = shape_of(node), find.of(args_of(node)[0])
        sizes = [1] * (len(new) - len(old)) + list(shape_of(args_of(node)[0]))
        old = [()] * (len(new) - len(old)) + old
        more = find.fresh(new)
        return [
            dim if size == want else more[k] for k, (dim, size, want) in enumerate(zip(old, sizes, new, strict=True))
        ]


@rule("slice")
class SliceCall(_View):
    """A slice that takes all entries; others run as ATen tasks."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        if shape_of(node) != shape_of(args_of(node)[0]) or argument(node, 4, "step", 1) != 1:
            raise NotSupported("a part of a dimension")
        return find.of(args_of(node)[0])


@rule("select")
class SelectCall:
    """One entry along a dimension."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        dims = find.of(args_of(node)[0])
        del dims[args_of(node)[1] % len(dims)]
        return dims

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x, (at, number) = made.read(node, args_of(node)[0]), args_of(node)[1:3]
        dim, size = x.dims[at % len(x.dims)], shape_of(args_of(node)[0])[at]
        if len(dim) != 1 or dim[0] not in x.tensor.axes or len(x.tensor.axes) == 1:
            raise NotSupported("an entry along several axes, or of a repeated one")
        return Value(select(made.g, x.tensor, dim[0], number % size), made.dims(node))
