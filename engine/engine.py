"""The Engine: what a program holds. Opens the model, checks requests, runs the step loop under one supervisor task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..streams.marks import MarkSwitch
from .cache.radix_node import CacheEvent
from .config import EngineConfig
from .engine_state import EngineState as EngineState
from .errors import EngineDead, MisuseError, Overloaded, RequestError
from .grammar_session import CompiledGrammar
from .grammar_store import GrammarStore
from .opening import make_scheduler, open_grammars, open_model
from .outputs import Completion, Failed, Sink
from .request import Request
from .request_builder import RequestBuilder, checked_deadline, checked_params
from .request_handle import RequestHandle as RequestHandle
from .sampling_params import SamplingParams
from .scheduler.scheduler import Scheduler, SchedulerStats, Update
from .step_loop import StepLoop, deliver
from .text.chat_template import ChatTemplate
from .text.tokenization import TextTokenizer
from .token_stream import TokenStream
from .worker import MarksLanes, Worker, WorkerLimits

STOP_TIMEOUT_S = 5.0  # how long closing waits for the step in flight before it gives the step up


class Engine:
    """One model on one device. `async with Engine(model=…) as engine: async for delta in engine.generate(…): …`

    Everything here is called on the event loop that started the engine.
    """

    def __init__(self, config: EngineConfig | None = None, /, **settings: object) -> None:
        """`config`, or its settings by name. Raises: ConfigError naming the field."""
        self.config = EngineConfig.given(config, settings)
        self.tokenizer: TextTokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self._eos_ids: frozenset[int] = frozenset()  # of the model that was opened
        self.model_name = self.config.model
        self.state = EngineState.NEW
        self.has_more_coming: Callable[[], bool] = lambda: False  # whether who takes in requests has a burst at hand
        self.marks = MarkSwitch()  # switched on, they record what the loop and its lanes do when
        self._watcher: Callable[[Request], None] | None = None
        self.proves_laws = False  # check every law of ownership after every step: for tests
        self._worker: Worker | None = None
        self._scheduler: Scheduler | None = None
        self._builder: RequestBuilder | None = None
        self._grammars: GrammarStore | None = None
        self._loop: StepLoop | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._death: EngineDead | None = None
        self.num_aborted = 0  # requests ended by `abort`

    @classmethod
    def on(
        cls,
        worker: Worker,
        *,
        tokenizer: TextTokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        **settings: object,
    ) -> Engine:
        """An engine over a worker that the caller made: another device, or a script."""
        engine = cls(EngineConfig.from_settings({"model": "custom-worker", **settings}))
        engine._worker = worker
        if isinstance(worker, MarksLanes):
            worker.marks = engine.marks
        engine.tokenizer = tokenizer
        engine.chat_template = chat_template or (tokenizer.chat_template if tokenizer is not None else None)
        return engine

    # ---- life

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load, build, warm up. Raises: ConfigError; the engine is closed then."""
        if self.state is not EngineState.NEW:
            raise MisuseError(f"an engine starts once; this one is {self.state.value}")
        self._event_loop = asyncio.get_running_loop()
        self.state = EngineState.STARTING
        try:
            if self._worker is None:
                opened = await open_model(self.config, self.marks)
                self._worker, self.model_name, self._eos_ids = opened.worker, opened.name, opened.eos_ids
                self.tokenizer, self.chat_template = opened.tokenizer, opened.chat_template
            limits = await self._worker.start()
            if self.state is not EngineState.STARTING:
                raise EngineDead("the engine was closed while it was starting")
            self._run_on(self._worker, limits)
        except BaseException:
            await self.aclose()
            raise
        self.state = EngineState.READY

    def _run_on(self, worker: Worker, limits: WorkerLimits) -> None:
        """Make what stands on a started worker, and set it going."""
        self._scheduler = make_scheduler(self.config, limits, worker)
        self._builder = RequestBuilder(limits, self.tokenizer, self._eos_ids)
        self._grammars = open_grammars(self.config, self.tokenizer, limits)
        self._loop = StepLoop(
            self._scheduler,
            worker,
            overlap=self.config.overlap,
            step_timeout_s=self.config.step_timeout_s,
            marks=self.marks,
            after_commit=self._scheduler.check if self.proves_laws else None,
            has_more_coming=lambda: self.has_more_coming(),
        )
        self._supervisor = asyncio.create_task(self._supervise(self._loop), name="slipstream-engine")

    def request_drain(self) -> None:
        """Take no new requests from now on; those that are here go on."""
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until all have ended; after `timeout_s` the rest end with Overloaded."""
        self._check_event_loop()
        self.request_drain()
        if self._loop is None or self._scheduler is None:
            return
        try:
            await asyncio.wait_for(self._loop.idle.wait(), timeout_s)
        except TimeoutError:
            error = Overloaded("the server is shutting down", draining=True)
            for request in list(self._scheduler.requests()):
                cancelled = self._scheduler.abort(request)
                if cancelled is not None:
                    deliver([Update(request, (), "", Failed(error=error, usage=cancelled.usage))])

    async def aclose(self) -> None:
        """End every request as cancelled, stop the loop and the worker. Returns in bounded time, from any task."""
        self._check_event_loop()
        if self.state is not EngineState.DEAD:
            self.state = EngineState.CLOSED
        if self._scheduler is not None:
            for request in list(self._scheduler.requests()):
                self._abort(request)
        if self._loop is not None:
            self._loop.close()
        try:
            if self._supervisor is not None:
                await asyncio.wait({self._supervisor}, timeout=STOP_TIMEOUT_S)
        finally:
            await self._stop()

    async def _stop(self) -> None:
        if self._supervisor is not None and not self._supervisor.done():
            self._supervisor.cancel()  # a step is stuck: its wait is given up, and with it the engine
            await asyncio.wait({self._supervisor})
        if self._grammars is not None:
            self._grammars.close()
        if self._worker is not None:
            await self._worker.aclose()

    async def _supervise(self, loop: StepLoop) -> None:
        """Run the loop; its death reaches every consumer and is kept for those who come later."""
        try:
            await loop.run()
        except asyncio.CancelledError:
            self._die(EngineDead("the engine was stopped while a step was running"))
            raise
        except Exception as error:
            self._die(error)

    def _die(self, error: Exception) -> None:
        death = error if isinstance(error, EngineDead) else EngineDead(f"the engine has died: {error}")
        if death is not error:
            death.__cause__ = error
        self._death = death
        if self.state is not EngineState.CLOSED:
            self.state = EngineState.DEAD
        if self._scheduler is not None:
            deliver(self._scheduler.abort_all(death))

    # ---- pauses and the prefix cache

    async def pause(self) -> None:
        """Start no more steps until `resume`; requests stay, and may come. Returns when nothing is in flight."""
        await self._started_loop().pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._started_loop().resume()

    @property
    def is_paused(self) -> bool:
        return self._loop is not None and self._loop.is_paused

    def flush_cache(self) -> None:
        """Drop every cached prefix, while idle or paused; requests that have begun are computed anew after `resume`.

        Raises: MisuseError while steps run.
        """
        if not self._started_loop().still.is_set():
            raise MisuseError("flush_cache() while steps run: wait until the engine is idle, or pause() it")
        self._started().flush_cache()

    def subscribe_cache(self, listener: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `listener` from the event loop, in order, for each prefix cached or dropped, until the result is called."""
        loop = asyncio.get_running_loop()

        def send(event: CacheEvent) -> None:
            loop.call_soon(listener, event)

        return self._started().memory.tree.subscribe(send)

    # ---- what it knows

    @property
    def limits(self) -> WorkerLimits:
        """What the worker can hold. Raises: MisuseError before the engine has started."""
        return self._started().limits

    @property
    def stats(self) -> SchedulerStats:
        """Counts of now and since the start. Raises: MisuseError before the engine has started."""
        return self._started().stats

    @property
    def death(self) -> EngineDead | None:
        """Why the engine is dead, if it is."""
        return self._death

    @property
    def num_settled_steps(self) -> int:
        """Steps committed or failed so far; while requests run it grows, or the engine is stuck."""
        return self._loop.num_settled if self._loop is not None else 0

    @property
    def num_forwards(self) -> Mapping[str, int]:
        """Forwards by the runner that computed them, where the worker has several: graph hits, and what missed them."""
        return getattr(self._worker, "num_forwards", {})

    def watch(self, watcher: Callable[[Request], None] | None) -> None:
        """Show `watcher` each request, the live ones at once, the others as they are submitted; None ends that."""
        self._watcher = watcher
        if watcher is not None:
            for request in list(self._started().requests()):
                watcher(request)

    # ---- requests

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> TokenStream:
        """Stream a request's deltas. A text prompt is tokenised as it stands (no chat template). Options as in `submit`."""
        return self._stream(
            prompt, params, whole=False, request_id=request_id, priority=priority, deadline_s=deadline_s
        )

    async def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Completion:
        """The whole answer, without a wake for each token. Raises as `generate` does; cancelling it aborts the request."""
        async with self._stream(
            prompt, params, whole=True, request_id=request_id, priority=priority, deadline_s=deadline_s
        ) as stream:
            return Completion.of([delta async for delta in stream])

    def _stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None, *, whole: bool, **options: Any
    ) -> TokenStream:
        async def submit(sink: Sink) -> RequestHandle:
            self._accepting()  # before a long text is encoded for nothing
            checked = checked_params(params)
            ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
            grammar = await self.compile_grammar(checked)
            return self.submit(ids, checked, sink, grammar=grammar, **options)

        return TokenStream(submit, whole=whole)

    async def compile_grammar(self, params: SamplingParams | None) -> CompiledGrammar | None:
        """What `submit` needs beside `params` that ask for structured output; compiled off the loop, kept for the next.

        Raises: RequestError for what cannot be enforced, naming the keyword of a schema by its path; Overloaded.
        """
        spec = None if params is None else params.structured_output
        return None if spec is None or self._grammars is None else await self._grammars.get(spec)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; long texts are encoded off the loop. Raises: RequestError."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids", param="prompt")
        return await self.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None,
        sink: Sink,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> RequestHandle:
        """Check and queue a request in one go; nothing is registered if it raises.

        `salt`: requests share cached prefixes only with the same salt. `priority`: higher goes first under that policy.
        `deadline_s`: seconds from now; a request that has begun by then finishes with what it has, another one fails.
        Raises: RequestError naming the field, Overloaded, EngineDead.
        """
        scheduler = self._accepting()
        assert self._builder is not None
        loop = self._started_loop()
        request = self._builder.build(
            prompt_ids,
            checked_params(params),
            sink,
            request_id=request_id,
            salt=salt,
            priority=priority,
            deadline=None if deadline_s is None else loop.clock() + checked_deadline(deadline_s),
            grammar=grammar,
        )
        scheduler.add(request)
        if self._watcher is not None:
            self._watcher(request)
        loop.wake()
        return RequestHandle(request, self._abort)

    def abort(self, request_id: str) -> int:
        """Abort every live request with this id; return how many there were."""
        self._check_event_loop()
        found = [request for request in self._started().requests() if request.request_id == request_id]
        for request in found:
            self._abort(request)
        return len(found)

    def _abort(self, request: Request) -> None:
        if self._scheduler is None or request.has_ended:
            return
        self._check_event_loop()
        end = self._scheduler.abort(request)
        if end is not None:
            self.num_aborted += 1
            deliver([Update(request, (), "", end)])
            if self._loop is not None:
                self._loop.wake()

    def _check_event_loop(self) -> None:
        """Raises: MisuseError on another event loop or thread than the engine's, where nothing here is safe."""
        if self._event_loop is not None and asyncio._get_running_loop() is not self._event_loop:
            raise MisuseError("an engine is used on the event loop that started it, and on no other loop or thread")

    def _accepting(self) -> Scheduler:
        self._check_event_loop()
        if self._death is not None:
            raise EngineDead(str(self._death)) from self._death
        if self.state is EngineState.DRAINING:
            raise Overloaded("the server is shutting down", draining=True)
        if self.state is EngineState.CLOSED:
            raise EngineDead("the engine is closed")
        if self.state is not EngineState.READY:
            raise Overloaded("the engine is still starting")
        return self._started()

    def _started_loop(self) -> StepLoop:
        self._check_event_loop()
        if self._loop is None:
            raise MisuseError("the engine has not started")
        return self._loop

    def _started(self) -> Scheduler:
        if self._scheduler is None:
            raise MisuseError("the engine has not started")
        return self._scheduler
