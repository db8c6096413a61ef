"""Large requests beside streams: what is sent, and that it is answered while the streams run."""

from __future__ import annotations

import argparse

import orjson
import pytest
import uvloop

from slipstream.engine.text.chat_template import ChatTemplate
from slipstream.http.intake import INLINE_BYTES, INLINE_MAX_BYTES
from slipstream.profiling.bench_http import MODEL_VOCAB, made_up_tokenizer
from slipstream.profiling.bench_intake import NUM_MESSAGES, TEMPLATE, large_requests, one_row

KIND = "chat of 2,000"


def test_every_kind_is_as_large_as_its_name_says_and_none_stays_on_the_loop() -> None:
    tokenizer = made_up_tokenizer(MODEL_VOCAB)
    kinds = {kind: (path, orjson.loads(body)) for kind, (path, body) in large_requests(tokenizer).items()}
    assert all(len(orjson.dumps(body)) > INLINE_BYTES for _, body in kinds.values())
    assert 99_900 < len(tokenizer.encode(kinds["text of 100k tokens"][1]["prompt"])) < 100_100
    assert len(kinds["100k ids"][1]["prompt"]) == 100_000
    assert len(kinds[KIND][1]["messages"]) == NUM_MESSAGES
    assert len(orjson.dumps(kinds["body of 3 MiB"][1])) > INLINE_MAX_BYTES
    assert "1999: The" in ChatTemplate(TEMPLATE).render(kinds[KIND][1]["messages"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inline", [False, True])
def test_large_requests_are_answered_while_the_streams_run(inline: bool) -> None:
    options = argparse.Namespace(streams=2, senders=1, step_ms=2.0, tokens=100, inline=inline)
    tokenizer = made_up_tokenizer(MODEL_VOCAB)
    row = uvloop.run(one_row(options, tokenizer, large_requests(tokenizer)[KIND]))
    assert (row["unfinished"], row["refused"]) == (0, 0)
    assert row["answered"] >= 1
    assert row["itl_ms_p50"] >= 1
    assert row["answer_ms_p50"] > 0
