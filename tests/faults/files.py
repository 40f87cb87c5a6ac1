"""Cases of damaged files: all kinds of files that are read, each with one thing made wrong."""

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

# What reads each file, and how a message may call it.
STEP = "run/checkpoints/step-000002"
CHECKPOINT = ("state.json", "model.safetensors", "optimizer.safetensors", "config.json")
KINDS: list[tuple[str, list[str], str]] = [
    *(("resume", [], f"{STEP}/{name}") for name in CHECKPOINT),
    *(("trainer", [], f"saved/{name}") for name in CHECKPOINT),
    ("resume", [], "run/metrics.jsonl"),
    ("resume", [], f"{STEP}/tokenizer.json"),
    ("nntile", ["plan", "hf.yaml"], "hf/config.json"),
    ("nntile", ["plan", "hf.yaml"], "hf/tokenizer.json"),
    ("nntile", ["train", "hf.yaml", "--out", "new"], "hf/generation_config.json"),
    ("nntile", ["train", "hf.yaml", "--out", "new"], "hf/tokenizer.json"),
    ("nntile", ["train", "run.yaml", "--out", "new"], "text.txt"),
    ("nntile", ["train", "run.yaml", "--out", "run", "--resume", "--set", "train.steps=3"], f"{STEP}/state.json"),
    ("transformers", [], "hf/config.json"),
    ("transformers", [], "hf/model.safetensors.index.json"),
    ("transformers", [], "hf/model-00001-of-00002.safetensors"),
    ("transformers", [], "hf/model-00002-of-00002.safetensors"),
    ("nntile", ["plan", "run.yaml", "--set", "tokenizer={path: hf/tokenizer.json}"], "hf/tokenizer.json"),
    ("corpus", [], "text.txt"),
    ("corpus", [], "run.yaml"),
    ("corpus", ["cache"], "cache/nntile_py"),
    ("rows", [], "swept/rows.jsonl"),
    ("rows", [], "swept/results.json"),
    ("models", [], "cache/.starpu/sampling/codelets"),
    ("models", [], "cache/.starpu/sampling/bus"),
]  # fmt: skip
LEAVES: list[Any] = [
    None, True, -1, 0, 1, 3, 1.5, 2**31, 2**63, 2**64, 10**30, 1e308, float("inf"), float("nan"), "", "x", "x" * 9999,
    "../x", "/etc/passwd", "\0", "\x1b[31m", [], [1], {}, {"a": 1}, "float32", "AdamW", "relu", "0" * 64,
]  # fmt: skip


WHOLE = [b"", b"\0", b"\n", b"{}", b"[]", b"null", b"3", b'"x"', b"[" * 99999, b"{" * 999, b"\x1f\x8b\x08" + b"\0" * 99]
BYTES = {"F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1, "C64": 8}
SHAPES = [[], [0], [-1], [2**62, 4], [2**63], [2**64], None, "x", [1.5]]
OFFSETS = [[], [0], [0, 0], [8, 4], [-1, 4], [0, 2**63], [0, 2**64], None, [1, 5]]


def case(draw: random.Random, template: Path) -> dict[str, Any]:
    """One file in another state; what refers to it may say so, as if it had been written like that."""
    reader, args, name = draw.choice(KINDS)
    if (template / name).is_dir():  # one of those in it
        inside = sorted(str(p.relative_to(template)) for p in (template / name).rglob("*") if p.is_file())
        name = draw.choice(inside)
    whole = (template / name).read_bytes()
    special = draw.random() < 0.08 and "starpu" not in name  # StarPU reads its files itself, and waits for a pipe
    content = _special(draw) if special else _damaged(draw, name, whole, template)
    files = {name: content if isinstance(content, dict) else content.decode("latin-1")}
    state = Path(name).with_name("state.json")
    described = (template / state).is_file() and state.name != Path(name).name
    if isinstance(content, bytes) and described and draw.random() < 0.7:
        facts = json.loads((template / state).read_text())
        if Path(name).name in facts["sha256"]:
            facts["sha256"][Path(name).name] = hashlib.sha256(content).hexdigest()
            files[str(state)] = json.dumps(facts)
    names = [name, str(Path(name).parent) if "/" in name else name]
    if isinstance(content, dict):  # paths are followed: the message may have that of another file
        names += ["tokenizer.path", "data.source"]
    return {"reader": reader, "args": args, "files": files, "damaged": names}


def _special(draw: random.Random) -> dict[str, Any]:
    """No file, but what may stand in its place."""
    links = ["loop", "/dev/zero", "/dev/null", "/proc/self/mem", "nowhere", "..", "/etc/passwd"]
    return draw.choice([{"fifo": True}, {"folder": True}, {"link": draw.choice(links)}])


def _damaged(draw: random.Random, name: str, whole: bytes, template: Path) -> bytes:
    if name.endswith(".safetensors") and draw.random() < 0.6:
        return _tensors(draw, whole)
    if name.endswith(".json") and draw.random() < 0.6:
        return json.dumps(_tree(draw, json.loads(whole))).encode()
    if name.endswith(".jsonl") and draw.random() < 0.6:
        lines = whole.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(_tree(draw, json.loads(lines[at]))).encode()
        return b"\n".join([*lines, b""])
    how = draw.randrange(11)
    at = draw.randrange(len(whole) + 1)
    if how < 3:
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4, 100))):
            if changed:
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    if how == 3:
        return whole[:at]
    if how == 4:
        return whole + draw.randbytes(draw.choice((1, 8, 1000)))
    if how == 5:
        return draw.choice(WHOLE)
    if how == 6:
        others = sorted(p for p in template.rglob("*") if p.is_file() and p.stat().st_size < 10**6)
        return draw.choice(others).read_bytes()
    if how == 7:
        return whole[:at] + whole[draw.randrange(len(whole) + 1) :]
    if how == 8:
        return draw.choice([whole.decode("latin-1").encode(c) for c in ("utf-16", "utf-32", "utf-8")])
    if how == 9:
        return whole[:at] + draw.choice([b"1e999", b"9" * 5000, b"NaN", b"-1", b"\xff\xfe", b"\0" * 4096]) + whole[at:]
    return draw.randbytes(len(whole))


def _tree(draw: random.Random, tree: Any) -> Any:
    """JSON of another shape: one value replaced, or a key gone."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in inside:
            places.append((value, key))
            walk(inner)

    walk(tree)
    if not places or draw.random() < 0.03:
        return draw.choice(LEAVES)
    upper = (tree, *tree.values()) if isinstance(tree, dict) else ()
    shallow = [place for place in places if any(place[0] is v for v in upper)]
    holder, key = draw.choice(draw.choice((places, shallow or places)))
    how = draw.randrange(6)
    if how == 0 and isinstance(holder, dict):
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[draw.choice(["x", "", "\0", "type", key + "x"])] = holder.pop(key)
    elif how == 2 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * draw.choice((-1, 2, 10**6, 0.5)) + draw.choice((0, 1))
    else:
        holder[key] = draw.choice(LEAVES)
    return tree


def _tensors(draw: random.Random, whole: bytes) -> bytes:
    """A header with hostile lengths, offsets, dtypes, shapes."""
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    how = draw.randrange(5)
    if how == 0:
        return struct.pack("<Q", draw.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))) + whole[8:]
    of = header[draw.choice([name for name in header if name != "__metadata__"])]
    if how == 1:
        of["dtype"] = draw.choice([*BYTES, "F4", "", "x", 3, None])
        if draw.random() < 0.7:  # with an offset that fits nothing else is asked
            each = BYTES.get(of["dtype"], 4)
            count = (of["data_offsets"][1] - of["data_offsets"][0]) // 4
            header = {"w": of | {"shape": [count], "data_offsets": [0, count * each]}}
            data = b"\x01" * (count * each)
    elif how == 2:
        of["shape"] = draw.choice([*SHAPES, of["shape"][::-1], [1, *of["shape"]]])
    elif how == 3:
        of["data_offsets"] = draw.choice([*OFFSETS, [0, len(data)]])
    elif how == 4 and draw.random() < 0.5:
        data = draw.choice([b"\xff" * len(data), b"\0" * len(data), struct.pack("<f", float("nan")) * (len(data) // 4)])
    else:
        name = draw.choice([*header])
        header[draw.choice(["x", "", "a.b.c", name + ".m", "\0"])] = header.pop(name)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
