from __future__ import annotations

import openai
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


@pytest.fixture
def client(server):
    """OpenAI's, which asks once."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client
