"""LayerNorm, RMSNorm and their gradients on CUDA.

The kernels are generated from the formulas of the norms. Only the kernel that computes the moments (count, mean, M2) of
a row cut into several tiles is written by hand. The tasks have the same tiles as in norm.cpp.

On an H100 the generated kernels for whole rows take 0.91 to 0.99 of the time of kernels written by hand
(experiments/results/2026-11-25-single-kernels-h100.md).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .accumulate_triton import combine_moments
from .elementwise import DropoutArgs
from .generated_triton import WIDEST, axes_of, by_formula
from .launch import Launches, ceil_div, launch, launches, numel, power_of_two, shape, tile
from .layer_norm import LayerNorm, LayerNormArgs, LayerNormGrad, LayerNormGradArgs, LayerNormStatisticsArgs
from .norm import Norm, NormGrad, normalised
from .rms_norm import RMSNorm, RMSNormArgs, RMSNormGrad, RMSNormGradArgs, RMSNormRstdArgs
from .scalar.expression import Element, Expression, Output, maximum, sqrt

AXIS = "embed"  # name of a tile's last axis in expressions


def _axes(task: Task, number: int) -> tuple[str, ...]:
    return axes_of(task, number, AXIS)


def _rows(task: Task, number: int, dropout: DropoutArgs | None) -> tuple[list[int], Element | None]:
    """Return where a dropout's row numbers are: [number of their tile], and the expression that reads them.

    The expression reads the tile as input `number`. Without row numbers: ([], None).
    """
    if not dropout or not dropout.row_numbers:
        return [], None
    return [len(task.accesses) - 1], Element(number, _axes(task, 0)[:-1])


def _whole(task: Task, norm: type[Norm], eps: float, dropout: DropoutArgs | None = None) -> Launches:
    """Return the launches of a norm on a tile with whole rows."""
    inputs = list(range(2, 3 + norm.weights))
    residual = len(task.accesses) > 3 + norm.weights
    inputs += [3 + norm.weights] * residual
    numbers, rows = _rows(task, len(inputs), dropout)
    axes = _axes(task, 0)
    outputs = norm.results(axes, eps, residual=residual, dropout=dropout, row_numbers=rows)
    return by_formula(task, axes, outputs, [0, 1, *[4 + norm.weights] * residual, *inputs, *numbers], dropout)


@launches("layer_norm")
def _layer_norm(task: Task) -> Launches:
    args = LayerNormArgs.of(task)
    return _whole(task, LayerNorm, args.eps, args.dropout)


@launches("rms_norm")
def _rms_norm(task: Task) -> Launches:
    return _whole(task, RMSNorm, RMSNormArgs.of(task).eps)


# -- rows cut into several tiles


@triton.jit
def _moments(STATE, X, rows, n, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the state (count, mean, M2) of each row of x; ACC: merge this state into the stored one."""
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, kept = row[:, None] * n + col[None, :], row < rows
    inside = kept[:, None] & (col < n)[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    mean = tl.sum(x, 1) / n
    d = tl.where(inside, x - mean[:, None], 0.0)
    m2, count, s = tl.sum(d * d, 1), mean * 0.0 + n, STATE + row * 3
    if ACC:
        count, mean, m2 = combine_moments(
            tl.load(s, kept, 0.0), tl.load(s + 1, kept, 0.0), tl.load(s + 2, kept, 0.0), count, mean, m2
        )
    tl.store(s, count, kept)
    tl.store(s + 1, mean, kept)
    tl.store(s + 2, m2, kept)


@launches("layer_norm_moments")
def _layer_norm_moments(task: Task) -> Launches:
    n = shape(task, 1)[-1]
    if n > WIDEST:
        raise ValueError(f"{task.op}: got rows of {n} on CUDA; allowed: tiles of embed of at most {WIDEST}")
    rows, block = numel(task, 1) // n, power_of_two(n)
    at_once, args = max(1, 1024 // block), (tile(task, 0), tile(task, 1), rows, n)
    sizes = {"ROWS": at_once, "BLOCK": block, "warps": min(16, max(1, at_once * block // 1024))}
    acc = task.accesses[0].accumulate
    return Launches((launch(_moments, ceil_div(rows, at_once), *args, ACC=acc, **sizes),))


@launches("rms_norm_squares")
def _rms_norm_squares(task: Task) -> Launches:
    axes = _axes(task, 1)
    x = Element(0, axes)
    return by_formula(task, axes, [Output(0, (*axes[:-1], 0), x * x, total=True)], [0, 1])


def _statistics(task: Task, variance: Expression, eps: float, middle: tuple[Expression, ...] = ()) -> Launches:
    """Return the launches that compute each row's statistics (*middle, 1 / sqrt(variance + eps)) from its state.

    middle: the mean for LayerNorm; empty for RMSNorm.
    """
    rows = _axes(task, 0)[:-1]
    values = (*middle, 1 / sqrt(variance + eps))
    return by_formula(task, rows, [Output(0, (*rows, k), value) for k, value in enumerate(values)], [0, 1])


@launches("layer_norm_stat")
def _layer_norm_stat(task: Task) -> Launches:
    count, middle, m2 = (Element(0, (*_axes(task, 0)[:-1], k)) for k in range(3))
    # In lanes beyond the last row the count is 0: the maximum avoids a division by 0.
    return _statistics(task, m2 / maximum(count, 1.0), LayerNormStatisticsArgs.of(task).eps, (middle,))


@launches("rms_norm_stat")
def _rms_norm_stat(task: Task) -> Launches:
    args = RMSNormRstdArgs.of(task)
    return _statistics(task, Element(0, (*_axes(task, 0)[:-1], 0)) / args.embed, args.eps)


def _applied(task: Task, count: int) -> Launches:
    """Return the launches that compute y from x, `count` statistics and `count` weights."""
    axes = _axes(task, 0)
    y = normalised(Element(1, axes), [Element(0, (*axes[:-1], k)) for k in range(count)]) * Element(2, (AXIS,))
    y = y + Element(3, (AXIS,)) if count > 1 else y
    return by_formula(task, axes, [Output(0, axes, y)], range(len(task.accesses)))


@launches("layer_norm_apply")
def _layer_norm_apply(task: Task) -> Launches:
    return _applied(task, 2)


@launches("rms_norm_apply")
def _rms_norm_apply(task: Task) -> Launches:
    return _applied(task, 1)


# -- gradients


def _sums(task: Task, grad: type[NormGrad]) -> Launches:
    """Return the launches that sum w (LayerNorm only) and w xhat over the tile's part of each row (see NormGrad)."""
    axes = _axes(task, 2)
    _, xhat, w = grad.terms(axes)
    values = [w, w * xhat][-grad.weights :]
    outputs = [Output(0, (*axes[:-1], k), value, total=True) for k, value in enumerate(values)]
    return by_formula(task, axes, outputs, [0, 2, 3, 1, 4])


@launches("layer_norm_grad_sums")
def _layer_norm_grad_sums(task: Task) -> Launches:
    return _sums(task, LayerNormGrad)


@launches("rms_norm_grad_sums")
def _rms_norm_grad_sums(task: Task) -> Launches:
    return _sums(task, RMSNormGrad)


@launches("layer_norm_grad")
def _layer_norm_grad(task: Task) -> Launches:
    a = LayerNormGradArgs.of(task)
    last = [k for k in (a.dbias, a.dropped) if k]
    inputs = [3, 4, 5, 6, *(k for k in (a.add, a.sums) if k)]
    numbers, rows = _rows(task, len(inputs), a.dropout)
    axes = _axes(task, 0)
    outputs = LayerNormGrad.results(
        axes, add=a.add > 0, dbias=a.dbias > 0, dropout=a.dropout, row_numbers=rows,
        sums=(inputs.index(a.sums), a.embed) if a.sums else None,
    )  # fmt: skip
    return by_formula(task, axes, outputs, [0, 1, 2, *last, *inputs, *numbers], a.dropout)


@launches("rms_norm_grad")
def _rms_norm_grad(task: Task) -> Launches:
    a = RMSNormGradArgs.of(task)
    sums, add = [6] * a.has_sums, list(range(6 + a.has_sums, len(task.accesses)))
    inputs = [2, 3, 4, 5, *add, *sums]
    sums_at = (len(inputs) - 1, a.embed) if a.has_sums else None
    axes = _axes(task, 0)
    outputs = RMSNormGrad.results(axes, add=bool(add), sums=sums_at)
    return by_formula(task, axes, outputs, [0, 1, *inputs])
