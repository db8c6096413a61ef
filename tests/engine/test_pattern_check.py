"""Regular expressions that are not read alike everywhere are refused, and no other ones."""

from __future__ import annotations

import pytest

from slipstream.engine import pattern_check
from slipstream.engine.errors import RequestError
from slipstream.engine.pattern_check import check_regex, pattern_fault


@pytest.mark.parametrize(
    "pattern",
    [r"^a|b$", r"(?:cat|dog)( [a-f0-9]{1,3}){2}", r"[^\]\-a-z]+\.\$\^", r"\d{3}\s\w*?", r"\x41\u00e9\n\t", "(?i)ab", ".*", "",
     r"[a\[b]", r"(?P<year>\d{4})-[-+]", r"\p{L}"],
)  # fmt: skip
def test_what_all_read_alike_passes(pattern):
    check_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"(?=a)b", r"(?<!a)b", r"(a)\1", r"\bword\b", "a^b", "a$b", "(^a|b$)", r"\Aab\Z", "[[:alpha:]]", "[a[b]]", "[a&&b]",
     "[a--b]", "[a~~b]", "[]a]", "[^]a]", r"[\b]", r"\0", r"\h", r"\cA", r"\Q.\E", r"\<a", r"\é", "[]"],
)  # fmt: skip
def test_what_engines_do_not_read_alike_is_refused(pattern):
    with pytest.raises(RequestError, match="the regex cannot be enforced: it ") as caught:
        check_regex(pattern)
    assert caught.value.param == "structured_output"


def test_a_pattern_is_looked_through_once(monkeypatch):
    """A class without an end was looked for from each of its brackets, for half a minute."""
    work = []
    is_common = pattern_check._is_common
    monkeypatch.setattr(pattern_check, "_is_common", lambda part: [work.append(len(part)), is_common(part)][1])
    for pattern in ("[a" * 1000, "[^a" * 1000, "[\\]" * 1000, "a[" * 1000):
        work.clear()
        assert pattern_fault(pattern) is not None
        assert sum(work) == len(pattern) - pattern.index("[")
