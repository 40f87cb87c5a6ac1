"""What README and docs/ say to type works; the site can be built."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import typer
from conftest import Python
from pages import PAGES, ROOT, blocks, commands, named

import nntile_py as nt
from nntile_py import cli
from nntile_py.config.run_config import load, resolve
from nntile_py.data.documents import Documents
from nntile_py.data.tokenization import train_tokenizer
from nntile_py.data.tokenizer import MASKED
from nntile_py.measure.sweep_points import load_sweep, points
from nntile_py.profiling.diagnosis import RULES

DOCS = ROOT / "docs"
MORE = [ROOT / "CHANGELOG.md", ROOT / "experiments" / "README.md"]
RESULTS = ROOT / "experiments" / "results"
NNTILE = Path(sys.executable).with_name("nntile")
USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, which typer brings along under its own name


def ids(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


# -- commands and files


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_have_such_options(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "nntile":
            try:
                parse(typer.main.get_command(cli.app), "nntile", words[1:])
            except typer.Exit:
                pass  # --help
            except USAGE_ERROR as error:
                pytest.fail(f"{' '.join(words)}: {error}")


def parse(command: Any, name: str, arguments: list[str], parent: Any = None) -> None:
    """As far as the values of options; runs nothing."""
    if hasattr(command, "resolve_command"):  # a group
        context = command.context_class(command, info_name=name, parent=parent)
        inner, found, rest = command.resolve_command(context, arguments)
        parse(found, inner, rest, context)
    else:
        command.make_context(name, arguments, parent=parent)


@pytest.mark.parametrize("page", [*PAGES, *MORE], ids=ids)
def test_files_named_are_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    told = re.findall(r"`((?:experiments|scheduler_configs|scripts|tests|tasks|nntile_py|models)/[\w./-]+\.\w+)`", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    assert not [file for file in told if "NAME" not in file and not (ROOT / file).exists()]
    shown = [word for words in commands(page) for word in words if re.fullmatch(r"experiments/\S+\.yaml", word)]
    assert all((ROOT / file).is_file() for file in shown), shown


@pytest.mark.parametrize("page", [*PAGES, *MORE], ids=ids)
def test_anchors_are_there(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", (page.parent / link if link else page).read_text(), re.M)
        assert anchor in map(slug, headings), f"{link}#{anchor}"


def slug(heading: str) -> str:
    """The anchor of a heading, as the site and GitHub have it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1300


def test_the_changelog_is_one_page() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 800


# -- glossary and results


def test_the_glossary_has_each_term_once() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "glossary.md").read_text(), re.M)[1:]
    terms = [term for term, _ in rows]
    assert len(terms) > 40 and len({term.lower() for term in terms}) == len(terms)
    assert terms == sorted(terms, key=str.lower)
    assert not [term for term, meaning in rows if not meaning.endswith(".")]


def test_measurements_are_in_the_results() -> None:
    """Other pages have no dated figures, and each file of results that is named exists."""
    dated = [page for page in PAGES if page.name != "results.md" and re.search(r"20\d\d-\d\d-\d\d", page.read_text())]
    assert not dated
    for page in (DOCS / "results.md", ROOT / "experiments" / "README.md", *RESULTS.glob("*.md")):
        for name in re.findall(r"20\d\d-\d\d-\d\d-[\w*-]+\.\w+", page.read_text()):
            assert list(RESULTS.glob(name)), f"{page.name}: {name}"


def test_results_have_the_newest_of_each_name() -> None:
    names = [re.sub(r"^20\d\d-\d\d-\d\d-", "", path.name) for path in RESULTS.iterdir()]
    assert len(names) > 100 and len(set(names)) == len(names)


def test_version() -> None:
    made = subprocess.run([NNTILE, "--version"], capture_output=True, text=True)
    assert made.stdout.strip() == nt.__version__


@pytest.mark.long
def test_the_site(tmp_path: Path) -> None:
    """Built strictly: a link, an anchor or a name in the reference that is not there fails."""
    subprocess.run(["make", "-s", "links"], cwd=ROOT, check=True)
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    made = forks.run(arguments, cwd=ROOT, env=quiet)
    assert made.returncode == 0, made.stderr
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    assert all((tmp_path / page).is_file() for page in pages)
    index = (tmp_path / "index.html").read_text()
    used = re.findall(r'<script[^>]* src="(https?://[^"]+)"', index)
    used += re.findall(r'href="(https?://[^"]+\.(?:css|woff2?))"', index)
    assert not used, "the site loads from elsewhere"
    # Search in pages that are opened from disk.
    assert 'src="js/iframe-worker.js"' in index
    assert "placement" in (tmp_path / "search" / "search_index.js").read_text()


def test_the_reference_has_all_names() -> None:
    text = (DOCS / "reference" / "python.md").read_text()
    modules = {"models", "tasks", "testing", "tiles"}
    missing = {name for name in nt.__all__ if name not in modules and not re.search(rf"nt\.{name}\b", text)}
    assert not missing


# -- what a user writes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user is who has done what "Own text" says, with fewer steps."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_text.txt").write_text("\n".join(f"line {k} of a text about tiles and tasks" for k in range(3000)))
    for text in blocks(DOCS / "own-text.md", "yaml"):
        (folder / str(named(text))).write_text(text)
    done = nntile(folder, "train", "my_run.yaml", "--set", "train.steps=2", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


SMALL = ("--set", "model.layers=1", "--set", "tokenizer.vocab_size=400")


def nntile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run([sys.executable, NNTILE, *arguments], cwd=folder)


def write_named(folder: Path, page: Path) -> None:
    """Write the examples of a page that begin with the name of a file."""
    for text in blocks(page, "yaml"):
        if name := named(text):
            (folder / name).write_text(text)


def test_own_text(folder: Path, python: Python) -> None:
    done = python("\n".join([f"import os; os.chdir({str(folder)!r})", *blocks(DOCS / "own-text.md", "python")]))
    assert done.returncode == 0, done.stderr
    assert "held_out_loss" in done.stdout


def test_using_a_model(folder: Path, python: Python) -> None:
    pytest.importorskip("transformers")
    write_reviews(folder / "reviews.csv")
    write_named(folder, DOCS / "fine-tune.md")
    small = ("model={type: bert, layers: 1, embed: 16, heads: 2, head: classification}", "tokenizer.vocab_size=300")
    sets = [word for one in (*small, "train.steps=1", "train.seq=16") for word in ("--set", one)]
    done = nntile(folder, "train", "classify.yaml", *sets, "--out", "runs/my_classifier")
    assert done.returncode == 0, done.stderr
    with (folder / "questions.csv").open("w") as file:
        file.writelines(["question,answer\n", *(f"what is {k}?,it is {k}\n" for k in range(40))])
    pairs = "model={type: bert, layers: 1, embed: 16, heads: 2, head: sentence_embedding}"
    small = (pairs, *small[1:], "train.batch=8")
    sets = [word for one in (*small, "train.steps=1", "train.seq=16") for word in ("--set", one)]
    for words in (["train", "sentences.yaml", *sets], ["eval", "runs/sentences", "--data", "questions.csv"]):
        done = nntile(folder, *words)
        assert done.returncode == 0, done.stderr
    page = DOCS / "use-your-model.md"
    done = python("\n".join([f"import os; os.chdir({str(folder)!r})", *blocks(page, "python")]))
    assert done.returncode == 0, done.stderr
    assert "'label'" in done.stdout and (folder / "loss.png").is_file()
    (folder / "texts.jsonl").write_text('{"text": "good"}\n{"text": "bad"}\n')
    done = nntile(folder, *commands(page)[0][1:])
    assert done.returncode == 0, done.stderr
    assert np.load(folder / "logits.npy").shape == (2, 2)


def test_the_data_format_of_the_page(folder: Path, python: Python) -> None:
    _, reader, used = blocks(DOCS / "extend.md", "python")
    np.save(folder / "tokens.npy", np.arange(2000, dtype=np.uint16) % 400)
    np.save(folder / "wrong.npy", np.zeros(3))
    refused = 'try:\n    read_token_file("wrong.npy", None)\nexcept nt.ConfigError as error:\n    print(error)'
    done = python("\n".join([f"import os; os.chdir({str(folder)!r})", reader, used, refused]))
    assert done.returncode == 0, done.stderr
    assert "held_out_loss" in done.stdout and "allowed: one row of integers" in done.stdout


def write_reviews(path: Path) -> None:
    rows = (f"{word} number {k},{word}" for k in range(8) for word in ("good", "bad"))
    path.write_text("\n".join(["review,verdict", *rows]))


def test_the_plan_of_first_steps() -> None:
    """The page shows what follows from config and cost model; of the measured seconds and rates the form alone."""
    shown = next(text for text in blocks(DOCS / "first-steps.md", "text") if text.startswith("parameters "))
    done = nntile(ROOT, "plan", "experiments/gpt2_tiny.yaml", "--set", "runtime.cpus=2", "--set", "tiles.batch=4")
    assert done.returncode == 0, done.stderr
    counted, measured = shown.splitlines()[:7], shown.splitlines()[7:9]
    assert [line.split("  ")[0] for line in measured] == ["mean task", "time a step"]
    for line in counted:
        assert line in done.stdout, line
    for line in measured:
        assert re.search(re.sub(r"\d[\d.,]*", r"\\d[\\d.,]*", line), done.stdout), line


def test_the_first_model(folder: Path, python: Python) -> None:
    """The README's loss curve and its text."""
    (folder / "runs" / "first").symlink_to("my_run")
    (curve,) = (words for words in commands(ROOT / "README.md") if words[0] == "python")
    done = python(f"import os; os.chdir({str(folder)!r})\n{curve[2].replace('% 40', '% 1')}")
    assert done.returncode == 0, done.stderr
    assert re.match(r"1 \d+\.\d+\n2 \d+\.\d+\n", done.stdout)
    (generate,) = (words for words in commands(ROOT / "README.md") if words[:2] == ["nntile", "generate"])
    shown = nntile(folder, *generate[1:-1], "3")
    assert shown.returncode == 0 and shown.stdout.startswith("def "), shown.stderr


def test_the_readmes_data_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of formats: what a text model and a classifier make of each."""
    monkeypatch.chdir(tmp_path)
    sizes = {"layers": 1, "embed": 16, "heads": 2}
    rest = {"tokenizer": {"vocab_size": 300}, "train": {"steps": 1, "batch": 1, "seq": 8}}
    (tmp_path / "texts").mkdir()
    write_reviews(tmp_path / "reviews.csv")
    (tmp_path / "rows.jsonl").write_text('{"review": "good", "verdict": "a"}\n{"review": "bad", "verdict": "b"}\n')
    (tmp_path / "texts" / "one.txt").write_text("one text")
    (tmp_path / "texts" / "notes.csv").write_text("another column\n")
    (tmp_path / "data.parquet").write_bytes(b"PAR1\xff\xfe\x00")

    def text(source: str) -> list[str]:
        section = resolve({"model": sizes, "data": {"source": source, "text": "review"}} | rest, [], "a.yaml").data
        return [part.text for part in Documents(section.name, section.extensions, section.text)]

    def classes(source: str) -> int:
        data = {"source": source, "text": "review", "label": "verdict"}
        model = sizes | {"type": "bert", "head": "classification"}
        return resolve({"model": model, "data": data} | rest, [], "a.yaml").model.classes  # type: ignore[no-any-return]

    assert text("rows.jsonl") == ["good", "bad"] and text("reviews.csv")[0] == "good number 0"
    assert text("texts") == ["one text"]
    with pytest.raises(nt.ConfigError, match="damaged, or of another format"):
        text("data.parquet")
    assert classes("reviews.csv") == classes("rows.jsonl") == 2
    (tmp_path / "names.conll").write_text("Ann B-PER\nwent O\n")
    model = sizes | {"type": "bert", "head": "token_classification"}
    words = resolve({"model": model, "data": {"source": "names.conll"}} | rest, [], "a.yaml")
    assert words.model.labels == ["B-PER", "O"] and text("names.conll")[0].startswith("Ann B-PER")
    for source in ("texts/one.txt", "texts", "data.parquet"):
        with pytest.raises(nt.ConfigError):
            classes(source)


def test_the_readme_has_such_a_run(folder: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    (folder / "readme.yaml").write_text(text)
    assert load(folder / "readme.yaml", [f"data.source={folder}/my_text.txt"]).train.steps == 500


@pytest.mark.long
def test_fine_tuning(folder: Path, python: Python) -> None:
    text, frozen, *_ = blocks(DOCS / "fine-tune.md", "yaml")
    write_named(folder, DOCS / "fine-tune.md")
    (folder / "frozen.yaml").write_text(text + frozen)
    talk = [{"role": "user", "content": "say a word"}, {"role": "assistant", "content": "tile"}]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(40)))
    (folder / "my_gpt2").symlink_to("runs/my_run")
    (folder / "watch.py").write_text(blocks(DOCS / "watch.md", "python")[0])
    watched = blocks(DOCS / "watch.md", "yaml")[-1].replace("my_file.py", "watch.py")
    (folder / "watched.yaml").write_text(text + watched)
    for name in ("tune", "frozen", "watched", "lora", "chat"):
        done = nntile(folder, "train", f"{name}.yaml", "--set", "train.steps=2")
        assert done.returncode == 0 and "note: Callback" not in done.stdout, done.stderr
        assert (" parameters are trained, the others are frozen" in done.stdout) == (name in ("frozen", "lora"))
    done = python(f"import os; os.chdir({str(folder)!r})\n{blocks(DOCS / 'fine-tune.md', 'python')[0]}")
    assert done.returncode == 0, done.stderr
    assert (folder / "tuned" / "model.safetensors").is_file()


def test_the_callback_of_the_page_ends_a_run() -> None:
    """After three measurements in a row that are not smaller than the smallest."""
    names: dict[str, Any] = {}
    exec(blocks(DOCS / "watch.md", "python")[0], names)
    losses = [5.0, 4.0, None, 4.5, 3.9, 4.0, 4.1, 3.9]
    lines = [{"step": 1} | ({"held_out_loss": loss} if loss else {}) for loss in losses]
    assert [names["watch"](line) for line in lines] == [False] * 7 + [True]


def test_encoding(python: Python, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=400, **sizes)).save_pretrained(tmp_path / "my_bert")
    train_tokenizer(["a text about tiles"], 270, MASKED).save(str(tmp_path / "my_bert" / "tokenizer.json"))
    (code,) = blocks(DOCS / "encode.md", "python")
    done = python(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    assert done.returncode == 0 and done.stdout == "(3, 16)\n(4, 16) (3, 16)\n", done.stderr
    (tmp_path / "texts.jsonl").write_text('{"text": "a tile"}\n{"text": ""}\n')
    done = nntile(tmp_path, *commands(DOCS / "encode.md")[0][1:])
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "vectors.npy").shape == (2, 16)


@pytest.mark.long
def test_a_sweep(folder: Path) -> None:
    text, other = blocks(DOCS / "tuning.md", "yaml")
    (folder / "packed.yaml").write_text(other)
    here = [f"data.source={folder}/my_text.txt"]
    variants = [point.sets["variant"] for point in points(load_sweep(folder / "packed.yaml", here))]
    assert variants == 3 * ["packed", "padded", "torch.compile"]
    text = text.replace("work: train, repeats: 5", "how: plan").replace("rounds: 3", "rounds: 1")
    (folder / "widths.yaml").write_text(text)
    done = nntile(folder, "sweep", "widths.yaml", *SMALL, "--out", "widths")
    assert done.returncode == 0, done.stderr
    assert (folder / "widths" / "results.csv").is_file()


def test_training_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(blocks(ROOT / "README.md", "python")[-1], names)
    assert names["logits"].shape == (4, 37, 611) and (tmp_path / "my_gpt2" / "config.json").is_file()


def test_tasks(python: Python, tmp_path: Path) -> None:
    code = "\n".join([f"import os; os.chdir({str(tmp_path)!r})", *blocks(DOCS / "tasks.md", "python")])
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[2. 2. 2. 2.]\n") and "axpy" in done.stdout
    assert (tmp_path / "profiled" / "report.html").is_file()


def test_memory(folder: Path) -> None:
    texts = blocks(DOCS / "how" / "memory.md", "yaml")
    run = (folder / "my_run.yaml").read_text()
    (folder / "disk.yaml").write_text(run + "".join(texts).replace("/scratch", str(folder)))
    config = load(folder / "disk.yaml", [f"data.source={folder}/my_text.txt"])
    assert config.runtime.disk is not None and config.recompute == "layer"


def test_the_findings_of_a_report_are_explained() -> None:
    """Each rule's name, and no other, stands in the table of docs/tuning.md."""
    told = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "tuning.md").read_text(), re.M)
    assert sorted(told) == sorted(diagnosis.rule for diagnosis in RULES) and len(told) >= 9
