"""A plugin of pytest: lines belong to the test during which they run, also where Hypothesis or unittest calls it."""

from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measuring = coverage.Coverage.current()
    assert measuring is not None
    measuring.switch_context(item.nodeid.partition("[")[0])
    yield
    measuring.switch_context("")
