"""One client's connection: uvicorn's HTTP/1.1 protocol, with limits on its head and a direct way to write chunks."""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import sys
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools
from starlette.types import Message, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .failures import Refused, failure_of
from .turnstile import Turnstile

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

EXTENSION = "slipstream.connection"
ARRIVED_AT = "slipstream.arrived_at"
MAX_HEAD_BYTES = 64 << 10
WRITE_BUFFER_BYTES = 16 << 10  # what waits in this process for a slow reader before its stream coalesces
SOCKET_BUFFER_BYTES = 256 << 10  # what waits in the kernel; left to itself that grows to megabytes
END = b"0\r\n\r\n"  # of a body in chunks
MAX_OPTION = (1 << 31) - 1  # the kernel's int
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 20, 5, 4  # a silent loss is noticed within 40 s
_UPGRADE = re.compile(rb"(?<=\n)upgrade:", re.IGNORECASE)
_TOO_SLOW = Refused(408, "the request's head did not arrive in time", code="head_timeout")
_TOO_LARGE = Refused(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")


class DirectConnection(Protocol):
    """Writes body chunks of the response that is under way, without ASGI's coroutine and the layers around it.

    Only between `http.response.start`, sent by `head` or through ASGI, and the last part of the body, which is written by
    `ended` or sent through ASGI, and only for responses without a content-length.
    """

    @property
    def is_writable(self) -> bool:
        """Whether a write neither waits nor is lost."""
        ...

    @property
    def transport(self) -> asyncio.WriteTransport:
        """Takes what `framed` makes."""
        ...

    @property
    def framed(self) -> Callable[[bytes], bytes]:
        """Makes of a part of the body, which must not be empty, what goes over the wire: `chunk`, or for a client that
        knows no chunks the part itself."""
        ...

    @property
    def has_timed_out(self) -> bool:
        """Whether the kernel gave it up: what was written was not taken in time, or nobody answers its probes."""
        ...

    async def head(self, send: Send, start: Message) -> bytes:
        """Send `start`, a `http.response.start`, but give what would be written for it to the caller, who writes it in front
        of the body's first part. Nothing if the connection is lost.
        """
        ...

    def ended(self, body: bytes) -> bytes:
        """What goes over the wire for the last part of the body, which must not be empty, and for its end. The caller writes
        it, and sends an empty last `http.response.body`, which is not written any more and waits for no slow reader.
        """
        ...

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call `on_hang_up` when the connection is lost; at once if it has been."""
        ...

    def unwatch(self, on_hang_up: Callable[[], None]) -> None:
        """Take it back. Does nothing if it has been called."""
        ...

    def abort(self) -> None:
        """Cut the connection without writing what is buffered."""
        ...


def chunk(body: bytes) -> bytes:
    """`body`, which must not be empty, as HTTP/1.1 frames what has no length of its own."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def direct_connection(scope: Scope) -> DirectConnection | None:
    """The connection a request came by, or None under a server that is not ours."""
    return cast("DirectConnection | None", scope.get("extensions", {}).get(EXTENSION))


def arrival(scope: Scope) -> float:
    """When a request's head was there, on `perf_counter`: before it waited for its turn. Now, under another server."""
    arrived_at: float = scope.get(ARRIVED_AT) or perf_counter()
    return arrived_at


class ServedConnection(HttpToolsProtocol):
    """Adds to uvicorn's protocol what it leaves out: time and size limits for a request's head, small write buffers,
    turns for a burst of requests, and itself as a DirectConnection in the request's scope."""

    __slots__ = ("framed", "is_writable")  # for every frame; a transport that is closing is found by `connection_lost`

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float,
        turnstile: Turnstile,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s = head_timeout_s
        self._turnstile = turnstile
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._reads_head = True  # and not a body
        self._answering: RequestResponseCycle | None = None  # `cycle` may be one behind it, of a pipelining client
        self.is_writable = False
        self.framed: Callable[[bytes], bytes] = chunk
        self.has_timed_out = False
        self._watchers: list[Callable[[], None]] | None = []  # None: the connection is lost

    # DirectConnection

    async def head(self, send: Send, start: Message) -> bytes:
        answering = self._answering
        if answering is None:
            raise RuntimeError("no request is being answered")
        transport, kept = answering.transport, _Kept(answering.transport)
        answering.transport = cast("asyncio.Transport", kept)
        try:
            await send(start)
        finally:
            answering.transport = transport
        return b"".join(kept.written)

    def ended(self, body: bytes) -> bytes:
        answering = self._answering
        if answering is not None:
            answering.flow = FlowControl(answering.transport)
            answering.transport = cast("asyncio.Transport", _Kept(answering.transport))
        return self.framed(body) + (END if self.framed is chunk else b"")

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        if self._watchers is None:
            on_hang_up()
        else:
            self._watchers.append(on_hang_up)

    def unwatch(self, on_hang_up: Callable[[], None]) -> None:
        if self._watchers and on_hang_up in self._watchers:
            self._watchers.remove(on_hang_up)

    def abort(self) -> None:
        self.is_writable = False
        self.transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether a response is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_writable = True
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_writable = False
        self.has_timed_out = isinstance(exc, TimeoutError)
        self._head_came()
        super().connection_lost(exc)
        answering, scopes = self._answering, [self.scope]
        if answering is not None and answering is not self.cycle:
            # The protocol above tells the last request that it has read, which stands behind the one that is answered.
            answering.disconnected = True
            answering.message_event.set()
            scopes.append(answering.scope)
        watchers, self._watchers = self._watchers or [], None
        for on_hang_up in watchers:
            on_hang_up()
        for scope in scopes:
            if scope is not None:  # else it and this would wait for the cycle collector, with all that hangs on them
                cast("dict[str, Any]", scope).pop("extensions", None)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data:
                self._refuse(_TOO_LARGE)
                return
        if self._reads_head:
            data = _without_upgrade(data)
        super().data_received(data)

    def _unset_keepalive_if_required(self) -> None:
        # Called for whatever comes. The rest of a body whose request has been answered does not keep a connection alive.
        if self._reads_head or self.is_busy:
            super()._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        self.is_writable = False
        super().pause_writing()

    def resume_writing(self) -> None:
        self.is_writable = not self.transport.is_closing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called by the protocol above where the parser cannot go on, while its error is handled."""
        answering = self._answering
        if answering is not None and not answering.response_complete:
            is_its_body = answering is self.cycle and answering.more_body
            if not is_its_body or answering.response_started:
                # No request, behind one whose answer is under way: that is not to suffer, and the connection ends with it.
                self.pipeline.clear()
                answering.keep_alive = False
                return
        error = sys.exc_info()[1]
        reason = "" if error is None or isinstance(error, httptools.HttpParserCallbackError) else f": {error}"
        self._answer(Refused(400, f"the request is not valid HTTP/1.1{reason}", code="invalid_http"))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # what stands behind a body has no say
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super()._unset_keepalive_if_required()
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: self}
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        self._reads_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_head = True
        super().on_message_complete()
        if not self.pipeline:
            # The end of a large body leaves the reading paused: that the client goes would not be noticed.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        scope = cast("dict[str, Any]", cycle.scope)
        scope[ARRIVED_AT] = perf_counter()
        self._answering, self.framed = cycle, chunk
        if scope["http_version"] != "1.1":
            self.framed, app, cycle.keep_alive = bytes, _until_close(cycle, app), False
            cycle.waiting_for_100_continue = False
        start = functools.partial(super()._start_asgi_task, cycle, app)
        if scope["method"] == "POST":
            self._turnstile.enter(start)
        else:
            start()  # probes do not wait behind a burst

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.is_busy:  # else the answer under way is not to suffer; the keep-alive limit comes after it
            self._refuse(_TOO_SLOW)

    def _refuse(self, refused: Refused) -> None:
        self._head_came()
        if self.is_busy:
            self.transport.close()
        else:
            self._answer(refused)

    def _answer(self, refused: Refused) -> None:
        """Answer what never became a request, and close."""
        body = failure_of(refused).body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[refused.status], *lines, b"\r\n", body]))
        self.transport.close()


class _Kept:
    """Stands in for `transport` where uvicorn would write what we write ourselves."""

    __slots__ = ("close", "written")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.written: list[bytes] = []
        self.close = transport.close

    def write(self, data: bytes) -> None:
        self.written.append(data)


def _until_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """`app` for a client older than HTTP/1.1, which knows no chunks: what has no length ends with the connection."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        is_endless = False

        async def sent(message: Any) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_endless:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif is_endless and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return served


def _without_upgrade(data: bytes) -> bytes:
    """`data` with its first head asking for no other protocol, as a server that speaks only this one may read it.

    The parser would drop the body behind such a head. Java's client offers HTTP/2 in every request without TLS.
    """
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"x-declined-upgrade:", data[:end]) + data[end:]


def set_up_listener(listener: socket.socket, write_timeout_s: float) -> None:
    """What every connection that it accepts is to have, and on Linux inherits: a burst pays nothing for it. A peer that
    vanished without a word is found by probes while idle, by unacknowledged bytes while written to; a frame does not wait for
    the next; and what waits in the kernel is bounded.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", min(int(write_timeout_s * 1000), MAX_OPTION)),
    ):
        option = getattr(socket, name, None)
        if option is not None:  # not every platform has them all
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
