"""Contestants of a comparison: their names, and checks that a contestant can run a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nntile_py.analysis.workloads import Work
from nntile_py.errors import ConfigError

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

OURS = "nntile"
BERT_PEERS = ("torch_packed", "torch_padded")  # see torch_bert.py
RANKED = ("ddp", "fsdp2", "fsdp2_offload")  # peers with a process for each GPU
PEERS = ("torch_eager", "torch_compile", *BERT_PEERS, *RANKED)
Peer = Literal["torch_eager", "torch_compile", "torch_packed", "torch_padded", "ddp", "fsdp2", "fsdp2_offload"]
LAYER_WORKS = ("encoder", "mha")  # see torch_layer.py
PLAIN_GPT2: dict[str, Any] = {  # settings of the GPT-2 in torch_gpt2.py
    "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu_new", "tie_embeddings": True, "layer_norm_eps": 1e-5,
}  # fmt: skip


def parse_peers(text: str | None) -> list[str]:
    """Return the peers in a comma-separated text; `torch` stands for torch_eager and torch_compile."""
    both = {"torch": ["torch_eager", "torch_compile"]}
    names = [name for item in text.split(",") for name in both.get(item, [item])] if text else []
    for name in names:
        if name not in PEERS:
            known = f"torch ({' and '.join(both['torch'])}), {', '.join(PEERS)}"
            raise ConfigError(f"--peer: {name!r} is not allowed; use {known}")
    return list(dict.fromkeys(names))


def world_size(config: RunConfig) -> int:
    """Return the number of processes of a ranked peer: one for each GPU; two on the CPU."""
    return config.workers if config.runtime.cuda else 2


def is_plain_gpt2(config: RunConfig) -> bool:
    """Return whether torch_gpt2.py implements the config's model."""
    model = config.model
    return bool(model.type == "gpt2") and all(getattr(model, key) == value for key, value in PLAIN_GPT2.items())


def check_gpus(count: int, key: str) -> None:
    """Raise ConfigError if the machine has fewer GPUs than `count`."""
    from nntile_py.execution.starpu_settings import cuda_devices

    if count > (present := cuda_devices() if count else 0):
        raise ConfigError(f"{key}: {count} is not allowed; this machine has {present} CUDA devices")


def check_peer(config: RunConfig, name: str, work: Work = "train") -> None:
    """Raise ConfigError if a peer cannot run the config."""
    of, inference = f"with --peer {name}", work != "train"
    if name in RANKED and inference:
        known = [one for one in PEERS if one not in RANKED]
        raise ConfigError(f"--peer: {name!r} is not allowed beside --inference; use torch, {', '.join(known)}")
    gpus = config.workers if config.runtime.cuda else 0
    if name not in RANKED and gpus > 1:
        raise ConfigError(f"runtime.cuda: got {config.runtime.cuda!r}; allowed {of}: 0 or 1; several are for ddp")
    if name not in (*RANKED, *BERT_PEERS):
        return
    kinds = {"ddp": ("bert", "gpt2")}.get(name, ("gpt2",) if name in RANKED else ("bert",))
    if config.model.type not in kinds:
        raise ConfigError(f"model.type: got {config.model.type}; allowed {of}: {' or '.join(kinds)}")
    _check_model(config, of, inference)
    if config.train.grad_accumulation != 1:
        raise ConfigError(f"train.grad_accumulation: got {config.train.grad_accumulation}; allowed {of}: 1")
    # Flash attention needs 16 bits. Under fp16, ranks would have to agree on the steps that loss scaling skips.
    known = (["bf16"] if name in RANKED else ["bf16", "fp16"]) if gpus else ["fp32"]
    if config.precision not in known:
        raise ConfigError(f"precision: got {config.precision}; allowed {of}: {' or '.join(known)}")
    if name in RANKED:
        _check_batch(config, of)


def _check_model(config: RunConfig, of: str, inference: bool) -> None:
    if config.model.type == "gpt2":
        for key, value in PLAIN_GPT2.items():
            if (got := getattr(config.model, key)) != value:
                raise ConfigError(f"model.{key}: got {got}; allowed {of}: {value}")
        return
    doing, head = ("a forward pass", "none") if inference else ("training", "masked_lm")
    if config.model.head != head:
        raise ConfigError(f"model.head: got {config.model.head}; allowed {of} in {doing}: {head}")


def _check_batch(config: RunConfig, of: str) -> None:
    """Raise ConfigError for a batch that the ranks of a peer cannot share."""
    batch, ranks = config.train.batch, world_size(config)
    if config.model.type == "bert" and batch < ranks:
        raise ConfigError(f"train.batch: got {batch}; allowed {of}: at least {ranks}, one for each rank")
    if config.model.type == "gpt2" and batch % ranks:
        raise ConfigError(f"train.batch: got {batch}; allowed {of}: a multiple of {ranks}")
