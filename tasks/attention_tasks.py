"""Arguments of the tasks of attention and of its gradient."""

from __future__ import annotations

from nntile_py.tiles import TaskArgs

from .attention_operands import OperandsArgs
from .mask import Limits


class AttentionArgs(TaskArgs):
    """Arguments of attention and flash_softmax_gemm."""

    out: tuple[int, int, int, int]  # order of the output's axes
    diagonal: bool  # whether keys after the query are masked
    qkv: OperandsArgs
    scale: float
    limits: Limits | None


class PairArgs(TaskArgs):
    """Arguments of attention_partial and flash_maxsumexp."""

    diagonal: bool
    qkv: OperandsArgs
    scale: float
    limits: Limits | None


class OutArgs(TaskArgs):
    """Arguments of attention_normalise."""

    out: tuple[int, int, int, int]


class AttentionGradArgs(TaskArgs):
    """Arguments of attention_grad."""

    d_out: tuple[int, int, int, int]  # order of the axes of the output's gradient
    out: tuple[int, int, int, int]  # order of the output's axes
    diagonal: bool
    qkv: OperandsArgs
    grads: OperandsArgs  # places of dq, dk and dv
    scale: float
    limits: Limits | None


class DeltaArgs(TaskArgs):
    """Arguments of attention_delta."""

    d_out: tuple[int, int, int, int]
    out: tuple[int, int, int, int]


class PairGradArgs(TaskArgs):
    """Arguments of attention_grad_pair."""

    d_out: tuple[int, int, int, int]
    diagonal: bool
    qkv: OperandsArgs
    grads: OperandsArgs
    scale: float
    limits: Limits | None
