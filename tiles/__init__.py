"""Tilings over named axes, and the flat lists of tile tasks that operators lower to. Pure data: no StarPU here."""

from .arguments import Slot, TaskArgs
from .tasklist import ACC, RW, Access, R, Task, TaskList, Tile, W
from .tiling import AXES, Part, Tiling, cut_as

__all__ = [
    "ACC", "AXES", "RW", "Access", "Part", "R", "Slot", "Task", "TaskArgs", "TaskList", "Tile", "Tiling", "W", "cut_as",
]  # fmt: skip
