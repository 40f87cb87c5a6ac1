"""Ranks that have GPUs, as far as it shows without one: which each takes, and how its workers share its part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_mpi import SCRIPT, ended, pytestmark, start

from nntile_py.system.load import cores

__all__ = ["pytestmark"]  # skipped where that is


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("count", "of", "share", "told"),
    [(1, 2, "", ["0 1", "1 1"]), (2, 4, "", ["0,1 1", "2,3 1"]), (1, 1, "1", ["0 2", "0 2"]), (1, 1, "", [])],
)
def test_ranks_take_gpus(count: int, of: int, share: str, told: list[str], tmp_path: Path) -> None:
    """Of a machine that has some in name."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(of))), "NNTILE_SHARE_GPUS": share}
    status, _, errors = ended(start(2, SCRIPT, "gpus", tmp_path / "found", count, of, **variables))
    if told:
        assert status == 0, errors
        assert [(tmp_path / f"found.{rank}").read_text() for rank in range(2)] == told
    else:
        assert status != 0
        assert "got 1 for each rank, and 2 ranks (rank 1 is one) have 1 GPU; allowed: fewer ranks a machine" in errors


@pytest.mark.skipif(cores() < 2, reason="one core")
@pytest.mark.long
def test_ranks_with_a_plan_for_their_workers(tmp_path: Path) -> None:
    """Each rank's part is placed on its workers, as on several GPUs, here on two cores."""
    found = []
    for ranks, more in ((1, []), (2, ["", "shard", "planned"])):
        status, _, errors = ended(start(ranks, SCRIPT, "train", tmp_path / f"of{ranks}", *more))
        assert status == 0, errors
        found += [json.loads((tmp_path / f"of{ranks}.{rank}").read_text()) for rank in range(ranks)]
    alone, *others = found
    for rank in others:
        for case, values in rank.items():
            if "chain" in case:
                assert all(values[key] == alone[case][key] for key in ("losses", "logits", "weights")), case
            np.testing.assert_allclose(values["losses"], alone[case]["losses"], rtol=1e-6, err_msg=case)
