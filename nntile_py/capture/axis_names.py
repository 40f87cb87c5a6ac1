"""Names of a captured module's axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nntile_py.capture.axis_groups import Atom
from nntile_py.capture.rules import AxisFinder

ROLES = "batch", "seq", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab", "position"


def axis_names(find: AxisFinder, sizes: Mapping[int, str]) -> dict[Atom, str]:
    """Return a name for each axis: the role that an operator or a config's size proposes, else d0, d1, ...

    Axes that are cut alike share the name before the dot: `seq` and `seq.2` are cut by `tiles.seq`.

    Args:
        sizes: {size: name} from the config of a module of transformers.
    """
    order: dict[Atom, None] = {}
    for dims in find.found.values():
        for one in dims if dims and isinstance(dims[0], list) else [dims]:
            for dim in one:
                order |= dict.fromkeys(find.groups.leaves(dim))
    for pairs in find.renames.values():
        for old, new in pairs:
            order |= dict.fromkeys(find.groups.leaves([old, new]))

    def head(atom: Atom) -> Atom:
        return find.groups.root(atom.alike[0])

    def role(atom: Atom) -> str | int:
        proposed = (one for like in atom.alike for one in like.roles)
        mine = sorted((one for one in proposed if one in ROLES), key=ROLES.index)
        return mine[0] if mine else sizes.get(atom.size, atom.size)

    _unite_alike(find, order, role)
    order = dict.fromkeys(find.groups.root(atom) for atom in order)
    bases: dict[Atom, str] = {}
    taken: dict[str, int] = {}
    plain = 0
    names: dict[Atom, str] = {}
    for atom in order:
        top = head(atom)
        if top not in bases:
            found = role(top)
            if isinstance(found, int):
                found, plain = f"d{plain}", plain + 1
            bases[top] = found
        base = bases[top]
        taken[base] = taken.get(base, 0) + 1
        names[atom] = base if taken[base] == 1 else f"{base}.{taken[base]}"
    return names


def _unite_alike(find: AxisFinder, order: Iterable[Atom], role: Callable[[Atom], str | int]) -> None:
    """Make axes of the same role and size one, such as the heads of all layers, unless a tensor has both."""
    alike: dict[tuple[str | int, int], list[Atom]] = {}
    for atom in order:
        known = alike.setdefault((role(atom), atom.size), [])
        if not any(find.groups.unite(one, atom) for one in known):
            known.append(atom)
