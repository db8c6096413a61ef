"""uvicorn inside our own event loop: binding, signals, and an order of shutting down that leaves nobody hanging."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from ..engine.engine import Engine, EngineState
from ..engine.errors import ConfigError
from .collector import calm_collector
from .connection import ServedConnection, set_up_listener
from .text_process import TextProcess
from .turnstile import Turnstile

EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE: a supervisor should start the process anew
LAST_WORDS_S = 5.0  # for the endings of drained streams to be written
BACKLOG = 2048
ACCEPTS_A_TURN = 8  # uvloop accepts one a turn from each: in turns that take milliseconds a burst would trickle in
WATCH_EVERY_S = 0.5
DESCRIPTORS = 1 << 14  # room for so many open files and connections is made at the start: 128 KiB


class HttpServer:
    """Serves one app while the `async with` block runs; `url` and `port` say where.

    Nothing of it handles signals. Leaving the block closes idle connections, waits up to LAST_WORDS_S for responses
    under way, and then cuts them: whoever wants them finished ends the engine's requests first.
    Raises: ConfigError if it cannot listen there.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        uds: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        root_path: str = "",
        head_timeout_s: float = 20.0,
        write_timeout_s: float = 30.0,
        keep_alive_s: int = 75,
    ) -> None:
        if (ssl_certfile is None) != (ssl_keyfile is None):
            missing = "ssl_certfile" if ssl_certfile is None else "ssl_keyfile"
            raise ConfigError("TLS needs a certificate and its key", field=missing)
        self._host, self._port, self._uds = host, port, uds
        self._scheme = "http" if ssl_certfile is None else "https"
        protocol = functools.partial(
            ServedConnection,
            head_timeout_s=head_timeout_s,
            turnstile=_turnstile_of(app),
        )
        self._config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # ours: uvicorn's is kept fresh by a poll
            root_path=root_path,
            backlog=BACKLOG,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        self._server = uvicorn.Server(self._config)
        self._write_timeout_s = write_timeout_s
        self._listeners: list[socket.socket] = []
        self._is_given_up = False
        self._date_timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port it listens on, also where port 0 was asked for."""
        return self._port

    @property
    def url(self) -> str:
        if self._uds is not None:
            return f"unix:{self._uds}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._port}"

    async def __aenter__(self) -> HttpServer:
        try:
            self._config.load()
        except OSError as error:
            raise ConfigError(f"cannot use the TLS files: {error}", field="ssl_certfile") from error
        self._server.lifespan = self._config.lifespan_class(self._config)
        is_uvloop = type(asyncio.get_running_loop()).__module__ == "uvloop"
        try:
            await asyncio.to_thread(self._bind, ACCEPTS_A_TURN if is_uvloop else 1)
            self._refresh_date()
            await self._server.startup(sockets=self._listeners)
        except BaseException:
            self._give_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_date()
        await self.responses_written(LAST_WORDS_S)
        self.cut_connections(only_busy=True)
        await self._server.shutdown(sockets=self._listeners)
        await asyncio.to_thread(self._close_listeners)

    async def responses_written(self, timeout_s: float) -> None:
        """Wait until no response is under way, or for `timeout_s`."""
        tasks = set(self._server.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def cut_connections(self, *, only_busy: bool = False) -> None:
        """Drop the connections as they are; what still runs for them is aborted as after any hang-up."""
        for connection in list(self._server.server_state.connections):
            cut = cast(ServedConnection, connection)
            if not only_busy or cut.is_busy:
                cut.abort()

    def _give_up(self) -> None:
        """Leave nothing of a start that failed, or that nobody waits for any more."""
        self._is_given_up = True
        self._stop_date()
        for server in getattr(self._server, "servers", ()):
            server.close()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._uds is not None and self._listeners:
            Path(self._uds).unlink(missing_ok=True)

    def _stop_date(self) -> None:
        if self._date_timer is not None:
            self._date_timer.cancel()

    def _refresh_date(self) -> None:
        self._server.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._date_timer = asyncio.get_running_loop().call_later(1.0, self._refresh_date)

    def _bind(self, num_listeners: int) -> None:
        try:
            if self._uds is not None:
                self._listeners.append(_bind_unix(self._uds))
            else:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                self._listeners.append(socket.create_server((self._host, self._port), family=family, backlog=BACKLOG))
                set_up_listener(self._listeners[0], self._write_timeout_s)
                self._port = self._listeners[0].getsockname()[1]
            while len(self._listeners) < num_listeners:
                self._listeners.append(self._listeners[0].dup())
            _make_room_for_descriptors(self._listeners[0])
        except OSError as error:
            where = self._uds if self._uds is not None else f"{self._host}:{self._port}"
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            field = "uds" if self._uds is not None else "port" if is_port else "host"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}", field=field) from error
        finally:
            if self._is_given_up:  # while this thread was at it
                self._close_listeners()


def _make_room_for_descriptors(any_open: socket.socket) -> None:
    """Have the kernel's table of this process's descriptors grow now. It doubles when it is full, up to 16 ms each time in a
    process of several threads, for which it waits (Linux: synchronize_rcu), and never shrinks: the connection that is one too
    many would make every stream wait. Call it from a thread.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if limit == resource.RLIM_INFINITY else min(DESCRIPTORS, limit)
    with contextlib.suppress(OSError):  # then it grows later
        os.close(fcntl.fcntl(any_open, fcntl.F_DUPFD_CLOEXEC, wanted - 1))


def _bind_unix(path: str) -> socket.socket:
    """A socket file that nobody serves any more is replaced, one that somebody serves is not."""
    if Path(path).exists() and stat.S_ISSOCK(Path(path).stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) != 0:
                Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock


class _Signals:
    """SIGTERM and SIGINT as events: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last_number = 0

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _arrived(self, number: int) -> None:
        self.last_number = number
        (self.second if self.first.is_set() else self.first).set()


async def serve(
    app: ASGIApp,
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    root_path: str = "",
    write_timeout_s: float = 30.0,
    drain_timeout_s: float = 30.0,
    text_process: TextProcess | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Listen, start `engine` unless it has been, serve until a signal or the engine's death; return the exit code.

    It listens while the engine starts, so that /health answers and /ready says no. SIGTERM drains: /ready and new
    requests get 503, live ones have `drain_timeout_s` to finish, the rest end with an error. SIGINT does the same
    without the wait, and a second signal ends everything at once. `text_process` is started behind the engine, if that
    is started here, and is closed with it. `on_ready` is called with the URL once requests
    are served. Raises: ConfigError.
    """
    server = HttpServer(
        app,
        host=host,
        port=port,
        uds=uds,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        root_path=root_path,
        write_timeout_s=write_timeout_s,
    )
    is_ours = engine.state is EngineState.NEW
    with _Signals() as signals:
        try:
            async with server:
                if is_ours:
                    await _first_of(signals.first.wait(), _start(engine, text_process))
                    if not engine.state.is_ready:
                        return 0
                with calm_collector():
                    if on_ready is not None:
                        on_ready(server.url)
                    await _first_of(signals.first.wait(), _death_of(engine))
                if not engine.state.is_alive:
                    return EXIT_ENGINE_DEAD
                limit_s = drain_timeout_s if signals.last_number == signal.SIGTERM else 0.0
                await _first_of(signals.second.wait(), _drain(engine, server, limit_s))
                if signals.second.is_set():
                    server.cut_connections()
                    return 128 + signals.last_number
                return 0
        finally:
            if is_ours and engine.state is not EngineState.CLOSED:
                await engine.aclose()
            if text_process is not None:
                await text_process.aclose()


def _turnstile_of(app: ASGIApp) -> Turnstile:
    """That of an app of ours, which knows its streams and its engine; behind another app it is not seen."""
    found = getattr(getattr(app, "state", None), "turnstile", None)
    return found if isinstance(found, Turnstile) else Turnstile()


async def _start(engine: Engine, text_process: TextProcess | None) -> None:
    await engine.start()
    if text_process is not None:
        await text_process.start(engine.tokenizer, engine.chat_template)


async def _drain(engine: Engine, server: HttpServer, limit_s: float) -> None:
    await engine.drain(limit_s)
    await server.responses_written(LAST_WORDS_S)


async def _death_of(engine: Engine) -> None:
    """Return once the engine is dead. A watchdog by the clock: clients have their errors long before."""
    while engine.state.is_alive:  # noqa: ASYNC110
        await asyncio.sleep(WATCH_EVERY_S)


async def _first_of(*awaited: Coroutine[Any, Any, object]) -> None:
    """Run all until one returns or raises; cancel the others and wait for them. Raises what one of them raised."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each, name=f"slipstream-serve-{index}") for index, each in enumerate(awaited)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
