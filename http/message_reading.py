"""How the texts of a chat's answers are read, and what they are held to so that they can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..engine.grammar_session import GrammarSpec
from ..engine.sampling_params import SamplingParams
from .front import Front
from .message_parser import MARKERS, CallForm, MessageParser
from .tools import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReading:
    """Of all choices of one request. `reasons`: <think> … </think> is set apart; `is_thinking`: the prompt has opened it."""

    form: CallForm | None
    names: frozenset[str]
    reasons: bool
    is_thinking: bool
    grammar: GrammarSpec | None  # what the calls in a text are held to
    args_mark: bool  # as `MessageParser` has it
    shows_marker: bool  # it is a special token, which would be left out of the text

    @property
    def is_plain(self) -> bool:
        """Texts are content as they stand."""
        return self.form is None and not self.reasons

    def parser(self) -> MessageParser:
        return MessageParser(
            self.form,
            names=self.names,
            reasons=self.reasons,
            is_thinking=self.is_thinking,
            args_mark=self.args_mark,
        )

    def held(self, params: SamplingParams) -> SamplingParams:
        """`params` under which the texts can be read so."""
        if self.shows_marker:
            params = replace(params, skip_special_tokens=False)
        return params if self.grammar is None else replace(params, structured_output=self.grammar)


def reading_of(
    front: Front, tools: Tools | None, prompt_ids: Sequence[int], *, has_format: bool, separates: bool
) -> MessageReading:
    """`has_format`: the texts are held to something already; `separates`: reasoning is to be set apart.

    Raises: RequestError for tools that this model's template does not know.
    """
    tokenizer, template = front.engine.tokenizer, front.engine.chat_template
    source = None if template is None else template.source
    form = None if tools is None else tools.form(source)
    # A text that is constrained from its start has no reasoning before it.
    is_free = not has_format and (tools is None or not tools.must_call)
    reasons = is_free and separates and source is not None and "</think>" in source
    ending = tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False) if reasons and tokenizer is not None else ""
    is_thinking = ending.rstrip().endswith("<think>")
    grammar = None
    if tools is not None and not has_format:
        grammar = tools.grammar(form, source, reasons=reasons, is_thinking=is_thinking)
    marker = None if form is None else MARKERS.get(form)
    return MessageReading(
        form=form,
        names=frozenset() if tools is None else tools.names,
        reasons=reasons,
        is_thinking=is_thinking,
        grammar=grammar,
        args_mark=grammar is not None and form is CallForm.MISTRAL and "[ARGS]" in (source or ""),
        shows_marker=marker is not None
        and tokenizer is not None
        and tokenizer.token_id(marker) in tokenizer.special_ids,
    )
