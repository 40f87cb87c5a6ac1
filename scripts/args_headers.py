"""C++ structs of the arguments that operators declare (tiles/arguments.py): a header for each Python file that does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tiles"))
from arguments import kind_of

_TYPES = {"int": "int64_t", "bool": "bool", "float": "double", "Slot": "double"}
_READ = {"int": "integer()", "bool": "integer() != 0", "float": "real()", "Slot": "real()"}


def write(root: Path, folder: Path) -> list[str]:
    """The headers, NAME_args.h of the file NAME.py, in `folder`; one that would stay the same is not touched."""
    declared: dict[str, tuple[Path, ast.ClassDef]] = {}
    for path in sorted([*root.glob("tasks/*.py"), *root.glob("tiles/*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "TaskArgs" for base in node.bases):
                if node.name in declared:
                    raise SystemExit(f"{path}: {node.name} is declared in {declared[node.name][0]} too")
                declared[node.name] = path, node
    headers = {name: f"{path.stem}_args.h" for name, (path, _) in declared.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for old in set(folder.glob("*_args.h")) - {folder / header for header in headers.values()}:
        old.unlink()
    for header in sorted(set(headers.values())):
        mine = [name for name in declared if headers[name] == header]
        source = declared[mine[0]][0].relative_to(root)
        structs, used = zip(*(_struct(declared[name][1], source) for name in mine), strict=True)
        unknown = {group for groups in used for group in groups} - set(declared)
        if unknown:
            raise SystemExit(f"{source}: no class of arguments is called {', '.join(sorted(unknown))}")
        others = sorted({headers[group] for groups in used for group in groups} - {header})
        lines = [f"// The arguments declared in {source}; made by scripts/args_headers.py.", "#pragma once"]
        lines += [f'#include "{other}"' for other in ("arguments.h", *others)]
        text = "\n".join([*lines, "", "namespace nntile {", "", *structs, "}  // namespace nntile", ""])
        path = folder / header
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return sorted(str(folder / header) for header in set(headers.values()))


def _struct(node: ast.ClassDef, source: Path) -> tuple[str, list[str]]:
    """The struct's text and the groups that it has."""
    members, reads, groups, last = [], [], [], ""
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name = ast.unparse(field.target)
        try:
            kind = kind_of(ast.unparse(field.annotation))
        except TypeError as error:
            raise SystemExit(f"{source}: {node.name}.{name}: {error}") from None
        if last and (kind.base in ("int", "bool") or kind.group):
            raise SystemExit(f"{source}: {node.name}.{name}: comes after {last}, which has to be the last")
        last = name if kind.last else last
        if kind.group:
            groups.append(kind.base)
            type_, read = kind.base, f"{kind.base}(r)"
            if kind.optional:
                type_, read = f"std::optional<{kind.base}>", f"r.group<{kind.base}>()"
        elif kind.length is not None:
            type_ = "at::IntArrayRef" if kind.length < 0 else f"std::array<int64_t, {kind.length}>"
            read = "r.rest()" if kind.length < 0 else f"r.integers<{kind.length}>()"
        else:
            type_, read = _TYPES[kind.base], f"r.{_READ[kind.base]}"
        members.append(f"  {type_} {name};")
        reads.append(f"{name}({read})")
    constructors = (
        f"  explicit {node.name}(const Args& t) : {node.name}(ArgsReader{{t}}) {{}}\n"
        f"  explicit {node.name}(ArgsReader&& r) : {node.name}(r) {{}}\n"
        f"  explicit {node.name}(ArgsReader& r) : {', '.join(reads)} {{}}"
    )
    return "\n".join([f"struct {node.name} {{", *members, constructors, "};", ""]), groups
