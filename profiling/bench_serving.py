"""Servers under an open load: requests arrive when they arrive, whether the server keeps up or not.

    slipstream bench serving ours=http://127.0.0.1:8000 [peer=http://127.0.0.1:9000] --rate 4 [--json FILE]

Any server with OpenAI's streaming /v1/completions. All get the same arrivals (Poisson, by seed), prompts and lengths, one
server after the other, and a row each. TTFT is from the moment that a request was due, so a client that falls behind
cannot hide it. Without an address a server over a scripted device is started, to try the bench itself.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

import uvloop

from ..engine.errors import ConfigError
from ..engine.text.tokenization import TextTokenizer
from .results import write_json

WORDS = ("sea", "stone", "light", "under", "river", "seven", "cloud", "after", "green", "door", "salt", "wind")
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoad:
    """Requests by a Poisson process of `rate` a second. Lengths are drawn evenly between half and all of the maximum."""

    rate: float
    num_requests: int
    prompt_words: int
    output_tokens: int
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        """The same for every server."""
        choose = random.Random(self.seed)
        due_s, found = 0.0, []
        for _ in range(self.num_requests):
            words = choose.randint(max(1, self.prompt_words // 2), self.prompt_words)
            tokens = choose.randint(max(1, self.output_tokens // 2), self.output_tokens)
            prompt = " ".join(choose.choice(WORDS) for _ in range(words))
            found.append(Arrival(due_s=due_s, prompt=prompt, max_tokens=tokens))
            due_s += choose.expovariate(self.rate)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. `due_s`: seconds after the start of the load."""

    due_s: float
    prompt: str
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client saw. Times on the client's clock, in seconds."""

    due: float
    chunks: list[float] = field(default_factory=list)  # when text came
    num_tokens: int = 0
    end: float = 0.0
    error: str = ""


async def ask(url: str, model: str, key: str | None, arrival: Arrival, started: float) -> Answer:
    """Send one request when it is due and read its stream to the end."""
    answer = Answer(due=started + arrival.due_s)
    await asyncio.sleep(max(0.0, answer.due - time.perf_counter()))
    body = {
        "model": model,
        "prompt": arrival.prompt,
        "max_tokens": arrival.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        await _read_stream(url, key, body, answer)
    except (OSError, ValueError, EOFError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter()
    return answer


async def _read_stream(url: str, key: str | None, body: dict[str, object], answer: Answer) -> None:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port or 80, limit=1 << 20)
    try:
        payload = json.dumps(body).encode()
        lines = [f"POST {where.path.rstrip('/')}/v1/completions HTTP/1.1", f"host: {where.netloc}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(payload)}"]
        lines += [f"authorization: Bearer {key}"] if key else []
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + payload)
        status = int((await reader.readline()).split()[1])
        # Chunk headers stand on lines of their own, so lines are enough: only those with `data:` count.
        async for line in reader:
            if not line.startswith(b"data:"):
                if status != 200 and line.startswith(b"{"):
                    raise ValueError(f"{status} {line[:200].decode(errors='replace')}")
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                return
            _take(json.loads(content), answer)
        raise EOFError(f"{status}, and the stream ended without its end mark")
    finally:
        writer.close()


def _take(event: dict[str, object], answer: Answer) -> None:
    if "error" in event:
        raise ValueError(str(event["error"])[:200])
    choices, usage = event.get("choices"), event.get("usage")
    if isinstance(choices, list) and choices and choices[0].get("text"):
        answer.chunks.append(time.perf_counter())
    if isinstance(usage, dict):
        answer.num_tokens = usage["completion_tokens"]


def first_model_blocking(url: str, key: str | None) -> str:
    """The first model that a server says it has. Raises: ConfigError if it does not say."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise ConfigError(f"{url}/v1/models does not say what is served there: {error}") from error


def base_url(url: str) -> str:
    """The address without OpenAI's `/v1`, which clients are told with or without. Raises: ConfigError."""
    if not url.startswith("http://"):
        raise ConfigError(f"{url!r} is no address of the form http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


async def drive(url: str, model: str, key: str | None, load: OpenLoad) -> dict[str, float]:
    """Put the load on one server and summarise what its clients saw."""
    started = time.perf_counter() + 0.05
    answers = await asyncio.gather(*[ask(url, model, key, arrival, started) for arrival in load.arrivals()])
    return summary(answers, load.rate)


def summary(answers: Sequence[Answer], rate: float) -> dict[str, float]:
    """Percentiles in milliseconds over all requests that were answered in full.

    Raises: ConfigError if none was.
    """
    good = [answer for answer in answers if not answer.error and answer.chunks]
    if not good:
        raise ConfigError(
            f"no request was answered: {next((each.error for each in answers if each.error), 'no text came')}"
        )
    wall = max(answer.end for answer in good) - min(answer.due for answer in good)
    result = {
        "rate": rate,
        "requests": float(len(answers)),
        "failed": float(len(answers) - len(good)),
        "requests_per_s": len(good) / wall,
        "tokens_per_s": sum(answer.num_tokens for answer in good) / wall,
    }
    columns = {
        "ttft_ms": [answer.chunks[0] - answer.due for answer in good],
        "itl_ms": [after - before for answer in good for before, after in pairwise(answer.chunks)],
        "e2e_ms": [answer.end - answer.due for answer in good],
    }
    for name, values in columns.items():
        ordered = sorted(values) or [0.0]
        for percentile in PERCENTILES:
            index = min(len(ordered) - 1, len(ordered) * percentile // 100)
            result[f"{name}_p{percentile}"] = ordered[index] * 1e3
    return result


async def measure(
    servers: dict[str, str], model: str | None, key: str | None, load: OpenLoad
) -> dict[str, dict[str, float]]:
    """A row a server, printed as it comes. All are asked for their model first: one that is not there costs no time."""
    rows: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        if not servers:
            servers = {"scripted": await _scripted_server(stack, load)}
        urls = {name: base_url(url) for name, url in servers.items()}
        if model is None:
            models = {name: await asyncio.to_thread(first_model_blocking, url, key) for name, url in urls.items()}
        else:
            models = dict.fromkeys(urls, model)
        for name, url in urls.items():
            rows[name] = await drive(url, models[name], key, load)
            if len(rows) == 1:
                print(f"{'':14}" + "".join(f"{column:>15}" for column in rows[name]))
            print(f"{name:14}" + "".join(f"{value:>15.5g}" for value in rows[name].values()), flush=True)
    return rows


async def _scripted_server(stack: AsyncExitStack, load: OpenLoad) -> str:
    from ..engine.engine import Engine
    from ..engine.scripted_worker import Script, ScriptedWorker
    from ..engine.worker import WorkerLimits
    from ..http.app import create_app
    from ..http.server import HttpServer

    longest = 8 * load.prompt_words + load.output_tokens + 16
    limits = WorkerLimits(
        num_pages=64 * (longest // 16 + 2), page_size=16, num_rows=64, max_model_len=longest, vocab_size=256
    )
    worker = ScriptedWorker(limits, Script(step_time_s=0.005, verifies=False))
    engine = await stack.enter_async_context(Engine.on(worker, tokenizer=byte_tokenizer(), page_size=16))
    app = create_app(engine, served_model_name="bench")
    server = await stack.enter_async_context(HttpServer(app, port=0))
    return f"http://127.0.0.1:{server.port}"


def byte_tokenizer() -> TextTokenizer:
    """A token a byte: text without a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench serving", description=__doc__.splitlines()[0])
    parser.add_argument("servers", nargs="*", metavar="NAME=URL")
    parser.add_argument("--model", help="the name that the servers know; by default each one's first in /v1/models")
    parser.add_argument("--key", help="bearer token")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="outputs of a request, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    load = OpenLoad(
        rate=options.rate,
        num_requests=options.requests,
        prompt_words=options.prompt_words,
        output_tokens=options.tokens,
        seed=options.seed,
    )
    servers = dict(server.split("=", 1) for server in options.servers if "=" in server)
    if len(servers) != len(options.servers):
        parser.error("servers are given as NAME=URL, each name once")
    rows = uvloop.run(measure(servers, options.model, options.key, load))
    if options.json:
        write_json(options.json, "serving", rows)


if __name__ == "__main__":
    main()
