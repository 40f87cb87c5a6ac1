"""Generates C++ headers: structs of kernel arguments from Python classes (tiles/arguments.py), and a table of dtypes.

    scripts/args_headers.py ROOT FOLDER
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tiles"))
from arguments import Kind, kind_of
from dtypes import DTYPES, SCALE_BYTES, UNIT

_TYPES = {"int": "int64_t", "bool": "bool", "float": "double", "Slot": "double"}
_READS = {"int": "r.integer()", "bool": "r.integer() != 0", "float": "r.real()", "Slot": "r.real()"}
Fields = dict[str, Kind]


def write(root: Path, folder: Path) -> list[str]:
    """Write NAME_args.h for each NAME.py with argument classes, and dtypes.h, to `folder`; return all their paths.

    Files whose content does not change keep their date, so that nothing is compiled again.
    """
    files: dict[Path, dict[str, Fields]] = {}  # {Python file: {argument class: its fields}}
    for path in sorted([*root.glob("tasks/*.py"), *root.glob("tiles/*.py")]):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        found = {n.name: _fields(path, n) for n in nodes if "TaskArgs" in map(ast.unparse, n.bases)}
        if found:
            files[path] = found
    classes = {name: fields for found in files.values() for name, fields in found.items()}
    homes = {name: _header(path) for path, found in files.items() for name in found}
    folder.mkdir(parents=True, exist_ok=True)
    for old in {header.name for header in folder.glob("*_args.h")} - set(homes.values()):
        (folder / old).unlink()
    for path, found in files.items():
        for name, fields in found.items():
            _check(path, name, fields, classes)
        others = {homes[kind.base] for fields in found.values() for kind in fields.values() if kind.group}
        included = ["arguments.h", *sorted(others - {_header(path)})]
        lines = [f"// The arguments declared in {path.relative_to(root)}; made by scripts/args_headers.py."]
        lines += ["#pragma once", *(f'#include "{name}"' for name in included), "", "namespace nntile {"]
        lines += [*(_struct(name, fields) for name, fields in found.items()), "}  // namespace nntile", ""]
        _keep(folder / _header(path), "\n".join(lines))
    _keep(folder / "dtypes.h", _dtypes())
    return sorted(str(header) for header in folder.glob("*.h"))


def _keep(header: Path, text: str) -> None:
    if not header.exists() or header.read_text() != text:
        header.write_text(text)


def _dtypes() -> str:
    scaled = " || ".join(f"type == at::ScalarType::{d.aten}" for d in DTYPES.values() if d.largest)
    rows = "".join(f'\n    {{"{d.name}", at::ScalarType::{d.aten}, "{d.numpy}"}},' for d in DTYPES.values())
    return f"""// The table of tiles/dtypes.py; made by scripts/args_headers.py.
#pragma once
#include <c10/core/ScalarType.h>

namespace nntile {{

struct Dtype {{
  const char* name;
  at::ScalarType type;
  const char* numpy;  // of arrays that go in and out
}};

inline constexpr Dtype kDtypes[] = {{{rows}
}};

// Dtypes whose tiles have a scale: an fp32 number behind the values.
inline constexpr size_t kScaleBytes = {SCALE_BYTES};
inline bool is_scaled(at::ScalarType type) {{ return {scaled}; }}
inline size_t scale_offset(size_t values) {{ return (values + kScaleBytes - 1) / kScaleBytes * kScaleBytes; }}
// 8-bit products need multiples of this number of columns and of summed elements.
inline constexpr int64_t kUnit = {UNIT};
inline int64_t up_to_unit(int64_t count) {{ return (count + kUnit - 1) / kUnit * kUnit; }}

}}  // namespace nntile
"""


def _header(path: Path) -> str:
    return f"{path.stem}_args.h"


def _fields(path: Path, node: ast.ClassDef) -> Fields:
    fields: Fields = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            try:
                fields[ast.unparse(field.target)] = kind_of(ast.unparse(field.annotation))
            except TypeError as error:
                raise SystemExit(f"{path}: {node.name}.{ast.unparse(field.target)}: {error}") from None
    return fields


def _check(path: Path, name: str, fields: Fields, classes: dict[str, Fields]) -> None:
    """Exit with a message if a field's class does not exist, or if fields of varying length would be ambiguous.

    Only the last field with integers may have a varying number of integers.
    """

    def has_ints(kind: Kind) -> bool:
        if kind.group:
            return any(map(has_ints, classes[kind.base].values()))
        return kind.base in ("int", "bool")

    def varies(kind: Kind) -> bool:
        return kind.length == -1 or kind.optional or (kind.group and any(map(varies, classes[kind.base].values())))

    last = ""
    for field, kind in fields.items():
        if kind.group and kind.base not in classes:
            raise SystemExit(f"{path}: {name}.{field}: there is no class of arguments {kind.base}")
        if kind.optional and not has_ints(kind):
            raise SystemExit(f"{path}: {name}.{field}: an optional class needs an int field")
        if last and has_ints(kind):
            raise SystemExit(f"{path}: {name}.{last} varies in length: only the last field with ints may, not {field}")
        last = field if varies(kind) else last


def _struct(name: str, fields: Fields) -> str:
    members, reads = zip(*(_member(field, kind) for field, kind in fields.items()), strict=True)
    return f"""
struct {name} {{
{chr(10).join(members)}

  explicit {name}(const Args& t) : {name}(ArgsReader{{t}}) {{}}
  explicit {name}(ArgsReader&& r) : {name}(r) {{}}
  explicit {name}(ArgsReader& r) : {", ".join(reads)} {{}}
}};
"""


def _member(name: str, kind: Kind) -> tuple[str, str]:
    """Return the C++ declaration and initialiser of a struct's member. C++ initialises members in declaration order."""
    if kind.optional:
        type_, read = f"std::optional<{kind.base}>", f"r.group<{kind.base}>()"
    elif kind.group:
        type_, read = kind.base, "r"
    elif kind.length is None:
        type_, read = _TYPES[kind.base], _READS[kind.base]
    elif kind.length < 0:
        type_, read = "at::IntArrayRef", "r.rest()"
    else:
        type_, read = f"std::array<int64_t, {kind.length}>", f"r.integers<{kind.length}>()"
    return f"  {type_} {name};", f"{name}({read})"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
