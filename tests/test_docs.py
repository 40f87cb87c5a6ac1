"""What docs/ says to write and to type works."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command import nntile
from conftest import Python

import nntile_py as nt

ROOT = Path(__file__).parent.parent
MODEL, OPERATOR = ((ROOT / "docs" / f"write-{name}.md").read_text() for name in ("a-model", "an-operator"))


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)


FILE, TRAINED, RMS, COMPARED = blocks(MODEL, "python")
OWN_OPERATOR, CHECKED, CALLED = blocks(OPERATOR, "python")
(CONFIG,) = blocks(MODEL, "yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a user is who has written the files of docs/."""
    for text in (FILE, CONFIG, OWN_OPERATOR):
        match = re.match("# (.*)\n", text)
        assert match
        (tmp_path / match[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in {"neox", "soft_clip"} & (set(sys.modules) - before):
        del sys.modules[name]


# -- a model


def test_the_files_are_short() -> None:
    assert len(FILE.splitlines()) <= 105 and len(OWN_OPERATOR.splitlines()) <= 85


def test_the_model_agrees_with_transformers(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(TRAINED, names)
    assert names["loss"] < np.log(512) and names["logits"].shape == (4, 32, 512)
    exec(COMPARED, names)
    hf, torch = names["hf"], names["torch"]
    again = names["NeoX"].from_hf(hf).to_hf()
    ids = torch.tensor(names["input_ids"])
    assert torch.equal(again(input_ids=ids).logits, hf(input_ids=ids).logits)
    pythia = hf.config.to_dict() | {"tie_word_embeddings": False}
    with pytest.raises(nt.ConfigError, match=r"tie_word_embeddings is False .*; allowed: True"):
        names["NeoX"].read_config(pythia)


def test_the_model_from_the_command_line(folder: Path, python: Python) -> None:
    """As the page says: plan, train; and the weights are what transformers reads."""
    plan, train = ([*line.split("#")[0].split()] for line in blocks(MODEL, "sh")[0].splitlines())
    assert nntile(*plan[1:]) == 0
    code = "import sys; from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"
    done = python(code, *train[1:], "--set", "train.steps=3", "--out", "run")
    assert done.returncode == 0, done.stderr
    from transformers import GPTNeoXForCausalLM

    _, loading = GPTNeoXForCausalLM.from_pretrained(folder / "run", output_loading_info=True)
    assert not any(loading.values()), loading


# The row of the page's last table, what is set, and what is changed in neox.py.
MISTAKES = [
    ("no such class in the file", "model.type=neox.py:Neo", "", ""),
    ("model.hiddn: unknown key", "model.hiddn=3", "", ""),
    ("allowed: a divisor of model.embed = 64", "model.heads=5", "", ""),
    ("tiles.head_dim: unknown key", "tiles.head_dim=4", "", ""),
    ("declared twice", "seed=0", "post_attention_layernorm", "input_layernorm"),
    ("is no part along one of its axes", "seed=0", '3, "head_dim"', '3, "dim"'),
    ("returned Tensor; allowed: nt.Traced(loss, outputs)", "seed=0", "return nt.Traced", "return (lambda y, _: y)"),
]
OF_PYTHON = [
    "labels: missing; the model needs input_ids, labels",
    "token_types: unknown input",
    "model: weight gpt_neox.final_layer_norm.bias is missing",
]


@pytest.mark.parametrize(("told", "setting", "old", "new"), MISTAKES, ids=[told for told, *_ in MISTAKES])
def test_mistakes_have_the_messages_told(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    told: str,
    setting: str,
    old: str,
    new: str,
) -> None:
    assert old in FILE
    (folder / "neox.py").write_text(FILE.replace(old, new) if old else FILE)
    assert nntile("plan", "neox.yaml", "--set", setting) == 2
    assert told in capsys.readouterr().err


def test_mistakes_in_python_have_the_messages_told(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(FILE, names)
    model = names["NeoX"](names["NeoXConfig"](layers=1, embed=8, heads=2, vocab=20, positions=6))
    ids = np.zeros((1, 6), int)
    said = []
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(model, batch=1, seq=6)
        for inputs in ({"input_ids": ids}, {"input_ids": ids, "labels": ids, "token_types": ids}):
            with pytest.raises(ValueError) as refused:
                trainer.step(inputs)
            said.append(str(refused.value))
    hf = model.to_hf()
    hf.gpt_neox.final_layer_norm.register_parameter("bias", None)
    with pytest.raises(nt.ConfigError) as lacking:
        names["NeoX"].from_hf(hf)
    for told, message in zip(OF_PYTHON, [*said, str(lacking.value)], strict=True):
        assert told in message


def test_all_messages_told_are_checked() -> None:
    told = re.findall(r"^\| `(.*?)` \|", MODEL.partition("## What goes wrong")[2], re.M)
    assert sorted(told) == sorted([*(row for row, *_ in MISTAKES), *OF_PYTHON])


def test_the_operators_that_the_page_names_are_there() -> None:
    from nntile_py import tasks

    (told,) = re.findall(r"^\*\*Operators\*\*.*?(?=\n\n)", MODEL, re.M | re.S)
    named = {name for name in re.findall(r"`(\w+)`", told) if name not in ("dense", "norm")}
    assert named and all(callable(getattr(tasks, name)) for name in named)


def test_the_model_with_rms_norm() -> None:
    """The page's few lines in the place of `norm`."""
    assert "from nntile_py.tasks import linear, rotary" in FILE
    text = FILE.replace("import dense, norm, padding", "import dense, padding")
    text = text.replace("\n\nclass NeoXConfig", f"\n\n{RMS}\n\nclass NeoXConfig")
    old = "from nntile_py.tasks import linear, "
    text = text.replace(old, f"{old}rms_norm, ")
    names: dict[str, Any] = {}
    exec(text, names)
    model = names["NeoX"](names["NeoXConfig"](layers=1, embed=12, heads=2, vocab=50, positions=9))
    assert {name for name in model.weight_shapes() if "norm" in name and "bias" in name} == set()
    ids = np.random.default_rng(0).integers(0, 50, (2, 9))
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(model, batch=2, seq=9, tiles={"embed": 5})
        first, *_, last = (trainer.step({"input_ids": ids, "labels": ids}, lr=1e-2) for _ in range(6))
    assert last < first


def test_tiles_of_shared_heads_are_those_told() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+|refused)[^|]* \| (\d*)", MODEL.partition("`tiles.heads` |")[2], re.M)
    assert len(rows) == 4
    for tile, heads, kv_heads in rows:
        tiling = nt.tiles.Tiling({"heads": int(tile)})
        if heads == "refused":
            with pytest.raises(nt.ConfigError, match="allowed: a multiple or a divisor of 3"):
                tiling.share("kv_heads", "heads", 12, 3)
        else:
            tiling.share("kv_heads", "heads", 12, 3)
            assert [tiling.tile("heads", 12), tiling.tile("kv_heads", 4)] == [int(heads), int(kv_heads)]


# -- an operator


def test_the_operator(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(CHECKED, names)
    right = names["SoftClip"].reference
    names["SoftClip"].reference = lambda self, *inputs: (1.1 * right(self, *inputs)[0],)
    with pytest.raises(AssertionError, match="off by"):
        exec(CHECKED, names)


def test_the_operator_in_the_model(folder: Path) -> None:
    text = FILE.replace("import dense, norm, padding", "import dense, padding").replace(
        "\n\nclass NeoXConfig", f"\n\n{CALLED}\n\nclass NeoXConfig"
    )
    assert CALLED in text
    (folder / "neox.py").write_text(text)
    from neox import NeoX, NeoXConfig  # type: ignore[import-not-found]

    sizes = yaml.safe_load(CONFIG)["model"]
    model = NeoX(NeoXConfig(**{k: v for k, v in sizes.items() if k != "type"}, vocab=99, positions=9))
    assert "gpt_neox.final_layer_norm.gain" in model.weight_shapes()
    ids = np.random.default_rng(0).integers(0, 99, (2, 9))
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer(model, batch=2, seq=9, tiles={"embed": 25, "seq": 4})
        first, *_, last = (trainer.step({"input_ids": ids, "labels": ids}, lr=1e-2) for _ in range(6))
    assert last < first


def test_files_and_names_that_the_pages_name_are_there() -> None:
    for text in (MODEL, OPERATOR, (ROOT / "CONTRIBUTING.md").read_text()):
        for path in set(re.findall(r"`((?:\w+/)+[\w*]+\.\w+|[A-Z]+\.md|(?:\w+/)+)`", text)):
            if "NAME" not in path:
                assert list(ROOT.glob(path.rstrip("/"))), path
    code = "\n".join(path.read_text() for path in (ROOT / "tasks").glob("*.*"))
    code += (ROOT / "tests" / "test_references.py").read_text()
    part = OPERATOR.partition("## B.")[2]
    for name in set(re.findall(r"`(\w+)`", part)) - {"embed"}:
        assert re.search(rf"\b{name}\b", code), name


def test_contributing() -> None:
    """The commands that need nothing to be built, and the table of rooms."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for target in set(re.findall(r"\bmake (\w+)", text)):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, target
    rooms = {name.rstrip("/") for name in re.findall(r"`([\w/]+/)`", text)}
    packages = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("nntile_py/*/__init__.py")}
    assert packages <= rooms, packages - rooms


def test_the_page_of_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its YAML is accepted, its table lists all optimizers and schedules, its defaults are those of the keys."""
    from nntile_py.config.optimizer_section import read_optimizer
    from nntile_py.config.schedules import SCHEDULES, learning_rate
    from nntile_py.tasks.optimizer import OPTIMIZERS
    from nntile_py.yaml_text import parse

    text = (ROOT / "docs" / "optimizers.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.py").write_text(*blocks(text, "python"))
    found = [read_optimizer(parse(block, "the page")["optimizer"]) for block in blocks(text, "yaml")]
    assert [learning_rate(found[1], step, 4) for step in range(1, 5)] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert len(found[2].groups) == 3 and found[3].method is nt.Muon
    rows = {name for name in re.findall(r"^\| `(\w+)`", text, re.M)}
    assert rows - {"schedule"} == {*OPTIMIZERS, *SCHEDULES}
    tables = {f"`{axis}`" for axis in nt.Muon.TABLES}
    assert tables <= set(re.findall(r"`\w+`", text))


def test_the_optimizer_of_the_page() -> None:
    """Its class is registered for YAML, and its reference is the formula of its docstring."""
    from nntile_py.tasks.optimizer import OPTIMIZERS
    from nntile_py.tiles import Slot

    names: dict[str, Any] = {}
    signum, _, _ = blocks((ROOT / "docs" / "extend.md").read_text(), "python")
    exec(signum, names)
    try:
        assert OPTIMIZERS["signum"] is names["Signum"]
        one = names["Signum"](lr=0.1, momentum=0.5)
        p, m = one.reference(np.array([1.0, 1.0]), np.array([2.0, -6.0]), [np.array([4.0, 4.0])], 0.5, 0.1, 1)
        assert np.allclose(p, [1 - 0.1 * 1.5, 1 - 0.1 * (-1 + 0.5)]) and np.allclose(m, [3.0, -1.0])
        assert one.args(Slot("lr"), 0.5).weight_decay == 0.5 and one.slots(3) == {}
        with pytest.raises(nt.ConfigError, match=r"optimizer\.momentum"):
            names["Signum"](momentum=2.0)
    finally:
        del OPTIMIZERS["signum"]
