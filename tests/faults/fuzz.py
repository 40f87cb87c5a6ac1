"""Fuzzed configs and damaged files: what a case is, how it runs, what it may do.

    python tests/faults/fuzz.py configs 10000 --seed 0        # `make torture` runs these two
    python tests/faults/fuzz.py files 2000 --seed 0
    python tests/faults/fuzz.py configs --case 4711 --seed 0  # one of them again, with all that it says

A case is decided by kind, seed and number alone. Those that went wrong once are kept in corpus/ and always run.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
CORPUS = HERE / "corpus"
LIMIT = 10.0  # seconds of the processor
LONGEST = 2000  # characters of a message

Case = dict[str, Any]  # reader, args, files: {name: content in latin-1, or {"link": to}, {"fifo": true}, ...}


class Zygote:
    """A process that runs one case after the other, see zygote.py."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("STARPU", "NNTILE", "XDG"))}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        command = [sys.executable, str(HERE / "zygote.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout and self._process.stdout.readline() == "ready\n"

    def run(self, folder: Path, reader: str, args: Iterable[str] = (), **env: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        what = {"folder": str(folder), "reader": reader, "args": [*args], "env": env}
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()


# -- running


def environment(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}  # StarPU's files are there, too


def originals(zygote: Zygote, root: Path) -> Path:
    """A folder with all the files that are read, none damaged."""
    folder = root / "originals"
    (folder / "work").mkdir(parents=True)
    done = zygote.run(folder / "work", "originals", **environment(folder / "work"))
    assert done["status"] == 0, done["err"]
    return folder / "work"


def put(path: Path, content: Any) -> None:
    """A file as a case has it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_bytes(content.encode("latin-1"))
    elif "link" in content:
        path.symlink_to(content["link"])
    elif "fifo" in content:
        os.mkfifo(path)
    elif "folder" in content:
        path.mkdir()


SPECIAL: dict[str, Any] = {
    "fifo": {"fifo": True}, "loop": {"link": "loop"}, "folder": {"folder": True}, "empty": "",
    "zero": {"link": "/dev/zero"},
    "bad.py": "raise ValueError('of the file')\n", "binary": "\x00\xff\xfe\x80" * 99, "deep": "[" * 5000,
}  # fmt: skip


def run(zygote: Zygote, case: Case, root: Path, template: Path) -> dict[str, Any]:
    """The answer of zygote.py, with what is wrong with it under "wrong", or None."""
    folder = Path(tempfile.mkdtemp(dir=root)) / "work"
    try:
        if case.get("damaged"):
            shutil.copytree(template, folder, symlinks=True)
        for name, content in ({} if case.get("damaged") else SPECIAL | {"text.txt": "words of text\n" * 99}).items():
            put(folder / name, content)
        for name, content in case["files"].items():
            put(folder / name, content)
        done = zygote.run(folder, case["reader"], case["args"], **environment(folder))
        return done | {"wrong": wrong(case, done)}
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def wrong(case: Case, done: dict[str, Any]) -> str | None:
    """What is not as it should be: accepted, or status 2 and one message that names a key or the file."""
    said, status = done["err"], done["status"]
    if not done["ended"] or done["processor"] > LIMIT:
        return "over 10 s"
    if "Traceback" in said or "Error ignored" in said or "panicked" in said:
        return "traceback"
    if status < 0 or status == 134:
        return "abort"
    if status == 0:
        return "warning" if "Warning" in said else None
    if status != 2 and not (status == 1 and case.get("damaged")):  # 1: a file cannot be written
        return f"status {status}"
    message = re.search(r"^error: ", said, re.MULTILINE | re.IGNORECASE)
    if not message or len(re.findall(r"^error: ", said, re.MULTILINE | re.IGNORECASE)) != 1:
        return "no one message"
    if len(said) > LONGEST + 200:
        return "a message without end"
    if not all(c.isprintable() or c == "\n" for c in said):
        return "control characters"
    if case.get("damaged") and not any(name in said for name in case["damaged"]):
        return "the file is not named"
    if not re.search(r"error: \S.*: ", said) and "Error: " not in said:
        return "no key is named"
    return None


# -- what cases are


def numbered(kind: str, seed: int, number: int, template: Path) -> Case:
    """The case of a number."""
    draw = random.Random(f"{kind} {seed} {number}")
    if kind == "configs":
        import configs

        return configs.case(draw)
    import files

    return files.case(draw, template)


def kept() -> dict[str, Case]:
    """The cases in corpus/."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))}


def fuzz(
    cases: Iterable[tuple[str, Callable[[Path], Case]]], processes: int, damaged: bool = True
) -> list[tuple[str, Case, dict[str, Any]]]:
    """Runs the cases, so many at once; those that went wrong. Tells of each as it comes.

    damaged: there are some that damage files, which must be made first."""
    found, counts, longest, lock = [], Counter[str](), [0.0, ""], threading.Lock()
    todo: Iterator[tuple[str, Callable[[Path], Case]]] = iter(cases)
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    zygotes = [Zygote() for _ in range(processes)]
    try:
        template = originals(zygotes[0], root) if damaged else root

        def work(zygote: Zygote) -> None:
            while True:
                with lock:
                    named = next(todo, None)
                if named is None:
                    return
                name, make = named
                case = make(template)
                done = run(zygote, case, root, template)
                with lock:
                    counts["accepted" if done["status"] == 0 else "refused"] += 1
                    if done["processor"] > longest[0]:
                        longest[:] = done["processor"], name
                    if done["wrong"]:
                        counts[done["wrong"]] += 1
                        found.append((name, case, done))
                        print(f"{name}: {done['wrong']}: {done['err'].strip()[-300:]}")

        threads = [threading.Thread(target=work, args=(zygote,)) for zygote in zygotes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for zygote in zygotes:
            zygote.close()
        shutil.rmtree(root, ignore_errors=True)
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"{told}; longest {longest[0]:.1f} s: {longest[1]}")
    return found


def named(kind: str, seed: int, numbers: Iterable[int]) -> Iterator[tuple[str, Callable[[Path], Case]]]:
    for number in numbers:
        yield f"{kind} --seed {seed} --case {number}", lambda template, n=number: numbered(kind, seed, n, template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["configs", "files", "corpus"])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", metavar="NAME", help="Write the case to corpus/NAME.json.")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    if asked.kind == "corpus":
        sys.exit(bool(fuzz(((name, lambda _, c=case: c) for name, case in kept().items()), asked.processes)))
    if asked.case is None:
        numbers = itertools.islice(itertools.count(asked.first), asked.count)
        sys.exit(bool(fuzz(named(asked.kind, asked.seed, numbers), asked.processes, asked.kind == "files")))
    root, zygote = Path(tempfile.mkdtemp(prefix="fuzz-")), Zygote()
    template = originals(zygote, root) if asked.kind == "files" else root
    case = numbered(asked.kind, asked.seed, asked.case, template)
    print(json.dumps(case, indent=1)[:4000])
    done = run(zygote, case, root, template)
    print({k: v for k, v in done.items() if k not in ("out", "err")})
    print(done["out"][-2000:], done["err"][-6000:])
    if asked.keep:
        (CORPUS / f"{asked.keep}.json").write_text(json.dumps(case, indent=1) + "\n")
    zygote.close()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
