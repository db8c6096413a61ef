"""What large requests cost the streams beside them: bodies of megabytes, 100k-token prompts, chats of 2,000 messages.

    slipstream bench intake [--streams 64] [--step-ms 10] [--tokens 500] [--tokenizer FOLDER] [--inline] [--json FILE]

A row without them, then a row a kind of request: as many streams as `--streams` for as long as `--tokens` steps take, and
beside them `--senders` clients that send large requests of that kind, one after the other, for as long as the streams run.
The worker only keeps time; streams' client, senders and text process have a process each, so it takes some cores to
itself. What is answered is computed as well, in chunks beside the streams, and asks for one token; the body of 3 MiB is
longer than the context and is refused once that is known. `--inline` takes them in on the loop, which the text process is
there to prevent; bodies over 1 MiB are refused unread then.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from ..engine.engine import Engine
from ..engine.loader.demo_model import demo_model_folder
from ..engine.text.chat_template import ChatTemplate
from ..engine.text.tokenization import TextTokenizer
from ..http.app import create_app
from ..http.child_process import ChildProcess
from ..http.collector import calm_collector
from ..http.server import HttpServer
from ..http.text_process import TextProcess
from .bench_http import MODEL_VOCAB, Load, PacedWorker, made_up_tokenizer, watch_loop
from .results import write_json
from .stream_client import quantile, run_client

LONGEST_TOKENS = 200_000  # also the chat of a tokenizer that makes a token of each byte
PROMPT_TOKENS = 100_000
NUM_MESSAGES = 2000
BODY_BYTES = 3 << 20
SENTENCE = "The stream slips past the stones, and nobody is late. "
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
COLUMNS = ("itl_ms_p50", "itl_ms_p99", "itl_ms_max", "lag_ms_p99", "lag_ms_max", "answered", "refused", "answer_ms_p50")


def large_requests(tokenizer: TextTokenizer) -> dict[str, tuple[str, bytes]]:
    """By kind: path and body."""
    sentence_tokens = len(tokenizer.encode(SENTENCE * 100, add_special_tokens=False)) / 100
    text = SENTENCE * round(PROMPT_TOKENS / sentence_tokens)
    ids = [place * 104729 % MODEL_VOCAB for place in range(PROMPT_TOKENS)]
    roles = ("user", "assistant")
    chat = [{"role": roles[index % 2], "content": f"{index}: {SENTENCE}"} for index in range(NUM_MESSAGES)]
    few = {"max_tokens": 1, "ignore_eos": True}
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "text of 100k tokens": ("/v1/completions", {"prompt": text}),
        "100k ids": ("/v1/completions", {"prompt": ids}),
        "chat of 2,000": ("/v1/chat/completions", {"messages": chat}),
        "body of 3 MiB": ("/v1/completions", {"prompt": SENTENCE * (BODY_BYTES // len(SENTENCE))}),
    }
    return {kind: (path, json.dumps({**body, **few}).encode()) for kind, (path, body) in asked.items()}


def send_blocking(port: int, path: str, num_senders: int) -> dict[str, float]:
    """Send the body that comes on standard input, again and again, until standard input ends.

    The body comes as its length in a line of its own, then its bytes; once it is there a line is printed, and the first
    request goes out when another line is read.
    """
    body = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    print("ready", flush=True)
    sys.stdin.buffer.readline()
    over = threading.Event()
    took_ms: list[float] = []
    statuses: list[int] = []

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while not over.is_set():
            start = time.perf_counter()
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
            except (OSError, http.client.HTTPException):  # refused before all of it was read
                connection.close()
                statuses.append(0)
            took_ms.append((time.perf_counter() - start) * 1e3)

    threads = [threading.Thread(target=send) for _ in range(num_senders)]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    over.set()
    for thread in threads:
        thread.join()
    num_answered = statuses.count(200)
    refused = len(statuses) - num_answered
    return {"answered": num_answered, "refused": refused, "answer_ms_p50": quantile(took_ms, 0.5)}


class Senders:
    """`send_blocking` in a process of its own."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    @classmethod
    async def ready(cls, port: int, path: str, body: bytes, num_senders: int) -> Senders:
        """Started, and waiting for `go`."""
        command = (sys.executable, "-m", f"{__package__}.bench_intake", "--send", str(port), path, str(num_senders))
        child = await ChildProcess.start(command)
        child.writer.write(b"%d\n%b" % (len(body), body))
        await child.writer.drain()
        await child.reader.readline()
        return cls(child)

    def go(self) -> None:
        self._child.writer.write(b"\n")

    async def stop(self) -> dict[str, float]:
        """What was answered, once all of it is."""
        self._child.writer.write_eof()  # which says that it is over
        numbers: dict[str, float] = json.loads(await self._child.reader.read())
        await self._child.kill()
        return numbers


@asynccontextmanager
async def served(options: argparse.Namespace, tokenizer: TextTokenizer) -> AsyncIterator[tuple[Engine, HttpServer]]:
    """An engine whose worker only keeps time, and its front, with a text process unless `--inline`."""
    num_rows = options.streams + options.senders
    vocab_size = max(tokenizer.vocab_size, MODEL_VOCAB)
    worker = PacedWorker(num_rows, LONGEST_TOKENS, options.step_ms / 1e3, vocab_size=vocab_size)
    template = tokenizer.chat_template or ChatTemplate(TEMPLATE)
    process = None if options.inline else TextProcess()
    async with Engine.on(
        worker,
        tokenizer=tokenizer,
        chat_template=template,
        max_running_requests=num_rows,
        prefix_cache=False,
    ) as engine:
        try:
            if process is not None:
                await process.start(tokenizer, template)
            app = create_app(engine, served_model_name="bench", text_process=process)
            async with HttpServer(app, port=0) as server:
                yield engine, server
        finally:
            if process is not None:
                await process.aclose()


async def one_row(
    options: argparse.Namespace, tokenizer: TextTokenizer, request: tuple[str, bytes] | None
) -> dict[str, float]:
    """The streams with `request` beside them, or alone, on a fresh server."""
    load = Load(num_streams=options.streams, output_tokens=options.tokens, text=True, vocab_size=MODEL_VOCAB)
    async with served(options, tokenizer) as (engine, server):
        senders = None if request is None else await Senders.ready(server.port, *request, options.senders)
        watch = asyncio.create_task(watch_loop(engine, load), name="watch")
        bodies = [load.body(number) for number in range(load.num_streams)]
        with calm_collector():
            streams = asyncio.create_task(
                run_client(server.port, load.path, bodies, load.output_tokens), name="streams"
            )
            if senders is not None:
                while engine.stats.num_running < load.num_streams and not streams.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                senders.go()
            numbers = await streams
        watch.cancel()
        numbers |= await watch
        return numbers if senders is None else {**numbers, **await senders.stop()}


def found_tokenizer(folder: str | None) -> TextTokenizer:
    """The folder's, the demo model's if it has been fetched, or one that is made up."""
    path = Path(folder) if folder is not None else demo_model_folder()
    if folder is None and not (path / "tokenizer.json").is_file():
        print("the demo model is not here: a made-up tokenizer with a token a byte takes its tokenizer's place")
        return made_up_tokenizer(MODEL_VOCAB)
    return TextTokenizer.load(path)


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """A row a kind, printed as it comes."""
    tokenizer = found_tokenizer(options.tokenizer)
    kinds: dict[str, tuple[str, bytes] | None] = {"no large requests": None, **large_requests(tokenizer)}
    print(f"{'beside the streams':20}{'MB':>6}" + "".join(f"{column:>15}" for column in COLUMNS))
    rows = {}
    for kind, request in kinds.items():
        rows[kind] = row = uvloop.run(one_row(options, tokenizer, request))
        size = "" if request is None else f"{len(request[1]) / 1e6:.1f}"
        told = [f"{row[column]:>15.4g}" if column in row else f"{'':15}" for column in COLUMNS]
        print(f"{kind:20}{size:>6}" + "".join(told), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(prog="bench intake", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=500, help="outputs of each stream")
    parser.add_argument("--senders", type=int, default=2, help="clients with large requests")
    parser.add_argument("--tokenizer", help="a model folder; by default the demo model's, if it has been fetched")
    parser.add_argument("--inline", action="store_true", help="without the text process")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--send", nargs=3, metavar=("PORT", "PATH", "SENDERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.send:
        port, path, num_senders = options.send
        print(json.dumps(send_blocking(int(port), path, int(num_senders))))
        return
    rows = measure(options)
    if options.json:
        write_json(options.json, "intake", rows)


if __name__ == "__main__":
    main()
