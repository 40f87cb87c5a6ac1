"""Cholesky factorisation in tiles: S = L L^T. StarPU runs each task as soon as its tiles are ready.

The tasks are written with torch: they run on CPU workers (one core each) and, with nt.Runtime(cuda=1), on a GPU.
"""

import argparse
import time

import numpy as np
import torch

import nntile_py as nt


@nt.task("torch", a="RW")
def factor(a: torch.Tensor) -> None:
    a.copy_(torch.linalg.cholesky(a))


@nt.task("torch", a="R", b="RW")
def solve(a: torch.Tensor, b: torch.Tensor) -> None:
    b.copy_(torch.linalg.solve_triangular(a.mT, b, upper=True, left=False))


@nt.task("torch", a="R", b="R", c="RW")
def update(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c.addmm_(a, b.mT, alpha=-1)


def cholesky(x: nt.Array, size: int) -> None:
    """Replace the lower triangle of x by its Cholesky factor L, in tiles of `size` x `size` elements.

    Tiles above the diagonal keep their values."""
    A = x.tiles(size, size)
    n = A.grid[0]
    for k in range(n):
        factor.options(priority=2)(A[k, k])
        for i in range(k + 1, n):
            solve.options(priority=1)(A[k, k], A[i, k])
        for i in range(k + 1, n):
            for j in range(k + 1, i + 1):
                update(A[i, k], A[j, k], A[i, j])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--tile", type=int, default=512)
    N, TILE = vars(parser.parse_args()).values()
    B = np.random.default_rng(0).standard_normal((N, N))
    S = B @ B.T + N * np.eye(N)
    with nt.Runtime() as runtime:
        x = nt.array(S)
        start = time.perf_counter()
        cholesky(x, TILE)
        runtime.wait()
        seconds = time.perf_counter() - start
        L = np.tril(np.asarray(x))
    error = abs(L - np.linalg.cholesky(S)).max() / abs(L).max()
    print(f"{N} x {N} in tiles of {TILE}: {seconds:.2f} s, {runtime.cpus} workers, {error:.0e} from numpy's")
    assert error < 1e-12
