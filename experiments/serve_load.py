"""Load of `nntile serve`: streamed completions by OpenAI's client, many at once and one after the other.

nntile serve runs/my_run --port 8000                                  # in another terminal
python experiments/serve_load.py http://127.0.0.1:8000/v1 [--requests 200] [--at-once 32] [--tokens 24]

Needs `pip install openai`. Prints lost requests, requests/s, and percentiles of the time to the first part and to the
whole text. Texts are greedy, and must be the same in both passes.
"""

import argparse
import asyncio
import time
from typing import NamedTuple

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("address")
parser.add_argument("--requests", type=int, default=200)
parser.add_argument("--at-once", type=int, default=32)
parser.add_argument("--tokens", type=int, default=24)
given = parser.parse_args()


class Answer(NamedTuple):
    """An answer: seconds to its first part, seconds to its end, and its text."""

    first: float
    whole: float
    text: str


async def ask(client: openai.AsyncOpenAI, model: str, number: int) -> Answer:
    begun, first, text = time.perf_counter(), 0.0, ""
    options = {"max_tokens": given.tokens, "temperature": 0.0}
    parts = await client.completions.create(model=model, prompt=f"def f{number} ", stream=True, **options)
    async for part in parts:
        first = first or time.perf_counter() - begun
        text += part.choices[0].text
    return Answer(first, time.perf_counter() - begun, text)


async def load(client: openai.AsyncOpenAI, model: str, at_once: int) -> list[str]:
    """Send all requests, `at_once` at a time; print and return the results."""
    gate = asyncio.Semaphore(at_once)

    async def limited(number: int) -> Answer:
        async with gate:
            return await ask(client, model, number)

    begun = time.perf_counter()
    answers = await asyncio.gather(*map(limited, range(given.requests)), return_exceptions=True)
    seconds = time.perf_counter() - begun
    good = [one for one in answers if isinstance(one, Answer)]
    times = []
    for name, place in {"first part": 0, "whole text": 1}.items():
        ordered = sorted(one[place] for one in good)
        p50, p99 = (ordered[int((len(ordered) - 1) * share)] * 1e3 for share in (0.5, 0.99))
        times.append(f"{name} p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    lost = f"{len(answers) - len(good)} lost"
    print(f"{at_once} at once: {lost}, {len(answers) / seconds:.1f} requests/s; {'; '.join(times)}")
    return [one.text for one in good]


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=given.address, api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id
    await ask(client, model, 0)
    together, alone = await load(client, model, given.at_once), await load(client, model, 1)
    print("the texts are the same" if together == alone else "THE TEXTS DIFFER")


asyncio.run(main())
