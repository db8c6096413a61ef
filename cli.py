"""The `slipstream` command: serve, generate, chat, bench. The only place where everything is composed.

Nothing heavy is imported before the settings have been checked, so that `--help` and a wrong setting answer at once.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer

from . import __version__
from .engine.config import EngineConfig
from .engine.errors import ConfigError, EngineDead, RequestError, SlipstreamError
from .engine.sampling_params import SamplingParams
from .http.settings import FrontSettings

if TYPE_CHECKING:
    from .engine.engine import Engine

DEMO_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_TOKENS = 512
USAGE_EXIT = 2  # wrong settings, as argument parsers use it
SOFTWARE_EXIT = 70  # EX_SOFTWARE: a supervisor should start us again
BENCH_ROOM = Path(__file__).parent / "profiling"

app = typer.Typer(
    name="slipstream",
    help="An asyncio-native LLM inference engine: one process, one event loop, one GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut off long option names
)


class Flag(NamedTuple):
    """How one setting appears on the command line. `others` are the names that vLLM and SGLang give it."""

    help: str
    others: tuple[str, ...] = ()


ENGINE_FLAGS: Mapping[str, Flag] = {
    "model": Flag(
        "The demo model's name, a Hugging Face folder with safetensors, a .gguf file, or a hub id.",
        ("--model-path", "-m"),
    ),
    "load_format": Flag("'dummy' fills the weights with noise, to measure speed without a checkpoint."),
    "dtype": Flag("Of weights and KV; 'auto' takes what the checkpoint and the device prefer."),
    "max_model_len": Flag(
        "Tokens of prompt and output together; by default what the model allows.", ("--context-length",)
    ),
    "chat_template": Flag("A file with a Jinja template to use instead of the model's own."),
    "skip_tokenizer": Flag("Ids in, ids out: load no tokenizer.", ("--skip-tokenizer-init",)),
    "device": Flag("'auto' takes a GPU if one answers."),
    "cpu_threads": Flag("Threads of one operation on the CPU; by default all cores but one."),
    "kv_memory_fraction": Flag(
        "Share of the device's free memory that weights, graphs and KV may fill together.",
        ("--gpu-memory-utilization", "--mem-fraction-static"),
    ),
    "max_total_tokens": Flag("Size of the KV pool in tokens, instead of the fraction."),
    "page_size": Flag("Tokens a KV page; a power of two.", ("--block-size",)),
    "prefix_cache": Flag("Keep the KV of finished requests for prompts that begin alike."),
    "max_running_requests": Flag("Requests computed at the same time.", ("--max-num-seqs",)),
    "max_queued_requests": Flag("Requests that may wait; more are refused with 429."),
    "chunked_prefill_size": Flag("Tokens of one prompt computed in one step, at most."),
    "max_prefill_tokens": Flag("Tokens of all prompts computed in one step, at most."),
    "overlap": Flag("Plan the next step while the device computes this one."),
    "decode_attention": Flag("Attention of decode steps.", ("--decode-attention-backend",)),
    "prefill_attention": Flag("Attention of prompts.", ("--prefill-attention-backend",)),
    "decode_graph": Flag("CUDA graphs of decode steps."),
    "prefill_graph": Flag("CUDA graphs of prefill steps."),
    "debug_cuda_graph": Flag("Run a step as one eager break inside the graph machinery."),
    "row_invariant": Flag("Compute a row alike whatever shares its batch; slower."),
}
SAMPLING_FLAGS: Mapping[str, Flag] = {
    "max_tokens": Flag(
        f"Tokens to generate, at most; by default {DEFAULT_MAX_TOKENS}, or what fits.", ("--max-new-tokens",)
    ),
    "min_tokens": Flag("Tokens before the answer may end."),
    "temperature": Flag("0 is greedy."),
    "top_p": Flag("Draw from the likeliest tokens that hold this probability together."),
    "top_k": Flag("Draw from this many of the likeliest tokens; 0: from all."),
    "min_p": Flag("Leave out tokens below this share of the likeliest one's probability."),
    "seed": Flag("The same seed gives the same answer."),
    "stop": Flag("Text that ends the answer; may be given several times."),
    "stop_token_ids": Flag("Token ids that end the answer; may be given several times."),
    "ignore_eos": Flag("Go on past the model's end of text."),
}
FRONT_FLAGS: Mapping[str, Flag] = {
    "max_body_bytes": Flag("A larger request body gets 413."),
    "max_choices": Flag("Answers of one request: n times its prompts."),
    "body_timeout_s": Flag("Seconds for a request body to arrive in full."),
    "ping_interval_s": Flag("Seconds of silence on a stream after which a comment is sent."),
    "write_timeout_s": Flag("Seconds that a client which does not read may hold up one write."),
    "max_pending_chars": Flag("Characters kept for a client that reads slower than its tokens come."),
}
_DEFAULTS: Mapping[str, object] = {"model": DEMO_MODEL}
_AS_LISTS: Mapping[object, object] = {tuple[str, ...]: list[str], tuple[int, ...]: list[int]}


def takes(record: type, flags: Mapping[str, Flag], into: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each of `flags`; it receives them as one mapping, the argument `into`.

    Name, type and default of an option are those of the record's field: there is no second list to keep in step.
    """
    types = get_type_hints(record)
    defaults = {field.name: field.default for field in fields(record) if field.default is not MISSING} | dict(_DEFAULTS)

    def parameter(name: str, flag: Flag) -> inspect.Parameter:
        option = typer.Option(*_spellings(name, types[name] is bool), *flag.others, help=flag.help)
        kind = Annotated[_AS_LISTS.get(types[name], types[name]), option]  # type: ignore[valid-type]  # made at run time
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**values: object) -> None:
            command(**{into: {name: values.pop(name) for name in flags}}, **values)

        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != into]
        parameters = [*own, *(parameter(name, flag) for name, flag in flags.items())]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapper

    return decorate


def _spellings(name: str, is_switch: bool) -> tuple[str, ...]:
    flag = "--" + name.replace("_", "-")
    return (f"{flag}/--no-{flag.removeprefix('--')}",) if is_switch else (flag,)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def _slipstream(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
@takes(EngineConfig, ENGINE_FLAGS, into="settings")
@takes(FrontSettings, FRONT_FLAGS, into="front")
def serve(
    *,
    settings: Mapping[str, object],
    front: Mapping[str, object],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str], typer.Option(help="The name in /v1/models; give it again for aliases. By default the model's own.")
    ] = [],  # noqa: B006  # typer copies it
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="What clients must send as their bearer token.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_ADMIN_KEY", help="Opens the routes that act on others' requests.")
    ] = None,
    allowed_origins: Annotated[list[str], typer.Option(help="Web pages that may call: CORS; may be given again.")] = [],  # noqa: B006
) -> None:
    """Serve a model over HTTP, with the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models."""
    config = EngineConfig.from_settings(settings)
    limits = FrontSettings(**front)  # type: ignore[arg-type]  # checked inside
    from .engine.engine import Engine
    from .http.app import create_app
    from .http.server import serve as serve_app

    engine = Engine(config)
    app = create_app(
        engine,
        served_model_name=served_model_name,
        api_key=api_key,
        admin_key=admin_key,
        cors_origins=allowed_origins,
        settings=limits,
    )
    _run(serve_app(app, engine, host=host, port=port))


@app.command()
@takes(EngineConfig, ENGINE_FLAGS, into="settings")
@takes(SamplingParams, SAMPLING_FLAGS, into="sampling")
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to go on from; '-' reads it from standard input.")],
    settings: Mapping[str, object],
    sampling: Mapping[str, object],
) -> None:
    """Go on from a prompt, printing the text as it comes."""
    config, params = _with_tokenizer(settings), _sampling_params(sampling)
    _run(_generate(config, sys.stdin.read() if prompt == "-" else prompt, params))


async def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> None:
    from .engine.engine import Engine

    async with Engine(config) as engine:
        await _print_stream(engine, await engine.encode(prompt), params, answer=[])


@app.command()
@takes(EngineConfig, ENGINE_FLAGS, into="settings")
@takes(SamplingParams, SAMPLING_FLAGS, into="sampling")
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    settings: Mapping[str, object],
    sampling: Mapping[str, object],
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends it."""
    config, params = _with_tokenizer(settings), _sampling_params(sampling)
    from .engine.engine import Engine

    engine = Engine(config)
    # One loop, run in turns: while the user types it stands still, and Ctrl-C cancels only what the turn runs.
    with _runner() as runner:
        try:
            runner.run(engine.start())
            _converse(runner, engine, params, system)
        finally:
            runner.run(engine.aclose())


def _converse(runner: asyncio.Runner, engine: Engine, params: SamplingParams, system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _ask()) not in (None, "/exit"):
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            answer: list[str] = []
            try:
                runner.run(_answer(engine, messages, params, answer))
            except KeyboardInterrupt:
                typer.secho(" [stopped]", dim=True)
            except RequestError as error:
                typer.secho(f"{error} (/reset forgets the conversation)", fg="red", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": "".join(answer)})


def _ask() -> str | None:
    """The next line of the user; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


async def _answer(
    engine: Engine, messages: Sequence[Mapping[str, str]], params: SamplingParams, answer: list[str]
) -> None:
    ids = await engine.encode(render_chat(engine, messages), add_special_tokens=False)
    await _print_stream(engine, ids, params, answer)


def render_chat(engine: Engine, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as the model's own prompt. Raises: ConfigError if the model has no chat template."""
    if engine.chat_template is None:
        raise ConfigError("this model has no chat template; give one", field="chat_template")
    return engine.chat_template.render(messages)


async def _print_stream(engine: Engine, ids: Sequence[int], params: SamplingParams, answer: list[str]) -> None:
    """Print the text as it comes; collect it in `answer`, so that it is there even if printing is stopped."""
    if params.max_tokens is None:
        params = replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, engine.limits.max_model_len - len(ids))))
    async with engine.generate(ids, params) as stream:
        async for delta in stream:
            answer.append(delta.text)
            print(delta.text, end="", flush=True)
    print()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(help="What to measure.", show_default=False)] = "",
) -> None:
    """Measure. `slipstream bench` lists what there is, `slipstream bench SUITE --help` explains one."""
    suites = _bench_suites()
    if suite not in suites:
        wanted = suite not in ("", "-h", "--help")
        typer.echo("Usage: slipstream bench SUITE [OPTIONS]\n\nSuites:", err=wanted)
        for name in suites:
            typer.echo(f"  {name:8}  {_first_line(f'bench_{name}')}", err=wanted)
        raise typer.Exit(USAGE_EXIT if wanted else 0)
    program = importlib.import_module(f".profiling.bench_{suite}", __package__)
    program.main(context.args)


def _bench_suites() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules([str(BENCH_ROOM)]))
    return sorted(name.removeprefix("bench_") for name in names if name.startswith("bench_"))


def _first_line(module: str) -> str:
    """What a measuring program says it does, without importing it."""
    text = ast.get_docstring(ast.parse((BENCH_ROOM / f"{module}.py").read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def _sampling_params(sampling: Mapping[str, object]) -> SamplingParams:
    try:
        return SamplingParams(**sampling)  # type: ignore[arg-type]  # checked inside
    except RequestError as error:  # here the caller is the operator
        raise ConfigError(str(error), field=error.param) from None


def _with_tokenizer(settings: Mapping[str, object]) -> EngineConfig:
    config = EngineConfig.from_settings(settings)
    if config.skip_tokenizer:
        raise ConfigError("text needs a tokenizer", field="skip_tokenizer")
    return config


def _runner() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _run(work: Coroutine[Any, Any, None]) -> None:
    with _runner() as runner:
        runner.run(work)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 wrong settings, 70 the engine died, 130 interrupted."""
    try:
        app(args=arguments, prog_name="slipstream")
    except ConfigError as error:
        _fail(_as_flag(str(error), error.field), USAGE_EXIT)
    except RequestError as error:
        _fail(str(error), USAGE_EXIT)
    except EngineDead as error:
        _fail(str(error), SOFTWARE_EXIT)
    except SlipstreamError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def _as_flag(message: str, field: str | None) -> str:
    """The message with the setting spelled as the user would: `--page-size` for `page_size`."""
    if field is None:
        return message
    flag = "--" + field.replace("_", "-")
    named = re.sub(rf"\b{field}\b", flag, message) if "_" in field or message.startswith(field) else message
    return named if flag in named else f"{flag}: {named}"


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(f"slipstream: {message}", err=True, fg="red")
    raise SystemExit(code)
