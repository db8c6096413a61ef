"""The `slipstream` command: serve, generate, chat, bench. The only place where everything is composed.

Nothing heavy is imported before the settings have been checked, so that `--help` and a wrong setting answer at once.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import logging
import pkgutil
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from . import __version__
from .cli_settings import DEFAULT_MAX_TOKENS, ENGINE_FLAGS, FRONT_FLAGS, SAMPLING_FLAGS, takes, with_flag
from .engine.config import EngineConfig
from .engine.errors import ConfigError, EngineDead, RequestError, SlipstreamError
from .engine.sampling_params import SamplingParams
from .http.settings import FrontSettings

if TYPE_CHECKING:
    from .engine.engine import Engine

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
    uds: Annotated[str | None, typer.Option(help="Listen on this Unix socket instead.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Serve over TLS with this certificate.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="The certificate's key.")] = None,
    root_path: Annotated[str, typer.Option(help="The path under which a proxy serves this.")] = "",
    served_model_name: Annotated[
        list[str], typer.Option(help="The name in /v1/models; give it again for aliases. By default --model.")
    ] = [],  # noqa: B006  # typer copies it
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="What clients must send as their bearer token.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_ADMIN_KEY", help="Opens the routes that act on others' requests.")
    ] = None,
    allowed_origins: Annotated[list[str], typer.Option(help="Web pages that may call: CORS; may be given again.")] = [],  # noqa: B006
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="Trace each request to this collector.")] = None,
    drain_timeout_s: Annotated[float, typer.Option(min=0, help="Seconds that live requests get after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model over HTTP, with the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models."""
    config = EngineConfig.from_settings(settings)
    limits = FrontSettings(**front)  # type: ignore[arg-type]  # checked inside
    from .engine.engine import Engine
    from .http.app import create_app
    from .http.server import serve as serve_app
    from .http.text_process import TextProcess
    from .http.tracing import RequestSpans
    from .profiling.recorder import Recorder

    engine = Engine(config)
    names = served_model_name or [config.model]
    text_process = TextProcess()
    app = create_app(
        engine,
        served_model_name=names,
        api_key=api_key,
        admin_key=admin_key,
        cors_origins=allowed_origins,
        settings=limits,
        text_process=text_process,
        recorder=Recorder(engine),
        spans=RequestSpans.exported_to(otlp_traces_endpoint) if otlp_traces_endpoint else None,
    )
    typer.echo(f"slipstream: loading {config.model}")
    _log_to_stderr()
    with _runner() as runner:
        code = runner.run(
            serve_app(
                app,
                engine,
                host=host,
                port=port,
                uds=uds,
                ssl_certfile=ssl_certfile,
                ssl_keyfile=ssl_keyfile,
                root_path=root_path,
                write_timeout_s=limits.write_timeout_s,
                drain_timeout_s=drain_timeout_s,
                text_process=text_process,
                on_ready=lambda url: _say_ready(
                    url, names[0], needs_key=api_key is not None, memory_table=engine.limits.memory_table
                ),
            )
        )
    raise typer.Exit(code)


def _log_to_stderr() -> None:
    """A line a request, with its id; what other libraries log is theirs to show."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    log = logging.getLogger("slipstream")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _say_ready(url: str, name: str, *, needs_key: bool, memory_table: str) -> None:
    """Print what the start took, and a curl line that can be pasted into another terminal and streams."""
    if memory_table:
        typer.echo(memory_table)
    body = {"model": name, "stream": True, "messages": [{"role": "user", "content": "Tell me about the sea."}]}
    socket = url.removeprefix("unix:")
    where = url if socket == url else f"--unix-socket {shlex.quote(socket)} http://localhost"
    key = ' -H "Authorization: Bearer $SLIPSTREAM_API_KEY"' if needs_key else ""
    typer.echo(f"slipstream: {name} is ready on {url} (Ctrl-C stops it). In another terminal:\n")
    typer.echo(f"  curl -N {where}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    typer.echo(f"    -d {shlex.quote(json.dumps(body))}\n")
    sys.stdout.flush()


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
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:  # said before the model is loaded
        raise RequestError("the prompt is empty", param="prompt")
    with _runner() as runner:
        runner.run(_generate(config, text, params))


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
    """Talk with a model. Ctrl-C stops an answer; /help, /reset and /exit are commands."""
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
        elif line.startswith("/") and line[1:].isalpha():  # /help, or what is no command and no message
            typer.echo("/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer")
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


@app.command()
@takes(EngineConfig, ENGINE_FLAGS, into="settings")
def profile(
    *,
    settings: Mapping[str, object],
    rows: Annotated[int, typer.Option(min=1, help="Requests that decode at the same time.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=3, max=2000, help="Steps to record.")] = 50,
    both_depths: Annotated[bool, typer.Option("--both-depths", help="Also with --no-overlap, beside it.")] = False,
    scripted: Annotated[bool, typer.Option("--scripted", help="No model: a device that only keeps time.")] = False,
    step_ms: Annotated[float, typer.Option(min=0.01, help="Of the scripted device: its forward.")] = 5.0,
    launch_ms: Annotated[float, typer.Option(min=0, help="Of the scripted device: the host's launch.")] = 1.0,
    url: Annotated[
        str | None, typer.Option(help="Record a running server instead, under the load that it has.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_ADMIN_KEY", help="That server's --admin-key.")
    ] = None,
    wait_s: Annotated[float, typer.Option(min=0, max=600, help="How long that server's steps may take.")] = 60.0,
    kernels: Annotated[bool, typer.Option(help="On CUDA: every kernel, not only when each step ran.")] = True,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Run under nsys: ranges, and a capture range (nsys.sh).")
    ] = False,
    torch_trace: Annotated[
        bool, typer.Option("--torch-trace", help="Also keep OUT.torch.json.gz, torch's own.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where to write: OUT.html, OUT.json, OUT.trace.json.gz.")] = Path("profile"),
) -> None:
    """Is the device waiting for the host? Record some steps, print the overlap report, write timeline and trace."""
    from .profiling import profile_run as run

    load = run.Load(rows=rows, prompt_tokens=prompt_tokens, steps=steps)
    run.make_folder(out)
    if url is not None:
        trace = out.with_name(f"{out.name}.server.trace.json.gz")
        timelines = [run.record_server_blocking(url, admin_key, steps=steps, wait_s=wait_s, into=trace)]
    else:
        make = run.engine_maker(settings, load, scripted=scripted, step_ms=step_ms, launch_ms=launch_ms)
        depths = (1, 0) if both_depths else (int(bool(settings["overlap"])),)
        with _runner() as runner:
            kept = out if torch_trace else None
            each = run.record_each(make, depths, load, kernels=kernels, nvtx=nvtx, torch_traces=kept)
            timelines = runner.run(each)
    typer.echo(run.reports_text(run.write_all(timelines, out)))
    typer.echo(f"slipstream: {out}.html shows the timeline; the traces beside it open in ui.perfetto.dev")


@app.command()
def overlap_report(
    *,
    files: Annotated[list[Path], typer.Argument(help="Traces: torch-profiler, Nsight Systems (SQLite), or ours.")],
    step_range: Annotated[str | None, typer.Option(help="Ranges whose name matches this pattern are steps.")] = None,
    burst_gap_us: Annotated[
        float, typer.Option(min=0.001, help="Without steps: an idle time that ends a burst.")
    ] = 20.0,
    stall_ms: Annotated[float | None, typer.Option(min=0, help="From when on the loop counts as stalled.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write OUT.html, OUT.json and OUT.trace.json.gz.")] = None,
) -> None:
    """Report on traces that were recorded before, by whatever engine: step, idle, exposed and hidden host time, stalls."""
    from .profiling import profile_run as run
    from .profiling.read_trace import read_traces

    options = run.ReportOptions(step_range=step_range, burst_gap_us=burst_gap_us, stall_ms=stall_ms)
    timelines = read_traces(files)
    reports = run.reports_of(timelines, options) if out is None else run.write_all(timelines, out, options)
    typer.echo(run.reports_text(reports))


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
    try:
        program = importlib.import_module(f".profiling.bench_{suite}", __package__)
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench {suite} needs {error.name}, which is not installed") from error
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


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 wrong settings, 70 the engine died, 130 interrupted."""
    try:
        app(args=arguments, prog_name="slipstream")
    except ConfigError as error:
        _fail(with_flag(str(error), error.field), USAGE_EXIT)
    except RequestError as error:
        _fail(str(error), USAGE_EXIT)
    except EngineDead as error:
        _fail(str(error), SOFTWARE_EXIT)
    except SlipstreamError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(f"slipstream: {message}", err=True, fg="red")
    raise SystemExit(code)
