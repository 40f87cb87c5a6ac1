"""experiments/real.py, without its downloads: what the peer of a comparison gets."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "experiments"))

pytestmark = pytest.mark.long  # the import of transformers' Trainer takes 6 s, so it is in the tests


def test_rows_of_a_classifier() -> None:
    from real import unpadded
    from real_peer import tensors

    ids = np.array([[101, 7, 102, 0], [101, 8, 9, 102], [101, 8, 9, 102]])
    batch = {"input_ids": ids, "attention_mask": np.where(ids, 1, 0), "labels": np.array([1, 0, -100])}
    rows = unpadded(batch)  # the third row only fills up the batch
    assert rows == {"input_ids": [[101, 7, 102], [101, 8, 9, 102]], "labels": [1, 0]}
    padded = tensors(rows)
    for key in batch:
        assert torch.equal(padded[key], torch.tensor(batch[key][:2])), key


def test_rows_of_a_causal_model() -> None:
    """Padding has number 0 here, as one of the tokens."""
    from real import unpadded
    from real_peer import tensors

    ids, labels = np.array([[5, 0, 6, 0], [5, 6, 7, 0]]), np.array([[-100, 0, 6, -100], [-100, -100, 7, -100]])
    rows = unpadded({"input_ids": ids, "labels": labels})
    assert rows == {"input_ids": [[5, 0, 6], [5, 6, 7]], "labels": [[-100, 0, 6], [-100, -100, 7]]}
    assert torch.equal(tensors(rows)["labels"], torch.tensor(labels[:, :3]))
