"""The process beside the server that takes in large bodies, so that the loop keeps its pace: the parent's side.

Frames both ways are a length in eight bytes and a pickle; both ends are this program. It ends with its parent, whose
death closes its input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from array import array
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from ..engine.errors import MisuseError, Overloaded, RequestError
from ..engine.text.chat_template import ChatTemplate
from ..engine.text.tokenization import TextTokenizer
from .child_process import ChildProcess
from .failures import CLIENT_GONE, Refused
from .intake import Prompts

log = logging.getLogger("slipstream.http")
MAX_WAITING_BYTES = 256 << 20
LENGTH_BYTES = 8
STOP_S = 2.0
JOB_TIMEOUT_S = 60.0  # a hundred times what three megabytes take; and a start, on a machine that is busy


class TextProcess:
    """One child process. A job at a time; the others wait, up to MAX_WAITING_BYTES of them. A child that dies fails
    its job and is replaced for the next one.
    """

    def __init__(self) -> None:
        self._settings: bytes | None = None
        self._child: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._num_waiting_bytes = 0
        self._is_closed = False
        self.is_starting = False  # `start` has been called, and has not returned
        self.num_jobs = 0
        self.num_deaths = 0

    @property
    def is_ready(self) -> bool:
        """Whether it has been started, and not closed."""
        return self._settings is not None

    async def start(self, tokenizer: TextTokenizer | None, chat_template: ChatTemplate | None) -> None:
        """Start the child with these; returns when it is ready. If it dies meanwhile, the next job tries again."""
        self.is_starting = True
        try:
            settings = await asyncio.to_thread(_packed_settings, tokenizer, chat_template)
            await self._spawn(settings)
        except Overloaded:
            # The server answers everybody else already: it does not go down for this.
            self.num_deaths += 1
            log.error("the text process did not start; the next large request starts another")
        finally:
            self.is_starting = False
        self._settings = settings

    async def aclose(self) -> None:
        """End the child. Returns in bounded time."""
        self._is_closed = True
        child, self._child, self._settings = self._child, None, None
        if child is None:
            return
        child.writer.close()
        try:
            await child.wait(STOP_S)
        except TimeoutError:
            await child.kill()

    async def take_in(
        self, name: str, raw: bytes, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[BaseModel, Prompts]:
        """The checked body (its prompt left out) and the prompts' ids. `is_wanted` is asked when the turn has come: whoever
        has gone by then holds up nobody.

        Raises: RequestError, Refused; Overloaded if too much is waiting, or if the child was lost or takes too long.
        """
        if self._num_waiting_bytes + len(raw) > MAX_WAITING_BYTES:
            raise Overloaded("too many large requests are waiting; try again later")
        self._num_waiting_bytes += len(raw)
        try:
            async with self._turn:
                if not is_wanted():
                    raise Refused(CLIENT_GONE, "the client has gone", code="client_gone")
                answer = await self._exchange((name, raw))
        finally:
            self._num_waiting_bytes -= len(raw)
        self.num_jobs += 1
        return _opened(answer)

    async def _exchange(self, job: tuple[str, bytes]) -> Any:
        if self._settings is None:
            raise MisuseError("the text process has not been started, or is closed")
        if self._child is not None and self._child.returncode is not None:
            self._mourn()  # it died with nothing to do: nobody needs to hear of it
            await self._kill()
        if self._child is None:
            await self._spawn(self._settings)
        try:
            return await self._asked(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))
        except (OSError, EOFError) as error:
            if not self._is_closed:
                self._mourn()
            raise Overloaded("the process for large requests was lost; try again") from error

    def _mourn(self) -> None:
        self.num_deaths += 1
        log.error("the text process died or hung; the next large request has another")

    async def _spawn(self, settings: bytes) -> None:
        self._child = await ChildProcess.start(
            [sys.executable, "-m", f"{__package__}.text_worker"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if self._is_closed:
            await self._kill()
            raise MisuseError("the text process was closed while it started")
        try:
            await self._asked(settings)
        except (OSError, EOFError) as error:
            raise Overloaded("the process for large requests does not start; the server's log has its words") from error

    async def _asked(self, packed: bytes) -> Any:
        """The child's answer. A child that gives none is ended: a later one would be taken for that to another question.

        Raises: OSError, which a timeout is, or EOFError if the child is lost.
        """
        try:
            async with asyncio.timeout(JOB_TIMEOUT_S):
                await self._send(packed)
                return await self._receive()
        except BaseException:
            await self._kill()
            raise

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def _send(self, packed: bytes) -> None:
        assert self._child is not None
        try:
            self._child.writer.write(len(packed).to_bytes(LENGTH_BYTES, "little"))
            self._child.writer.write(packed)
        except RuntimeError as error:  # uvloop's word for a socket that it has closed already
            raise BrokenPipeError("the child has closed its input") from error
        await self._child.writer.drain()

    async def _receive(self) -> Any:
        assert self._child is not None
        reader = self._child.reader
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        return pickle.loads(await reader.readexactly(length))


def _packed_settings(tokenizer: TextTokenizer | None, chat_template: ChatTemplate | None) -> bytes:
    """The tokenizer as it stands, whatever it was made from."""
    made_from: dict[str, Any] | None = None
    if tokenizer is not None:
        made_from = {
            "json": tokenizer.backend.to_str(),
            "special_tokens": dict(tokenizer.special_tokens),
            "eos_ids": tokenizer.eos_ids,
        }
    template = chat_template.source if chat_template is not None else None
    return pickle.dumps((made_from, template), pickle.HIGHEST_PROTOCOL)


def _opened(answer: Any) -> tuple[BaseModel, Prompts]:
    match answer:
        case ("made", body, packed):
            prompts: Prompts = []
            for each in packed:
                ids = array("i")
                ids.frombytes(each)
                prompts.append(ids)
            return body, prompts
        case ("request error", message, param, code):
            raise RequestError(message, param=param, code=code)
        case ("refused", status, message, code):
            raise Refused(status, message, code=code)
    raise MisuseError(f"the text process: {answer[1]}")
