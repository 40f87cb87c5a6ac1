"""A task with a CUDA kernel of your own, compiled by cupy: heat spreads over a plate (Jacobi's iteration), in tiles.

python examples/cupy_kernel.py                    # CPU workers run the task in numpy
python examples/cupy_kernel.py --cuda 1           # a GPU runs the kernel: pip install -e '.[cupy]'
python examples/cupy_kernel.py --cuda 1 --cpus 2  # both kinds of workers share the tiles
"""

import argparse
import time

import numpy as np

import nntile_py as nt

KERNEL = r"""
extern "C" __global__ void spread(double* out, const double* up, const double* own, const double* down,
                                  int has_up, int has_down, int up_rows, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (column >= columns) return;
  const int at = row * columns + column;
  const bool first = row == 0, last = row == rows - 1;
  if (column == 0 || column == columns - 1 || (first && !has_up) || (last && !has_down)) {  // the edge keeps its heat
    out[at] = own[at];
    return;
  }
  const double above = first ? up[(up_rows - 1) * columns + column] : own[at - columns];
  const double below = last ? down[column] : own[at + columns];
  out[at] = 0.25 * (above + below + own[at - 1] + own[at + 1]);
}
"""


@nt.task(out="W", up="R", own="R", down="R")
def spread(out, up, own, down, has_up, has_down):
    """Set each element of a band to the mean of its four neighbours. up, down: the bands above and below."""
    padded = np.concatenate([up[-1:] if has_up else own[:1], own, down[:1] if has_down else own[-1:]])
    out[...] = own
    inner = slice(0 if has_up else 1, len(own) - (0 if has_down else 1))
    mean = 0.25 * (padded[:-2, 1:-1] + padded[2:, 1:-1] + own[:, :-2] + own[:, 2:])
    out[inner, 1:-1] = mean[inner]


@spread.cuda
def spread_on_gpu(out, up, own, down, has_up, has_down):
    """Launch the kernel on the worker's stream, which is cupy's current stream."""
    import cupy

    rows, columns = own.shape
    kernel = cupy.RawKernel(KERNEL, "spread")  # compiled at the first call; cupy keeps the binary
    sizes = [np.int32(value) for value in (has_up, has_down, len(up), rows, columns)]
    kernel(((columns + 127) // 128, rows), (128,), (out, up, own, down, *sizes))


def step(now: nt.Tiles, after: nt.Tiles) -> None:
    """Submit one step: a task for each band of rows. StarPU lets a task wait only for its neighbours' last step."""
    bands = now.grid[0]
    for k in range(bands):
        up, down = max(k - 1, 0), min(k + 1, bands - 1)
        spread(after[k, 0], now[up, 0], now[k, 0], now[down, 0], k > 0, k < bands - 1)


def reference(plate: np.ndarray, steps: int) -> np.ndarray:
    """Return the plate after a number of steps, computed at once by numpy."""
    for _ in range(steps):
        after = plate.copy()
        after[1:-1, 1:-1] = 0.25 * (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:])
        plate = after
    return plate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--band", type=int, default=300, help="rows of a tile")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cuda", type=int, default=0)
    parser.add_argument("--cpus", type=int)
    o = parser.parse_args()
    plate = np.zeros((o.size, o.size))
    plate[0] = 100  # the upper edge is hot
    with nt.Runtime(cpus=o.cpus, cuda=o.cuda) as runtime:
        arrays = nt.array(plate), nt.array(plate)
        now, after = (array.tiles(o.band, o.size) for array in arrays)
        step(now, after)  # compiles the kernel
        runtime.wait()
        start = time.perf_counter()
        for _ in range(1, o.steps):
            now, after = after, now
            step(now, after)
        runtime.wait()
        seconds = time.perf_counter() - start
        heat = np.asarray(arrays[o.steps % 2])
    wrong = abs(heat - reference(plate, o.steps)).max()
    workers = f"{runtime.cpus} CPU and {runtime.cuda} CUDA workers"
    size = f"{o.size} x {o.size} in bands of {o.band}"
    print(f"{o.steps} steps of {size}: {seconds:.3f} s on {workers}, error {wrong:.0e}")
    assert wrong < 1e-12
