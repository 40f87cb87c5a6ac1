"""The script that tests/test_captured_runs.py starts, also by mpirun: trains a captured module and prints its bits."""

import hashlib
import sys
from typing import Any

import torch
from torch import nn

import nntile_py as nt

WIDTH, HEADS, VOCAB = 256, 4, 60


class Layer(nn.Module):
    """Attention with dropout, a convolution with batch norm, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, seq, WIDTH))
        x = x + torch.tanh(self.batch_norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss(output: Any, inputs: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten())


def main(workers: int, memory: int, folder: str) -> None:
    torch.manual_seed(0)
    module = Network()
    ids = torch.randint(0, VOCAB, (6, 12))
    model = nt.from_torch(module, {"ids": ids, "labels": ids}, loss)
    disk: Any = {"path": folder, "size": 1 << 30} if memory else None
    how: dict[str, Any] = {"memory": memory << 10, "disk": disk} if memory else {}
    with nt.Runtime(cpus=workers, mpi=True, **how) as runtime:
        tiles = {"batch": 2, "ffn": 64, "vocab": 25, "d1": 100}
        trainer = nt.Trainer(model, 6, 12, tiles, optimizer=nt.AdamW(lr=1e-3))
        state = sum(trainer.built.kept_tiles().values())
        arrays = {"ids": ids.numpy(), "labels": ids.numpy()}
        losses = [trainer.step(arrays) for _ in range(3)]
        digest = hashlib.sha256(b"".join(value.tobytes() for value in trainer.state_dict().values())).hexdigest()
        rank = runtime.ranks.rank if runtime.ranks else 0
    if rank == 0:
        print("bits", [one.hex() for one in losses], digest, state >> 10)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
