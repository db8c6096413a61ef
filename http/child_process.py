"""A program in a process of its own, at the other end of a socket."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcess:
    """Its standard input and output are one socket, of which `reader` and `writer` are the other end.

    Started with `subprocess`, which shares this process's memory until the program runs. uvloop's own way forks: all
    page tables are copied while the loop waits, and then each page that is written to, which a server with gigabytes
    mapped and streams under way pays for with every stream.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _process: subprocess.Popen[bytes]

    @classmethod
    async def start(cls, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> ChildProcess:
        """Raises: OSError. A child whose start is cancelled is killed."""
        ours, theirs = socket.socketpair()

        def spawn() -> subprocess.Popen[bytes]:
            with theirs:  # here: were it closed by who gave up, the child could get a stranger's socket of that number
                end = theirs.fileno()
                return subprocess.Popen(command, stdin=end, stdout=end, env=env)

        spawned = asyncio.get_running_loop().run_in_executor(None, spawn)
        try:
            process = await asyncio.shield(spawned)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            spawned.add_done_callback(_discard)
            raise
        return cls(reader=reader, writer=writer, _process=process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    async def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended. Raises: TimeoutError."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    async def kill(self) -> None:
        """Returns when it is gone. Does nothing if it is."""
        self.writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


def _discard(spawned: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Nobody wants it any more."""
    if not spawned.cancelled() and spawned.exception() is None:
        spawned.result().kill()
        threading.Thread(target=spawned.result().wait, daemon=True).start()  # at most until the kernel has ended it
