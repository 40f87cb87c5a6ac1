"""Padded arrays of sequences.

Lists of arrays become padded arrays, shorter arrays are padded to a model's length, and an attention_mask gives the
lengths of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.graph.params import Array, Input

MASK = "attention_mask"


def padded(inputs: Mapping[str, Any], length: int, declared: Mapping[str, Input] = {}) -> dict[str, Array]:
    """Return inputs as arrays. A list of arrays of unequal lengths becomes a padded array, and attention_mask is added.

    Args:
        length: positions of a padded sequence.
        declared: the model's inputs, if known.

    Raises:
        ValueError: a list holds anything but arrays of 1 to `length` tokens, or a sequence has different lengths in
            different inputs.
    """
    without_seq = {MASK, *(name for name, one in declared.items() if "seq" not in one.tensor.axes)}
    lists = {
        name: value
        for name, value in inputs.items()
        if name not in without_seq and isinstance(value, list | tuple) and not _flat(value)
    }
    if lists and MASK in inputs:
        raise ValueError(f"{MASK}: got lists of arrays too, whose lengths define the mask; allowed: the lists alone")
    arrays = {name: _array(name, value) for name, value in inputs.items() if name not in lists}
    first, known_lengths = next(iter(lists), ""), list[int]()
    for name, array in arrays.items() if lists else ():
        if name not in without_seq and array.ndim > 1:
            raise ValueError(f"{name}: got an array, and a list of arrays as {first}; allowed: two arrays or two lists")
    for name, value in lists.items():
        rows = [_array(f"{name}[{k}]", row) for k, row in enumerate(value)]
        if not rows:
            raise ValueError(f"{name}: got {value!r}; allowed: a list of arrays, one for each sequence")
        more = declared[name].tensor.shape[2:] if name in declared else rows[0].shape[1:]
        for k, row in enumerate(rows):
            _check_row(f"{name}[{k}]", row, length, more)
        lengths = [len(row) for row in rows]
        if (known_lengths := known_lengths or lengths) != lengths:
            raise ValueError(f"{name}: its rows differ in length from those of {first}; allowed: equal lengths")
        arrays[name] = np.zeros((len(rows), length, *more), np.result_type(*rows))
        for k, row in enumerate(rows):
            arrays[name][k, : len(row)] = row
    if lists:
        arrays[MASK] = (np.arange(length) < np.array(known_lengths)[:, None]).astype(np.int64)
    return arrays


def widened(arrays: dict[str, Array], length: int, declared: Mapping[str, Input]) -> dict[str, Array]:
    """Pad arrays [sequences, n, ...] with n < length to [sequences, length, ...], and add or pad attention_mask."""
    with_seq = {
        name: value
        for name, value in arrays.items()
        if value.ndim > 1 and (name == MASK or (name in declared and "seq" in declared[name].tensor.axes))
    }
    widths = {value.shape[1] for value in with_seq.values()}
    if len(widths) != 1 or (n := widths.pop()) >= length:  # the caller checks the shapes
        return arrays
    with_seq.setdefault(MASK, np.ones((len(next(iter(with_seq.values()))), n), np.int64))
    for name, value in with_seq.items():
        around = [(0, 0), (0, length - n), *[(0, 0)] * (value.ndim - 2)]
        ignored = declared[name].ignored if name in declared else None
        arrays[name] = np.pad(value, around, constant_values=ignored or 0)
    return arrays


def _check_row(name: str, row: Array, length: int, more: tuple[int, ...]) -> None:
    """Raise ValueError unless the row has the shape [tokens, *more] with 1 to `length` tokens."""
    if not row.ndim or row.shape[1:] != more:
        need = ", ".join(["tokens", *map(str, more)])
        raise ValueError(f"{name}: got shape {row.shape}; allowed: [{need}]")
    if not len(row):
        raise ValueError(f"{name}: an empty sequence; allowed: at least one token")
    if len(row) > length:
        raise ValueError(f"{name}: a sequence of {len(row)} tokens; allowed: at most seq = {length}")


def _flat(value: Any) -> bool:
    """Return whether a list holds plain numbers, one for each sequence, and no arrays."""
    return bool(value) and not any(isinstance(one, list | tuple) or np.ndim(one) for one in value)


def _array(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:  # a tensor of another library may raise any exception
        raise ValueError(f"{name}: is not an array ({type(error).__name__}: {error})") from error


def lengths_of(arrays: Mapping[str, Array], length: int) -> list[int]:
    """Return the length of each sequence of padded arrays, from their attention_mask.

    Raises:
        ValueError: the mask has holes, or a sequence is empty.
    """
    if MASK not in arrays:
        return [length] * len(next(value for value in arrays.values() if value.ndim > 1))
    mask = arrays[MASK] != 0
    lengths: list[int] = mask.sum(1).tolist()
    for row, n in enumerate(lengths):
        if not n:
            raise ValueError(f"{MASK}[{row}]: an empty sequence; allowed: at least one token")
        if not mask[row, :n].all():
            raise ValueError(f"{MASK}[{row}]: has holes; allowed with pack: ones, then zeros")
    return lengths
