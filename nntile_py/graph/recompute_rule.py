"""Which forward operators run again in the backward pass: the setting `recompute`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

from nntile_py.tiles import Task

RECOMPUTE = "none", "attention", "layer"
AUTO = "auto"  # the fastest value of RECOMPUTE that fits, see recompute_choice.py
_LAYER = re.compile(r"((?:[^.]*\.)*?[^.]*\d)\.")  # h3. or model.layers.3.
_ATTENTION = re.compile(r"((?:[^.]*\.)*?[^.]*(?:attn|attention)[^.]*)\.")


WORDS = f"{', '.join((*RECOMPUTE, AUTO))}, or a list of patterns of operators' names"


def as_recompute(value: Any) -> str | tuple[str, ...] | None:
    """Return the setting `recompute`; None if it is neither AUTO, a name of RECOMPUTE, nor a list of patterns."""
    if isinstance(value, str):
        return value if value in (*RECOMPUTE, AUTO) else None
    patterns = isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value)
    return tuple(value) if patterns else None


def segment_of(recompute: str | Sequence[str]) -> Callable[[Task], str | None]:
    """Return a function that gives the segment (see tiles/recompute.py) of a forward task; None: not repeated.

    A segment is a layer, the attention of a layer, or the operators of a layer whose names match a pattern.
    """

    def of(task: Task) -> str | None:
        layer = _LAYER.match(task.op)
        if not layer or recompute == "layer":
            return layer and layer[1]
        if recompute == "attention":
            inside = _ATTENTION.match(task.op, layer.end())
            return inside and inside[0]
        return layer[1] if any(fnmatch.fnmatchcase(task.op, pattern) for pattern in recompute) else None

    return of
