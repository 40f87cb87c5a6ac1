"""Finds the axes of a captured graph: dimensions that operators force to be equal become one axis (union-find).

A dimension of a torch tensor is a list of atoms: one for most dimensions, none for a dimension of size 1 that only
broadcasts, several for a dimension that a view makes of several axes (batch and seq flattened to one). A view that
splits a dimension splits its atom everywhere. Two dimensions of one tensor never become one axis. If an operator would
force this, it reads one of the two under another name, and both have tiles of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence


class Atom:
    """An axis. After a union it stands for the axis `same`, after a split for the axes `parts`.

    `AxisGroups.leaves` follows both; compare axes by it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.same: Atom | None = None
        self.parts: tuple[Atom, ...] = ()
        self.tensors: set[int] = set()  # numbers of the tensors that have this axis
        self.roles: list[str] = []  # names that operators or inputs propose
        self.alike: list[Atom] = [self]  # axes that must have tiles of the same size; they share this list

    def __repr__(self) -> str:
        return f"Atom({self.size})"


Dim = tuple[Atom, ...]


class Mismatch(ValueError):
    """Two dimensions cannot have the same axes, because their sizes cannot be split into equal factors."""


def size_of(dim: Iterable[Atom]) -> int:
    return math.prod(atom.size for atom in dim)


class AxisGroups:
    """All atoms of a captured graph."""

    def __init__(self) -> None:
        self._tensors = 0

    def leaves(self, dim: Iterable[Atom]) -> Dim:
        """Return a dimension's axes as they are now: after all unions and splits so far."""
        return tuple(self._walk(dim))

    def _walk(self, dim: Iterable[Atom]) -> Iterator[Atom]:
        for atom in dim:
            root = self.root(atom)
            if root.parts:
                yield from self._walk(root.parts)
            else:
                yield root

    @staticmethod
    def root(atom: Atom) -> Atom:
        while atom.same:
            atom = atom.same
        return atom

    def tensor(self, dims: Sequence[Dim]) -> None:
        """Record that one tensor has these dimensions: no two of its axes may become one."""
        self._tensors += 1
        for dim in dims:
            for atom in self.leaves(dim):
                atom.tensors.add(self._tensors)

    def split(self, atom: Atom, sizes: Sequence[int]) -> tuple[Atom, ...]:
        """Split an axis in all tensors, slowest part first. Axes that must have equal tiles are split alike."""
        root = self.root(atom)
        assert math.prod(sizes) == root.size and not root.parts, (root, sizes)
        root.parts = tuple(Atom(size) for size in sizes)
        for part in root.parts:
            part.tensors = set(root.tensors)
        for other in {self.root(one) for one in root.alike} - {root}:
            if not other.parts:
                self.split(other, sizes)
            for part, like in zip(root.parts, other.parts, strict=False):
                self.cut_alike(part, like)
        return root.parts

    @staticmethod
    def cut_alike(a: Atom, b: Atom) -> None:
        """Record that two axes must be cut into tiles of the same size."""
        if a.alike is not b.alike:
            a.alike += b.alike
            for one in b.alike[:]:
                one.alike = a.alike

    def unite(self, a: Atom, b: Atom) -> bool:
        """Make two axes of equal size one. Return False if a tensor has both, so that they must stay two."""
        a, b = self.root(a), self.root(b)
        if a is b:
            return True
        assert a.size == b.size and not a.parts and not b.parts, (a, b)
        if a.tensors & b.tensors:
            return False
        b.same = a
        a.tensors |= b.tensors
        a.roles += b.roles
        self.cut_alike(a, b)
        return True

    def align(self, left: Iterable[Atom], right: Iterable[Atom]) -> list[tuple[Atom, Atom]]:
        """Split the axes of two dimensions of equal size until they correspond; return the pairs of equal axes.

        Raises:
            Mismatch: an axis would have to be split at a place that does not divide it.
        """
        pairs: list[tuple[Atom, Atom]] = []
        a, b = list(self.leaves(left))[::-1], list(self.leaves(right))[::-1]
        while a and b:
            x, y = a.pop(), b.pop()
            if x.size == y.size:
                pairs.append((x, y))
            elif x.size > y.size:
                a += self._cut(x, y.size)
                b.append(y)
            else:
                b += self._cut(y, x.size)
                a.append(x)
        if any(atom.size > 1 for atom in (*a, *b)):
            raise Mismatch("the dimensions have different sizes")
        return pairs

    def _cut(self, atom: Atom, first: int) -> list[Atom]:
        """Split an axis into a part of size `first` and the rest; return them in reverse."""
        if atom.size % first or first == 1:
            raise Mismatch(f"{atom.size} is not a multiple of {first}")
        return list(self.split(atom, [first, atom.size // first]))[::-1]

    def regroup(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
        """Return the dimensions of a view with another shape. Splits axes where a new dimension ends within one.

        Raises:
            Mismatch: a new dimension ends at a place that does not divide an axis.
        """
        waiting = [atom for dim in dims for atom in self.leaves(dim)][::-1]
        result: list[Dim] = []
        for size in shape:
            taken: list[Atom] = []
            while size_of(taken) < size:
                if not waiting:
                    raise Mismatch("the view has more elements")
                atom, left = waiting.pop(), size // size_of(taken)
                if size % size_of(taken) or (atom.size <= left and left % atom.size):
                    raise Mismatch(f"{size} is not a product of axes")
                if atom.size > left:
                    *rest, atom = self._cut(atom, left)
                    waiting += rest
                taken.append(atom)
            if size == 1 and waiting and waiting[-1].size == 1:
                taken.append(waiting.pop())
            result.append(tuple(taken))
        if any(atom.size > 1 for atom in waiting):
            raise Mismatch("the view has fewer elements")
        return result
