"""Simulated steps on several nodes: counts by hand, one node for all against all nodes, refused options."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import nntile_py as nt
from nntile_py import cli
from nntile_py.analysis.cluster_plan import ClusterPlan, peaks, plan_cluster, requested_cluster
from nntile_py.analysis.plan import plan
from nntile_py.analysis.simulate import simulate
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.graph.built_step import Step
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.measure import worker
from nntile_py.measure.sweep_spec import METRICS, Measure
from nntile_py.tiles import R, Task, TaskList, Tile, Tiling, W, device_model
from nntile_py.tiles.allreduce import ClusterNode, Network, Piecewise, Transfer, all_reduce, with_sums
from nntile_py.tiles.placement import Speed, place
from nntile_py.tiles.rank_tasks import MOST_BYTES, RECEIVE, SEND

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
GPT2, TINY = EXPERIMENTS / "gpt2_124m.yaml", EXPERIMENTS / "gpt2_tiny.yaml"
HAND = Speed(flop_s=1e12, bytes_s=1e15, link_s=1e9, latency=1e-3, overhead=0.5e-3)
SLOW = Network(bytes_s=1e9, latency=2e-3, message=0.1e-3)
ROWS = ["train.seq=16", "tiles.batch=1", "runtime.cpus=1"]
SMALL = ["model.layers=2", "model.embed=256", "model.heads=4", "train.seq=128", "tokenizer.vocab_size=300"]


def shown(made: ClusterPlan) -> str:
    console = Console(width=1000)
    with console.capture() as text:
        console.print(made.render())
    return text.get()


def of_gpus(*sets: str) -> RunConfig:
    return load(GPT2, [*SMALL, *sets])


def gpt2(rows: int, tile: int, alone: bool = True) -> Step:
    config = nt.models.GPT2Config(layers=2, embed=256, heads=4, vocab=512, positions=128)
    return StepSpec(
        nt.models.GPT2(config, {}), rows, 128, Tiling({"batch": tile}), precision="bf16", optimizer=nt.AdamW(),
        clip_grad_norm=1.0, accumulate="chain", fusion=Fusion(), one_machine=alone,
    ).step()  # fmt: skip


# -- sums


@pytest.mark.few(4)
@pytest.mark.parametrize("words", [1, 10**7])
@pytest.mark.parametrize("nodes", [2, 3, 4, 6, 7, 12, 45])
def test_every_node_gets_the_sum_of_all(nodes: int, words: int) -> None:
    """Messages match, and carry what is said; what a node has taken in, when it has added, is of all nodes."""
    tile = Tile("w.grad", (0,), (words,), "fp32", persistent=True)
    maker = Task("make", [W(tile)], worker=0)
    lists = [
        all_reduce(tile, maker, ClusterNode(node, nodes, SLOW, 1, HAND), itertools.count(), 0) for node in range(nodes)
    ]
    sends = [{t.tag: t for t in one if isinstance(t, Transfer) and t.kernel == SEND} for one in lists]
    holds: list[set[int]] = [{node} for node in range(nodes)]
    rounds = [[t for t in one if isinstance(t, Transfer) and t.kernel == RECEIVE] for one in lists]
    assert len({len(of) for of in rounds}) == 1
    adds = [t for t in lists[0] if not isinstance(t, Transfer)]
    number = 0
    for add in adds:
        count, before = len(add.parts), [set(held) for held in holds]
        for node, receives in enumerate(rounds):
            for receive in receives[number : number + count]:
                sent = sends[receive.peer][receive.tag]
                assert sent.peer == node and sent.size == receive.size and sent.accesses[0].tile is tile
                assert not holds[node] & before[receive.peer]  # nothing twice
                holds[node] |= before[receive.peer]
        number += count
    assert all(held == set(range(nodes)) for held in holds)
    for node, receives in enumerate(rounds):  # the way back
        assert all(sends[receive.peer][receive.tag].peer == node for receive in receives[number:])
    sent_bytes = sum(t.size for t in sends[0].values())
    if words == 1:
        assert number == len(rounds[0]) and sent_bytes == 4 * number  # whole, and not back
    else:
        assert sent_bytes == pytest.approx(2 * (nodes - 1) / nodes * tile.bytes, rel=1e-4)
    assert len(adds) <= 6  # no chain


def test_sums_follow_the_last_contribution() -> None:
    first = gpt2(4, 1).first.tasks
    made = with_sums(first.tasks, ClusterNode(0, 2, SLOW, 1, HAND))
    written = {a.tile for t in first.tasks for a in t.accesses if a.mode != "R" and a.tile.persistent}
    summed = {t.accesses[0].tile: k for k, t in enumerate(made) if isinstance(t, Transfer) and t.kernel == SEND}
    assert summed.keys() == {tile for tile in written if not tile.part("batch")}
    assert {tile.tensor for tile in summed} >= {g.name for g in gpt2(4, 1).grads.values()}
    for k, task in enumerate(made):
        for access in task.accesses:
            if not isinstance(task, Transfer | Piecewise) and access.mode != "R" and access.tile in summed:
                assert k < summed[access.tile]
    assert [t for t in made if not isinstance(t, Transfer | Piecewise)] == first.tasks
    assert with_sums(first.tasks, ClusterNode(0, 1, SLOW, 1, HAND)) == first.tasks


def test_by_hand() -> None:
    """Two nodes make 1 MB in 4 ms, give it to each other, add; then 1 ms of update."""
    tile, out = Tile("g", (0,), (250_000,), "fp32", persistent=True), Tile("o", (0,), (1,), "fp32")
    first, update = TaskList(), TaskList()
    first.emit("x", [W(tile)], flop=4e9)
    update.emit("y", [W(out), R(tile)], flop=1e9)
    lists = [first.resolve().tasks, update.resolve().tasks]
    nodes = [[with_sums(lists[0], ClusterNode(node, 2, SLOW, 1, HAND)), lists[1]] for node in range(2)]
    travel = 1e-3 + 2e-3 + 2 * 0.1e-3  # through the card, on its way, handled on both sides
    add = 250_000 / 1e12 + 0.5e-3
    for nodes_of_all in (nodes, nodes[:1]):
        gradients, rest = simulate(nodes_of_all, 1, HAND, SLOW)
        assert gradients.computed == pytest.approx(4.5e-3) and rest.seconds == pytest.approx(1.5e-3)
        assert gradients.seconds == pytest.approx(4.5e-3 + travel + add)
        assert gradients.between == 10**6 and gradients.messages == 1 and gradients.thread == pytest.approx(0.2e-3)
        assert gradients.last is tile and gradients.cards == {0: pytest.approx(1e-3)}
        assert gradients.sending == pytest.approx(gradients.seconds - 4.5e-3)
        assert gradients.adding == [pytest.approx(add)]


def test_messages_of_a_card_go_one_after_the_other() -> None:
    """Three nodes: each sends to two others, two thirds of the tile in all, and as much comes back."""
    tile = Tile("g", (0,), (750_000,), "fp32", persistent=True)
    first, empty = TaskList(), TaskList()
    first.emit("x", [W(tile)], flop=0.0)
    tasks, network = first.resolve().tasks, replace(SLOW, message=0.0, latency=1e-3)
    nodes = [[with_sums(tasks, ClusterNode(node, 3, network, 1, HAND)), empty.tasks] for node in range(3)]
    gradients, _ = simulate(nodes, 1, HAND, network)
    add = 2 * 250_000 / 1e12 + 0.5e-3
    assert gradients.seconds == pytest.approx(0.5e-3 + 2 * (2e-3 + 1e-3) + add)


def test_what_cannot_hide_goes_through_all_cards() -> None:
    """The last gradients of a step, cut into a slice for each card; as many bytes travel in all."""
    tasks = place(gpt2(8, 2).first.tasks, 2, device_model.GPU["bf16"]).tasks
    slow, sent = replace(SLOW, latency=1e-6, bytes_s=1e7), []
    for share in (1, 2):
        at = ClusterNode(0, 3, replace(slow, share=share), 2, device_model.GPU["bf16"])
        made = with_sums(tasks, at)
        sent.append(sum(t.size for t in made if isinstance(t, Transfer) and t.kernel == SEND))
        kinds = Counter(t.kernel for t in made if isinstance(t, Piecewise))
        assert kinds["slice"] == kinds["join"] and (kinds["slice"] > 0) == (share == 1)
        tensors = {t.accesses[0].tile.tensor for t in made if t.kernel == "slice"}
        assert not tensors or any("wte" in name for name in tensors)  # the embedding's is the last of all
        joined = [k for k, t in enumerate(made) if t.kernel == "join"]
        assert all(made[k].worker == next(t.worker for t in reversed(made[:k]) if t.kernel == "slice") for k in joined)
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_a_tile_that_no_message_holds() -> None:
    tile = Tile("w.grad", (0,), (MOST_BYTES, 3), "fp32", persistent=True, axes=("embed", "ffn"))
    with pytest.raises(ConfigError, match=r"w.grad\[0\] has .*allowed: smaller tiles along embed, ffn"):
        all_reduce(tile, Task("make", [W(tile)], worker=0), ClusterNode(0, 2, SLOW, 1, HAND), itertools.count(), 0)


# -- one node for all of them


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("nodes", "gpus", "share"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (2, 4, 1), (3, 2, 1), (5, 1, 1)]
)
@pytest.mark.parametrize("network", ["400Gb/s", "1Gb/s"])
def test_one_node_stands_for_all(nodes: int, gpus: int, share: int, network: str) -> None:
    config = of_gpus(f"train.batch={4 * nodes * gpus}", "tiles.batch=2")
    on = requested_cluster(config, nodes, gpus, network, share)
    assert on
    assert plan_cluster(config, on).to_dict() == plan_cluster(config, on, every=True).to_dict()


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_runs_its_part_of_the_whole_program(nodes: int) -> None:
    """Made once, for a batch of its own, it has the tasks that the program of the whole batch has for its part."""

    def kinds(tasks: list[Task], parts: set[int]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for task in tasks:
            batch = {part for a in task.accesses for part in a.tile.part("batch")}
            if batch and batch <= parts:
                found[task.kernel, task.flop, tuple((a.tile.shape, a.tile.dtype) for a in task.accesses)] += 1
        return found

    whole = gpt2(4 * nodes, 2).first.tasks.tasks
    own = kinds(gpt2(4, 2, alone=False).first.tasks.tasks, {0, 1})
    for node in range(nodes):
        assert kinds(whole, {2 * node, 2 * node + 1}) == own and own.total() > 20
    single = kinds(gpt2(2, 2, alone=False).first.tasks.tasks, {0})  # its gradients are sums, too: fp32
    assert single == kinds(whole, {1})


def test_nodes_of_one_gpu_against_one_node_of_four() -> None:
    """A sum in rounds over a network like the links of a node, and a chain from GPU to GPU, take about as long."""
    config = load(GPT2, ["model.layers=6", "train.batch=128", "tokenizer.vocab_size=2048"])
    network = replace(device_model.network(device_model.GPU["bf16"].link_s), latency=15e-6)
    apart, together = requested_cluster(config, 4, 1), requested_cluster(config, 1, 4)
    assert apart and together
    of_nodes = plan_cluster(config, replace(apart, network=network))
    assert of_nodes.step_seconds == pytest.approx(plan_cluster(config, together).step_seconds, rel=0.1)
    assert of_nodes.efficiency < 1


def test_one_node_is_what_plan_tells() -> None:
    config = of_gpus("runtime.cuda=2", "train.batch=8", "tiles.batch=4")
    on = requested_cluster(config, 1)
    assert on and plan_cluster(config, on).step_seconds == plan(config).step_seconds
    cpus = load(TINY, ["runtime.cpus=2", "tiles={batch: 4}"])
    on = requested_cluster(cpus, 1)
    assert on and plan_cluster(cpus, on).step_seconds == pytest.approx(plan(cpus).step_seconds, rel=0.01)


# -- what is told


def test_a_slow_network_is_named() -> None:
    config = of_gpus("train.batch=64", "model.layers=4")
    fast, slow, shared = (requested_cluster(config, 8, 2, *how) for how in (("400Gb/s",), ("1Gb/s",), ("1Gb/s", 2)))
    assert fast and slow and shared
    quick, late, later = (plan_cluster(config, on) for on in (fast, slow, shared))
    assert quick.step_seconds < late.step_seconds < later.step_seconds
    assert late.efficiency < 0.95 and "network's bandwidth" in late.limit and late.card > 0.8
    assert quick.between_bytes > late.between_bytes > 1.7 * 4 * plan(config).parameters  # 2 * 7/8 of fp32 gradients
    phases = late.computed_seconds + late.exposed_seconds + late.update_seconds
    assert phases == pytest.approx(late.step_seconds)


def test_strong_scaling() -> None:
    config = of_gpus("train.batch=64", "model.layers=4")
    for nodes in (1, 4):
        on = requested_cluster(config, nodes, 2)
        assert on
        made, one = plan_cluster(config, on, strong=True), requested_cluster(config, 1, 2)
        assert one and made.alone_seconds == pytest.approx(plan_cluster(config, one).step_seconds)
        assert made.efficiency == pytest.approx(made.alone_seconds / nodes / made.step_seconds)
    assert made.efficiency < 0.9


def test_micro_batches_are_summed_once() -> None:
    """Gradients travel when the last has added to them."""
    one, three = (
        plan_cluster(config, on)
        for config in (of_gpus("train.batch=16", f"train.grad_accumulation={n}") for n in (1, 3))
        if (on := requested_cluster(config, 2, 2))
    )
    assert three.between_bytes == one.between_bytes and three.messages == one.messages
    assert 2.2 * one.computed_seconds < three.computed_seconds < 3.5 * one.computed_seconds


def test_memory_of_each_worker() -> None:
    step = gpt2(4, 1)
    assert peaks([low.tasks.tasks for low in step.lists], 1) == [step.peak_bytes()]
    big, small = Tile("a", (0,), (1000,), "fp32"), Tile("b", (0,), (10,), "fp32")
    tasks = TaskList()
    tasks.emit("x", [W(big)])
    tasks.emit("y", [R(big), W(small)])
    tasks.emit("z", [R(small), W(Tile("c", (0,), (1,), "fp32"))])
    for task, number in zip(tasks.resolve().tasks, (0, 1, 0), strict=True):
        task.worker = number
    assert peaks([tasks.tasks], 2) == [4000, 4040]  # the first copy goes when its last reader, elsewhere, has ended


@pytest.mark.parametrize("lacking", [0, 10 << 20])
def test_what_has_no_room_is_told(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_gpus("train.batch=64")
    on = requested_cluster(config, 4, 2)
    assert on
    peak = plan_cluster(config, on).peak_bytes
    given = plan_cluster(of_gpus("train.batch=64", f"runtime.cuda_memory={peak - lacking}"), on)
    monkeypatch.setattr(device_model, "MEMORY", peak - lacking)
    for made in (given, plan_cluster(config, on)):
        assert made.peak_bytes == peak and made.lacking_bytes == lacking
        assert ("more than it has" in shown(made)) == ("lacks 0.0 GiB" in made.limit) == bool(lacking)


def test_cpu_nodes() -> None:
    config = load(TINY, ["runtime.cpus=2", "train.batch=32"])
    on = requested_cluster(config, 4)
    assert on and on.workers == 1 and on.network.bytes_s == 5e9
    made = plan_cluster(config, on)
    assert "2 CPU cores" in made.machine and made.worker_seconds is None and 0.5 < made.efficiency < 1.1


def test_sums_that_meet_in_rounds_scale() -> None:
    """On CPU nodes the ranks' tasks are simulated: in a chain each rank waits for the one before."""
    made = {}
    for policy in ("chain", "tree"):
        sets = "model.layers=1", "train.batch=16", "tiles.batch=1", "train.grad_accumulation=2", f"accumulate={policy}"
        config = load(TINY, ["runtime.cpus=1", *sets])
        on = requested_cluster(config, 16, network="1Gb/s")
        assert on
        made[policy] = plan_cluster(config, on)
    assert made["tree"].efficiency > 1.2 * made["chain"].efficiency
    assert made["tree"].messages < made["chain"].messages and made["tree"].between_bytes < made["chain"].between_bytes


def test_planning_does_not_grow_with_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = StepSpec.step
    monkeypatch.setattr(StepSpec, "step", lambda self: made.append(self.rows) or original(self))
    tasks = []
    for nodes in (2, 128):
        config = of_gpus(f"train.batch={nodes * 16}")
        on = requested_cluster(config, nodes, 8)
        assert on
        tasks.append(plan_cluster(config, on).tasks)
    assert tasks[0] == tasks[1] and made[: len(made) // 2] == made[len(made) // 2 :] and max(made) == 16


@pytest.mark.skipif(not os.environ.get("NNTILE_TORTURE"), reason="NNTILE_TORTURE=1 runs it")
def test_a_thousand_gpus_in_a_minute() -> None:
    import time

    sizes = ["model.layers=48", "model.embed=1600", "model.heads=25", "tokenizer.vocab_size=50304"]
    config = load(GPT2, [*sizes, "train.seq=1024", "train.batch=16384"])
    on, start = requested_cluster(config, 128, 8), time.perf_counter()
    assert on and plan_cluster(config, on).efficiency > 0.9
    assert time.perf_counter() - start < 60


def planned(config: RunConfig, nodes: int) -> ClusterPlan:
    on = requested_cluster(config, nodes, 1 if config.runtime.cuda else None)
    return plan_cluster(config, on or pytest.fail("no nodes"))


@pytest.mark.parametrize("batch", [1, 2, 5, 7])
def test_any_batch_on_ranks(batch: int) -> None:
    """The ranks of mpirun are simulated: all tasks of the common program, each on its rank."""
    sets = [[*ROWS, f"train.batch={rows}"] for rows in (batch, -(-batch // 3))]
    made, alone, fullest = (planned(load(TINY, sets[k]), nodes) for k, nodes in ((0, 3), (0, 1), (1, 1)))
    assert made.tokens == alone.tokens == 16 * batch
    assert made.step_seconds < alone.step_seconds if batch > 2 else made.step_seconds > 0
    assert made.own_seconds == pytest.approx(fullest.step_seconds)
    tokens_s = [one.tokens / one.step_seconds for one in (made, fullest)]
    assert made.efficiency == pytest.approx(tokens_s[0] / 3 / tokens_s[1])  # whatever the nodes have of the batch
    assert ("such parts" in shown(made)) == (batch % 3 > 0)
    assert made.efficiency < (1.0 if batch == 1 else 1.2)  # they share the update, too


def test_weights_that_are_borrowed_are_played() -> None:
    kept, borrowed = (planned(load(TINY, [*ROWS, f"runtime.shard_weights={how}"]), 4) for how in ("false", "true"))
    assert borrowed.peak_bytes < kept.peak_bytes


def test_an_uneven_batch_on_gpus_takes_the_time_of_the_largest_part() -> None:
    made, full = (planned(of_gpus(f"train.batch={batch}"), 3) for batch in (31, 33))
    assert made.step_seconds == full.step_seconds
    assert (made.tokens, full.tokens) == (31 * 128, 33 * 128)


# -- what is refused, and how it is called


@pytest.mark.parametrize(
    ("options", "sets", "told"),
    [
        (["--nodes", "0"], [], "--nodes: got 0; allowed: an integer from 1 to 4096"),
        (["--nodes", "2", "--network", "400"], [], "--network: got '400'; allowed: bits or bytes a second, such as"),
        (["--nodes", "2", "--network", "0Gb/s"], [], "--network: got '0Gb/s'; allowed: bits or bytes a second"),
        (["--nodes", "2", "--gpus-per-node", "0"], [], "--gpus-per-node: got 0; allowed: an integer from 1"),
        (["--nodes", "2", "--gpus-per-node", "4", "--gpus-per-nic", "5"], [], "--gpus-per-nic: got 5; allowed: an int"),
        (["--gpus-per-node", "8"], [], "--gpus-per-node: got 8; allowed: only with --nodes"),
        (["--nodes", "2"], ["runtime.shard_weights=true"], "runtime.shard_weights: got true; allowed with --nodes and"),
        (["--strong"], [], "--strong: allowed: only with --nodes"),
        (["--nodes", "2", "--gpus-per-node", "2"], ["runtime.placement=scheduler"], "runtime.placement, runtime.cpus:"),
        (["--nodes", "2", "--gpus-per-node", "2"], ["runtime.cuda=0", "runtime.cpus=1", "precision=fp32"],
         "--gpus-per-node: got 2; allowed: none if runtime.cuda is 0"),
    ],
)  # fmt: skip
def test_refused(options: list[str], sets: list[str], told: str) -> None:
    setting = [word for item in [*SMALL, *sets] for word in ("--set", item)]
    result = CliRunner().invoke(cli.app, ["plan", str(GPT2), *setting, *options])
    assert isinstance(result.exception, ConfigError) and told in str(result.exception)


def test_the_command() -> None:
    setting = [word for item in [*SMALL, "train.batch=64"] for word in ("--set", item)]
    options = ["--nodes", "4", "--gpus-per-node", "8", "--network", "12.5GB/s", "--gpus-per-nic", "8"]
    shown = CliRunner().invoke(cli.app, ["plan", str(GPT2), *setting, *options])
    assert not shown.exception, shown.exception
    told = ("nodes               4, each 8 GPUs", "1 card a node, of 12.5 GB/s each way", "limited by", "of one GPU")
    assert all(text in shown.stdout for text in told)
    assert '"efficiency"' in CliRunner().invoke(cli.app, ["plan", str(GPT2), *setting, *options, "--json"]).stdout


def test_a_point_of_a_sweep() -> None:
    how = Measure(how="plan", nodes=2, gpus_per_node=2, network="100Gb/s")
    config = of_gpus("train.batch=16")
    with ExitStack() as running:
        row = worker._ours(config, how, running)[1]
        with pytest.raises(ConfigError, match=r"measure.network: got 100Gb/s; allowed: only with measure.nodes"):
            worker._ours(config, Measure(how="plan", network="100Gb/s"), running)
    assert row.keys() - {"limit"} == set(METRICS["nodes"]) - {"took", "load"}  # of the process that asks for it
    assert row["gpus"] == 4 and 0 < row["efficiency"] < 1 and row["limit"] and row["seconds"] > 0
    with pytest.raises(ConfigError, match=r"measure.nodes: got 2; allowed: null where measure.how is not plan"):
        Measure(nodes=2)


@pytest.mark.parametrize("name", ["nodes-weak", "nodes-strong"])
def test_the_experiments(name: str) -> None:
    """Every point can be planned: its batch fits its nodes."""
    from nntile_py.measure.sweep_points import load_sweep, points

    for one in points(load_sweep(EXPERIMENTS / f"{name}.yaml")):
        how = one.measure
        assert one.config and requested_cluster(one.config, how.nodes, how.gpus_per_node, how.network, how.gpus_per_nic)
