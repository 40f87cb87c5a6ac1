"""Cases of configs: whole, valid YAML texts and command lines with one to four things made wrong."""

import copy
import functools
import random
import string
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"layers": 1, "embed": 24, "heads": 2, "ffn": 32, "kv_heads": 1}
NUMBERS = [
    "-1", "0", "1", "2", "3", "7", "8", "100", "10000", "1000000", "-0.0", "0.5", "1.0", "1e3", "1e308", "-1e308",
    "1e400",
    "1e-320", ".inf", "-.inf", ".nan", "2147483647", "2147483648", "4294967296", "9223372036854775807",
    "9223372036854775808", "1" + "0" * 30, "1" * 5000, "0x" + "f" * 2000, "0b" + "1" * 70, "1_000", "1:30:00", "017",
    "0o17",
]  # fmt: skip
WORDS = [
    "true", "false", "yes", "off", "~", "null", "''", "'1'", "'all'", "x" * 100, "x" * 5000, "x" * 200000, '"\\0"',
    '"a\\0b"', '"\\x1b[31mred\\a"', '"\\ud800"', '"\\U0001F600"', "'Ω≠日本'", '"\\u202Eevil"', "'%s%n{}$HOME'", "'*'",
    "' '",
    "chain", "cosine", "sgd", "bf16", "planned", "modular-eager", "10min", "0.0000001s", "1" * 400 + "h", "500MB",
    "1" * 400 + "GiB", "9" * 30 + "TB", "python-stdlib", "bert", "llama", "gpt2", "gpu", "multi_gpu", "cpu",
]  # fmt: skip
PATHS = [
    ".", "..", "../..", "/", "/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem",
    "/proc/self/fd/0", "fifo",
    "loop", "folder", "empty", "zero", "binary", "deep", "run.yaml", "text.txt", "loop/x", "text.txt/x", "fifo/x", "~",
    "~root", "~nobody_there/x", "~\\0", "nofile.py:X", "bad.py:X", "folder/.py:X", "zero.py:X", "fifo:X", ":", ".py:",
    "a/" * 3000, "x.yaml", "deep.yaml", "/etc/passwd", "//", "a\\0b/c", "\\udcff/x", "http://127.0.0.1/x",
]  # fmt: skip
TREES = [
    "[]", "[1]", "[null]", "[[[]]]", "[1, 2, 3]", "[a, b]", "[0.9, 0.95]", "[0.9, .nan]", "{}", "{a: 1}", "{1: 2}",
    "{null: null}", "{type: gpt2}", "{true: 1}", "{? [1] : 2}", "{? {a: 1} : 2}", "{1.5: x}", "{2020-01-01: x}",
    "{'': 1}",
    "{'a.b': 1}", "{'\\\\0': 1}", "[" * 60 + "]" * 60, "[" * 3000, "{a: " * 60 + "1" + "}" * 60, "{" * 900,
    "{" + "y" * 5000 + ": 1}", "[" + "1, " * 3000 + "1]", "{a: 1, a: 2}", "{<<: {a: 1}}", "{<<: 3}", "{=: 1}",
]  # fmt: skip
_TENS = (f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
LAUGHS = f"[&a0 [1,1,1,1,1,1,1,1,1,1], {', '.join(_TENS)}]"
TAGS = [
    "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!timestamp 2020-13-45", "!!timestamp x",
    "!!binary 'aGk='", "!!binary '!'", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!float x", "!!int x",
    "!!int ''",
    "!foo bar", "!!str 1", "!!null 3", "!!bool maybe", "!!merge x", "!!value x", "!<tag:yaml.org,2002:int> 1",
    "!!seq 1",
    "!!map [1]", "2020-01-01", "2020-01-01T00:00:00Z", "2020-99-99", "12:30:45", "&a [*a]", "&a {b: *a}", "*nobody",
    "&a 1",
    LAUGHS, "? a", "- 1", "|\n    text\n", ">-\n    text\n", "'", '"', "%", "@", "`", "\t", "#", "---", "...", "!",
    "&", "*",
]  # fmt: skip


INSERTED = ["\0", "\t", "\r", "\x85", "\ufeff", ":", "-", "{", "&x ", "*x "]
NO_SETS = ["", "=", "a", "=1", ".=1", "a..b=1", "model=1", "model.=1", " =1", "a.b.c.d.e=1", "é=1", "x" * 9999]
NEW = ["new.yaml", "folder", "folder/x.yaml", "/", "", "/dev/full", "loop", "run.yaml", "a/b/c", "x" * 300]
OWN = "import nntile_py as nt\nclass Mine(nt.Model):\n    class Config(nt.ModelConfig):\n        x: int = 1\n"
COMMANDS = ["plan", "config", "sweep", "init", "nothing", ""]
ODD = ["--schema", "--json", "--model", "gpt2", "--steps", "-1", "--set", "", "--unknown", "--", "-x", "\udcff"]
ODD += ["run.yaml"]


def hostile(draw: random.Random) -> str:
    """A value, as YAML text."""
    kind = draw.randrange(10)
    if kind == 0:
        return str(draw.choice((-1, 1)) * (2 ** draw.randrange(70) + draw.choice((-1, 0, 1))))
    if kind == 1:
        return repr(draw.choice((-1, 1)) * 10 ** draw.uniform(-330, 308))
    if kind == 2:
        return '"' + "".join(f"\\u{draw.randrange(0x10000):04x}" for _ in range(draw.randrange(9))) + '"'
    if kind == 3:
        return '"' + draw.choice(PATHS) + '"'
    if kind > 7:  # often allowed
        return draw.choice(NUMBERS)
    return draw.choice(draw.choice((NUMBERS, WORDS, TREES, TAGS)))


@functools.cache
def bases() -> dict[str, list[Any]]:
    """Small configs, sweeps and scheduler files to start from."""
    runs = []
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        tree = yaml.safe_load(path.read_text())
        if "train" in tree:
            tree["model"] |= {key: value for key, value in SMALL.items() if key in tree["model"]}
            tree["tokenizer"], tree["data"] = {"vocab_size": 300}, {"source": "text.txt"}
            tree["train"] |= {"batch": 2, "seq": 8}
            tree["model"].pop("positions", None)
            tree["tiles"] = {"batch": 1, "embed": 12, "ffn": 16}
            runs.append(tree)
    sweeps = [
        {"config": "run.yaml", "grid": {"tiles.embed": [8, 12], "runtime.cpus": [1, 2]}, "measure": {"how": "plan"}},
        {"config": "run.yaml", "list": [{"train.batch": 1}, {"train.batch": 2}], "set": {"seed": 3}, "rounds": 2},
        {"config": "run.yaml", "random": {"count": 2, "over": {"tiles.embed": [8, 12, 24]}}, "time_limit": 5,
         "plots": [{"x": "tiles.embed", "y": ["seconds", "tasks"], "title": "t"}], "best": {"metric": "seconds"}},
    ]  # fmt: skip
    schedulers = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "scheduler_configs").glob("*.yaml"))]
    return {"run": runs, "sweep": sweeps, "scheduler": schedulers}


@functools.cache
def all_keys() -> list[str]:
    from nntile_py.config.run_config import all_keys as of
    from nntile_py.models.registry import known

    return sorted({key for cls in known().values() for key in of(cls.Config)})


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is a value, sections and items of lists too."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*at, key), *_places(value, (*at, key)))]


def _misspelt(draw: random.Random, key: str) -> str:
    at = draw.randrange(len(key) + 1)
    return key[:at] + draw.choice([*string.ascii_letters, "", ".", " ", "\0", "é", "-"]) + key[at + draw.randrange(2) :]


def text_of(draw: random.Random, tree: Any) -> str:
    """A YAML text of it with something wrong."""
    tree, values = copy.deepcopy(tree), {}
    for number in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            break
        *above, key = draw.choice(places)
        holder = tree
        for name in above:
            holder = holder[name]
        how, mark = draw.randrange(10), f"@@{number}@@"
        if how < 6:
            holder[key], values[mark] = mark, hostile(draw)
        elif how == 6 and isinstance(holder, dict):
            del holder[key]
        elif how == 7 and isinstance(holder, dict):
            holder[_misspelt(draw, str(key))] = holder.pop(key)
        elif how == 8:
            *_, other = draw.choice(places)
            if isinstance(holder, dict):
                holder[other] = copy.deepcopy(holder[key])
        else:  # a key that may stand there, or elsewhere
            name = draw.choice(all_keys()).split(".")
            inside = tree.setdefault(name[0], {}) if len(name) > 1 and isinstance(tree, dict) else tree
            if isinstance(inside, dict):
                inside[name[-1]], values[mark] = mark, hostile(draw)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    for mark, value in values.items():
        text = text.replace(f"'{mark}'", value).replace(mark, value)
    if draw.random() < 0.2:  # as text
        for _ in range(draw.randrange(1, 5)):
            at, how = draw.randrange(len(text) + 1), draw.randrange(5)
            lines = text.split("\n")
            line = draw.randrange(len(lines))
            if how == 0:
                text = text[:at]
            elif how == 1:
                text = text[:at] + chr(draw.randrange(256)) + text[at + 1 :]
            elif how == 2:
                text = text[:at] + draw.choice(INSERTED) + text[at:]
            elif how == 3:
                text = "\n".join([*lines[: line + 1], *lines[line:]])
            else:
                text = "\n".join([*lines[:line], "  " + lines[line], *lines[line + 1 :]])
    return text


def encoded(draw: random.Random, text: str) -> str:
    """Bytes of a file, as latin-1."""
    coding = draw.choice(["utf-8"] * 20 + ["utf-16", "utf-32", "utf-8-sig"])
    return text.encode(coding, errors="surrogatepass").decode("latin-1")


def _set(draw: random.Random) -> str:
    key = draw.choice(all_keys())
    how = draw.randrange(8)
    if how == 0:
        key = _misspelt(draw, key)
    if how == 1:
        return draw.choice(NO_SETS)
    return f"{key}={hostile(draw)}".replace("\0", "")


def _sets(draw: random.Random, odds: float) -> list[str]:
    return [part for _ in range(draw.randrange(1, 4)) for part in ("--set", _set(draw))] if draw.random() < odds else []


def _plain(draw: random.Random, kind: str) -> str:
    return yaml.safe_dump(draw.choice(bases()[kind]), sort_keys=False)


def case(draw: random.Random) -> dict[str, Any]:
    """A command line and its files."""
    what = draw.randrange(20)
    run, files, reader = "run.yaml", {}, "nntile"
    files[run] = encoded(draw, text_of(draw, draw.choice(bases()["run"])))
    args = [draw.choice(["plan", "plan", "config"]), run, *_sets(draw, 0.2)]
    if what in (0, 1, 2):
        files[run] = _plain(draw, "run")
        args = [draw.choice(["plan", "config"]), run, *_sets(draw, 1)]
    elif what == 3:
        files[run] = yaml.safe_dump({**draw.choice(bases()["run"]), "scheduler": "./own.yaml"}, sort_keys=False)
        files["own.yaml"] = encoded(draw, text_of(draw, draw.choice(bases()["scheduler"])))
        args = ["plan", run, *_sets(draw, 0.3)]
    elif what in (4, 5, 6):
        reader, files[run] = "sweep", _plain(draw, "run")
        files["sweep.yaml"] = encoded(draw, text_of(draw, draw.choice(bases()["sweep"])))
        args = ["sweep", "sweep.yaml", *_sets(draw, 0.2)]
    elif what == 7:
        types = ["gpt2", "bert", "llama", "own.py:Mine", "", "nobody", *PATHS]
        model = draw.choice(types).replace("\\0", "").replace("\\udcff", "\udcff")
        args = ["init", draw.choice(NEW), "--model", model, *_sets(draw, 0.6)]
        files["own.py"] = OWN
    elif what == 8:
        where = draw.choice(PATHS).replace("\\0", "").replace("\\udcff", "\udcff")
        args = [draw.choice(COMMANDS), where, *draw.choices(ODD, k=draw.randrange(4))]
        reader, files[run] = "sweep", _plain(draw, "run")
    return {"reader": reader, "args": args, "files": files}
