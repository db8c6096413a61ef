"""Log-probabilities of /generate, in SGLang's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..engine.errors import RequestError
from ..engine.outputs import TokenLogprobs
from .bodies import MAX_LOGPROBS
from .logprob_fields import TokenTexts


class NativeLogprobs(BaseModel):
    """What is asked for. `logprob_start_len`: the position in the prompt from which on its tokens are scored too, -1 for
    none of them.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    return_text_in_logprobs: bool = False

    def asked(self) -> dict[str, Any]:
        """As arguments of SamplingParams. Raises: RequestError naming the field."""
        if not self.return_logprob:
            for name in ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise RequestError(f"{name} needs return_logprob to be true", param=name)
            return {}
        if self.logprob_start_len < 0:
            return {"logprobs": self.top_logprobs_num}
        return {
            "logprobs": self.top_logprobs_num,
            "prompt_logprobs": self.top_logprobs_num,
            "logprob_start": self.logprob_start_len,
        }


class NativeScores:
    """Log-probabilities as fields of `meta_info`: [logprob, id, text] a token, the text null unless asked for."""

    def __init__(self, asked: NativeLogprobs, texts: TokenTexts) -> None:
        self._asked = asked
        self._texts = texts

    def num_of_prompt(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are scored. Nothing comes before its first one."""
        start = self._asked.logprob_start_len
        return 0 if start < 0 else max(0, len(prompt) - max(1, start))

    def of_prompt(self, prompt: Sequence[int], scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The prompt's from the start that was asked for."""
        has_first = self._asked.logprob_start_len == 0
        first = [self._entry(None, prompt[0])] if has_first else []
        told: dict[str, Any] = {"input_token_logprobs": first + self._tokens(scores)}
        if self._asked.top_logprobs_num:
            told["input_top_logprobs"] = [None] * has_first + self._tops(scores)
        return told

    def of_output(self, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        told: dict[str, Any] = {"output_token_logprobs": self._tokens(scores)}
        if self._asked.top_logprobs_num:
            told["output_top_logprobs"] = self._tops(scores)
        return told

    def _tokens(self, scores: Sequence[TokenLogprobs]) -> list[list[Any]]:
        return [self._entry(each.logprob, each.token_id) for each in scores]

    def _tops(self, scores: Sequence[TokenLogprobs]) -> list[list[list[Any]]]:
        return [[self._entry(*pair) for pair in zip(each.top_logprobs, each.top_ids, strict=True)] for each in scores]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, self._texts.text(token_id) if self._asked.return_text_in_logprobs else None]
