"""Relative positions in attention: products with embeddings of the distance are added to the scores.

Axes: scores [.., seq, key]; content_to_position [.., seq, relative] (products of queries with embeddings);
position_to_content [.., key, relative] (products of keys with embeddings); index [distance]. Entry t of the index is
the position along `relative` for all pairs (query s, key k) with k - s = t - (size of seq - 1).
"""

from __future__ import annotations

import numpy as np

from nntile_py.tiles import ACC, RW, R, TaskArgs

from .op import Array, GraphLike, Lowering, Op, Tensor, require


class RelativeArgs(TaskArgs):
    """Arguments of relative_scores and relative_scores_grad, on tiles [.., seq, key]."""

    first: int  # position in the index for the tile's first query and first key
    queries: bool  # True: the task has a tile of content_to_position
    keys: bool  # True: the task has a tile of position_to_content


class RelativeScores(Op):
    """y[s, k] = scores[s, k] + content_to_position[s, r] + position_to_content[k, r], r = index[k - s + seq - 1].

    The operator works in place: y has the tiles of the scores. One of the two products may be missing. The axes
    relative and distance are never cut. Source: He et al. 2021, "DeBERTa: Decoding-enhanced BERT with disentangled
    attention", eq. 4, where the products are scaled; here they must already be scaled.

    Args:
        index: int64 [distance], of size seq + key - 1: positions along `relative`, non-decreasing.

    Raises:
        ValueError: axes or sizes do not fit.
    """

    picks = "distance", "relative"

    def __init__(
        self,
        scores: Tensor,
        index: Tensor,
        content_to_position: Tensor | None,
        position_to_content: Tensor | None,
        out: Tensor,
    ) -> None:
        rule = "relative_scores: scores [.., seq, key] need an int64 index of seq + key - 1 distances"
        distances = scores.size("seq") + scores.size("key") - 1
        fits = scores.axes[-2:] == ("seq", "key") and (index.axes, index.dtype) == (("distance",), "int64")
        require(fits and index.shape == (distances,), rule, scores, index)
        rule = "relative_scores: a product has the axes of the scores, relative in the place of key or of seq"
        for product, axis in ((content_to_position, "seq"), (position_to_content, "key")):
            require(not product or product.axes == (*scores.axes[:-2], axis, "relative"), rule, scores, product)
        products = [t for t in (content_to_position, position_to_content) if t]
        require(bool(products), "relative_scores: needs one product with embeddings of distances", scores)
        assert out.storage is scores.storage, (scores, out)
        super().__init__([scores, index, *products], [out])
        self.queries, self.keys = content_to_position, position_to_content

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        dy = grads[0]
        assert dy is not None
        products = self.inputs[2:]
        outs = [g.temp("relative_grad", t.axes, t.shape, t.dtype) for t in products]
        return [dy, None, *g.add(RelativeScoresGrad(self, dy, outs)).outputs]

    def flop(self) -> float:
        return float(self.output.numel * (len(self.inputs) - 2))

    def args(self, lowering: Lowering, at: dict[str, int]) -> RelativeArgs:
        scores = self.inputs[0]
        shift = lowering.part(scores, "key", at).offset - lowering.part(scores, "seq", at).offset
        return RelativeArgs(shift + scores.size("seq") - 1, self.queries is not None, self.keys is not None)

    def lower(self, lowering: Lowering) -> None:
        index, *products = self.inputs[1:]
        for at in lowering.indices(self.output):
            whole = at | {"relative": 0, "distance": 0}
            reads = [R(lowering.tile(t, whole)) for t in (index, *products)]
            lowering.emit("relative_scores", [RW(lowering.tile(self.output, at)), *reads], self.args(lowering, at))

    def rows(self, index: Array) -> Array:
        """Return an array [seq, key]: the position along `relative` of each pair of a query and a key."""
        seq, key = self.output.shape[-2:]
        return np.asarray(index[np.arange(key) - np.arange(seq)[:, None] + seq - 1], int)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        y, rows, products = inputs[0], self.rows(inputs[1]), list(inputs[2:])
        seq, key = (np.arange(size) for size in rows.shape)
        if self.queries:
            y = y + products.pop(0)[..., seq[:, None], rows]
        if self.keys:
            y = y + products.pop(0)[..., key, rows]
        return (y,)


class RelativeScoresGrad(Op):
    """Gradients of content_to_position and position_to_content, or of one of them if RelativeScores lacks the other.

    - d content_to_position[s, r] = sum of dy[s, k] over all keys k with index[k - s + seq - 1] = r
    - d position_to_content[k, r] = sum of dy[s, k] over all queries s with index[k - s + seq - 1] = r
    """

    picks = ("distance",)

    def __init__(self, forward: RelativeScores, dy: Tensor, outs: list[Tensor]) -> None:
        super().__init__([dy, forward.inputs[1]], outs)
        self.forward = forward

    def flop(self) -> float:
        return float(self.inputs[0].numel * len(self.outputs))

    def lower(self, lowering: Lowering) -> None:
        dy, index = self.inputs
        for at in lowering.indices(dy):
            whole = at | {"relative": 0, "distance": 0}
            sums = [ACC(lowering.tile(t, whole)) for t in self.outputs]
            reads = [R(lowering.tile(t, whole)) for t in (dy, index)]
            lowering.emit("relative_scores_grad", [*sums, *reads], self.forward.args(lowering, at))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        relative = self.output.size("relative")
        rows = (self.forward.rows(inputs[1])[..., None] == np.arange(relative)).astype(float)  # [seq, key, relative]
        sums = {"s": self.forward.queries, "k": self.forward.keys}
        return tuple(np.einsum(f"...sk,skr->...{axis}r", inputs[0], rows) for axis, product in sums.items() if product)


def relative_scores(
    g: GraphLike,
    scores: Tensor,
    index: Tensor,
    content_to_position: Tensor | None,
    position_to_content: Tensor | None,
) -> Tensor:
    """Add an operator to the graph that adds the products to the scores in place; return the scores after it.

    Formula and axes: see RelativeScores.
    """
    out = Tensor(f"{scores.name}.relative", scores.axes, scores.shape, scores.dtype, storage=scores, band=scores.band)
    return g.add(RelativeScores(scores, index, content_to_position, position_to_content, out)).output
