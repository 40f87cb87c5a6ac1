"""`nntile graph`: what is in the picture."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

from nntile_py.analysis import draw
from nntile_py.analysis.workloads import build
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system.units import si

TREE: dict[str, Any] = {
    "model": {"layers": 2, "embed": 16, "heads": 2, "vocab": 300, "positions": 8},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 1, "batch": 4, "seq": 8},
    "tiles": {"batch": 2, "embed": 8},
}
CONFIG = RunConfig.model_validate(TREE)


def operators(dot: str) -> list[str]:
    """The titles of the operators or tasks, without those of the legend."""
    return re.findall(r'shape=ellipse[^\n]*label="[△□○] ([^\\"]+)\\n', dot)


def test_logical() -> None:
    dot = draw.draw(CONFIG, layer=0, phase="forward")
    assert "Contract + bias + gelu_new" in operators(dot) and len(operators(dot)) == 7
    # The first product: 2 * 32 tokens * 16 * 48 flop, and a bias on 1536 words. Of each tile of the batch, two tasks:
    # both read 128 + 384 words and write 768, the first reads 48 of the bias, the second what the first has written.
    assert "50.7 kflop, 7.51 per element" in dot
    large = {"model": TREE["model"] | {"embed": 4096}, "train": {"steps": 1, "batch": 1024, "seq": 8}, "tiles": {}}
    wide = draw.draw(RunConfig.model_validate(TREE | large), layer=0, phase="forward")
    assert re.search(r", \d,\d{3} per element", wide) and "e+0" not in wide
    assert "h.1." not in dot and "backward" not in dot
    for kind in ("ellipse", "box", "cylinder"):
        assert f"shape={kind}" in dot


def test_before_and_after() -> None:
    both = draw.draw(CONFIG, layer=0, phase="forward", fusion="both")
    assert "naive (before fusion): 22 operators" in both and "fused (after fusion): 7 operators" in both
    assert len(operators(both)) == 29
    nodes = re.findall(r"^(\w+) \[", both, re.M)
    assert len(nodes) == len(set(nodes)), "two nodes of one name"
    edges = re.findall(r"^(\w+) -> (\w+) ", both, re.M)
    assert edges and all({a, b} <= set(nodes) and a.split("_")[0] == b.split("_")[0] for a, b in edges[:-1])


def test_the_end_of_a_whole_step_is_drawn_short() -> None:
    """One node for AdamW of all weights beside the rest; each of them where the update alone is asked for."""
    whole, update = draw.draw(CONFIG), draw.draw(CONFIG, phase="update")
    weights = operators(update).count("AdamW")
    assert weights == 28 and f"{weights} AdamW" in operators(whole) and "AdamW" not in operators(whole)
    assert f"of all {weights} gradients" in whole and "gradients" not in "".join(operators(update))
    count = re.search(r"after fusion\): (\d+) operators", whole)
    assert count and int(count[1]) == len(operators(whole)) + weights - 1


def test_tasks_of_a_large_model_are_those_of_one_layer() -> None:
    """The title and the note of the command say so; a layer, and a small model, are drawn whole."""
    dot, layer = draw.draw(CONFIG, level="tiles"), draw.draw(CONFIG, level="tiles", layer=0)
    every = draw.draw(CONFIG, level="tiles", tensors=True)
    nodes = every.count("shape=")
    assert nodes > draw.MOST_CURVED and nodes > dot.count("shape=") == layer.count("shape=")
    assert f"only layer 0 of 2, as the whole has {nodes} nodes; --tensors draws all" in dot and "only" not in every
    assert draw.note(dot, False) == "the picture shows layer 0 only; --tensors draws the whole model"
    uncut = RunConfig.model_validate(TREE | {"tiles": {}})
    small = draw.draw(uncut, level="tiles", phase="forward")
    assert "only layer" not in small and small == draw.draw(uncut, level="tiles", phase="forward", tensors=True)


def test_a_task_that_reshapes_says_so() -> None:
    dot = draw.draw(CONFIG, level="tiles", work="linear_reshape", phase="forward", fusion="both")
    naive, _, fused = dot.partition("fused (after fusion)")
    assert "reshape" not in naive.partition("naive")[2] and "△ contract + reshape" in fused


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_tiles(phase: str) -> None:
    """Every task of the phase is there, and nothing waits for itself."""
    built = build(CONFIG)
    dot = draw.draw(CONFIG, level="tiles", phase=phase, tensors=True)
    _, low = built.graphs[phase == "update"]
    assert len(operators(dot)) == sum(
        phase == "update" or task.op.endswith(".backward") == (phase == "backward") for task in low.tasks.tasks
    )
    if phase == "forward":
        assert "contract + bias" in operators(dot), "a task's fused operations are in its label"
    after: dict[str, set[str]] = {}
    for a, b in re.findall(r"^(after_\w+) -> (after_\w+) ", dot, re.M):
        after.setdefault(a, set()).add(b)
    state: dict[str, int] = {}

    def visit(node: str) -> None:
        assert state.get(node) != 1, "a cycle"
        if node not in state:
            state[node] = 1
            for follower in after.get(node, ()):
                visit(follower)
            state[node] = 2

    sys.setrecursionlimit(20_000)
    for node in list(after):
        visit(node)


def test_refused_and_without_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--layer 7"):
        draw.draw(CONFIG, layer=7)
    with pytest.raises(ConfigError, match="suffix"):
        draw.write("digraph {}", tmp_path / "g.jpeg")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NNTileError, match="apt-get install graphviz"):
        draw.write("digraph {}", tmp_path / "g.svg")
    assert (tmp_path / "g.dot").read_text() == "digraph {}"
    with pytest.raises(NNTileError, match=r"the graph is in .*g.dot"):  # the same graph once more
        draw.write("digraph {}", tmp_path / "g.svg")
    (tmp_path / "g.dot").write_text("mine")
    with pytest.raises(NNTileError, match=r"ends in .dot.*g.dot exists and was left as it is"):
        draw.write("digraph {}", tmp_path / "g.svg")
    assert (tmp_path / "g.dot").read_text() == "mine"


def test_dot_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed then; the graph is kept, no half a picture is."""
    program = tmp_path / "dot"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec /bin/sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(draw, "MOST_SECONDS", 2.0)
    with pytest.raises(NNTileError, match=r"after 2 s on 0 nodes.*--layer 0, --phase forward, --level.*sfdp.*g.dot"):
        draw.write("digraph {}", tmp_path / "g.svg")
    assert (tmp_path / "g.dot").exists() and not (tmp_path / "g.svg").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    monkeypatch.setattr(draw, "MOST_SECONDS", 100.0)
    program.write_text("#!/bin/sh\nread all\necho $1 $all\n")
    draw.write("digraph {}\n", tmp_path / "g.svg")
    assert (tmp_path / "g.svg").read_text() == "-Tsvg digraph {}\n"


def test_command(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.to_yaml())
    command = [sys.executable, "-m", "nntile_py.cli", "graph", "c.yaml", "--layer", "1"]
    done = forks.run([*command, "--out", "g.dot"], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "g.dot").read_text().startswith("digraph {")
    done = forks.run([*command, "--out", "g.dot", "--phase", "fwd"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "--phase" in done.stderr


def test_si() -> None:
    assert [si(n) for n in (0, 999, 1000, 1_234_567, 2.5e12)] == ["0 ", "999 ", "1 k", "1.23 M", "2.5 T"]


def four_layers(**more: Any) -> RunConfig:
    return RunConfig.model_validate(TREE | {"model": TREE["model"] | {"layers": 4}} | more)


@pytest.mark.parametrize("level", ["logical", "tiles"])
def test_layers_that_are_alike_are_drawn_once(level: str) -> None:
    """The picture tells how many there are, counts all of them, and nothing of it is cut off."""
    config = four_layers()
    folded, every = (draw.draw(config, level=level, folded=folded, tensors=True) for folded in (True, False))
    assert "x 4: layers 0 to 3" in folded and "x 3: layers 1 to 3" in folded  # forward, backward
    assert "alike" not in every and "h3.mlp" not in folded and "h*.mlp" in folded and "h.*.ln_1.weight" in folded
    titles = [re.search(r"after fusion\): [^\"]*", picture) for picture in (folded, every)]
    assert titles[0] and titles[1] and titles[0][0] == titles[1][0]
    assert len(operators(folded)) < 0.75 * len(operators(every))
    edges = re.findall(r"^(\w+) -> (\w+) \[", folded, re.M)
    # What follows the layers reads from the last of them, which stands for all.
    last = re.findall(r'^(\w+) \[shape=box[^\n]*label="h\*\.mlp\.add', folded, re.M)
    head = re.findall(r"^(\w+) \[shape=ellipse[^\n]*\\nhead\\n", folded, re.M)
    assert any(a in last and b in head for a, b in edges)
    deep = draw.draw(four_layers(model=TREE["model"] | {"layers": 12}), level=level, tensors=True)
    assert len(operators(deep)) == len(operators(folded)) and "x 12: layers 0 to 11" in deep


def test_a_whole_model_is_an_overview() -> None:
    """Its operators are those of the picture with tensors; edges between them stand for tensors, which are no nodes."""
    config = four_layers()
    overview, whole = draw.draw(config), draw.draw(config, tensors=True)
    assert operators(overview) == operators(whole) and "x 4: layers 0 to 3" in overview
    nodes = overview.partition("cluster_legend")[0]
    assert "shape=cylinder" not in nodes and nodes.count("shape=") < 0.5 * whole.count("shape=")
    edges = re.findall(r"^(after_o\d+) -> (after_o\d+) \[[^\n]*label=\"[\d.]+ k?B\"", overview, re.M)
    assert len(edges) > 0.5 * len(operators(overview)) and "input_ids" in nodes and "loss" in nodes
    assert "overview" in draw.note(overview, True) and not draw.note(overview, False)


def test_two_layers_are_not_folded() -> None:
    assert "alike" not in draw.draw(CONFIG) and "alike" not in draw.draw(four_layers(), layer=1)


def test_what_another_phase_made_is_drawn_again() -> None:
    """No edge goes from the forward pass into the box of the backward pass; the forward's result is there, dashed."""
    dot = draw.draw(CONFIG, layer=0)
    boxes = re.split(r"^subgraph cluster_after\d+ \{$", dot, flags=re.M)
    nodes = {node: number for number, box in enumerate(boxes) for node in re.findall(r"^(after_\w+) \[", box, re.M)}
    edges = re.findall(r"^(after_\w+) -> (after_\w+) \[", dot, re.M)
    assert len(set(nodes.values())) == 3 and all(nodes[a] == nodes[b] for a, b in edges)
    assert 'dashed" label="h0.attn.lse"' in dot and "that another part writes" in dot


def test_the_legend_is_of_what_is_drawn() -> None:
    legend = draw.draw(CONFIG, layer=0, phase="forward").partition("cluster_legend")[2]
    assert "weight" in legend and "gradient of a weight" not in legend and "another part" not in legend
    assert "added in any order" not in draw.draw(CONFIG, level="tiles", phase="backward")
    commute = draw.draw(RunConfig.model_validate(TREE | {"accumulate": "commute"}), level="tiles", phase="backward")
    assert "added in any order" in commute


@pytest.mark.skipif(not shutil.which("dot"), reason="needs graphviz")
def test_too_many_nodes_are_refused_at_once(tmp_path: Path) -> None:
    dot = "digraph {" + "a [shape=box]\n" * (draw.MOST_NODES + 1) + "}"
    with pytest.raises(ConfigError, match=r"too many.*--layer 0, --phase forward, --level logical, or larger tiles"):
        draw.write(dot, tmp_path / "g.svg")
