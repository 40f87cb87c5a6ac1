"""Compiles the Triton kernels of tile tasks, and encodes their launches for C++, which starts them at every step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nntile_py.tiles.dtypes import DTYPES

from .dynamic_size import DynamicSize
from .launch import ALIGNMENT, Argument, Float, Int, Launch, Launches, Matrix, ScratchAddress, TaskFloat, TileAddress
from .pdl import compiled_so, overlaps, waits


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel: its machine code (cubin) and what C++ needs for a launch."""

    cubin: bytes
    name: str
    shared: int  # bytes of dynamic shared memory
    warps: int
    overlaps: bool  # True: the kernel may start before the previous kernel has ended (see pdl.py)
    maps: tuple[tuple[int, ...], ...] = ()  # for each Matrix: element bytes, element type, rows, columns, swizzle


def _type(arg: Argument) -> str:
    """Return Triton's name for the type of an argument."""
    match arg:
        case TileAddress(_, dtype) | ScratchAddress(_, dtype):
            return "*" + DTYPES[dtype].triton
        case Matrix(TileAddress(_, dtype), block=block):
            return f"tensordesc<{DTYPES[dtype].triton}{list(block)}>"
        case Int(_, bits):
            return f"i{bits}"
        case DynamicSize():
            return "i32" if arg < 2**31 else "i64"
        case Float():
            return "fp32"
        case TaskFloat(_, dtype):
            return DTYPES[dtype].triton


def _aligned(arg: Argument) -> bool:
    """Return True if an address, or the value of an int, is always a multiple of ALIGNMENT."""
    if isinstance(arg, Int):
        return arg.value % ALIGNMENT == 0
    if isinstance(arg, DynamicSize):  # a multiple of ALIGNMENT for any filled size
        return (arg.times if arg.divisor > 1 else arg.factor) % ALIGNMENT == 0
    return isinstance(arg, TileAddress | ScratchAddress)


def compile_launch(launch: Launch, capability: int = 90) -> Binary:
    """Compile the kernel of a launch for sm_{capability}. Needs no GPU.

    Launches with the same kernel, argument types and constexprs are compiled once per process.
    """
    types = tuple((_type(arg), _aligned(arg)) for arg in launch.args)
    return _compile(launch.kernel, types, launch.constexprs, launch.warps, capability, overlaps(capability))


@functools.cache
def _compile(
    kernel: Any,
    types: tuple[tuple[str, bool], ...],
    constexprs: tuple[tuple[str, Any], ...],
    warps: int,
    cc: int,
    overlap: bool,
) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constexprs)
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(types), (kernel.__name__, names, types)
    known = dict(zip(names, types, strict=True))
    # The compiled kernel has all parameters except the constexprs. A JIT call would also remove integers equal to 1;
    # direct compilation keeps them.
    signature = {name: known[name][0] if name in known else "constexpr" for name in kernel.arg_names}
    attrs = {
        (number,): [["tt.divisibility", ALIGNMENT]]
        for number, name in enumerate(kernel.arg_names)
        if name in known and known[name][1]
    }
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": warps, "launch_pdl": overlap}
    with compiled_so():
        compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    data = compiled.metadata
    assert data.global_scratch_size == 0 and data.num_ctas == 1, kernel.__name__
    maps = tuple(map(_map, data.tensordesc_meta or ()))
    waiting = overlap and waits(compiled.asm.get("ptx", ""))
    return Binary(compiled.asm["cubin"], data.name, data.shared, data.num_warps, waiting, maps)


def _map(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the arguments of cuTensorMapEncodeTiled for one tensor descriptor: (bytes, type, rows, columns, swizzle).

    Triton gives the hardware's number of the element type; the driver numbers some types differently.
    """
    of_driver = {8: 10, 9: 8, 10: 9}
    kind = of_driver.get(meta["elem_type"], meta["elem_type"])
    return meta["elem_size"], kind, *meta["block_size"], meta["swizzle"]


Value = tuple[int, float | tuple[int, ...]]


def shared_memory(capability: int) -> int:
    """Return the maximum bytes of shared memory of one program (thread block) at this compute capability.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    return 1024 * {70: 96, 75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99)


NEVER, ALWAYS, IN_GRAPH = range(3)  # when a kernel may start before the previous kernel has ended
Encoded = tuple[bytes, str, int, int, int, list[Value], list[Value]]


def encode_table(launches: Launches) -> list[tuple[int, int]]:
    """Return the entries of the table as pairs (kind, value): (0, number of a tile) or (3, int64)."""
    return [(0, entry.tile) if isinstance(entry, TileAddress) else (3, entry.value) for entry in launches.table]


def encode(launch: Launch, binary: Binary) -> Encoded:
    """Return (cubin, function, shared bytes, warps, overlaps, grid, parameters), from which C++ calls cuLaunchKernelEx.

    overlaps is NEVER, ALWAYS or IN_GRAPH. The three grid sizes and the parameters are pairs (kind, value):

    - 0: address of the task's tile number `value`
    - 1: address of the task's scratch block plus `value` bytes
    - 2, 3: the constant `value` as int32, int64
    - 4: the constant `value` as fp32
    - 5, 6: the task's float number `value` as fp32, or truncated to int64
    - 7, 8: a DynamicSize in the current step as int32, int64; `value` is DynamicSize.formula
    - 9: a CUtensorMap; `value` is (tile, columns, element bytes, element type, rows of a block, columns of a block,
      swizzle), and the next parameter is the number of rows

    A kernel compiled by Triton 3.6 expects the non-constexpr parameters in order, each with its size and natural
    alignment. A tensor descriptor is passed as the map, its sizes as int32 and its strides as int64. Two null pointers
    follow, for global scratch and profile scratch. No kernel uses them; `compile_launch` checks the global scratch.
    Shared memory above 48 KiB requires that C++ sets CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    """
    parameters: list[Value] = []
    maps = iter(binary.maps)
    for arg in launch.args:
        match arg:
            case DynamicSize():
                parameters.append(_encoded_live(arg))
            case TileAddress(number):
                parameters.append((0, number))
            case ScratchAddress(offset):
                parameters.append((1, offset))
            case Int(value, bits):
                parameters.append((2 if bits == 32 else 3, value))
            case Float(constant):
                parameters.append((4, constant))
            case TaskFloat(position, dtype):
                parameters.append((5 if dtype == "fp32" else 6, position))
            case Matrix(TileAddress(number), rows, columns):
                size = _encoded_live(rows) if isinstance(rows, DynamicSize) else (2, rows)
                parameters += [(9, (number, columns, *next(maps))), size, (2, columns), (3, columns), (3, 1)]
    parameters += [(3, 0), (3, 0)]
    grid = [_encoded_live(size) if isinstance(size, DynamicSize) else (2, size) for size in launch.grid]
    overlapping = (IN_GRAPH if launch.early else ALWAYS) if binary.overlaps else NEVER
    return binary.cubin, binary.name, binary.shared, binary.warps, overlapping, grid, parameters


def _encoded_live(arg: DynamicSize) -> Value:
    """Return the pair (kind, value) of `encode` for a DynamicSize."""
    return (7 if arg < 2**31 else 8), arg.formula
