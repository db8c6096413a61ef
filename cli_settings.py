"""The settings of the engine, of sampling and of the HTTP front as options of the command line."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, NamedTuple, get_type_hints

import typer

DEMO_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_TOKENS = 512


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
    "grammar_backend": Flag(
        "Of structured output; a library by its name serves all of it, 'auto' only what our automata do not read."
    ),
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
    "eviction_policy": Flag("Which cached prefix goes first.", ("--radix-eviction-policy",)),
    "max_running_requests": Flag("Requests computed at the same time.", ("--max-num-seqs",)),
    "max_queued_requests": Flag("Requests that may wait; more are refused with 429."),
    "max_queued_tokens": Flag("Tokens of all waiting requests together; by default without a limit."),
    "schedule_policy": Flag(
        "Who goes first: by arrival (fcfs), the longest cached prefix (lpm), the shortest prefill, or by priority.",
        ("--scheduling-policy",),
    ),
    "policy_window": Flag("So many of the oldest waiting requests are ranked by lpm and shortest-prefill."),
    "priority_preemption": Flag(
        "Send lower priorities back where a higher one lacks room (--schedule-policy priority)."
    ),
    "itl_budget_ms": Flag(
        "Milliseconds between two tokens of an answer that prompts in the same step may cost; by default no limit."
    ),
    "chunked_prefill_size": Flag("Prompt tokens computed in one step, at most; longer prompts are cut."),
    "max_prefill_tokens": Flag("Tokens of one step, those of decoding requests included, at most."),
    "overlap": Flag("Plan the next step while the device computes this one."),
    "step_timeout_s": Flag("Seconds after which a step that has not come back is stuck, and the engine dead."),
    "decode_attention": Flag("Attention of decode steps.", ("--decode-attention-backend",)),
    "prefill_attention": Flag("Attention of prompts.", ("--prefill-attention-backend",)),
    "decode_graph": Flag("CUDA graphs of decode steps."),
    "prefill_graph": Flag("CUDA graphs of prefill steps."),
    "hidden_states": Flag("What CUDA graphs give of hidden states; steps of requests that ask for more run without."),
    "debug_canary": Flag("Poison freed KV pages, so that whoever reads one shows it; slow."),
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
    "stuck_after_s": Flag("Seconds without the end of a step, while requests run, after which /health says so."),
    "max_pending_chars": Flag("Characters kept for a client that reads slower than its tokens come."),
    "stream_interval": Flag(
        "Tokens a frame; 'auto' is one as long as the loop has time for that, then up to 8 or 50 ms."
    ),
    "log_prompts": Flag("Show the beginning of each prompt in the log of requests."),
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


def with_flag(message: str, field: str | None) -> str:
    """The message with the setting spelled as the user would: `--page-size` for `page_size`."""
    if field is None:
        return message
    flag = "--" + field.replace("_", "-")
    # A field that is a plain word, such as device, may occur later in the message as that word.
    named = re.sub(rf"\b{field}\b" if "_" in field else rf"\A{field}\b", flag, message)
    return named if flag in named else f"{flag}: {named}"
