"""One row per operator: its name, and a function that builds it on tensors with random values.

A row makes tensors (`case.x`: an input, `case.y`: an output) and adds one operator or a few to the case's graph.
"""

from __future__ import annotations

import operators_attention
import operators_contract
import operators_generated
import operators_generation
import operators_losses
import operators_plain

_PARTS = (operators_contract, operators_plain, operators_losses, operators_generated, operators_attention)
_PARTS += (operators_generation,)
ROWS = {name: row for part in _PARTS for name, row in part.ROWS.items()}
assert len(ROWS) == sum(len(part.ROWS) for part in _PARTS), "a row in two files"

TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "seq": 3, "embed": 8, "heads": 2, "ffn": 10, "vocab": 12},
    "ragged": {"batch": 3, "seq": 4, "embed": 10, "heads": 3, "ffn": 17, "vocab": 17},
}
