"""Tasks placed before they run: little travels, all workers have as much to do, results stay the same."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from orders import waits

import nntile_py as nt
from nntile_py.execution import cuda_graph
from nntile_py.graph.built_step import Step
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.profiling.recorder import run_steps
from nntile_py.tiles import ACC, RW, R, TaskList, Tile, Tiling, W, placement
from nntile_py.tiles.placement import Residency, Speed, place
from nntile_py.tiles.task import Task
from nntile_py.tiles.task_groups import grouped

CONFIG = nt.models.GPT2Config(layers=3, embed=256, heads=4, vocab=512, positions=128)
GPU = Speed(flop_s=600e12, bytes_s=3.5e12, link_s=250e9, latency=0.0)


def step(tiles: dict[str, int], policy: str = "chain", layers: int = CONFIG.layers) -> Step:
    model = nt.models.GPT2(CONFIG.changed(layers=layers), {})
    return StepSpec(
        model, 64, 128, Tiling(tiles), precision="bf16", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate=policy, fusion=Fusion(), grad_accumulation=1,
    ).step()  # fmt: skip


def moved(tasks: list[Task], kinds: tuple[str, ...]) -> int:
    """Return the bytes of tiles that tasks find on another worker, without tensors with a name prefix in `kinds`."""
    copies: dict[Tile, set[int]] = {}
    total = 0
    for task in tasks:
        for access in task.accesses:
            held = copies.setdefault(access.tile, set())
            if access.mode != "W" and held and task.worker not in held and not access.tile.tensor.startswith(kinds):
                total += access.tile.bytes
            if access.mode == "R":
                held.add(task.worker)
            else:
                copies[access.tile] = {task.worker}
    return total


def load(tasks: list[Task], workers: int) -> list[float]:
    work = [0.0] * workers
    for task in tasks:
        work[task.worker] += GPU.seconds(task)
    return work


def test_batch_tiles_stay_where_they_are() -> None:
    residency: Residency = {}
    first, update = (place(low.tasks, 4, GPU, residency).tasks for low in step({"batch": 16}, layers=8).lists)
    # Weights and their gradients travel, and in the embedding the tensors without a batch axis.
    grads = {access.tile.tensor for task in first for access in task.accesses if access.tile.persistent}
    others = [t for t in first if not t.kernel.startswith("embedding_grad")]
    assert moved(others, ("embed.", *grads)) == 0
    work = load(first, 4)
    assert max(work) < 1.1 * min(work)
    matrices = [t for t in update if t.kernel == "adamw" and len(t.accesses[0].tile.shape) > 1]
    assert {t.worker for t in matrices} == {0, 1, 2, 3}  # the sums have ended on different workers
    at = {(a.tile.tensor, a.tile.index): t.worker for t in first for a in t.accesses if a.mode != "R"}
    stays = [t for t in matrices if at[t.accesses[3].tile.tensor, t.accesses[3].tile.index] == t.worker]
    assert len(stays) > 0.6 * len(matrices)


@pytest.mark.parametrize(("size", "owners"), [(16, [0, 1, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3]), (13, [0, 0, 1, 2, 3])])
def test_each_worker_has_neighbours_of_the_batch(size: int, owners: list[int]) -> None:
    tasks = place(step({"batch": size}).lists[0].tasks, 4, GPU).tasks
    for task in tasks:
        batch = {a.tile.index[a.tile.axes.index("batch")] for a in task.accesses if "batch" in a.tile.axes}
        if len(batch) == 1:
            assert task.worker == owners[batch.pop()]


@pytest.mark.parametrize("size", [16, 8])
def test_the_backward_pass_of_a_part_of_the_batch_waits_for_no_other(size: int) -> None:
    tasks = place(step({"batch": size}).lists[0].tasks, 4, GPU).tasks
    before = waits(tasks)
    ends = [k for k, task in enumerate(tasks) if task.kernel == "attention_grad"]
    assert len(ends) == CONFIG.layers * 64 // size
    for k in ends:
        assert {tasks[j].worker for j in before[k] if "backward" in tasks[j].op} == {tasks[k].worker}


@pytest.mark.parametrize("size", [16, 8])
def test_no_task_of_a_group_waits_for_what_another_of_it_needs(size: int) -> None:
    one = place(step({"batch": size}).lists[0].tasks, 4, GPU)
    groups = grouped(one, GPU.flop_s, GPU.bytes_s, 1e-4).tasks
    # The tasks in the order of the groups; each is the same object in a group as in the list.
    tasks, group = [], {}
    for number, task in enumerate(groups):
        for part in task.parts or [task]:
            group[len(tasks)] = number
            tasks.append(part)
    before = waits(tasks, group)
    elsewhere = [{g for g in held if groups[g].worker != task.worker} for task, held in zip(tasks, before, strict=True)]
    for number, task in enumerate(groups):
        needs = [elsewhere[k] for k in group if group[k] == number]
        assert all(need == needs[0] for need in needs), task.op


def test_tiles_that_are_changed_in_place_are_not_sums() -> None:
    """Tasks of four batch tiles write keys into one tile of a cache, and add to one sum: only the sum is split."""
    cache, total = Tile("cache", (0,), (64,), "fp32"), Tile("total", (0,), (1,), "fp32")
    tasks = TaskList()
    tasks.emit("zero", [W(cache)])
    for k in range(4):
        x, y = (Tile(name, (k,), (8,), "fp32", axes=("batch",)) for name in "xy")
        tasks.emit("make", [W(x)])
        tasks.emit("write", [W(y), RW(cache), ACC(total), R(x)])
    placed = place(tasks.resolve(), 2, GPU).tasks
    used = [access.tile for task in placed if task.kernel == "write" for access in task.accesses]
    assert used.count(cache) == 4 and used.count(total) < 4
    assert {task.worker for task in placed if task.kernel == "write"} == {0, 1}


def test_a_cache_that_two_workers_change_has_the_texts_of_one_worker() -> None:
    """Each worker has half of the rows of a batch; both write into the same pages of keys and values."""
    config = nt.models.LlamaConfig(layers=2, embed=32, heads=4, kv_heads=2, ffn=48, vocab=60, positions=256)
    model = nt.models.Llama(config, seed=1)
    model.weights = {name: value * (8 if value.ndim > 1 else 1) for name, value in model.weights.items()}
    prompts = [np.random.default_rng(n).integers(3, 60, n).tolist() for n in (1, 150, 17, 70)]
    texts = []
    for where in ("scheduler", "planned"):
        with nt.Runtime(cpus=2, placement=where), nt.Generator(model, tiles={"batch": 2}) as generator:
            texts.append([text.tokens for text in generator(prompts, max_tokens=20, temperature=0)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("size", [16, 8])
def test_sums_beside_are_added_in_the_order_of_the_batch(size: int) -> None:
    one, tasks = step({"batch": size}).lists[0].tasks, place(step({"batch": size}).lists[0].tasks, 4, GPU)

    def contributions(of: list[Task]) -> dict[str, list[str]]:
        """Map each gradient to the name of an input of the task that wrote it."""
        made, found = {}, {}  # type: ignore[var-annotated]
        for task in of:
            name = next((str(a.tile) for a in task.accesses if "batch" in a.tile.axes), "")
            for access in task.accesses:
                if task.kernel == "combine":
                    name = made[task.accesses[1].tile]
                if access.mode != "R" and access.tile.persistent:
                    found.setdefault(str(access.tile), []).append(name)
                elif access.tile.tensor.endswith(".part"):
                    made[access.tile] = name
        return found

    assert contributions(tasks.tasks) == contributions(one.tasks)
    assert sum(t.kernel == "combine" for t in tasks.tasks) > 0 and tasks.tasks[-1].worker >= 0
    freed = [tile for task in tasks.tasks for tile in task.frees]
    assert len(freed) == len(set(freed)) and all(not tile.persistent for tile in freed)


@pytest.mark.parametrize("size", [64, 16])
def test_squares_are_taken_as_a_backward_pass_makes_gradients(size: int) -> None:
    """Gradients that end with the same part of the batch are added first, as far as they exist by then."""
    first, update = step({"batch": size}, layers=4).lists
    made, ends = {}, first.tasks.ends("batch")
    for at, task in enumerate(first.tasks.tasks):
        made.update((a.tile.key, at) for a in task.accesses if a.mode != "R" and a.tile.kind == "grad")
    squares = [t.accesses[1].tile.key for t in update.tasks.tasks if t.kernel == "sum_squares"]
    assert set(squares) == set(made)
    kernels = [t.kernel for t in update.tasks.tasks]
    assert kernels.index("add_scalars") <= 8 and kernels.count("sum_squares") == len(squares)
    for part in {ends.get(key, 0) for key in squares}:
        places = [made[key] for key in squares if ends.get(key, 0) == part]
        layers = [places[k : k + 8] for k in range(0, len(places), 8)]
        assert all(np.mean(a) < np.mean(b) for a, b in pairwise(layers[:-1])), places


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_weights_are_updated_as_the_next_run_needs_them(workers: int) -> None:
    """Updates of the first layer run at once; updates of a later layer run after tasks that need earlier weights."""
    lists, residency = step({"batch": 16}, layers=8).lists, Residency()
    placed = [place(low.tasks, workers, GPU, residency) for low in lists]
    placement.delay(placed, workers)
    first, update = (one.tasks for one in placed)
    assert not any(task.delay for task in first)
    total, needed = len(first) + len(update), dict[Any, int]()
    for at, task in enumerate(first):
        for access in task.accesses:
            needed.setdefault(access.tile.key, at)
    delayed = 0
    for at, task in enumerate(update, len(first)):
        own = at + task.delay
        if task.kernel == "adamw":
            until = total + needed[task.accesses[0].tile.key]
            assert own == (max(at, until - 2 * workers) if workers > 1 else at)
            delayed += own >= total
        else:
            assert not task.delay
    assert (delayed > 50) == (workers > 1)


def test_delayed_tasks_run_later() -> None:
    """On two CPU workers: a worker's first tasks of a step before its last updates of the step before, if they are
    submitted by then, which on a busy machine they may not be."""
    config = nt.models.GPT2Config(layers=4, embed=32, heads=4, vocab=64, positions=16)
    with nt.Runtime(cpus=2, placement="planned"):
        trace = run_steps(nt.Trainer(nt.models.GPT2(config, seed=0), 4, 16, {"batch": 2}), 10, 1)
    updates = ["AdamW" in trace.info_of(n).name for n in range(len(trace))]  # in the order of submission
    begins = [n for n in range(1, len(trace)) if updates[n - 1] and not updates[n]]  # steps, but for the first
    late = []
    for begin in begins:
        before = {w: max(trace.start[n] for n in range(begin) if trace.worker[n] == w) for w in (0, 1)}
        late.append(sum(trace.start[n] < before[trace.worker[n]] for n in range(begin, len(trace))))
    assert len(late) == 9 and max(late) > 10, late


def test_generation_with_a_cut_batch() -> None:
    """Each worker keeps the pages of its part. The workers exchange nothing, and the texts are those of one worker."""
    config = nt.models.LlamaConfig(layers=2, embed=32, heads=4, kv_heads=2, ffn=48, vocab=60, positions=200)
    model, rng = nt.models.Llama(config, seed=1), np.random.default_rng(0)
    prompts, greedy = [rng.integers(3, 60, n).tolist() for n in (5, 90, 17, 40, 3, 60, 8)], {"temperature": 0}
    with nt.Runtime(cpus=1), nt.Generator(model) as generator:
        want = generator(prompts, max_tokens=20, **greedy)
    with nt.Runtime(cpus=2, placement="planned"), nt.Generator(model, tiles={"batch": 2}, batch=6) as generator:
        assert generator(prompts, max_tokens=20, **greedy) == want
        decoder: Any = generator._engine and generator._engine.decoder
        lists = [program.served.program.list for program in decoder.bound.programs.values()]
    users: dict[int, set[int]] = {}
    for tasks in lists:
        assert cuda_graph.exchange(tasks) == "" and all(task.worker >= 0 for task in tasks.tasks)
        for tile, worker in ((a.tile, t.worker) for t in tasks.tasks for a in t.accesses if a.tile.kind == "cache"):
            users.setdefault(tile.index[tile.axes.index("page")], set()).add(worker)
    assert users == {0: {0}, 1: {0}, 2: {1}}
    decoding = [cuda_graph.shares(tasks) for tasks in lists if len({task.worker for task in tasks.tasks}) == 2]
    assert decoding
    for one in decoding:
        assert [share.worker for share in one] == [0, 1]
        assert sorted(one[0].numbers + one[1].numbers) == [*range(sum(len(share.tasks.tasks) for share in one))]


def test_parts_of_a_layer_spread() -> None:
    """One batch tile: heads and hidden units are divided among the workers."""
    first = place(step({"ffn": 256, "heads": 1}).lists[0].tasks, 4, GPU).tasks
    work = load(first, 4)
    assert max(work) < 1.5 * min(work)


@pytest.mark.parametrize("policy", ["chain", "commute", "redux", "tree"])
def test_every_task_has_a_worker_and_the_same_each_time(policy: str) -> None:
    one, two = (
        [t.worker for low in step({"batch": 20}, policy).lists for t in place(low.tasks, 3, GPU).tasks] for _ in "ab"
    )
    assert one == two and set(one) == {0, 1, 2}


def test_what_travels_against_who_is_idle() -> None:
    big, small = Tile("big", (0,), (1000, 1000), "fp32"), Tile("small", (0,), (1,), "fp32")
    tasks = TaskList()
    tasks.emit("make", [W(big)], flop=600e12 * 1e-3)
    tasks.emit("short", [ACC(big)], flop=600e12 * 1e-6)  # 16 us of travel
    tasks.emit("long", [ACC(big)], flop=600e12 * 20e-6)  # and the other worker has nothing to do
    tasks.emit("other", [W(small)], flop=600e12 * 0.975e-3)
    tasks.emit("read", [R(big), W(Tile("out", (0,), (1,), "fp32"))], flop=0.0)  # a little more to do than the other
    workers = [task.worker for task in place(tasks.resolve(), 2, GPU).tasks]
    assert workers == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("size", [16, 8])
def test_the_norm_is_summed_where_gradients_are(size: int) -> None:
    """Only one sum of squares of each part of the batch travels, and clip."""
    lists, residency = step({"batch": size}).lists, Residency()
    for low in lists:
        tasks = place(low.tasks, 4, GPU, residency).tasks
    sums = [t for t in tasks if t.kernel in ("sum_squares", "add_scalars", "clip")]
    travelled = sum(len(t.accesses) for t in sums if t.kernel == "clip") + 3
    assert moved(sums, ()) < 8 * travelled
    assert len({t.worker for t in sums}) == 4


def test_the_gradient_of_a_large_vocabulary_stays() -> None:
    config = nt.models.GPT2Config(layers=1, embed=256, heads=4, vocab=50304, positions=128)
    made = StepSpec(
        nt.models.GPT2(config, {}), 64, 128, Tiling({"batch": 16}), precision="bf16", optimizer=nt.AdamW(),
        clip_grad_norm=1.0, accumulate="chain", fusion=Fusion(),
    ).step()  # fmt: skip
    tasks = place(made.lists[0].tasks, 4, GPU).tasks
    adds = [t for t in tasks if t.kernel == "embedding_grad" and "wte" in t.accesses[0].tile.tensor]
    before = [t for t in tasks[: tasks.index(adds[0])] if adds[0].accesses[0].tile in [a.tile for a in t.accesses]]
    assert len(adds) == 4 and {t.worker for t in adds} == {before[-1].worker}


def test_training_with_planned_workers() -> None:
    """Bitwise the losses that a scheduler's choice gives."""

    def losses(placement: str) -> list[float]:
        config = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=64, positions=16)
        weights = nt.models.GPT2(config).weights
        ids = [[(3 * b + s) % 64 for s in range(16)] for b in range(4)]
        with nt.Runtime(cpus=2, placement=placement):
            trainer = nt.Trainer(nt.models.GPT2(config, weights), 4, 16, {"batch": 1, "ffn": 48})
            return [float(trainer.step(ids, ids)) for _ in range(4)]

    assert losses("planned") == losses("scheduler")


def test_planned_tasks_run_in_the_order_of_submission() -> None:
    """One worker, in submission order; by priority, sums of weights' gradients would wait for the end of the step."""
    config = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=64, positions=16)
    with nt.Runtime(cpus=1, placement="planned"):
        trace = run_steps(nt.Trainer(nt.models.GPT2(config, seed=0), 4, 16, {"batch": 1}), 2, 1)
    assert len(trace) > 100 and np.all(np.diff(trace.start) >= 0)


@nt.task(x="R", y="RW")
def axpy(x: np.ndarray, y: np.ndarray, *, alpha: float) -> None:
    if alpha < 0:
        raise ValueError("alpha is negative")
    y += alpha * x


def test_tasks_without_a_plan() -> None:
    """Any free worker runs Python tasks; a failure is reported, and later tasks run."""
    with nt.Runtime(cpus=2, placement="planned"):
        x, y = nt.array(np.ones(4)), [nt.array(np.zeros(4)) for _ in range(20)]
        for _ in range(10):
            for one in y:
                axpy(x, one, alpha=0.5)
        assert all(np.array_equal(one.numpy(), np.full(4, 5.0)) for one in y)
        axpy(x, y[0], alpha=-1.0)
        with pytest.raises(nt.TaskError, match="alpha is negative"):
            y[0].numpy()
        axpy(x, y[1], alpha=1.0)
        assert np.array_equal(y[1].numpy(), np.full(4, 6.0))


def test_unknown_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(nt.ConfigError, match=r"runtime.placement: got 'best'; allowed: scheduler or planned"):
        nt.Runtime(cpus=1, placement="best")
    monkeypatch.setenv("STARPU_SCHED", "lws")
    with pytest.raises(nt.ConfigError, match=r"STARPU_SCHED: got \S+ with runtime\.placement: planned; allowed: "):
        nt.Runtime(cpus=1, placement="planned")


def of_all_workers(task: Task, load: Any, copies: Any, readers: Any, speed: Speed) -> int:
    """Return the cheapest worker by comparing all; among equal costs, up to rounding, the least loaded worker."""
    seconds = load.seconds
    most = len(seconds) * speed.seconds(task)
    costs = [
        (min(work - min(seconds), most) + placement._travel(task, worker, copies, readers, speed), work)
        for worker, work in enumerate(seconds)
    ]
    return costs.index(min(costs))


@pytest.mark.few(5)
@pytest.mark.parametrize("tiles", [{"batch": 16}, {"batch": 32, "ffn": 256}, {"heads": 1, "ffn": 128, "vocab": 100}])
@pytest.mark.parametrize(("workers", "policy"), [(2, "chain"), (3, "tree"), (4, "redux"), (8, "chain"), (16, "chain")])
def test_the_cheapest_of_all(tiles: dict[str, int], workers: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few workers are looked at, and the choice is that of a look at all."""
    made = step(tiles, policy, layers=2)

    def chosen() -> list[int]:
        residency: Residency = {}
        placed = (place(low.tasks, workers, GPU, residency) for low in (*made.lists, *made.lists))
        return [task.worker for one in placed for task in one.tasks]

    few = chosen()
    monkeypatch.setattr(placement, "_cheapest", of_all_workers)
    assert chosen() == few and len(set(few)) == workers


def test_more_workers_take_no_longer_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original, looked = step({"batch": 1}, layers=1), placement._travel, []
    monkeypatch.setattr(placement, "_travel", lambda *of: looked.append(1) or original(*of))
    counts = []
    for workers in (4, 64):
        residency: Residency = {}
        for low in (*made.lists, *made.lists):
            place(low.tasks, workers, GPU, residency)
        counts.append(len(looked))
        looked.clear()
    assert counts[1] < 1.2 * counts[0]
