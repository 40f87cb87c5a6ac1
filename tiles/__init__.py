"""Tilings of named axes, and the flat lists of tasks to which operators are lowered. Pure data: no StarPU here."""

from .arguments import Slot, TaskArgs
from .task import ACC, RW, Access, R, Task, Tile, W
from .tasklist import TaskList
from .tiling import AXES, TileRange, Tiling, cut_as

__all__ = [
    "ACC",
    "AXES",
    "RW",
    "Access",
    "R",
    "Slot",
    "Task",
    "TaskArgs",
    "TaskList",
    "Tile",
    "TileRange",
    "Tiling",
    "W",
    "cut_as",
]  # fmt: skip
