"""A real server on a free port over a scripted engine, and raw clients for what libraries hide."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools
import pytest
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.engine.engine import Engine
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.text.tokenization import TextTokenizer
from slipstream.engine.worker import WorkerLimits
from slipstream.http.app import create_app
from slipstream.http.server import HttpServer
from slipstream.http.settings import FrontSettings

MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message.role + ' ' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant ' }}{% endif %}"
)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """What is served runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


def make_tokenizer() -> TextTokenizer:
    """Byte-level, so that any token is text; ids of single letters can be looked up to script a sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|turn|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the stream slips past the stones"], trainer)
    return TextTokenizer(tokenizer, eos_ids=frozenset({0}), chat_template=TEMPLATE)


class Scripted:
    """What the engine answers: `text` over and over, or what `token_of` says."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def saying(self, text: str) -> Callable[[int, Any], int]:
        """Token by token `text`, then the end token, whatever the prompt; the prompt must not hold `text`'s start."""
        ids = [*self._tokenizer.encode(text), 0]
        start = len(self._tokenizer.encode("PROMPT"))

        def token_of(seed: int, history: Any) -> int:
            return ids[min(len(history) - start, len(ids) - 1)]

        return token_of


@dataclass
class Served:
    """One running server. Closing it is the fixture's."""

    engine: Engine
    server: HttpServer
    worker: ScriptedWorker
    clients: list[Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    async def connect(self, **options: Any) -> Client:
        client = await Client.connect(self.server.port, **options)
        self.clients.append(client)
        return client

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own, answered in full."""
        client = await self.connect()
        await client.send(method, path, body, **headers)
        answer = await client.answer()
        client.close()
        return answer

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        return await self.ask("POST", path, body, **headers)

    async def idle(self) -> None:
        """Wait until the engine holds nothing; every page must then be home."""
        async with asyncio.timeout(5):
            while self.engine.stats.num_running or self.engine.stats.num_waiting:
                await asyncio.sleep(0)
            await self.engine._loop.idle.wait()  # type: ignore[union-attr]
        stats = self.engine.stats
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


@dataclass
class Answer:
    """An HTTP response as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event, parsed; the end mark as a string. Comments are left out."""
        blocks = [block for block in self.body.decode().split("\n\n") if block.startswith("data: ")]
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]

    @property
    def events_by_kind(self) -> list[tuple[str, Any]]:
        """Events that have a name, with their data."""
        pairs = [block.split("\ndata: ", 1) for block in self.body.decode().split("\n\n") if block]
        return [(name.removeprefix("event: "), json.loads(data)) for name, data in pairs]


class Client:
    """A raw HTTP/1.1 client that sees every byte as it comes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Client:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(sock)

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(payload)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send_raw("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)

    async def send_raw(self, raw: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, raw)

    async def answer(self) -> Answer:
        """Read until the response is complete or the server closes."""
        return await self.read_until(lambda answer: answer.complete)

    async def next_answer(self) -> Answer:
        """The same of a further request on this connection."""
        before = self._answer
        return await self.read_until(lambda answer: answer.complete and answer is not before)

    async def read_until(self, is_enough: Callable[[Answer], bool]) -> Answer:
        async with asyncio.timeout(10):
            while not is_enough(self._answer):
                received = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                if not received:
                    break
                self._parser.feed_data(received)
        return self._answer

    def shut(self) -> None:
        """Half-close: nothing more to send, still reading."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._answer = Answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.complete = True


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return make_tokenizer()


@pytest.fixture
def scripted(tokenizer: TextTokenizer) -> Scripted:
    return Scripted(tokenizer)


@pytest.fixture
async def serving(tokenizer: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """A context manager that serves an engine with the given script and settings; it ends with every page home."""
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def start(
            script: Script | None = None,
            *,
            num_pages: int = 256,
            num_rows: int = 64,
            max_model_len: int = MAX_MODEL_LEN,
            with_tokenizer: bool = True,
            front: FrontSettings | None = None,
            engine_settings: dict[str, Any] | None = None,
            started: bool = True,
            **app_settings: Any,
        ) -> AsyncIterator[Served]:
            limits = WorkerLimits(
                num_pages=num_pages, page_size=4, num_rows=num_rows, max_model_len=max_model_len, vocab_size=300
            )
            worker = ScriptedWorker(limits, script)
            settings = {"page_size": 4, "chunked_prefill_size": 256, **(engine_settings or {})}
            engine = Engine.on(worker, tokenizer=tokenizer if with_tokenizer else None, **settings)
            engine.proves_laws = True
            app = create_app(engine, **{"served_model_name": "tiny", "settings": front, **app_settings})
            async with HttpServer(app, port=0) as server:
                served = Served(engine, server, worker)
                try:
                    if started:
                        await engine.start()
                    yield served
                    if engine.state.is_ready:
                        await served.idle()
                finally:
                    await engine.aclose()
                    for client in served.clients:
                        client.close()

        yield start
        await stack.aclose()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Any]]:
    """Clients of a port, closed with the test."""
    clients: list[Client] = []

    async def connected(port: int) -> Client:
        clients.append(await Client.connect(port))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
