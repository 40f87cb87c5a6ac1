"""Arrays held by StarPU, whole or cut into tiles, as arguments of tasks in Python."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.execution.runtime import Runtime
from nntile_py.execution.tile_grid import Ints, Slices, TileGrid, shape_text
from nntile_py.tiles import Access, TaskList, Tile
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import PYTHON, Task
from nntile_py.typed import typed

_numbers = itertools.count(1)  # the number under which profiles show an array
Handles = dict[Ints, _core.Tile]


class ArrayStorage:
    """The elements of an array, stored in one or several grids of tiles. Tasks copy the elements between grids.

    Each tile has its own StarPU handle. Views into one allocation would save the copies, but StarPU's asynchronous
    partitioning has an open bug on CUDA devices. Contiguous tiles are also fastest for BLAS and transfers, and StarPU
    can evict them one by one.
    """

    def __init__(self, shape: Ints, dtype: str, zeros: bool = False) -> None:
        if not _core.running():
            raise TaskError("no runtime is running: use `with nntile_py.Runtime(...):`")
        self.shape, self.dtype, self.zeros, self.number = shape, dtype, zeros, next(_numbers)
        self.whole = TileGrid(shape, tuple(max(length, 1) for length in shape))
        # Grids that hold the elements after all tasks submitted so far. Empty: no task has written the array.
        self.current: set[TileGrid] = set()
        self._handles: dict[TileGrid, Handles] = {}

    def handles(self, cut: TileGrid) -> Handles:
        """Return {index: StarPU handle} for the tiles of a grid. The handles are created at the first use of the grid.

        An array that is too large for one tile can therefore be used in smaller tiles.
        """
        if cut not in self._handles:
            shapes = {index: [part.stop - part.start for part in cut.where(index)] for index in cut}
            self._handles[cut] = {index: _core.Tile(shape, self.dtype) for index, shape in shapes.items()}
        return self._handles[cut]

    def source(self, cut: TileGrid) -> TileGrid:
        """Return a grid that holds the elements, `cut` if possible. Return `cut` also if no task has written the array.

        The zeros of an array of nt.zeros are written here, at its first use.
        """
        if self.zeros and not self.current:
            for handle in self.handles(cut).values():
                handle.zero()
            self.current.add(cut)
        return cut if cut in self.current or not self.current else max(self.current)

    def bring(self, cut: TileGrid, user: str) -> None:
        """Copy the elements into the grid `cut`, unless it holds them already.

        user: names the task and its argument in the error message.

        Raises:
            TaskError: some elements are missing: no task wrote them.
        """
        source = self.source(cut)
        if source == cut:
            return
        have = self.handles(source)
        if not all(handle.initialised for handle in have.values()):
            raise TaskError(f"{user} needs tiles of {cut}, but only some of the tiles of {source} were written")
        for index in cut:
            pieces = source.pieces(cut.where(index))
            accesses = [(user, "W", Array(self, cut, index))]
            accesses += [(user, "R", Array(self, source, one)) for one, _, _ in pieces]
            spec = (_copier([piece[1:] for piece in pieces]), True, True, [False] + [True] * len(pieces), 0)
            submit("copy_tiles", accesses, spec, always=True)
        self.current.add(cut)

    def wrote(self, cut: TileGrid) -> None:
        """Record that a task writes a tile of the grid `cut`. Other grids become invalid, and their memory is freed."""
        for other in self.current - {cut}:
            for handle in self._handles[other].values():
                handle.invalidate()
        self.current = {cut}


def submit(name: str, accesses: Sequence[tuple[str, str, Array]], spec: Any, **options: Any) -> Any:
    """Submit a task in Python, and return its submission in C++.

    Args:
        accesses: (label for error messages, mode, array) for each array.
        spec: see Spec in python_task.py.
        options: see submit_python in csrc/bindings.cpp.
    """
    labels, modes, arrays = zip(*accesses, strict=True) if accesses else ((), (), ())
    submitted = _core.submit_python(name, labels, [array.tile for array in arrays], modes, spec, **options)
    if Runtime.watched is not None:
        tasks = TaskList()
        tasks.tasks = [Task(PYTHON, [Access(array.as_tile(), mode) for _, mode, array in accesses], op=name)]
        Runtime.watched.append((submitted.run, tasks))
    return submitted


def _copier(pieces: Sequence[tuple[Slices, Slices]]) -> Any:
    """Return the function of a task that copies pieces of other tiles into a tile.

    pieces: for each other tile, the slices of the tile to write and the slices of the other tile.
    """

    def call(device: int, stream: int, parts: list[Any], floats: list[float]) -> None:
        import torch

        to, *sources = map(torch.utils.dlpack.from_dlpack, parts)
        for source, (there, here) in zip(sources, pieces, strict=True):
            to[there] = source[here]

    return call


class Array:
    """An array held by StarPU, or one tile of an array, as an argument of tasks. `np.asarray(x)` copies its elements.

    nt.array, nt.empty and nt.zeros return arrays. `x.tiles(...)[...]` returns tiles. All tilings of an array hold the
    same elements: if a task writes a tile, tasks and reads that follow find the new elements in the array and in its
    other tilings.
    """

    def __init__(self, data: ArrayStorage, cut: TileGrid, index: Ints) -> None:
        self.data, self.cut, self.index = data, cut, index

    @property
    def key(self) -> Any:
        """A key that is equal for all Array objects of the same tile."""
        return id(self.data), self.cut, self.index

    @property
    def where(self) -> Slices:
        """The slices of the array that this tile holds."""
        return self.cut.where(self.index)

    @property
    def shape(self) -> Ints:
        return tuple(part.stop - part.start for part in self.where)

    @property
    def ndim(self) -> int:
        return len(self.index)

    @property
    def dtype(self) -> Any:
        """The dtype in numpy; float32 for bfloat16, which numpy lacks."""
        return np.dtype(DTYPES[self.data.dtype].numpy)

    @property
    def tile(self) -> _core.Tile:
        """The StarPU handle of this array or tile."""
        return self.data.handles(self.cut)[self.index]

    def as_tile(self) -> Tile:
        """Create a Tile that describes this array or tile in profiles: its name there, its shape and its dtype."""
        name = f"array {self.data.number}" + (f" in {self.cut}" if self.cut != self.data.whole else "")
        return Tile(name, self.index, self.shape, self.data.dtype, persistent=True)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Wait for the tasks that write the array or tile, and return a copy.

        Raises:
            TaskError: a task failed, or no task has written the array.
        """
        source = self.data.source(self.cut)
        pieces, handles = source.pieces(self.where), self.data.handles(source)
        _core.check()
        for index, _, _ in pieces:
            if not handles[index].initialised:
                which = "" if source == self.data.whole else f": tile {_of(index)} of {source} is missing"
                raise TaskError(f"{self!r} was read before any task wrote it{which}")
        out = np.empty(self.shape, self.dtype)
        for index, there, here in pieces:
            out[there] = handles[index].read()[here]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("an nt.Array cannot be viewed, only copied: tasks may be writing it")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def tiles(self, *sizes: int | None, rows: int | None = None, columns: int | None = None) -> Tiles:
        """Return the array cut into tiles: `x.tiles(64, 64)` by axis, or `x.tiles(rows=64)` by name.

        An axis with the size None, or without a size, is not cut. Sizes need not divide the array: the last tile of an
        axis may be smaller. Nothing is copied until a task uses the tiles.

        Raises:
            ValueError: a size that is not a positive integer, more sizes than axes, or a tile that is cut again.
        """
        if self.cut != self.data.whole:
            raise ValueError(f"{self!r} cannot be cut again; allowed: other tiles of its array")
        wanted = list(sizes) + [None] * (self.ndim - len(sizes))
        for axis, size in ((0, rows), (1, columns)):
            if size is None:
                continue
            if axis >= self.ndim or (axis < len(sizes) and sizes[axis] is not None):
                got = f"{('rows', 'columns')[axis]}={size}"
                raise ValueError(f"tiles: got {got}; allowed: one size for each axis of {self!r}")
            wanted[axis] = size
        if len(wanted) > self.ndim:
            raise ValueError(f"tiles: {len(sizes)} sizes are too many for {self!r}, which has {self.ndim} axes")
        for size in wanted:
            if size is not None and (not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1):
                raise ValueError(f"tiles: got size {size!r}; allowed: a positive integer, or None for an uncut axis")
        whole = self.data.whole.sizes
        cut = TileGrid(self.data.shape, tuple(min(int(w or s), s) for w, s in zip(wanted, whole, strict=True)))
        return Tiles(self.data, cut)

    def __repr__(self) -> str:
        dtype = DTYPES[self.data.dtype].torch
        if self.cut != self.data.whole:
            return f"Array({shape_text(self.shape)} {dtype}, tile {_of(self.index)} of {shape_text(self.data.shape)})"
        cuts = sorted(self.data.current - {self.data.whole})
        state = f", in tiles of {' and '.join(map(str, cuts))}" if cuts else ""
        if not self.data.current:
            state = ", all zeros" if self.data.zeros else ", not yet written"
        return f"Array({shape_text(self.shape)} {dtype}{state})"


@dataclass(frozen=True, repr=False)
class Tiles:
    """An array cut into tiles: `A[i, j]` is a tile.

    `A[i, :]` and `A[i, :k]` are lists of tiles. An argument of a task may be such a list.
    """

    data: ArrayStorage
    cut: TileGrid

    @property
    def grid(self) -> Ints:
        """The number of tiles along each axis."""
        return self.cut.grid

    @overload
    def __getitem__(self, index: int | tuple[int, ...]) -> Array: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: slice | tuple[int | slice, ...]) -> list[Array]: ...
    def __getitem__(self, index: Any) -> Array | list[Array]:
        """Return a tile, or for slices a list of tiles. Trailing uncut axes may be left out.

        Raises:
            IndexError: there is no such tile.
        """
        parts = index if isinstance(index, tuple) else (index,)
        left = self.grid[len(parts) :]
        if len(parts) > len(self.grid) or any(count > 1 for count in left):
            raise IndexError(f"{self!r} takes {len(self.grid)} indices, got {len(parts)}")
        picked, many = [], False
        for part, count in zip((*parts, *(0 for _ in left)), self.grid, strict=True):
            if isinstance(part, slice):
                picked.append(range(count)[part])
                many = True
            elif not isinstance(part, int | np.integer):
                raise IndexError(f"{self!r}: got index {part!r}; allowed: integers and slices")
            elif not -count <= part < count:
                raise IndexError(f"{self!r} has no tile {_of(parts)}")
            else:
                picked.append(range(int(part) % count, int(part) % count + 1))
        tiles = [Array(self.data, self.cut, one) for one in itertools.product(*picked)]
        return tiles if many else tiles[0]

    def __iter__(self) -> Iterator[Array]:
        """Yield all tiles, row by row."""
        return (Array(self.data, self.cut, one) for one in self.cut)

    def __len__(self) -> int:
        return int(np.prod(self.grid, dtype=int))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the whole array, as Array.numpy does."""
        return Array(self.data, self.data.whole, (0,) * len(self.grid)).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return Array(self.data, self.data.whole, (0,) * len(self.grid)).__array__(dtype, copy)

    def __repr__(self) -> str:
        of = f"{shape_text(self.data.shape)} {DTYPES[self.data.dtype].torch}"
        return f"Tiles({shape_text(self.grid)} tiles of {self.cut}, of {of})"


@typed
def array(value: Any, dtype: Any = None) -> Array:
    """Copy a numpy array, or anything that numpy converts to one, into an array held by StarPU.

    Args:
        dtype: float16, float32, float64, bfloat16, bool, int16, int32 or int64, as a name or as a type of numpy;
            default: the dtype of `value`.

    Raises:
        TypeError: another dtype.
        TaskError: no runtime is running.
    """
    value = np.asarray(value)
    if value.dtype.kind in "OSU" or (value.dtype.kind in "cmM" and dtype is not None):
        raise TypeError(f"value: got {value.dtype}; allowed: numbers, or an array of them")
    result = empty(value.shape, value.dtype if dtype is None else dtype)
    result.tile.write(value)
    result.data.current.add(result.data.whole)
    return result


@typed
def empty(shape: int | Sequence[int], dtype: Any = "float64") -> Array:
    """Return an array without contents: tasks must write each part before a task reads it.

    Raises:
        ValueError: a wrong shape.
        TypeError, TaskError: see `array`.
    """
    return _new(shape, dtype, False)


@typed
def zeros(shape: int | Sequence[int], dtype: Any = "float64") -> Array:
    """Return an array of zeros. The zeros are written at its first use, into the tiles and on the workers that use it.

    Raises errors as `empty`.
    """
    return _new(shape, dtype, True)


def _new(shape: int | Sequence[int], dtype: Any, zeros: bool) -> Array:
    lengths = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    if not all(isinstance(length, int | np.integer) and length >= 0 for length in lengths):
        raise ValueError(f"shape: got {shape!r}; allowed: integers of at least 0")
    data = ArrayStorage(tuple(map(int, lengths)), array_dtype(dtype), zeros)
    return Array(data, data.whole, (0,) * len(lengths))


def array_dtype(wanted: Any) -> str:
    """Return the name in DTYPES of a dtype. wanted: a dtype of numpy or torch, or the name of a dtype."""
    name = str(wanted).removeprefix("torch.")
    known = {dtype.torch: dtype.name for dtype in DTYPES.values() if not dtype.largest}  # no fp8: arrays lack scales
    if name not in known and name not in known.values():
        with contextlib.suppress(TypeError, ValueError):
            name = np.dtype(wanted).name
    if name not in known and name not in known.values():
        raise TypeError(f"dtype: got {name}; allowed: {', '.join(known)}")
    return known.get(name, name)


def _of(index: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, index))}]"
