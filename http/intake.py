"""From the bytes of a request to a checked record and token ids: here for small bodies, in the text process for large."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from ..engine.errors import Overloaded
from ..engine.text.chat_template import ChatTemplate
from ..engine.text.tokenization import TextTokenizer
from .disconnect import watching
from .endpoint import Call
from .front import Front
from .request_body import checked, parsed, read_body

if TYPE_CHECKING:
    from .text_process import TextProcess

Body = TypeVar("Body", bound=BaseModel)
Prompts = list[Sequence[int]]
INLINE_BYTES = 32 << 10  # parsed, checked, rendered and encoded within a slice or two of the loop
INLINE_MAX_BYTES = 1 << 20  # without a text process larger bodies are not taken


class Texts(Protocol):
    """What prompts are made with."""

    tokenizer: TextTokenizer | None
    chat_template: ChatTemplate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake(Generic[Body]):
    """How one endpoint's bodies are taken in.

    `encode` makes the prompts' ids; it must need nothing but its arguments, for it may run in another process. `emptied`
    says what the fields that held the prompt are set to before the record comes back from there.
    """

    name: str
    body: type[Body]
    encode: Callable[[Texts, Body], Awaitable[Prompts]]
    emptied: Callable[[Body], Mapping[str, Any]]

    def check(self, raw: bytes) -> Body:
        """Raises: RequestError or Refused."""
        return checked(self.body, parsed(raw))

    def without_prompt(self, body: Body) -> Body:
        return body.model_copy(update=dict(self.emptied(body)))


async def take_in(front: Front, call: Call, intake: Intake[Body]) -> tuple[Body, Callable[[], Awaitable[Prompts]]]:
    """The request's body, and what gives its prompts' ids: only now, or already, if the text process had it.

    Raises: RequestError naming the field; Refused; Overloaded if the text process has too much to do.
    """
    limit, process = front.settings.max_body_bytes, front.text_process
    raw = await read_body(call.request, front.settings, limit if process is not None else min(limit, INLINE_MAX_BYTES))
    if process is not None and not process.is_ready:
        if len(raw) > INLINE_MAX_BYTES:
            raise Overloaded("large requests are not taken in yet; try again")  # it starts behind the engine
        process = None
    if process is not None and len(raw) > INLINE_BYTES:
        made, prompts = await _beside(process, call, intake.name, raw)
        if not isinstance(made, intake.body):
            raise TypeError(f"the text process made a {type(made).__name__} for {intake.name}")

        async def ready() -> Prompts:
            return prompts

        return made, ready
    body = intake.check(raw)
    return body, lambda: intake.encode(front.engine, body)


async def _beside(process: TextProcess, call: Call, name: str, raw: bytes) -> tuple[BaseModel, Prompts]:
    """By the text process, unless the client hangs up before its turn comes."""
    gone = asyncio.Event()
    async with watching(call.request.scope, call.request.receive, gone.set):
        job = process.take_in(name, raw, is_wanted=lambda: not gone.is_set())
        (made,) = await asyncio.gather(job, return_exceptions=True)  # raised below: what watches may group what it sees
    if isinstance(made, BaseException):
        raise made
    return made
