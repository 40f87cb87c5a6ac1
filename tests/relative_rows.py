"""Rows of attention with relative positions and its gradient, over segments or rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nntile_py.models.deberta_parts import distance_rows
from nntile_py.tasks.attention_relative import relative_attention
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.testing import Case, ids, padding

BSHD = "batch seq heads head_dim"
# {name: arguments `buckets` and `longest` of `distance_rows`}.
DISTANCES = {"linear": (0, 1000), "clipped": (0, 13), "log": (16, 120), "log of few": (4, 120)}


@dataclass(frozen=True)
class RelativeRow:
    """A row that compares the output, and the gradients of q, k, v and the products."""

    mask: str = "segments"
    distances: str = "log"
    products: str = "queries keys"
    dropout: float = 0.0
    ends: tuple[int, ...] = ()  # of the segments
    start: int = 0  # of the first segment
    axes: str = BSHD
    scale: float | None = None

    def __call__(self, case: Case) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        buckets, longest = DISTANCES[self.distances]
        rows, index = distance_rows(case.sizes["seq"], case.sizes["seq"], buckets, longest)
        case.sizes |= {"distance": len(index), "relative": len(rows), "sequences": len(self.ends) + 1}
        q, k, v = (case.x(self.axes) for _ in range(3))
        of_distances = case.x("distance", lambda *_: index, "int64")
        names = self.axes.replace("head_dim", "relative")
        products = [case.x(names) if one in self.products else None for one in ("queries", "keys")]
        if self.mask == "segments" and self.dropout:
            case.graph.row_numbers["seq"] = case.x("batch seq", ids(1000), "int64")
        offsets = np.array([self.start, *self.ends])
        mask = Mask(
            padding=case.x("batch seq", padding, "int64") if self.mask == "padding" else None,
            segments=case.x("sequences", lambda *_: offsets, "int64") if self.mask == "segments" else None,
        )
        inputs = [t for t in (q, k, v, *products) if t]
        for tensor in inputs:
            tensor.requires_grad = True
        out = relative_attention(case.graph, q, k, v, mask, of_distances, *products, self.dropout, self.scale)
        op, dy = case.graph.ops[-1], case.x(self.axes)
        grads = dict(zip(op.inputs, op.gradient(case.graph, dy, None), strict=True))
        for number, tensor in enumerate([out, *(grads[t] for t in inputs)]):
            assert isinstance(tensor, Tensor)
            tensor.storage.kind, tensor.storage.name = "scalar", f"result{number}"


ENDS = (1, 1, 40, 41, 137)  # of 150 positions: segments of length 1 and 0, 13 positions of no segment
BIN = {"batch": 1, "seq": 150, "heads": 2, "head_dim": 24}
CASES: dict[str, tuple[RelativeRow, dict[str, int]]] = {
    "log": (RelativeRow(ends=ENDS), {}),
    "log of few": (RelativeRow(distances="log of few", ends=ENDS), {"heads": 1}),
    "linear": (RelativeRow(distances="linear", ends=ENDS), {"heads": 1}),
    "clipped": (RelativeRow(distances="clipped", ends=ENDS, start=1), {}),
    "queries": (RelativeRow(products="queries", ends=ENDS), {}),
    "keys": (RelativeRow(products="keys", distances="clipped", ends=ENDS), {}),
    "one that fills the bin": (RelativeRow(ends=(150,)), {}),
    "an empty bin": (RelativeRow(ends=(0, 0)), {}),
    "heads first": (RelativeRow(axes="heads batch seq head_dim", ends=ENDS), {"heads": 1}),
    "dropout": (RelativeRow(dropout=0.3, ends=ENDS), {"heads": 1}),
    "rows": (RelativeRow("none", "linear"), {"batch": 1}),
    "padding": (RelativeRow("padding", "log of few"), {"batch": 1}),
    "padding dropout": (RelativeRow("padding", dropout=0.3), {}),
}


def fitted(name: str, positions: int, **sizes: int) -> tuple[RelativeRow, dict[str, int], dict[str, int]]:
    """Return the row of CASES, its sizes and its tiles for this number of positions."""
    row, tiles = CASES[name]
    row = replace(row, ends=tuple(max(end * positions // 150, row.start) for end in row.ends))
    rows = {"batch": 2} if row.mask != "segments" else {}
    return row, {**BIN, **rows, "seq": positions, "key": positions, **sizes}, tiles
