"""Generation: greedy texts of transformers under any tiling, draws, continuous batching."""

from __future__ import annotations

import functools
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import nntile_py as nt
from nntile_py.graph.key_value_cache import CacheShape, Sampling, check_cached
from nntile_py.graph.step import StepSpec
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.decoder import PREFILL_TOKENS, Decoder, Row, prefill_size
from nntile_py.inference.generated_text import Options
from nntile_py.inference.text_stream import TextStream
from nntile_py.models.registry import from_hf
from nntile_py.tasks.cached_attention import CachedAttention
from nntile_py.tasks.sample import Sample, drawn
from nntile_py.testing import error

VOCAB, POSITIONS, NEW = 211, 820, 200
SIZES = {"vocab_size": VOCAB, "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None}
LLAMA = SIZES | {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": POSITIONS,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", SIZES | {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": POSITIONS}),
    "llama": ("Llama", LLAMA | {"rope_parameters": ROPE | {"original_max_position_embeddings": 100}}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 33}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 20}),
}
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"heads": 2, "ffn": 32, "vocab": 100, "embed": 16},
    "ragged": {"heads": 3, "embed": 24, "ffn": 50, "vocab": 60, "batch": 3, "seq": 50},
}


@functools.cache
def hf_model(kind: str) -> Any:
    name, options = KINDS[kind]
    torch.manual_seed(0)
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    return cls(getattr(transformers, f"{name}Config")(**options)).eval()


@functools.cache
def prompts() -> list[list[int]]:
    """20 prompts of unequal lengths; the longest take several prefill passes."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, n).tolist() for n in [1, 600, *rng.integers(2, 300, 18)]]


@functools.cache
def greedy(kind: str, new: int = NEW, first: int = 0, end: int | None = None) -> list[list[int]]:
    """The new tokens of transformers' greedy search behind prompts `first` to `end`."""
    model, options = hf_model(kind), {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0].tolist()[len(ids) :] for ids in prompts()[first:end]]


@pytest.fixture(scope="module", autouse=True)
def _running(runtime: nt.Runtime) -> None:
    """A running StarPU with two CPU workers."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "tiles", "rows"),
    [
        ("llama", "ragged", 8), ("llama", "uncut", 8), ("llama", "even", 20), ("gpt2", "uncut", 20),
        ("gpt2", "ragged", 8), ("mistral", "even", 8), ("qwen3", "uncut", 8),
    ],
)  # fmt: skip
def test_greedy_texts_are_those_of_transformers(kind: str, tiles: str, rows: int) -> None:
    """200 tokens for 20 prompts: in 20 rows at once; in 8 rows, where waiting prompts take the place of ended ones."""
    tiling = TILINGS[tiles] | ({"heads": 2} if kind != "gpt2" and "heads" in TILINGS[tiles] else {})
    with nt.Generator(from_hf(hf_model(kind)), tiles=tiling, batch=rows) as generator:
        texts = generator(prompts(), max_tokens=NEW, temperature=0)
    assert [one.tokens for one in texts] == greedy(kind)
    assert [one.prompt_tokens for one in texts] == list(map(len, prompts()))
    assert {one.reason for one in texts} == {"length"}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_of_a_cached_step_are_those_of_a_whole_pass(kind: str) -> None:
    """In fp64, position by position: chunks of a prompt, then single tokens."""
    model, ids = from_hf(hf_model(kind)), prompts()[1][:60]
    with torch.no_grad():
        want = hf_model(kind).double()(torch.tensor([ids])).logits[0].numpy()
        hf_model(kind).float()
    shape, ends = CacheShape(len(ids), 9, 8), [33, 48, *range(49, 61)]
    spec = StepSpec(model, 1, 33, precision="fp64")
    decoder = Decoder(BoundModel(model, "fp64"), 1, shape)
    row = Row(ids, len(ids))
    assert decoder.admit(row)
    programs: dict[int, Any] = {}
    for end in ends:
        new = end - row.past
        if new not in programs:
            programs[new] = _with_logits(decoder, spec, new)
        program, past, row.tokens = programs[new], row.past, ids[:end]
        program.write(decoder._arrays(program, [row], new))
        program.run({})
        row.past = end
        assert error(program.read("logits")[0], want[past:end]) < 1e-5
    decoder.bound.close()


def _with_logits(decoder: Decoder, spec: StepSpec, new: int) -> Any:
    """Return the program of a pass whose logits can be read; it draws no token."""
    graph, traced, _ = StepSpec(spec.model, 1, new, precision="fp64").trace(training=False, cache=decoder.shape)
    graph.prune(traced.outputs.values())
    evaluation = spec._evaluation(graph, traced.outputs, traced.outputs)
    decoder._add_pools(evaluation)
    assert decoder._cache
    return decoder.bound.program(new, lambda: evaluation, decoder._cache.handles)


OPTIONS: dict[str, Any] = {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


def test_draws_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the other prompts, the tiling, the number of rows, or the number of passes that are read together.

    In fp64: in fp32 the rounding of a product of other sizes can move a draw across the bound between two tokens."""
    with nt.Generator(from_hf(hf_model("llama")), batch=4, precision="fp64") as generator:
        many = generator(prompts()[:9], max_tokens=20, seed=3, **OPTIONS)
        few = generator(prompts()[:3], max_tokens=20, seed=3, **OPTIONS)
        other = generator(prompts()[:3], max_tokens=20, seed=4, **OPTIONS)
    assert few == many[:3] and other != few
    monkeypatch.setattr(Decoder, "passes_at_once", 3)
    with nt.Generator(from_hf(hf_model("llama")), tiles=TILINGS["even"], batch=16, precision="fp64") as generator:
        assert generator(prompts()[:9], max_tokens=20, seed=3, **OPTIONS) == many


def test_drawn_tokens_have_the_probabilities_of_transformers() -> None:
    """The probabilities after each filter of transformers, against 4000 draws at evenly spaced u."""
    rng, u = np.random.default_rng(1), (np.arange(4000) + 0.5) / 4000
    logits, history = rng.normal(size=40) * 2, [3, 5, 5, 17]
    for options in [OPTIONS, OPTIONS | {"top_k": 0}, OPTIONS | {"top_p": 1.0, "min_p": 0.1}, OPTIONS | {"min_p": 0.0}]:
        scores, ids = torch.tensor(logits)[None], torch.tensor([history])
        steps = [
            transformers.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
            transformers.TemperatureLogitsWarper(options["temperature"]),
            *([transformers.TopKLogitsWarper(options["top_k"])] if options["top_k"] else []),
            *([transformers.TopPLogitsWarper(options["top_p"])] if options["top_p"] < 1 else []),
            *([transformers.MinPLogitsWarper(options["min_p"])] if options["min_p"] else []),
        ]
        for one in steps:
            scores = one(ids, scores)
        want = scores.softmax(-1)[0].numpy()
        counts = np.bincount([drawn(logits, np.array(list(options.values())), x, history) for x in u], minlength=40)
        assert np.abs(counts / len(u) - want).max() < 1e-3, options


def test_penalised_greedy_texts_are_those_of_transformers() -> None:
    ids, options = prompts()[:4], {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    model = hf_model("gpt2")
    want = [model.generate(torch.tensor([p]), repetition_penalty=1.5, **options)[0].tolist()[len(p) :] for p in ids]
    with nt.Generator(from_hf(model)) as generator:
        got = generator(ids, max_tokens=30, temperature=0, repetition_penalty=1.5)
    assert [one.tokens for one in got] == want


def test_a_small_cache_makes_prompts_wait() -> None:
    """Pages for two of the texts: the others wait for pages, not for rows."""
    few, most = prompts()[2:10], 300 + NEW
    model = from_hf(hf_model("gpt2"))
    room = (1 + 2 * -(-most // 64)) * 64 * 2 * 2 * 64 * 4  # pages x positions x layers x (k, v) x embed x bytes
    with nt.Generator(model, max_length=most, cache=room) as generator:
        assert [one.tokens for one in generator(few, max_tokens=NEW, temperature=0)] == greedy("gpt2")[2:10]
        with pytest.raises(nt.ConfigError, match=r"cache: 1,000 bytes are not enough; allowed: at least"):
            nt.Generator(model, max_length=most, cache=1000)(few, max_tokens=NEW)


def test_calls_from_several_threads_share_passes() -> None:
    texts: dict[int, Any] = {}
    with nt.Generator(from_hf(hf_model("llama"))) as generator:

        def call(number: int) -> None:
            texts[number] = generator(prompts()[number : number + 2], max_tokens=NEW, temperature=0)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        stream = generator(prompts()[4:5], max_tokens=NEW, temperature=0, stream=True)
        assert [part.token for part in stream] == greedy("llama")[4]
        for one in threads:
            one.join()
    assert all([t.tokens for t in texts[k]] == greedy("llama")[k : k + 2] for k in range(4))


def test_a_stream_that_is_given_up_leaves_the_generator_usable() -> None:
    with nt.Generator(from_hf(hf_model("gpt2"))) as generator:
        stream = generator(prompts()[:3], max_tokens=NEW, temperature=0, stream=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert generator(prompts()[3:4], max_tokens=5, temperature=0)[0].tokens == greedy("gpt2")[3][:5]


def test_new_weights_are_used() -> None:
    model = from_hf(hf_model("gpt2"))
    with nt.Generator(model) as generator:
        generator(prompts()[:1], max_tokens=3, temperature=0)
        name = "transformer.wte.weight"
        model.weights = dict(model.weights) | {name: np.roll(model.weights[name], 1, 0)}
        changed = generator(prompts()[:1], max_tokens=3, temperature=0)[0].tokens
    with nt.Generator(model) as generator:
        assert generator(prompts()[:1], max_tokens=3, temperature=0)[0].tokens == changed


# -- texts


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token; number 256 is <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with a tokenizer of bytes."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(1)
    options = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 96, "vocab_size": 257, "initializer_range": 0.3}
    config = transformers.GPT2Config(**options, eos_token_id=256, bos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    named = dict.fromkeys(("eos_token", "bos_token"), "<|endoftext|>")
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


def test_characters_of_several_tokens_and_stop_texts() -> None:
    stream = TextStream(byte_tokenizer(), [], ["END", "ENTE"])
    given = [stream.add(token) for token in byte_tokenizer().encode("naïve ENT END more").ids]
    assert "".join(given) == stream.text == "naïve ENT " and stream.stopped
    assert "�" not in "".join(given) and "" in given
    held = TextStream(byte_tokenizer(), [], ["abc"])
    assert [held.add(token) for token in byte_tokenizer().encode("xab").ids] == ["x", "", ""] and held.finish() == "ab"


def test_texts_of_a_folder(folder: Path) -> None:
    with nt.Generator(folder) as generator:
        one, empty = generator(["tiles ", ""], max_tokens=12, temperature=0)
        assert (one.prompt_tokens, empty.prompt_tokens) == (6, 1)  # an empty prompt begins with the end of a text
        assert len(generator("tiles ", temperature=0)[0].tokens) in range(91)  # up to the model's 96 positions
        stop = one.text[3]
        stopped = generator("tiles ", max_tokens=12, temperature=0, stop=[stop])[0]
        assert stopped.text == one.text[: one.text.index(stop)] and stopped.reason == "stop"
        end = generator.special.stops if generator.special else None
    assert end == {256} and len(one.text) <= 12


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0}, r"top_p: got 0; allowed: a number above 0 and at most 1"),
    ({"top_k": -2}, r"top_k: got -2; allowed: an integer of at least -1 and at most 16777216$"),
    ({"temperature": -1}, r"temperature: got -1; allowed: a number of at least 0"),
    ({"temperature": float("nan")}, r"temperature: got nan; allowed: "),
    ({"temperature": 10**400}, r"temperature: got 10+; allowed: a number"),
    ({"max_tokens": 10**400}, r"max_tokens: got 10+; allowed: an integer of at least 1 and at most 2147483647"),
    ({"max_tokens": 0}, r"max_tokens: got 0; allowed: an integer of at least 1"),
    ({"max_tokens": 96}, r"max_tokens: got 96; allowed: less than 96, as a prompt and"),
    ({"stop": [""]}, r"stop: got \[''\]; allowed: texts that are not empty"),
    ({"stop": ["a", "\ud800"]}, r"stop: half of a character"),
    ({"min_p": 2}, r"min_p: got 2; allowed: "),
    ({"beams": 2}, r"beams: unknown option; allowed: max_tokens, temperature"),
]


def test_top_k_of_0_and_of_minus_1_draw_among_all_tokens() -> None:
    assert Options(top_k=0) == Options(top_k=-1) == Options()


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_wrong_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with nt.Generator(folder) as generator, pytest.raises(nt.ConfigError, match=message):
        generator("a", **options)


def test_wrong_prompts_and_models(folder: Path, tmp_path: Path) -> None:
    with nt.Generator(folder) as generator:
        for prompt, message in [
            ("x" * 90, r"prompts\[0\]: 90 tokens; allowed: 1 to 86, as the prompt and max_tokens = 10 "),
            (5, "prompts: got 5"), ([("a", "b")], r"prompts\[0\]: got .*; allowed: texts, or lists of"),
            ([[1, 999]], r"prompts\[0\]: token numbers from 1 to 999"), ([[]], r"prompts\[0\]: 0 tokens"),
        ]:  # fmt: skip
            with pytest.raises((ValueError, nt.ConfigError), match=message):
                generator(prompt, max_tokens=10)  # type: ignore[call-overload]
    bert = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))  # fmt: skip
    with pytest.raises(nt.ConfigError, match=r"model: got BERT; allowed: a model that predicts the next token"):
        nt.Generator(from_hf(bert))
    with pytest.raises(nt.ConfigError, match=r"no such folder"):
        nt.Generator(tmp_path / "missing")


def test_messages_about_a_limit_say_its_reason(folder: Path) -> None:
    for limit, reason in ((None, "95, as the model has 96 positions"), (50, "49, as max_length is 50")):
        with nt.Generator(folder, max_length=limit) as generator, pytest.raises(ValueError, match=f"1 to {reason}"):
            generator("x" * 96)


@pytest.mark.parametrize(("number", "ids"), [(0, [0]), ([7, 8], [7]), (None, [256])])
def test_an_empty_text_begins_with_the_folders_token(folder: Path, tmp_path: Path, number: Any, ids: list[int]) -> None:
    shutil.copytree(folder, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text()) | {"bos_token_id": number}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    assert nt.Generator(tmp_path / "own").tokens("", Options()) == [ids]


def test_a_tokenizer_without_a_beginning_and_another_models_tokenizer() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 300}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with nt.Generator(from_hf(hf_model("gpt2")), tokenizer=tokenizer) as generator:
        for prompt, message in [
            (["a", ""], r"prompts\[1\]: got an empty text; allowed: a text that is not empty, as "),
            ("b", r"the model's vocabulary\. The tokenizer does not fit the model"),
            ([300], r"the model's vocabulary$"),
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=message):
                generator(prompt)


class OwnPositions(nt.Model):
    """A causal model that declares its positions itself, which a cache does not know."""

    class Config(nt.ModelConfig):
        type: str = "own"
        embed: int = 16
        vocab: int = 20

    objective = "causal"

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        from nntile_py.models.parts import INIT
        from nntile_py.tasks import bias_add, embedding, linear

        tokens = {"batch": batch.size, "seq": batch.seq}
        ids = g.input("input_ids", tokens, below=20)
        places = g.input("places", {"seq": batch.seq}, below=64, default=np.arange(batch.seq))
        table = g.param("table", {"vocab": 20, "embed": 16}, INIT)
        rows = g.param("p", {"position": 64, "embed": 16}, INIT)
        x = bias_add(g, embedding(g, ids, table), embedding(g, places, rows))
        return nt.Traced(None, {"logits": linear(g, x, table, ["batch", "seq", "vocab"])})


def test_positions_that_a_cache_does_not_know_are_refused() -> None:
    model = OwnPositions(OwnPositions.Config())
    message = "the model has the input places for each token"
    with nt.Generator(model, max_length=64) as generator, pytest.raises(nt.ConfigError, match=message):
        generator([[1, 2]], max_tokens=3)


def test_kernels_may_read_the_cache_early() -> None:
    """No two attentions share keys and values, and no operator before an attention changes the page table."""
    spec = StepSpec(from_hf(hf_model("llama")), 2, 1)
    graph = spec.generation(CacheShape(64, 5, 16), Sampling(greedy=True), advances=True).graph
    check_cached(graph)
    first, second = (op for op in graph.ops if isinstance(op, CachedAttention))
    (sample,) = (op for op in graph.ops if isinstance(op, Sample))
    own, second.pools = second.pools, first.pools
    with pytest.raises(AssertionError, match="two attentions share a pool"):
        check_cached(graph)
    second.pools = own
    graph.ops.remove(sample)
    graph.ops.insert(0, sample)
    with pytest.raises(AssertionError, match="changes the page table"):
        check_cached(graph)


@pytest.mark.parametrize(
    ("left", "size"), [(1, 16), (16, 16), (17, 16), (26, 32), (100, 128), (130, 128), (200, 256), (700, 256)]
)
def test_size_of_prefill(left: int, size: int) -> None:
    """A prefill pass has little padding; a long prompt takes several passes."""
    assert prefill_size(left, PREFILL_TOKENS["CPU"]) == size


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("config.json", "eos_token_id", "256"), ("generation_config.json", "eos_token_id", [256, True]),
     ("config.json", "bos_token_id", 1.5), ("generation_config.json", "bos_token_id", {})],
)  # fmt: skip
def test_numbers_of_special_tokens_that_are_none(folder: Path, tmp_path: Path, file: str, key: str, value: Any) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | {key: value}))
    message = re.escape(f"{file}: {key}: got {value!r}; allowed: a token number, a list of them, or null")
    with pytest.raises(nt.ConfigError, match=message):
        nt.Generator(tmp_path)


@pytest.mark.parametrize("content", ["", "[1, 2]"])
def test_a_damaged_config_of_a_run_is_refused(folder: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(nt.ConfigError, match=r"config\.yaml: got .*; allowed: the config that `nntile train` writes"):
        nt.Generator(tmp_path)


def test_a_closed_generator_ends_its_iterators(folder: Path) -> None:
    generator = nt.Generator(folder)
    parts = generator("a", max_tokens=20, stream=True)
    next(parts)
    generator.close()
    with pytest.raises(nt.NNTileError, match="the Generator was closed before the texts ended"):
        list(parts)


def test_texts_without_a_tokenizer(folder: Path) -> None:
    with nt.Generator(nt.models.GPT2.from_hf(folder)) as generator:
        (text,) = generator([[1, 2]], max_tokens=3, temperature=0)
        parts = generator([[1, 2]], max_tokens=3, temperature=0, stream=True)
        assert generator([1, 2], max_tokens=3, temperature=0) == [text], "a list of token numbers is one prompt"
        assert text.text is None and [(part.token, part.text) for part in parts] == [(n, "") for n in text.tokens]


def test_half_a_character_is_refused(folder: Path) -> None:
    with nt.Generator(folder) as generator, pytest.raises(ValueError, match=r"prompts\[0\]: half of a character"):
        generator("\ud800")


# -- a cache whose axis page is cut


def pools_of(generator: nt.Generator) -> dict[str, set[int]]:
    """{program: the numbers of the page tiles that its attentions use}."""
    decoder: Decoder = generator._engine.decoder  # type: ignore[union-attr]
    used: dict[str, set[int]] = {}
    for key, program in decoder.bound.programs.items():
        tasks = program.evaluation.forward.tasks.tasks
        tiles = {a.tile for task in tasks for a in task.accesses if a.tile.kind == "cache"}
        used[str(key)] = {tile.index[tile.axes.index("page")] for tile in tiles}
    return used


def test_each_tile_of_the_batch_has_its_own_pages() -> None:
    """A prefill uses one part of the cache. The texts are those of an uncut cache, even if prompts wait for pages."""
    model = from_hf(hf_model("llama"))
    texts = prompts()[2:16]
    with nt.Generator(model, tiles={}, batch=5) as generator:
        want = generator(texts, max_tokens=30, temperature=0)
    page = 2 * 2 * 2 * 16 * 64 * 4  # bytes: layers, keys and values, heads, head_dim, slots
    with nt.Generator(model, tiles={"batch": 2}, batch=5) as generator:
        assert generator(texts, max_tokens=30, temperature=0) == want
        used = pools_of(generator)
        shape = generator._engine.decoder.shape  # type: ignore[union-attr]
    assert shape.part_count == 3 and shape.pages == 5 * (shape.entries - 2) + 3
    assert {frozenset(tiles) for tiles in used.values()} >= {frozenset({n}) for n in range(3)} | {frozenset(range(3))}
    few = 3 * 8 * page  # in each part: page 0, the pages of the longest text, and one more page
    with nt.Generator(model, tiles={"batch": 2}, batch=5, max_length=330, cache=few) as generator:
        assert generator(texts, max_tokens=30, temperature=0) == want
        assert generator._engine.decoder.shape.most_pages == 7  # type: ignore[union-attr]
    with pytest.raises(
        nt.ConfigError, match=rf"cache: {few // 2:,} bytes .* at least {3 * 7 * page:,}, .* each of the 3"
    ):
        nt.Generator(model, tiles={"batch": 2}, batch=5, max_length=330, cache=few // 2)(texts, max_tokens=30)


def test_weights_that_change_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread replaces the weights between the builds of two programs. The call fails; later texts are right."""
    model = from_hf(hf_model("llama"))
    with nt.Generator(model) as generator:
        want = generator(prompts()[2:4], max_tokens=12, temperature=0)
    real, changed = Decoder._program, []

    def program(self: Decoder, key: tuple[Any, ...], shared: Any) -> Any:
        if "alternate" in key and not changed:
            changed.append(True)
            model.weights = {name: value.copy() for name, value in model.weights.items()}
        return real(self, key, shared)

    monkeypatch.setattr(Decoder, "_program", program)
    with nt.Generator(model) as generator:
        with pytest.raises(
            nt.ConfigError, match=r"model.weights or the Runtime has changed while texts were generated"
        ):
            generator(prompts()[2:4], max_tokens=12, temperature=0)
        assert changed
        for _ in range(2):
            assert generator(prompts()[2:4], max_tokens=12, temperature=0) == want
