"""A schedule for tests."""


def too_high(step: int, steps: int, lr: float) -> float:
    """Return `lr` in the first half of the steps, then a thousand times as much: the loss falls, and rises again."""
    return lr if 2 * step <= steps else 1000 * lr
