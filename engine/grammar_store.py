"""Compiled grammars of one engine: made off the loop, kept while there is room, bounded in time and size."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .errors import Overloaded, RequestError
from .grammar_session import CompiledGrammar, GrammarBackend, GrammarSpec
from .grammar_triggers import read_triggers
from .pattern_check import check_regex
from .schema_check import check_schema

COMPILE_TIMEOUT_S = 10.0
YIELD_S = 2e-4  # after so long a compilation lets the loop go on
MAX_WAITING = 64  # grammars that wait to be compiled; more are refused
MAX_GRAMMARS = 256
MAX_BYTES = 512 << 20  # of all kept grammars; requests that run keep theirs whatever happens here


class GrammarStore:
    """`make_backend` loads the library and reads the tokenizer: it runs in the compiling thread, with the first grammar.

    Loop thread only. A grammar that several requests ask for at once is compiled once.
    """

    def __init__(self, make_backend: Callable[[], GrammarBackend], *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._make_backend = make_backend
        self._timeout_s = timeout_s
        self._backend: GrammarBackend | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._coming: dict[GrammarSpec, asyncio.Future[CompiledGrammar]] = {}
        self.num_compiled = 0

    async def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar, compiled or kept. Raises: RequestError for what cannot be enforced or takes too long; Overloaded."""
        kept = self._kept.get(spec)
        if kept is not None:
            self._kept.move_to_end(spec)
            return kept
        coming = self._coming.get(spec)
        if coming is None:
            if len(self._coming) >= MAX_WAITING:
                raise Overloaded(f"{len(self._coming)} grammars wait to be compiled; try again later")
            coming = asyncio.get_running_loop().run_in_executor(self._executor, self._compile_blocking, spec)
            self._coming[spec] = coming
            coming.add_done_callback(lambda done: self._arrived(spec, done))
        try:
            # Shielded: one who gives up does not take it from the others.
            return await asyncio.wait_for(asyncio.shield(coming), self._timeout_s)
        except TimeoutError:
            raise RequestError(
                f"compiling the {spec.kind} takes longer than {self._timeout_s:g} s", param="structured_output"
            ) from None

    def close(self) -> None:
        """Compile nothing more. A compilation under way is left to itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile_blocking(self, spec: GrammarSpec) -> CompiledGrammar:
        # Much of it holds the interpreter's lock, for which the event loop would wait 5 ms each time it awaited something.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(YIELD_S)
        try:
            return self._compiled(spec)
        finally:
            sys.setswitchinterval(interval)

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind == "json_schema":
            check_schema(_parsed(spec.source))
        if spec.kind == "regex":
            check_regex(spec.source)
        if spec.kind == "triggered":
            for schema in read_triggers(spec.source).schemas.values():
                check_schema(schema)
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend.compile_blocking(spec)

    def _arrived(self, spec: GrammarSpec, done: asyncio.Future[CompiledGrammar]) -> None:
        del self._coming[spec]
        if done.cancelled() or done.exception() is not None:
            return
        self.num_compiled += 1
        self._kept[spec] = done.result()
        while len(self._kept) > 1 and (len(self._kept) > MAX_GRAMMARS or self._num_bytes > MAX_BYTES):
            self._kept.popitem(last=False)

    @property
    def _num_bytes(self) -> int:
        return sum(grammar.num_bytes for grammar in self._kept.values())


def _parsed(source: str) -> object:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}", param="structured_output") from None
