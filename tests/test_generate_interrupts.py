"""What comes in the middle of a generation: logits that are not finite, other weights, another Runtime, Ctrl-C."""

from __future__ import annotations

import signal
from threading import Thread
from typing import Any

import numpy as np
import pytest
from test_generate import OPTIONS, _running, greedy, hf_model, prompts

import nntile_py as nt
from nntile_py.execution.program import Store
from nntile_py.inference.decoder import GREEDY, Decoder
from nntile_py.inference.engine import Engine, Request
from nntile_py.models.registry import from_hf

__all__ = ["_running"]


@pytest.mark.parametrize(("value", "options"), [(np.nan, {}), (np.inf, {"temperature": 0}), (np.nan, OPTIONS)])
def test_logits_that_are_not_finite_end_with_one_message(value: float, options: dict[str, Any]) -> None:
    """The embedding of the position at which the third new token of the second prompt is drawn is broken."""
    model = from_hf(hf_model("gpt2"))
    table = model.weights["transformer.wpe.weight"].copy()
    table[6] = value
    model.weights = dict(model.weights) | {"transformer.wpe.weight": table}
    with nt.Generator(model) as generator:
        stream = generator([[1], [5] * 5], max_tokens=4, stream=True, **options)
        message = r"prompts\[1\]: the logits of new token 3 are nan or infinite; allowed: finite"
        with pytest.raises(nt.NotFinite, match=message):
            assert sum(part.index for part in stream) < 3
        assert len(generator([[1]], max_tokens=4, **options)[0].tokens) == 4


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["weights", "runtime"])
def test_a_change_in_the_middle_of_a_text_is_refused(what: str, python: Any) -> None:
    done = python(CHANGE, what)
    assert done.returncode == 0, done.stderr


CHANGE = """
import sys; sys.path.insert(0, "tests")
import numpy as np
from test_generate import from_hf, greedy, hf_model, nt, prompts
model, runtime = from_hf(hf_model("gpt2")), nt.Runtime(cpus=1).start()
generator = nt.Generator(model)
for ended in (False, True):  # a text that has begun; one that was given up, whose passes are still submitted
    stream = generator(prompts()[:3], max_tokens=20, temperature=0, stream=True)
    next(stream)
    if ended:
        stream.close()
    if sys.argv[1] == "weights":
        model.weights = {name: value.copy() for name, value in model.weights.items()}
    else:
        runtime.stop()
        runtime = nt.Runtime(cpus=1).start()
    try:
        list(stream)
        assert ended
    except nt.ConfigError as error:
        assert not ended and str(error).startswith("generation: model.weights or the Runtime has changed while")
    again = generator(prompts()[2:4], max_tokens=20, temperature=0)
    assert [one.tokens for one in again] == greedy("gpt2", 20, 2, 4)
generator.close()
runtime.stop()
"""


@pytest.mark.parametrize("place", ["admit", "prefill", "decode", "tokens"])
def test_an_interrupt_leaves_no_pages_and_no_wrong_tokens(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before or after the second call of each part of a step: all pages are free, and the next texts right."""
    with nt.Generator(from_hf(hf_model("gpt2"))) as generator:
        want = generator(prompts()[:9], max_tokens=12, temperature=0)
        assert generator._engine
        decoder, real = generator._engine.decoder, getattr(Decoder, place)
        for after in (False, True):
            calls: list[int] = []

            def interrupted(*given: Any, after: bool = after, calls: list[int] = calls) -> Any:
                calls.append(1)
                made = real(*given) if after or len(calls) != 2 else None
                if len(calls) == 2:
                    raise KeyboardInterrupt
                return made

            fake = staticmethod(interrupted) if place == "tokens" else interrupted
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Decoder, place, fake)
                generator(prompts()[:9], max_tokens=12, temperature=0)
            assert not generator._engine.busy and decoder.free_pages(0) == decoder.shape.most_pages
            assert generator(prompts()[:9], max_tokens=12, temperature=0) == want


@pytest.mark.parametrize("tiles", [{}, {"batch": 2}])
@pytest.mark.parametrize("cancelled", [0, 1, 5])  # the request has a row; has just got a row; waits for a row
def test_a_text_that_is_cancelled_while_others_get_rows(
    cancelled: int, tiles: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is lost, no request is forgotten, and the other texts are right."""
    with nt.Generator(from_hf(hf_model("gpt2")), tiles=tiles, batch=4) as generator:
        engine = generator.engine(4, max(map(len, prompts())) + 12)
        requests = [Request(prompt, 12, GREEDY) for prompt in prompts()[:6]]
        engine.add(requests[0])
        engine.step()
        for request in requests[1:]:
            engine.add(request)
        real = Request.new_row

        def new_row(request: Request) -> Any:
            if request is requests[2]:
                engine.cancel(requests[cancelled])
            return real(request)

        monkeypatch.setattr(Request, "new_row", new_row)
        while engine.busy:
            engine.step()
        want = greedy("gpt2", 12, 0, 6)
        for k, request in enumerate(requests):
            tokens = [event.token for event in request.events]
            assert request.ended and not request.error and tokens == want[k][: None if k != cancelled else len(tokens)]
        assert len(requests[cancelled].events) < 12
        engine.close()
        shape, decoder = engine.decoder.shape, engine.decoder
        assert sum(map(decoder.free_pages, range(shape.part_count))) == shape.pages - shape.part_count


def test_another_threads_larger_call_waits_for_all_texts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger call comes before the second text is added. Two engines would share programs and pages."""
    with nt.Generator(from_hf(hf_model("gpt2")), batch=8) as generator:
        engine, real, threads = generator.engine(2, 300), Engine.add, list[Thread]()

        def add(engine: Engine, request: Request) -> None:
            if request.name == "prompts[1]" and not threads:
                threads.append(Thread(target=generator.engine, args=(8, 300)))
                threads[0].start()
                threads[0].join(0.3)
                assert threads[0].is_alive() and generator._engine is engine
            real(engine, request)

        monkeypatch.setattr(Engine, "add", add)
        assert [one.tokens for one in generator(prompts()[:2], max_tokens=12, temperature=0)] == greedy(
            "gpt2", 12, 0, 2
        )
        threads[0].join()
        assert generator._engine is not engine


def test_an_interrupt_while_programs_are_built_leaves_no_tiles_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while weights, pages or inputs are written: for each generator at another write."""
    model, texts = from_hf(hf_model("gpt2")), prompts()[2:4]
    real, left = Store._written, [0]  # calls until Ctrl-C

    def written(*given: Any) -> Any:
        tiles = real(*given)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return tiles

    monkeypatch.setattr(Store, "_written", written)
    with nt.Generator(model) as generator:
        want = generator(texts, max_tokens=2, temperature=0)
    for place in range(1, -left[0] + 1):
        left[0] = place
        with nt.Generator(model) as generator:
            with pytest.raises(KeyboardInterrupt):
                generator(texts, max_tokens=2, temperature=0)
            assert generator(texts, max_tokens=2, temperature=0) == want
