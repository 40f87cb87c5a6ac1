"""Contestants of a comparison, nntile_py and PyTorch programs: names, and checks that a contestant can run a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nntile_py.analysis.workloads import Work
from nntile_py.errors import ConfigError
from nntile_py.yaml_text import as_written, one_line

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

OURS = "nntile"
BERT_PEERS = ("torch_packed", "torch_padded")  # see torch_bert.py
RANKED = ("ddp", "fsdp2", "fsdp2_offload")  # peers with a process for each GPU
COMPILE_MODES = {"torch_compile": None, "torch_graphs": "reduce-overhead"}  # `mode` of torch.compile
PEERS = ("torch_eager", *COMPILE_MODES, *BERT_PEERS, *RANKED)
Peer = Literal[
    "torch_eager", "torch_compile", "torch_graphs", "torch_packed", "torch_padded", "ddp", "fsdp2", "fsdp2_offload"
]
LAYER_WORKS = ("encoder", "mha")  # see torch_layer.py
PLAIN_GPT2: dict[str, Any] = {  # the only settings that the GPT-2 of torch_gpt2.py has
    "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu_new", "tie_embeddings": True, "layer_norm_eps": 1e-5,
}  # fmt: skip


def parse_peers(text: str | None) -> list[str]:
    """Return the peers in a comma-separated text; `torch` stands for torch_eager and torch_compile."""
    both = {"torch": ["torch_eager", "torch_compile"]}
    names = [name for item in text.split(",") for name in both.get(item, [item])] if text else []
    for name in names:
        if name not in PEERS:
            known = f"torch ({' and '.join(both['torch'])}), {', '.join(PEERS)}"
            raise ConfigError(f"--peer: got {name!r}; allowed: {known}")
    return list(dict.fromkeys(names))


def world_size(config: RunConfig) -> int:
    """Return the number of processes of a peer in RANKED: one for each GPU; two on the CPU."""
    return config.workers if config.runtime.cuda else 2


def is_plain_gpt2(config: RunConfig) -> bool:
    """Return whether torch_gpt2.py implements the config's model."""
    model = config.model
    return bool(model.type == "gpt2") and all(getattr(model, key) == value for key, value in PLAIN_GPT2.items())


def check_gpus(count: int, key: str) -> None:
    """Raise ConfigError if the machine has fewer GPUs than `count`."""
    from nntile_py.execution.starpu_settings import cuda_devices

    if count > (present := cuda_devices() if count else 0):
        raise ConfigError(f"{key}: got {count}; allowed: at most {present}, the number of CUDA devices")


def check_peer(config: RunConfig, name: str, work: Work = "train") -> None:
    """Raise ConfigError if a peer cannot run the config."""
    of, inference, ranked = f"with --peer {name}", work != "train", name in RANKED
    if ranked and inference:
        known = [peer for peer in PEERS if peer not in RANKED]
        raise ConfigError(f"--peer: got {name!r} with --inference; allowed: torch, {', '.join(known)}")
    gpus = config.workers if config.runtime.cuda else 0
    if name == "torch_graphs" and not gpus:
        raise ConfigError(f"runtime.cuda: got {config.runtime.cuda!r}; allowed {of}: 1, as it uses CUDA graphs")
    if not ranked and gpus > 1:
        raise ConfigError(f"runtime.cuda: got {config.runtime.cuda!r}; allowed {of}: 0 or 1; several are for ddp")
    how, allowed = config.optimizer, ("adamw", "sgd")  # torch_peers.py builds these two, with one group
    if not inference and (how.name not in allowed or how.groups):
        key, value, need = ("groups", how.groups, "[]") if how.groups else ("name", how.name, " or ".join(allowed))
        raise ConfigError(f"optimizer.{key}: got {one_line(value)}; allowed {of}: {need}")
    if not ranked and name not in BERT_PEERS:
        return
    for key, value, values in _needs(config, name, inference, gpus):
        if value not in values:
            phase = (" in a forward pass" if inference else " in training") if key == "model.head" else ""
            need = " or ".join(map(as_written, values))
            raise ConfigError(f"{key}: got {as_written(value)}; allowed {of}{phase}: {need}")
    batch, ranks = config.train.batch, world_size(config) if ranked else 1
    if config.model.type == "bert" and batch < ranks:
        raise ConfigError(f"train.batch: got {batch}; allowed {of}: at least {ranks}, one for each rank")
    if config.model.type == "gpt2" and batch % ranks:
        raise ConfigError(f"train.batch: got {batch}; allowed {of}: a multiple of {ranks}")


def _needs(config: RunConfig, name: str, inference: bool, gpus: int) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Yield (key, the config's value, the values that the peer can run) for each key that limits the peer."""
    model, ranked = config.model, name in RANKED
    yield "model.type", model.type, {"ddp": ("bert", "gpt2")}.get(name, ("gpt2",) if ranked else ("bert",))
    if model.type == "gpt2":
        yield from ((f"model.{key}", getattr(model, key), [value]) for key, value in PLAIN_GPT2.items())
    else:
        yield "model.head", model.head, ["none" if inference else "masked_lm"]
    yield "train.grad_accumulation", config.train.grad_accumulation, [1]
    # Flash attention needs 16 bits. Under fp16, ranks would have to agree on the steps that loss scaling skips.
    yield "precision", config.precision, ["fp32"] if not gpus else ["bf16"] if ranked else ["bf16", "fp16"]
