"""Bodies made from the server's own schema: whatever they are, they are no internal error."""

import os
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings

from freehold.server.child import running_server
from sampling import commit_number

PAUSES = ("/pause_generation", "/update_weights_from_disk")
SECONDS = float(os.environ.get("FREEHOLD_HOSTILE_SECONDS", "600"))
SHORT_SECONDS = 25.0
SMALL = {"max_tokens": 3, "max_completion_tokens": 3, "max_new_tokens": 3, "max_output_tokens": 3, "n": 2}


def shrunk(body):
    """The same body, asking for less work."""
    if isinstance(body, list):
        return [shrunk(item) for item in body[:4]]
    if not isinstance(body, dict):
        return body
    smaller = {
        name: min(value, SMALL[name]) if name in SMALL and type(value) in (int, float) else shrunk(value)
        for name, value in body.items()
    }
    if "messages" in body and body.get("max_completion_tokens") is None:
        smaller["max_tokens"] = smaller.get("max_tokens") or 3  # without, it is as much as fits
    if "input" in body:
        smaller["max_output_tokens"] = smaller.get("max_output_tokens") or 3  # likewise
    if "prompt" in body and "max_tokens" in body and body["max_tokens"] is None:
        smaller["max_tokens"] = 3  # likewise
    if body.get("timeout") is not None:
        smaller["timeout"] = 60.0  # a deadline of its own that passes is a 503, and meant
    if body.keys() & {"text", "input_ids"}:
        smaller["sampling_params"] = smaller.get("sampling_params") or {"max_new_tokens": 3}
    return smaller


def try_operation(operation, number: int, seconds: float, headers: dict[str, str]) -> int:
    """How many cases there was time for."""
    end, tried, examples = time.monotonic() + seconds, 0, max(int(40 * seconds), 20)

    @seed(number)
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def check(case):
        nonlocal tried
        if tried == 0 or time.monotonic() < end:
            case.body = shrunk(case.body)
            response = case.call(timeout=60, headers=headers)
            is_meant = response.status_code < 500 or (response.status_code == 503 and "error" in response.text)
            assert is_meant, f"{operation.label} {case.body!r}: {response.text}"
            tried += 1

    check()
    return tried


def fuzz(url: str, seconds: float, headers: dict[str, str], first_seed: int = 0) -> None:
    """Every operation in turn. It takes less time where an operation has few inputs."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in PAUSES]
    assert len(operations) > 25
    for number, operation in enumerate(operations):
        assert try_operation(operation, first_seed + number, seconds / len(operations), headers), operation.label
    assert httpx.get(f"{url}/health").status_code == 200


def test_no_body_that_fits_the_schema_is_an_internal_error(url):
    fuzz(url, SHORT_SECONDS, {}, 1000 * commit_number())


@pytest.mark.hostile
@pytest.mark.timeout(2 * SECONDS + 600)
def test_no_body_is_an_internal_error_with_a_key_or_without():
    keys = ("--api-key", "client", "--admin-api-key", "root")
    for flags, headers in (
        ((), {}),
        (keys, {"Authorization": "Bearer client"}),
        (keys, {"Authorization": "Bearer root"}),
    ):
        with running_server("--num-pages", "400", "--allow-any-model", *flags) as url:
            end, first_seed = time.monotonic() + SECONDS / (2 if flags else 1), 0
            while time.monotonic() < end:
                fuzz(url, end - time.monotonic(), headers, first_seed)
                first_seed += 1000
