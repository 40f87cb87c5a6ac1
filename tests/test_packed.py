"""Packed sequences: the same losses, gradients and draws as padded ones."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nntile_py as nt
from nntile_py.execution.task_payload import lives_on_cuda
from nntile_py.graph.bin_packing import Bins, bins_of
from nntile_py.graph.packed_inputs import positions_of
from nntile_py.graph.padding import padded
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import Tiling

pytestmark = pytest.mark.usefixtures("runtime")
LENGTH = 16
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "embed": 8, "heads": 1, "ffn": 32, "vocab": 15},
    "ragged": {"batch": 3, "embed": 9, "heads": 1, "ffn": 37, "vocab": 17},
}
LENGTHS = {
    "some": [3, 16, 1, 9, 5, 7, 2],
    "full": [16, 16, 16, 16],
    "ones": [1, 1, 1, 1, 1],
    "one": [5],
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (nt.models.BERT, {}),
    "distilbert": (nt.models.DistilBERT, {}),
    "roberta": (nt.models.RoBERTa, {}),
    "deberta": (nt.models.DeBERTa, {"relative_positions": 9, "attention": "naive"}),
    "deberta v3": (nt.models.DeBERTaV2, {"position_buckets": 8, "attention": "naive"}),
    "deberta fused": (nt.models.DeBERTa, {"relative_positions": 9, "attention": "segments"}),
    "deberta v3 fused": (nt.models.DeBERTaV2, {"position_buckets": 8, "attention": "segments"}),
    "modernbert": (nt.models.ModernBERT, {"local_attention": 5, "layers": 2}),  # the second layer is local
    "albert": (nt.models.ALBERT, {"layers": 2}),  # with shared weights
    "gpt2": (nt.models.GPT2, {}),
    "llama": (nt.models.Llama, {"kv_heads": 1, "ffn": 24}),
}


def inputs(lengths: list[int], seed: int = 0) -> dict[str, Any]:
    """Padded arrays with token 1, RoBERTa's padding, and their mask."""
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), LENGTH), 1)
    mask, labels = np.zeros_like(ids), np.full_like(ids, -100)
    for row, n in enumerate(lengths):
        ids[row, :n], mask[row, :n] = rng.integers(2, 30, n), 1
        labels[row, :n] = np.where(rng.random(n) < 0.5, ids[row, :n], -100)
    labels[0, 0] = ids[0, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def made(name: str, **fields: Any) -> Any:
    cls, more = MODELS[name]
    fields = {"layers": 1, "embed": 16, "heads": 2, "vocab": 30, "positions": LENGTH} | more | fields
    return cls(cls.Config(**fields), seed=3)


def trained(name: str, batch: dict[str, Any], rows: int, pack: bool, steps: int = 2, **options: Any) -> Any:
    """Losses and norms, the last gradients, an evaluation with logits."""
    fields = {key: options.pop(key) for key in ("dropout", "attention", "attention_dropout") if key in options}
    trainer = nt.Trainer(made(name, **fields), rows, LENGTH, pack=pack, **{"optimizer": nt.SGD(lr=0.1)} | options)
    results = [trainer.submit(batch).result() for _ in range(steps)]
    loss, logits = trainer.evaluate({key: value[:rows] for key, value in batch.items()}, return_logits=True)
    found = [[r.loss, r.grad_norm] for r in results], trainer.gradients(), loss, logits
    trainer.close()
    return found


def check(name: str, lengths: list[int], tiles: dict[str, int], rows: int | None = None, **options: Any) -> None:
    batch, rows = inputs(lengths), rows or len(lengths)
    one, other = (trained(name, batch, rows, pack, tiles=tiles, **options) for pack in (False, True))
    assert np.allclose(one[0], other[0], rtol=2e-6, atol=2e-6)
    assert one[2] == pytest.approx(other[2], rel=2e-6)
    for key, value in one[1].items():
        assert np.allclose(value, other[1][key], rtol=1e-5, atol=1e-6), key
    real = batch["attention_mask"][:rows] > 0
    assert np.allclose(one[3][real], other[3][real], rtol=1e-5, atol=1e-5) and not other[3][~real].any()


CUT = itertools.cycle(["uncut", "even"])


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "tiling"), [(name, tiling) for name in MODELS for tiling in ("ragged", next(CUT))])
def test_equals_padded(name: str, tiling: str) -> None:
    dropout = {} if name == "llama" else {"dropout": 0.2}
    check(name, LENGTHS["some"], TILINGS[tiling], **dropout)


@pytest.mark.parametrize("optimizer", [nt.AdamW(eps=1e-3), nt.Lion(lr=1e-4), nt.Muon(lr=0.01)])
def test_optimizers(optimizer: nt.tasks.Optimizer) -> None:
    check("gpt2", LENGTHS["some"], TILINGS["ragged"], optimizer=optimizer)


@pytest.mark.few(4)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_lengths(lengths: str, tiling: str) -> None:
    check("bert", LENGTHS[lengths], TILINGS[tiling], dropout=0.2)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_each_sequence(name: str) -> None:
    """The logits, the loss and the gradients of each sequence alone, among the others of its bin and padded."""
    batch, found = inputs(LENGTHS["some"]), []
    real = batch["attention_mask"] > 0
    # The only token of a sequence has nothing before it to be predicted from.
    rows = [row for row, n in enumerate(LENGTHS["some"]) if n > 1 or MODELS[name][0].objective == "masked"]
    for pack in (False, True):
        trainer = nt.Trainer(made(name), 7, LENGTH, TILINGS["ragged"], pack=pack, optimizer=nt.SGD(lr=0.0))
        own = []
        for row in rows:
            labels = np.where(real & (np.arange(7)[:, None] == row), batch["input_ids"], -100)
            loss, logits = trainer.evaluate(batch | {"labels": labels}, return_logits=True)
            trainer.step(batch | {"labels": labels})
            own.append((loss, logits[row, : LENGTHS["some"][row]], *trainer.gradients().values()))
        found.append(own)
        trainer.close()
    for row, (one, other) in enumerate(zip(*found, strict=True)):
        scale = max(np.linalg.norm(value) for value in one[2:])  # of gradients: some are nothing but rounding
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert np.linalg.norm(a - b) < 1e-6 * max(np.linalg.norm(a), scale * (number > 1)), (row, number)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_empty_bins(name: str) -> None:
    """Of three bins the first alone has a sequence: the same as that by itself."""
    dropout = {} if name == "llama" else {"dropout": 0.2}
    batch, found = inputs([5]), []
    batch["labels"] = np.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    for rows, options in ((1, {"pack": False}), (3, {"pack": True, "tiles": {"batch": 1, "embed": 7}})):
        trainer = nt.Trainer(made(name, **dropout), rows, LENGTH, **options)
        losses = [trainer.step(batch), trainer.step(batch)]
        found.append((losses, trainer.gradients(), trainer.evaluate(batch)))
        trainer.close()
    (losses, grads, loss), (packed_losses, packed, packed_loss) = found
    assert np.allclose(losses, packed_losses, rtol=2e-6) and loss == pytest.approx(packed_loss, rel=2e-6)
    assert all(np.allclose(value, packed[key], rtol=1e-5, atol=1e-6) for key, value in grads.items())


@pytest.mark.few(4)
@pytest.mark.parametrize("fusion", [True, {"found": False}, False], ids=str)
@pytest.mark.parametrize("accumulate", ["chain", "commute", "redux", "tree"])
def test_policies(accumulate: str, fusion: Any) -> None:
    check("bert", LENGTHS["some"], TILINGS["ragged"], dropout=0.2, accumulate=accumulate, fusion=fusion)


@pytest.mark.parametrize("attention", ["merge", "flash", "naive", "segments", "varlen", "cudnn"])
def test_forms_of_attention(attention: str) -> None:
    check("gpt2", LENGTHS["some"], TILINGS["ragged"], attention=attention)


DROPPED = [("bert", "uncut", True), ("gpt2", "even", False), ("gpt2", "even", True), ("modernbert", "even", True)]
DROPPED += [("modernbert", "uncut", False), ("llama", "even", True)]
DROPPED += [("deberta", "ragged", True), ("deberta v3", "even", False)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "tiling", "pack"), DROPPED)
def test_dropout_of_attention(name: str, tiling: str, pack: bool) -> None:
    """Of the probabilities: what the padded batch draws with all scores in memory, one task draws, packed or not."""
    batch, options = inputs(LENGTHS["some"]), {"tiles": TILINGS[tiling], "attention_dropout": 0.3}
    one = trained(name, batch, 7, pack=False, attention="naive", **options)
    other = trained(name, batch, 7, pack=pack, attention="segments", **options)
    assert np.allclose(one[0], other[0], rtol=2e-6, atol=2e-6) and one[2] == pytest.approx(other[2], rel=2e-6)
    for key, value in one[1].items():
        assert np.allclose(value, other[1][key], rtol=1e-5, atol=1e-6), key


def test_dropout_of_attention_over_cut_sequences() -> None:
    """Training is as with scores in memory: the same tasks. An evaluation, without dropout, has them not."""
    options = {"attention_dropout": 0.3, "tiles": {"batch": 3, "seq": 5}}
    one, other = (trained("bert", inputs(LENGTHS["some"]), 7, False, attention=form, **options)
                  for form in ("naive", "segments"))  # fmt: skip
    assert one[0] == other[0] and one[2] == pytest.approx(other[2], rel=2e-6)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_what_cuda_workers_compute(name: str, tiling: str) -> None:
    """What is filled alone, where it is in the first rows of every tile: not where there are scores in memory."""
    spec = StepSpec(made(name), 7, LENGTH, Tiling(TILINGS[tiling]), pack=True)
    assert lives_on_cuda(spec.step().first.tasks) == ("deberta" not in name or "fused" in name)


@pytest.mark.parametrize("tiling", TILINGS)
def test_logits_of_masked_tokens_alone(tiling: str) -> None:
    """As without packing; model.masked: 0 makes those of all tokens. A bin without any is right, too."""
    batch = inputs(LENGTHS["some"])
    batch["labels"][1:3] = -100
    found = []
    for masked in (None, 0):
        trainer = nt.Trainer(made("bert", masked=masked, dropout=0.2), 7, LENGTH, TILINGS[tiling], pack=True)
        found.append([trainer.step(batch) for _ in range(3)])
        kinds = {task.kernel for task in trainer.built.first.tasks.tasks}
        assert ("gather" in kinds) == (masked is None)
        trainer.close()
    assert np.allclose(found[0], found[1], rtol=2e-6)


def test_passes() -> None:
    """As many sequences to each pass as padded; dropout draws by pass."""
    check("bert", [3, 16, 1, 9, 5, 7], TILINGS["even"], rows=3, grad_accumulation=2, dropout=0.2)


def test_checked() -> None:
    """What lies behind the filled part of a tile is no number, and nobody looks at it."""
    check("bert", LENGTHS["some"], TILINGS["ragged"], check_finite=True)


def test_fp64() -> None:
    batch = inputs(LENGTHS["some"])
    one, other = (trained("bert", batch, 7, pack, tiles=TILINGS["ragged"], precision="fp64") for pack in (False, True))
    assert np.allclose(one[0], other[0], rtol=1e-13)
    assert all(np.allclose(value, other[1][key], rtol=1e-11, atol=1e-13) for key, value in one[1].items())


CLASSIFIERS = ["bert", "distilbert", "roberta", "albert", "deberta v3", "modernbert"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "tiling"), [*zip(CLASSIFIERS, itertools.cycle(TILINGS)), ("bert", "even"), ("bert", "ragged")]
)
def test_classes_of_sequences(name: str, tiling: str) -> None:
    """Heads on the first token of each, with dropout; logits in the caller's order."""
    batch = inputs(LENGTHS["some"])
    batch["labels"] = np.array([0, 1, 2, -100, 1, 0, 2])
    found = []
    for pack in (False, True):
        model = made(name, head="classification", classes=3, dropout=0.2)
        trainer = nt.Trainer(model, 7, LENGTH, TILINGS[tiling], pack=pack, optimizer=nt.SGD(lr=0.1))
        results = [trainer.submit(batch).result() for _ in range(2)]
        grads, evaluated = trainer.gradients(), trainer.evaluate(batch, return_logits=True)
        found.append(([(r.loss, r.grad_norm) for r in results], grads, *evaluated))
        trainer.close()
    one, other = found
    assert np.allclose(one[0], other[0], rtol=5e-6, atol=2e-6) and one[2] == pytest.approx(other[2], rel=5e-6)
    assert one[3].shape == other[3].shape == (7, 3) and np.allclose(one[3], other[3], rtol=1e-5, atol=1e-5)
    for key, value in one[1].items():
        assert np.allclose(value, other[1][key], rtol=1e-4, atol=2e-6), key


def test_pretraining() -> None:
    """Labels of tokens and of pairs of sentences together."""
    batch = inputs(LENGTHS["some"]) | {"next_sentence_label": np.array([0, 1, 1, 0, -100, 0, 1])}
    found = []
    for pack in (False, True):
        model = made("bert", head="pretraining", dropout=0.2)
        trainer = nt.Trainer(model, 7, LENGTH, TILINGS["ragged"], pack=pack)
        found.append([trainer.step(batch) for _ in range(3)])
        trainer.close()
    assert np.allclose(found[0], found[1], rtol=2e-5)


def test_lists_of_arrays_of_unequal_lengths() -> None:
    batch = inputs(LENGTHS["some"])
    lists = {
        key: [row[:n] for row, n in zip(batch[key], LENGTHS["some"], strict=True)] for key in ("input_ids", "labels")
    }
    losses = []
    for given_ in (batch, lists):
        trainer = nt.Trainer(made("bert"), 7, LENGTH, {"batch": 2}, pack=True)
        losses.append([trainer.step(given_), trainer.step(given_)])
        trainer.close()
    assert losses[0] == losses[1]


def test_filled_by_another() -> None:
    """What another has packed, as a run's batches do, is the same to a trainer that has packed nothing yet: labels are
    not shifted once more, and outputs are those of sequences."""
    batch = inputs(LENGTHS["some"])
    for name in ("gpt2", "bert"):
        packs, takes = (nt.Trainer(made(name), 8, LENGTH, tiles={"batch": 4}, pack=True) for _ in range(2))
        filled = packs.filled(batch)
        loss, outputs = packs.evaluate(batch, return_outputs=True)
        other, theirs = takes.evaluate(filled, return_outputs=True)
        assert other == loss
        for output, value in outputs.items():
            np.testing.assert_array_equal(theirs[output], value)
        assert [takes.step(filled) for _ in range(2)] == [packs.step(batch) for _ in range(2)]


def test_filled_for_others() -> None:
    """Refused before anything is counted as a step."""
    batch = inputs(LENGTHS["some"])
    one = nt.Trainer(made("gpt2"), 8, LENGTH, tiles={"batch": 4}, pack=True)
    two = nt.Trainer(made("gpt2"), 4, LENGTH, tiles={"batch": 4}, pack=True, grad_accumulation=2)
    for trainer, filled, passes in (one, two.filled(batch), 2), (two, one.filled(batch), 1):
        with pytest.raises(ValueError, match=f"inputs: filled for {passes} passes; allowed here: {3 - passes}"):
            trainer.step(filled)
        assert not trainer.steps
    with pytest.raises(ValueError, match="labels: given beside inputs that are filled"):
        one.step(one.filled(batch), batch["labels"])


def test_another_number_of_sequences() -> None:
    """As many as fit, without a program of their own."""
    trainer = nt.Trainer(made("bert"), 4, LENGTH, {"batch": 2}, pack=True)
    programs = len(trainer._programs.steps)
    for lengths in ([2] * 30, [16, 16], [16] * 4):
        assert np.isfinite(trainer.step(inputs(lengths)))
    assert len(trainer._programs.steps) == programs
    with pytest.raises(ValueError, match=r"5 sequences of 80 tokens do not fit into 2 bins of 32"):
        trainer.step(inputs([16] * 5))
    trainer.close()


def test_resumed(tmp_path: Any) -> None:
    options: dict[str, Any] = {"tiles": {"batch": 2}, "pack": True}
    whole = nt.Trainer(made("bert", dropout=0.1), 4, LENGTH, **options)
    batches = [inputs(lengths, seed) for seed, lengths in enumerate(itertools.permutations([16, 3, 9, 5]))][:4]
    losses = [whole.step(batch) for batch in batches]
    whole.close()
    part = nt.Trainer(made("bert", dropout=0.1), 4, LENGTH, **options)
    found = [part.step(batch) for batch in batches[:2]]
    part.save(tmp_path / "saved")
    part.close()
    again = nt.Trainer.load(tmp_path / "saved")
    assert [*found, *(again.step(batch) for batch in batches[2:])] == losses
    again.close()


@pytest.mark.parametrize("name", MODELS)
def test_bins_have_equal_work(name: str) -> None:
    """Where a long sequence's attention counts as its square does."""
    trainer = nt.Trainer(made(name), 4, LENGTH, {"batch": 2}, pack=True)
    filled = trainer.filled(inputs([16, 8, 8, 1]), None, 1)
    works = [sum(n + n * n / 96 for n in of) for of in _by_bin(filled.places)]
    assert max(works) == pytest.approx(16 + 256 / 96)
    assert trainer._bins and trainer._bins.quadratic == pytest.approx(1 / 96)
    trainer.close()


def test_bins_that_others_have_filled() -> None:
    """As `nntile train` gives them: labels, which are shifted there, are not shifted once more."""
    trainer = nt.Trainer(made("gpt2"), 4, LENGTH, {"batch": 2}, pack=True)
    given = inputs([16, 8, 8, 3])
    given["labels"] = np.where(given["attention_mask"] > 0, given["input_ids"], -100)
    filled = bins_of(trainer.spec).fill(given, 1, 4, shift=True)
    assert trainer.evaluate(filled) == trainer.evaluate(given)
    trainer.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=4, max_size=24), st.integers(2, 4), st.booleans())
def test_bins_are_evened(lengths: list[int], count: int, limited: bool) -> None:
    """No sequence that is moved, and no two that are swapped, would bring the fullest and the emptiest nearer."""
    rows = -(-len(lengths) // count) if limited else None
    bins = Bins(count, 64 * len(lengths), 64, 1 / 96, rows=rows)
    of: list[list[int]] = [[] for _ in range(count)]
    for row, place in enumerate(bins.places(lengths)):
        assert place.length == lengths[row]
        of[place.bin].append(place.length)
    assert sum(map(len, of)) == len(lengths) and max(map(len, of)) <= (rows or len(lengths))
    works = [sum(map(bins.work, one)) for one in of]
    most, least = of[int(np.argmax(works))], of[int(np.argmin(works))]
    gap = max(works) - min(works)
    moved = [abs(gap - 2 * bins.work(n)) for n in most if len(least) != rows]
    swapped = [abs(gap - 2 * (bins.work(n) - bins.work(m))) for n, m in itertools.product(most, least)]
    assert min([*moved, *swapped], default=gap) >= gap - 0.011 * max(works) - 1e-9


def _by_bin(places: Any) -> list[list[int]]:
    return [[place.length for place in places if place.bin == number] for number in (0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_bins(lengths: list[int], count: int, passes: int) -> None:
    """Each token lies at one place; sequences stay whole, and positions are counted within them."""
    bins = Bins(count, 12 * len(lengths), 12)
    values = [np.arange(n) + 100 * row for row, n in enumerate(lengths)]
    filled = bins.fill({"x": values}, passes, 10, shift=False)
    x, segments = filled.arrays["x"], filled.arrays["segments"]
    positions, seen = positions_of(segments, bins.capacity), []
    for number, offsets in enumerate(segments):
        used = int(max(offsets))
        live = filled.live[number // count][f"seq of {number % count}"]
        assert (np.diff(offsets) >= 0).all() and live == max(used, 1)
        for first, end in itertools.pairwise(offsets):
            if first < end:
                seen.append(x[number, first:end].tolist())
                assert positions[number, first:end].tolist() == [*range(end - first)]
    assert sorted(seen) == [value.tolist() for value in values]
    back = bins.unpacked(x, filled.places, ["batch", "seq"])
    assert (back == padded({"x": values}, 12)["x"]).all()


def test_tools_take_packed_runs(tmp_path: Any) -> None:
    """plan, graph, profile and bench of a config with train.pack."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {type: bert, layers: 1, embed: 16, heads: 2}\ndata: {max_bytes: 100000}\ntokenizer: {vocab_size: 300}\n"
        "train: {steps: 3, batch: 4, seq: 12, pack: true}\ntiles: {batch: 2, embed: 8}\nruntime: {cpus: 2}\n"
    )
    for arguments, told in (
        (["plan"], "tasks a step"),
        (["graph", "--out", "g.dot"], "g.dot"),
        (["profile", "--out", "profile"], "report"),
        (["bench", "step", "--alpha", "0.6", "--rounds", "1", "--steps", "1"], "tokens/s"),
        (["bench", "step", "--alpha", "0.6", "--rounds", "1", "--steps", "1", "--inference"], "tokens/s"),
    ):
        place = 2 if arguments[0] == "bench" else 1
        command = [sys.executable, "-m", "nntile_py.cli", *arguments[:place], str(config), *arguments[place:]]
        done = forks.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 and told in done.stdout, done.stderr


def test_timed_steps_of_a_bin_without_room_to_spare(tmp_path: Path) -> None:
    """Tokens that are counted are those of the sequences, not of the bin."""
    config = Path(__file__).parents[1] / "experiments/bert_tiny.yaml"
    sets = {"train.seq": 8, "train.batch": 6, "train.pack": "true", "model.layers": 1, "tiles": "{}", "runtime.cpus": 1}
    command = [sys.executable, "-m", "nntile_py.cli", "bench", "step", config, "--alpha", "0.6", "--json"]
    command += ["--rounds", "2", *[f"--set={key}={value}" for key, value in sets.items()]]
    done = forks.run(command, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(done.stdout)["nntile"]
    assert 6 < row["tokens"] < 48 and row["seconds"]["median"] > 0
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"]["median"])
