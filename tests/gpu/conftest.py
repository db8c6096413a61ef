"""What the tests on the card have in common: a mode that a test leaves behind must not fail the tests after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

_OF_NO_CONCERN = (
    # torch says that the mode which forbids waiting does not see every wait; it is asked for here.
    "ignore:Synchronization debug mode",
    "ignore:Warning. Profiler clears events",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            for warning in _OF_NO_CONCERN:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
