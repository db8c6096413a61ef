"""A start that fails or is cancelled leaves nothing that listens."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.errors import ConfigError
from slipstream.http.connection import MAX_OPTION
from slipstream.http.server import ACCEPTS_A_TURN, DESCRIPTORS, HttpServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def num_open() -> int:
    """Sockets of this process."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


@pytest.fixture(params=["port", "uds"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> HttpServer:
    return HttpServer(app, port=0) if request.param == "port" else HttpServer(app, uds=str(tmp_path / "s"))


async def assert_nothing_left(before: int, folder: Path) -> None:
    async with asyncio.timeout(10):
        while num_open() > before:  # a loop closes what it has accepted from in its next turns
            await asyncio.sleep(0.001)
    assert not list(folder.iterdir())


async def test_a_loop_that_cannot_listen_to_the_fourth(server: HttpServer, tmp_path: Path) -> None:
    async def startup(sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        server._server.servers = [await loop.create_server(asyncio.Protocol, sock=sock) for sock in sockets[:3]]
        raise OSError(errno.ENOMEM, "no memory")

    server._server.startup = startup  # type: ignore[method-assign]
    before = num_open()
    with pytest.raises(OSError, match="no memory"):
        await server.__aenter__()
    await assert_nothing_left(before, tmp_path)
    assert server._date_timer is not None
    assert server._date_timer.cancelled()


async def test_a_process_without_descriptors(
    server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "dup", dup)
    before = num_open()
    with pytest.raises(ConfigError, match="too many open files"):
        await server.__aenter__()
    await assert_nothing_left(before, tmp_path)


async def test_a_start_that_is_cancelled_while_it_binds(server: HttpServer, tmp_path: Path) -> None:
    bind, begun, goes_on = server._bind, threading.Event(), threading.Event()

    def slow_bind(num_listeners: int) -> None:
        begun.set()
        assert goes_on.wait(10)
        bind(num_listeners)

    server._bind = slow_bind  # type: ignore[method-assign]
    before = num_open()
    task = asyncio.create_task(server.__aenter__())
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    async with asyncio.timeout(10):
        while len(server._listeners) < ACCEPTS_A_TURN:
            await asyncio.sleep(0.001)
    await assert_nothing_left(before, tmp_path)


async def test_there_is_room_for_all_descriptors_before_the_first_connection(server: HttpServer) -> None:
    """The kernel's table never shrinks, so that what an earlier test has opened could only hide a fault."""
    async with server:
        status = Path("/proc/self/status").read_text()
    room = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("FDSize:"))
    assert room >= min(DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@pytest.mark.parametrize("limit", [300, resource.RLIM_INFINITY])
async def test_a_low_limit_of_descriptors_or_none_hinders_no_start(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    asked: list[int] = []
    real = fcntl.fcntl

    def noted(descriptor: Any, command: int, value: int) -> int:
        asked.append(value)
        return real(descriptor, command, value)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(fcntl, "fcntl", noted)
    async with server:
        assert asked == [299 if limit == 300 else DESCRIPTORS - 1]


async def test_a_write_timeout_longer_than_the_kernel_counts() -> None:
    async with HttpServer(app, port=0, write_timeout_s=1e9) as server:
        option = server._listeners[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == MAX_OPTION
