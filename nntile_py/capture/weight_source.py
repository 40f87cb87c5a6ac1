"""Sources of the parameters of a captured module: their places in the module's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nntile_py.capture.rewrites import WeightPart
from nntile_py.capture.rules import Names
from nntile_py.errors import ConfigError
from nntile_py.graph.params import Source


def source_of_part(
    name: str, whole: tuple[int, ...], dims: list[Names], part: WeightPart, axis_sizes: Mapping[str, int]
) -> Source:
    """Return the Source of a parameter that is a part of a module's weight: its place in the weight.

    Args:
        name: The weight's name.
        whole: Shape of the weight.
        dims: Axes of each dimension of the parameter.
        part: The part of the weight.
        axis_sizes: {axis: size}.

    Raises:
        ConfigError: The weight is split within a row.
    """
    view: list[int] = []
    index: list[slice | int] = []
    for at, dim in enumerate(dims):
        sizes = [axis_sizes[axis] for axis in dim]
        if at != part.dim:
            view += sizes
            index += [slice(None)] * len(sizes)
        elif whole[at] % part.size == 0 and part.start % part.size == 0:
            view += [whole[at] // part.size, *sizes]
            index += [part.start // part.size, *[slice(None)] * len(sizes)]
        else:
            inner = math.prod(sizes[1:])
            if whole[at] % inner or part.start % inner:
                raise ConfigError(f"model: {name} is split at {part.start}, within a row of {inner}; allowed: at rows")
            view += [whole[at] // inner, *sizes[1:]]
            first = part.start // inner
            index += [slice(first, first + sizes[0]), *[slice(None)] * (len(sizes) - 1)]
    return Source(name, whole, tuple(view), tuple(index))
