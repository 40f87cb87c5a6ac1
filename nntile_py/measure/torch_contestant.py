"""The PyTorch model of each contestant.

Contestants (`nntile bench step --peer`, `measure.contestant`, `measure.peers`):
    torch_eager, torch_compile: The model of transformers, padded, with its attention_mask. For GPT-2 training on a GPU:
        the plain model of torch_gpt2.py. For `encoder` and `mha`: torch.nn's layers (torch_layer.py).
    torch_graphs: As torch_compile, in its mode reduce-overhead, which uses CUDA graphs. On a GPU only.
    torch_packed, torch_padded: PyTorch's fastest BERT (torch_bert.py).
    ddp, fsdp2, fsdp2_offload: BERT or GPT-2, a process for each GPU; on the CPU, for tests, two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nntile_py.config.run_config import RunConfig
from nntile_py.measure.contestants import BERT_PEERS, LAYER_WORKS, RANKED, is_plain_gpt2, world_size
from nntile_py.measure.sweep_spec import Measure
from nntile_py.measure.torch_bert import ranked_bert, torch_bert
from nntile_py.measure.torch_gpt2 import ranked_gpt2, torch_gpt2
from nntile_py.measure.torch_layer import torch_layer
from nntile_py.measure.torch_peers import Step, join_ranks, transformers_model
from nntile_py.measure.workload_inputs import Array, count_tokens, inputs_of


def torch_contestant(config: RunConfig, how: Measure, place: Mapping[str, int] | None) -> tuple[Any, dict[str, Any]]:
    """Return a function that runs steps of a PyTorch contestant, and facts about it for the result.

    Args:
        place: rank and port of this process, if the contestant has a process for each GPU.
    """
    name, work = how.contestant, how.work
    if work in LAYER_WORKS:
        options = {"captured": bool(how.captured), "autotune": how.autotune, "stacked": how.stacked}
        tokens = round(how.alpha * config.train.batch * config.train.seq)
        return torch_layer(config, work, how.phase, name, **options), {"tokens": tokens}
    inputs, facts = inputs_of(config, work, how.alpha), dict[str, Any]()
    run: Step
    if name in RANKED:
        assert place
        run, facts = ranked(config, inputs, name, place["rank"], place["port"])
    elif name in BERT_PEERS:
        run, facts = torch_bert(config, inputs, name, work)
    elif work == "train" and config.runtime.cuda and is_plain_gpt2(config):
        run = torch_gpt2(config, inputs, name)
    else:
        run = transformers_model(config, inputs, name, work)
    return run, facts | {"tokens": count_tokens(config, work, inputs)}


def ranked(
    config: RunConfig, arrays: Mapping[str, Array], name: str, rank: int, port: int
) -> tuple[Step, dict[str, Any]]:
    """Return a function that runs a rank's steps of `ddp`, `fsdp2` or `fsdp2_offload`, and facts about the contestant.

    The losses of the steps are means over all ranks.
    """
    world = world_size(config)
    device = join_ranks(config, rank, port, offload=name == "fsdp2_offload")
    if config.model.type == "gpt2":
        steps = ranked_gpt2(config, arrays, name, rank, device)
    else:
        steps = ranked_bert(config, arrays, rank, device)

    def run(n: int) -> list[float]:
        mean = torch.tensor(steps(n), device=device) / world
        dist.all_reduce(mean)
        return [float(loss) for loss in mean.tolist()]

    return run, {"processes": world}
