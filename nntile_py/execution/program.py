"""Native programs, built from lists of tile tasks: StarPU handles for the tiles, codelets, and footprints of tasks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution import memory, memory_checks
from nntile_py.execution.host_copy import HostCopy, assembled
from nntile_py.execution.mpi import Ranks
from nntile_py.execution.python_task import bound
from nntile_py.execution.runtime import Runtime
from nntile_py.execution.task_payload import (
    body,
    capability_of_devices,
    encoded_launches,
    lives_on_cuda,
    on_cpu_workers,
)
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tasks import launch
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import Slot, TaskList, Tile, device_model
from nntile_py.tiles.eviction import Offloaded, mark_evictions
from nntile_py.tiles.placement import Residency, Speed, delay, place
from nntile_py.tiles.rank_tasks import SEND, MessageTask, RankLists, Replicas, described, listed
from nntile_py.tiles.task import MONOIDS, Task
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped
from nntile_py.tiles.worker_kinds import assign_kinds


class Store:
    """StarPU handles of the tiles that outlive a program, shared by all programs of a trainer.

    Args:
        causes: {name: value} of possible causes of different plans on different ranks, for the error message.

    Attributes:
        handles: {key of the tile: handle}.
    """

    def __init__(self, causes: Mapping[str, str] | None = None) -> None:
        self.handles: dict[Hashable, _core.Tile] = {}
        self._causes = causes
        runtime = Runtime.current
        self.ranks = runtime.ranks if runtime else None
        self._replicas = (
            Replicas(self.ranks.size, self.ranks.tags, runtime.shard_weights) if runtime and self.ranks else None
        )
        # {key of the tile: ranks, or workers, that hold the tile} between programs.
        self.on_ranks: Residency = {}
        self.residency: Residency = {}
        self._grids: WeakKeyDictionary[Lowering, dict[Tensor, tuple[list[Placed], list[Tile]]]] = WeakKeyDictionary()
        self._read_inputs: WeakKeyDictionary[Lowering, dict[Tensor, bool]] = WeakKeyDictionary()

    def handle(self, tile: Tile) -> _core.Tile:
        """Return the StarPU handle of a tile. A temporary tile gets a new handle at each call."""
        if not tile.persistent:
            return _new(tile)
        if tile.key not in self.handles:
            self.handles[tile.key] = _new(tile)
        return self.handles[tile.key]

    def write(self, lowering: Lowering, tensor: Tensor, value: np.ndarray[Any, Any]) -> None:
        """Write a whole array into a tensor's tiles, after the tasks submitted so far, without waiting."""
        for where, handle in self._written(lowering, tensor):
            handle.write(np.ascontiguousarray(value[where]))

    def write_input(self, lowering: Lowering, tensor: Tensor, value: np.ndarray[Any, Any]) -> None:
        """Write an input of a step as `write` does, if a task reads the input."""
        known = self._read_inputs.setdefault(lowering, {})
        if tensor not in known:
            known[tensor] = lowering.accesses(tensor)
        if known[tensor]:
            self.write(lowering, tensor, value)

    def zero(self, lowering: Lowering, tensor: Tensor) -> None:
        """Fill a tensor's tiles with zeros on the workers that will use them."""
        for _, handle in self._written(lowering, tensor):
            handle.zero()

    def _written(self, lowering: Lowering, tensor: Tensor) -> list[Placed]:
        """Return the tiles of a tensor that this rank uses, and record that the host writes the tensor now.

        Every rank writes the tiles that it uses.
        """
        grids = self._grids.setdefault(lowering, {})
        if tensor not in grids:  # cached, because inputs are written at every step
            grid = [*lowering.grid(tensor)]
            mine = [(where, self.handle(tile)) for where, tile in grid if self._uses(tile)]
            grids[tensor] = mine, [tile for _, tile in grid]
        mine, tiles = grids[tensor]
        if self._replicas:
            for tile in tiles:
                self._replicas.written(tile)
        return mine

    def _uses(self, tile: Tile) -> bool:
        return not (self._replicas and self.ranks) or self.ranks.rank in self._replicas.users(tile)

    def share(self, lists: Sequence[TaskList]) -> list[RankLists]:
        """Check that all ranks have the same lists, then return each rank's part of each list.

        lists: task lists in which each task has a rank.
        """
        assert self._replicas and self.ranks
        self.ranks.same("the plan", described(lists), self._causes)
        self._grids.clear()  # the rank may use further tiles now
        return self._replicas.share(lists)

    def ran(self, shared: RankLists) -> None:
        """Record that each rank's part of a list was submitted, which changes the ranks that hold its tiles."""
        assert self._replicas
        self._replicas.ran(shared)

    def bring(self, needs: Iterable[tuple[Tile, Iterable[int]]]) -> None:
        """Send tiles to the ranks that need them. Call it on all ranks.

        A tile arrives with the contents that the tasks submitted so far write. needs: (tile, ranks) pairs.
        """
        if not (self._replicas and self.ranks):
            return
        for rank, message in self._replicas.brought(needs):
            if rank == self.ranks.rank:
                number = _core.post(self.handle(message.accesses[0].tile), **_message(message))
                if Runtime.watched is not None:
                    Runtime.watched.append((number, listed(message)))

    def pieces(self, tensors: Mapping[Tensor, Lowering]) -> list[Piece]:
        """Return the tiles of tensors, each with a rank that holds the tile after the tasks submitted so far.

        All ranks get the same list.
        """
        pieces: list[Piece] = []
        for tensor, lowering in tensors.items():
            for where, tile in lowering.grid(tensor):
                holders = self._replicas.holders(tile) if self._replicas else [0]
                pieces.append(Piece(tensor, where, tile, holders[len(pieces) % len(holders)]))
        return pieces

    def fetch(self, *names: str) -> _core.Fetch:
        """Return an object whose `wait()` returns these scalars, with the values that the tasks submitted so far write.

        Call it on every rank.
        """
        keys = [("scalar", name, (0,)) for name in names]
        if self._replicas:
            self.bring((self._replicas.tiles[key], self._everywhere) for key in keys)
        return _core.Fetch([self.handles[key] for key in keys])

    @property
    def _everywhere(self) -> range:
        return range(self.ranks.size if self.ranks else 1)

    def read(self, lowering: Lowering, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Wait for the tasks that write a tensor, and return the whole tensor.

        Every rank calls this and gets the same array.
        """
        self.bring((tile, self._everywhere) for _, tile in lowering.grid(tensor))
        return assembled(tensor, [(where, self.handle(tile).read()) for where, tile in lowering.grid(tensor)])

    def copy(self, tiles: Iterable[Tile]) -> HostCopy:
        """Start to copy tiles with the contents that the tasks submitted so far write.

        Later tasks that write a tile wait until it is copied.
        """
        return HostCopy([self.handle(tile) for tile in tiles])


Placed = tuple[Any, _core.Tile]  # the slices of a tensor that a tile holds, and the tile's handle


class Piece(NamedTuple):
    """A tile of a tensor: `where`, the slices of the tensor that the tile holds, and a rank that holds the tile."""

    tensor: Tensor
    where: Any
    tile: Tile
    rank: int


def _new(tile: Tile) -> _core.Tile:
    """Return a new StarPU handle for a tile."""
    handle = _core.Tile(list(tile.shape), tile.dtype, MONOIDS.index(tile.monoid), tile.redux, tile.scales)
    if (runtime := Runtime.current) and runtime.disk and tile.kind in runtime.disk.kept:
        handle.keep_off_disk()
    return handle


@no_search_for_cycles()
def programs(
    lists: Sequence[TaskList], store: Store, tf32: bool = False, checked: bool = False,
    offload: Collection[Offloaded] = (), order: Sequence[int] | None = None,
) -> list[Program]:  # fmt: skip
    """Return a native program for each resolved task list. The programs will run one after the other, repeatedly.

    Args:
        store: holds the tiles that outlive the programs.
        tf32: True: products on CUDA may round fp32 tiles to tf32.
        checked: True: check what tasks write for NaN and infinity, see _core.take_not_finite.
        offload: kinds of tiles that leave a GPU between uses, see tiles/eviction.py.
        order: positions of the lists in the order in which the programs run, see Step.order; None: each runs once.
    """
    gpus, runtime = _core.cuda_workers(), Runtime.current
    assert runtime is not None
    assign_kinds(lists, runtime.on_cpu)
    speeds = [device_model.speed([tasks], gpus > 0) for tasks in lists]
    shares: Sequence[RankLists | None] = [None] * len(lists)
    # For each whole list, before ranks split it, so that all ranks get the same values.
    filled = [gpus > 0 and not _core.cpu_workers() and lives_on_cuda(tasks) for tasks in lists]
    if store.ranks:
        shares = _split_over_ranks(lists, speeds, store, store.ranks, gpus)
        lists = [one.lists[store.ranks.rank] for one in shares if one]
        memory_checks.check_lists(lists, runtime)
    if runtime.placement == "planned":
        count = [gpus or _core.cpu_workers()] * len(lists)
        lists = [place(*one, store.residency) for one in zip(lists, count, speeds, strict=True)]
    held, window = memory.residents_of_step(runtime, lists, offload), 0
    if gpus:
        order = order or range(len(lists))
        room = memory.room_to_plan(runtime, [lists[k] for k in order])
        most, one_worker = memory.group_bytes(runtime, room > 0), gpus == 1 and not _core.cpu_workers()
        lists = [
            grouped(tasks, speed.flop_s, speed.bytes_s, GROUP_SECONDS, most, one_worker, not checked, held)
            for tasks, speed in zip(lists, speeds, strict=True)
        ]
        if room:
            _core.reserve_for_tiles()
            window = memory_checks.window(lists, runtime)
        in_turn = [lists[k] for k in order]
        if mark_evictions(in_turn, room if room and not store.ranks else math.inf, offload):
            memory.limit_evictions(in_turn, runtime, offload)
    # With several ranks no weight update is delayed: other ranks wait for the new weights too, and for longer.
    if runtime.placement == "planned" and not store.ranks:
        delay(lists, gpus or _core.cpu_workers())
    for tasks in lists:
        memory_checks.check_tasks(tasks, runtime, in_step=len(lists) > 1)
    return [Program(*one, store, tf32, checked, held, window) for one in zip(lists, shares, filled, strict=True)]


def _split_over_ranks(
    lists: Sequence[TaskList], speeds: Sequence[Speed], store: Store, ranks: Ranks, gpus: int
) -> Sequence[RankLists]:
    """Split task lists over the ranks and return each rank's parts. The workers within a rank are chosen later."""
    speeds = [device_model.rank_of_gpus(one, gpus) if gpus else device_model.rank(ranks.cores) for one in speeds]
    count = [ranks.size] * len(lists)
    shares = store.share([place(*one, store.on_ranks) for one in zip(lists, count, speeds, strict=True)])
    for task in (task for one in shares for task in one.lists[ranks.rank].tasks):
        task.worker = -1
    return shares


def _message(one: MessageTask) -> dict[str, Any]:
    """Return the keyword arguments for the C++ binding of one end of a message between ranks, except the tile."""
    tile = one.accesses[0].tile
    name = f"{tile}, for {one.op}" if one.op else str(tile)
    return {"peer": one.peer, "tag": one.tag, "priority": one.priority, "sends": one.kernel == SEND, "name": name}


def _bodies(task: Task) -> list[list[Task]]:
    """Return the parts of a task, grouped by the payload that runs them.

    Without CPU workers, a payload can run several parts at once; CPU workers run one part at a time.
    """
    parts = [part.without_waits for part in task.parts or [task]]
    return launch.together(parts) if _core.cuda_workers() and not _core.cpu_workers() else [[part] for part in parts]


class Program:
    """A task list whose tiles have StarPU handles. `run` submits all tasks and returns. `programs` creates Programs.

    Args:
        tasks: the list; with several ranks, this rank's part of the list.
        shared: the parts of all ranks; None: there is one rank.
        filled: True: CUDA workers compute only the part of tiles that a step fills.
        residents: keys of tiles that the program holds between runs for their only task, see tiles/residents.py.
        window: bound on the tasks in flight while the program is submitted, besides runtime.window; 0: no such bound.
    """

    def __init__(
        self, tasks: TaskList, shared: RankLists | None, filled: bool, store: Store, tf32: bool, checked: bool,
        residents: Collection[Hashable], window: int = 0,
    ) -> None:  # fmt: skip
        capability = capability_of_devices()
        # True: all workers compute full tiles, because CUDA kernels do. CPU kernels could compute the filled part, but
        # they would store it without gaps, and CUDA kernels expect the full stride between rows.
        whole = capability is not None and not filled
        self.list, self.tasks = tasks, len(tasks.tasks)
        self._store, self._shared, self._residents = store, shared, residents
        self.slots: list[str] = []
        self.native = _core.Program(tf32, checked, window)
        handles: dict[Tile, _core.Tile] = {}
        for task in tasks.tasks:
            for tile in (*task.clears, *(access.tile for access in task.accesses)):
                if tile not in handles:
                    handles[tile] = store.handle(tile)
            for tile in task.clears:
                self.native.add_invalidate(handles[tile])
            if isinstance(task, MessageTask):
                self.native.add_message(handles[task.accesses[0].tile], **_message(task))
            else:
                self._add(task, handles, capability, whole)
            for tile in task.frees:
                self.native.add_invalidate(handles[tile])

    def _add(self, task: Task, handles: Mapping[Tile, _core.Tile], capability: int | None, whole: bool) -> None:
        """Add a task with its payloads, which compute full tiles or only the filled part."""
        runs = _bodies(task)
        places = {tile: k for k, tile in enumerate((*(access.tile for access in task.accesses), *task.scratch))}
        floats: list[float] = []
        slots: list[tuple[int, int]] = []
        bodies: list[tuple[Any, ...]] = []
        for run in runs:
            part, first = run[0], len(floats)
            live = [] if whole else self.list.live_sizes(part)
            if live and bound(part):  # a task in Python would compute on the full tile
                need = "pack: false, or operators whose tasks are not in Python"
                raise ConfigError(f"pack: {part.op} runs a task in Python ({part.kernel}); allowed: {need}")
            lives = [(tile, axis, len(part.floats) + k) for k, (tile, axis, _) in enumerate(live)]
            for value in (*part.floats, *(slot for *_, slot in live)):
                if isinstance(value, Slot):
                    if value.name not in self.slots:
                        self.slots.append(value.name)
                    slots.append((len(floats), self.slots.index(value.name)))
                floats.append(0.0 if isinstance(value, Slot) else float(value))
            accumulates = sum(1 << k for k, a in enumerate(part.accesses) if a.accumulate)
            at = list(range(len(part.accesses)))
            if task.parts:
                at = [places[a.tile] for one in run for a in one.accesses]
            kernel, ints = on_cpu_workers(part)
            launched = encoded_launches(run, capability, live)
            named = (kernel, part.op or part.kernel)
            bodies.append(body(*named, at, ints, first, accumulates, launched, bound(part), lives))
        shapes = [a.tile.shape for a in task.accesses]
        dtype = next((a.tile.dtype for a in task.accesses if a.tile.dtype != "int64"), "fp32")
        self.native.add(
            bodies=bodies,
            codelet=f"{task.kernel}_{dtype}",
            name=task.op or task.kernel,
            tiles=[handles[a.tile] for a in task.accesses],
            scratch=[(tile.shape, tile.dtype, tile.scales) for tile in task.scratch],
            residents=[k for k, a in enumerate(task.accesses) if a.tile.key in self._residents],
            modes=[a.mode for a in task.accesses],
            floats=floats,
            slots=slots,
            footprint=zlib.crc32(repr((shapes, [(p.kernel, p.ints) for run in runs for p in run])).encode()),
            priority=task.priority,
            flop=task.flop,
            worker=task.worker,
            delay=task.delay,
            leaves=[places[tile] for tile in task.evicts],
            kind=task.kind,
        )

    @property
    def checked_run(self) -> int:
        """The number of the last run of a checked program."""
        return int(self.native.checked_run)

    def named(self, task: int, number: int) -> str:
        """Return a text about payload `number` of a task: its operator, its kernel, the tiles that it writes."""
        part, *_ = run = _bodies(self.list.tasks[task])[number]
        tiles = [*dict.fromkeys(str(a.tile) for one in run for a in one.accesses if a.mode != "R")]
        more = f" and {len(tiles) - 3} more" if len(tiles) > 3 else ""
        return f"{part.op or part.kernel} (kernel {part.kernel}), which writes {', '.join(tiles[:3])}{more}"

    def run(self, slots: dict[str, float] | None = None) -> None:
        """Submit every task and return. slots: {name: value} of the scalars that change from step to step."""
        if self._shared:
            self._store.bring(self._shared.needs.items())
        number = self.native.run([float((slots or {})[name]) for name in self.slots])
        if self._shared:
            self._store.ran(self._shared)
        if Runtime.watched is not None:
            Runtime.watched.append((number, self.list))
