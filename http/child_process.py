"""A program in a process of its own, at the other end of a socket."""

from __future__ import annotations

import asyncio
import socket
import subprocess
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
        """Raises: OSError. A child whose start is cancelled finds its socket closed."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                end = theirs.fileno()
                process = await asyncio.to_thread(lambda: subprocess.Popen(command, stdin=end, stdout=end, env=env))
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
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
