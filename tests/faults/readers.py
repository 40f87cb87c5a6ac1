"""What fuzzed cases run: the command `nntile`, and whatever reads a kind of file. In forks of zygote.py's process."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "".join(f"def function_{n}(x):\n    return x * {n} + {n % 7}\n\n\n" for n in range(300))
RUN = {
    "model": {"layers": 1, "embed": 8, "heads": 2},
    "data": {"source": "text.txt"},
    "tokenizer": {"vocab_size": 270},
    "train": {"batch": 2, "seq": 8, "steps": 2, "eval_every": 2, "eval_batches": 1},
    "runtime": {"cpus": 1},
    "sample": {"tokens": 2},
}


def prepare() -> None:
    """Import what the readers need, and take out of `nntile sweep` what would measure."""
    import safetensors.numpy
    import safetensors.torch  # noqa: F401

    import nntile_py as nt
    import nntile_py.analysis.plan
    import nntile_py.cli
    import nntile_py.config.describe
    import nntile_py.measure.autotune
    import nntile_py.measure.results
    import nntile_py.training.run
    from nntile_py.models.registry import known

    known()
    assert nt.Trainer and nt.Runtime


def main(*call: Any) -> None:
    """As the command tells of errors."""
    from nntile_py.cli import main as run

    run(*call)


def nntile(*args: str) -> None:
    """The command itself; what has many tasks is not planned, which is allowed to take its time."""
    import nntile_py.analysis.plan as module

    plan = module.plan
    module.plan = lambda config, *spec: plan(config, *spec) if _small(config) else sys.exit(0)
    sys.argv = ["nntile", *args]
    main()


def _small(config: Any) -> bool:
    tiles, model = config.tile_sizes, config.model
    sizes = {**model.model_dump(), "batch": config.train.batch, "seq": config.train.seq}
    count = math.prod(-(-(sizes.get(axis) or 1) // tile) for axis, tile in tiles.items())
    return count * model.layers <= 200 and config.train.grad_accumulation <= 10**4


def sweep(*args: str) -> None:
    """The command, up to where it would measure."""
    import nntile_py.measure.runner as module
    from nntile_py.measure.sweep_points import points

    def run(chosen: Any, *_: Any, **__: Any) -> Any:
        points(chosen)
        raise SystemExit(0)

    module.run = run  # type: ignore[assignment]
    nntile(*args)


def resume() -> None:
    """What `nntile train --resume` reads, but for the training."""

    def call() -> None:
        from nntile_py.checkpoint.reader import read_averages
        from nntile_py.checkpoint.resume import check_same_config, check_same_data, data_facts, newest_checkpoint
        from nntile_py.checkpoint.run_folder import Metrics
        from nntile_py.config.builders import step_spec
        from nntile_py.config.run_config import load
        from nntile_py.training.datasets import build_dataset

        said: list[str] = []
        config = load("run.yaml", ["train.steps=4"])
        try:
            found = newest_checkpoint(Path("run"), said.append)
        finally:
            print("\n".join(said))
        check_same_config(found, config)
        check_same_data(found, data_facts(config, build_dataset(config, step_spec(config))))
        assert found.model(config).weights
        assert isinstance(read_averages(found.folder), dict)
        metrics = Metrics(Path("run"), found.step, said.append)
        assert all(line["step"] <= found.step for line in metrics.lines)
        metrics.close()

    main(call)


def trainer() -> None:
    """nt.Trainer.load, and a step."""

    def call() -> None:
        import nntile_py as nt

        with nt.Runtime(cpus=1):
            ids = np.zeros((2, 8), int)
            assert np.isfinite(nt.Trainer.load("saved").step(ids, ids))

    main(call)


def transformers() -> None:
    """A folder of save_pretrained, as a model."""

    def call() -> None:
        import nntile_py as nt

        model = nt.models.from_hf("hf")
        assert all(np.isfinite(value).all() for value in model.weights.values())

    main(call)


def corpus(what: str = "") -> None:
    """The text of a run, and the cache of what it was made into."""

    def call() -> None:
        import nntile_py.data.corpus as data
        from nntile_py.config.builders import step_spec
        from nntile_py.config.run_config import load
        from nntile_py.training.datasets import build_dataset

        data.LONG_TEXT = 1000
        made = build_dataset(config := load("run.yaml"), step_spec(config)).corpus  # type: ignore[attr-defined]
        if what == "cache":
            assert np.array_equal(made.train[0].ids, np.load("expected.npy")), "the cache gave other tokens"

    main(call)


def rows() -> None:
    """`nntile sweep` where all points have their rows already."""
    import nntile_py.measure.runner as module

    def measure(point: Any, *_: Any) -> dict[str, Any]:
        names = ("seconds", "tasks", "flop", "bytes_moved", "peak_bytes", "parallelism", "planned_task_us")
        return {"id": point.id, "sets": point.sets, "measure": {}, "status": "ok", **dict.fromkeys(names, 1.0)}

    module.measure_point = measure  # type: ignore[assignment]
    nntile("sweep", "sweep.yaml", "--out", "swept")


def models() -> None:
    """StarPU with a policy that reads what was measured before."""

    def call() -> None:
        import nntile_py as nt

        with nt.Runtime(cpus=1, scheduler="dmdas"):
            model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
            ids = np.zeros((2, 8), int)
            assert np.isfinite(nt.Trainer(model, 2, 8).step(ids, ids))

    main(call)


# -- what is not damaged yet


def originals() -> None:
    """Make all these files, in the current folder."""
    import yaml
    from safetensors.numpy import save_file

    import nntile_py as nt
    from nntile_py.config.builders import step_spec
    from nntile_py.config.run_config import load
    from nntile_py.data import corpus as data
    from nntile_py.training.datasets import build_dataset

    data.LONG_TEXT = 1000
    Path("text.txt").write_text(TEXT)
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    hf = RUN | {"model": {"from": "hf"}}
    hf.pop("tokenizer")
    Path("hf.yaml").write_text(yaml.safe_dump(hf))
    Path("texts").mkdir()
    for name in ("one.txt", "two.py"):
        (Path("texts") / name).write_text(TEXT)
    np.save("expected.npy", build_dataset(config := load("run.yaml"), step_spec(config)).corpus.train[0].ids)
    model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=270, positions=8))
    try:
        nntile("train", "run.yaml", "--out", "run", "--set", "checkpoint.every=1")
    except SystemExit as end:
        assert not end.code, end.code
    with nt.Runtime(cpus=1, scheduler="dmdas"):  # leaves its models, too
        made, ids = nt.Trainer(model, 2, 8), np.zeros((2, 8), int)
        for _ in range(12):
            made.step(ids, ids)
        made.save("saved")
    weights, names = model.weights, sorted(model.weights)
    Path("hf").mkdir()
    parts = {f"model-0000{k + 1}-of-00002.safetensors": names[k::2] for k in range(2)}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, Path("hf") / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (Path("hf") / "model.safetensors.index.json").write_text(json.dumps(index))
    (Path("hf") / "config.json").write_text(json.dumps(model.hf_config()))
    (Path("hf") / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    os.link("run/tokenizer.json", "hf/tokenizer.json")
    swept = {"config": "run.yaml", "grid": {"train.batch": [1, 2]}, "measure": {"how": "plan"}}
    Path("sweep.yaml").write_text(yaml.safe_dump(swept))
    try:
        nntile("sweep", "sweep.yaml", "--out", "swept")
    except SystemExit as end:
        assert not end.code, end.code


READERS: dict[str, Callable[..., None]] = {
    of.__name__: of for of in (nntile, sweep, resume, trainer, transformers, corpus, rows, models, originals)
}
