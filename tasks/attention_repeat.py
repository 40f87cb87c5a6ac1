"""Repeats each head of keys and values for the query heads that share it. Attention with stored scores needs this."""

from __future__ import annotations

from nntile_py.tiles import ACC, R, TaskArgs, Tiling, W

from .op import Array, GraphLike, Lowering, Op, Tensor


class RepeatArgs(TaskArgs):
    """Arguments of attention_repeat and attention_repeat_grad."""

    axis: int  # position of the axis heads


class AttentionRepeat(Op):
    """y[.., head, ..] = x[.., head // group, ..]: the axis kv_heads becomes heads."""

    picks = ("kv_heads",)

    def __init__(self, x: Tensor, out: Tensor) -> None:
        super().__init__([x], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        x = self.inputs[0]
        return [g.add(AttentionRepeatGrad(grads[0], g.temp("repeat_grad", x.axes, x.shape, x.dtype))).output]

    def fit(self, tiling: Tiling) -> None:
        fit_groups(self.inputs[0], self.output, tiling)

    def lower(self, lowering: Lowering) -> None:
        x, y = self.inputs[0], self.output
        for index in lowering.indices(y):
            shared = lowering.tile(x, index | {"kv_heads": tile_of_group(lowering, x, y, index["heads"])})
            lowering.emit(
                "attention_repeat", [W(lowering.tile(y, index)), R(shared)], RepeatArgs(y.axes.index("heads"))
            )

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        axis = self.output.axes.index("heads")
        return (inputs[0].repeat(self.output.shape[axis] // inputs[0].shape[axis], axis),)


class AttentionRepeatGrad(Op):
    """dx[.., i, ..] = sum of dy over the query heads of group i."""

    def __init__(self, dy: Tensor, out: Tensor) -> None:
        super().__init__([dy], [out])

    def fit(self, tiling: Tiling) -> None:
        fit_groups(self.output, self.inputs[0], tiling)

    def lower(self, lowering: Lowering) -> None:
        dy, dx = self.inputs[0], self.output
        for index in lowering.indices(dy):
            shared = lowering.tile(dx, index | {"kv_heads": tile_of_group(lowering, dx, dy, index["heads"])})
            args = RepeatArgs(dy.axes.index("heads"))
            lowering.emit("attention_repeat_grad", [ACC(shared), R(lowering.tile(dy, index))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        axis = self.output.axes.index("kv_heads")
        shape = list(self.output.shape)
        shape.insert(axis + 1, -1)
        return (inputs[0].reshape(shape).sum(axis + 1),)


def repeat_heads(g: GraphLike, x: Tensor, heads: int) -> Tensor:
    """Return x with each kv_head repeated for consecutive query heads, so that the result has `heads` heads."""
    axes = ["heads" if axis == "kv_heads" else axis for axis in x.axes]
    shape = [heads if axis == "heads" else x.size(axis) for axis in axes]
    return g.add(AttentionRepeat(x, g.temp("repeat", axes, shape, x.dtype))).output


def tile_of_group(lowering: Lowering, few: Tensor, many: Tensor, heads: int) -> int:
    """Return the tile number along kv_heads of `few` (k or v) for tile number `heads` along heads of `many` (q)."""
    group = many.size("heads") // few.size("kv_heads")
    first = lowering.parts(many, "heads")[heads].offset // group
    return next(i for i, part in enumerate(lowering.parts(few, "kv_heads")) if first < part.end)


def fit_groups(few: Tensor, many: Tensor, tiling: Tiling) -> None:
    tiling.share("kv_heads", "heads", many.size("heads"), many.size("heads") // few.size("kv_heads"))
