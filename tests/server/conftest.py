from __future__ import annotations

import pytest

from freehold.server.child import running_server


@pytest.fixture(scope="session")
def server():
    """A real server with the bundled model, auditing after every step -> its URL."""
    flags = ("--audit-interval", "1", "--max-running-requests", "16", "--num-pages", "400", "--allow-any-model")
    with running_server(*flags) as url:
        yield url


@pytest.fixture(scope="session")
def url(server):
    return server
