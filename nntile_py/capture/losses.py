"""Losses: a cross-entropy that is the module's loss, and any other scalar."""

from __future__ import annotations

import torch
from torch.fx import Node

from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import TASKS, CapturedModule, args_of, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, NotSupported, Value, argument, rule
from nntile_py.execution.python_task import PythonTask
from nntile_py.graph.graph import Graph
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.formula import ONE, total_over
from nntile_py.tasks.op import GraphLike, Lowering, Op, Tensor
from nntile_py.tiles import ACC, R, Slot, TaskArgs, W

PASSES = "passes_scale"  # slot: 1 / (number of micro-batches of a step)


def loss_call(captured: CapturedModule) -> Node | None:
    """Return the call that computes the loss; operators after the call that only copy or reshape are skipped."""
    node = captured.loss
    while node is not None and name_of(node) in ("to", "alias", "clone", "contiguous", "view", "reshape"):
        node = args_of(node)[0]
    return node


def plain_cross_entropy(captured: CapturedModule, node: Node) -> bool:
    """Return whether a call is the mean cross-entropy that is the module's whole loss."""
    if name_of(node) != "cross_entropy_loss" or node is not loss_call(captured):
        return False
    logits, labels = args_of(node)[:2]
    options = [
        argument(node, k, name, default)
        for k, (name, default) in enumerate(
            (("weight", None), ("reduction", 1), ("ignore_index", IGNORED), ("label_smoothing", 0.0)), 2
        )
    ]
    own = isinstance(labels, Node) and captured.where.get(labels) != TASKS
    classes = own and not labels.meta["val"].dtype.is_floating_point
    return bool(classes) and len(shape_of(logits)) == 2 and options == [None, 1, IGNORED, 0.0]


@rule("cross_entropy_loss")
class CrossEntropyCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        if not plain_cross_entropy(find.captured, node):
            raise NotSupported("another cross-entropy than the mean over labels")
        logits, labels = args_of(node)[:2]
        find.same(node, labels, 0, find.of(logits)[0])
        find.propose(find.of(logits)[1], "vocab")
        return []

    def build(self, made: GraphBuilder, node: Node) -> Value:
        logits, labels = (made.read(node, one) for one in args_of(node)[:2])
        if len(logits.dims[1]) != 1:
            raise NotSupported("classes of several axes")
        logits = made.ordered(logits)
        labels = made.ordered(labels)
        return Value(cross_entropy(made.g, logits.tensor, labels.tensor), [])


@rule("mse_loss")
class MeanSquaredErrorCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        if argument(node, 2, "reduction", 1) != 1:
            raise NotSupported("another reduction than the mean")
        x, target = args_of(node)[:2]
        for at, dim in enumerate(find.of(x)):
            find.same(node, target, at, dim)
        return []

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.spread(made.read(node, args_of(node)[0]))
        target = made.read(node, args_of(node)[1])
        error = made.combined([x, target], lambda a, b: (a - b) * (a - b), "squared error")
        total = total_over(made.g, error.tensor, error.tensor.axes)
        return made.scaled(Value(total, []), 1 / error.tensor.numel)


@rule("broadcast_tensors")
class BroadcastCall:
    def dims(self, find: AxisFinder, node: Node) -> list[list[Dim]]:
        operands = args_of(node)[0]
        if len({shape_of(one) for one in operands}) > 1:
            raise NotSupported("tensors of different shapes")
        return [find.of(one) for one in operands]

    def build(self, made: GraphBuilder, node: Node) -> list[Value]:
        return [made.read(node, one) for one in args_of(node)[0]]


class ScalarLossArgs(TaskArgs):
    scale: Slot


class ScalarLoss(Op):
    """loss = x * scale for a tensor x of one number; the slot `scale` is 1 / (number of micro-batches)."""

    def __init__(self, x: Tensor, loss: Tensor) -> None:
        super().__init__([x], [loss])
        self.scale = Slot(PASSES)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x = self.inputs[0]
        return [g.add(ScalarLossGrad(g.temp("loss_grad", x.axes, x.shape, x.dtype))).output]

    def lower(self, lowering: Lowering) -> None:
        accesses = [ACC(lowering.tile(self.output, {ONE: 0})), R(lowering.tile(self.inputs[0], {ONE: 0}))]
        lowering.emit(_add_loss, accesses, ScalarLossArgs(self.scale))


class ScalarLossGrad(Op):
    """dx = scale: the gradient of ScalarLoss."""

    def __init__(self, out: Tensor) -> None:
        super().__init__([], [out])

    def flop(self) -> float:
        return 1.0

    def lower(self, lowering: Lowering) -> None:
        lowering.emit(_loss_grad, [W(lowering.tile(self.output, {ONE: 0}))], ScalarLossArgs(Slot(PASSES)))


def _add(loss: torch.Tensor, x: torch.Tensor, *, scale: float) -> None:
    loss += x * scale


def _fill(dx: torch.Tensor, *, scale: float) -> None:
    dx.fill_(scale)


_add_loss = PythonTask(_add, "torch", {"loss": "ACC", "x": "R"})
_loss_grad = PythonTask(_fill, "torch", {"dx": "W"})


def scalar_loss(g: Graph, x: Tensor, batch: int) -> Tensor:
    """Return the loss tensor for a scalar `x` that a module computes: the mean of x over the micro-batches."""
    g.input("passes.", {"batch": batch}, "int64", default=0, scale=PASSES, weight=float(batch))
    return g.add(ScalarLoss(x, g.named("loss", [ONE], [1], "scalar", "fp64"))).output
