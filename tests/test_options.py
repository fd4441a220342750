"""Options: flags, environment, file; limits; what `check` and /server_info say of them."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from commands import run
from freehold.config import EngineConfig
from freehold.options import options_of
from freehold.runtime.engine_options import EngineOptions
from freehold.server.config import ServerConfig
from freehold.server.operator.status import _options


def check(*arguments: str, **environment: str) -> str:
    """The output of `freehold check`, which must succeed."""
    code, output = run("check", *arguments, **environment)
    assert code == 0, output
    return output


def refused(*arguments: str, **environment: str) -> str:
    code, output = run("check", *arguments, **environment)
    assert code != 0
    return output


def test_every_option_has_help_and_a_group():
    for record in (EngineConfig, ServerConfig):
        options = list(options_of(record))
        assert len(options) == len(fields(record))
        assert all(one.help.endswith(".") and one.group for one in options)
    names = [one.name for record in (EngineConfig, ServerConfig) for one in options_of(record)]
    assert len(set(names)) == len(names)


def test_keyword_arguments_are_typed_like_the_configuration():
    wanted = get_type_hints(EngineConfig)
    del wanted["model"]
    assert get_type_hints(EngineOptions) == wanted


def test_the_plan_is_that_of_the_configuration():
    shown = check("--num-pages", "100", "--page-size", "4", "--max-running-requests", "7")
    assert "100 of 4 tokens" in shown
    assert "400 tokens" in shown
    assert "7 requests at most" in shown
    assert "num_pages = 100 (from flag)" in shown
    assert "longer than the pool" in shown
    assert "host memory" not in shown
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file")
    shown = check("--num-pages", "100", *tiers, "--hicache-storage-capacity", "2GiB")
    assert "MiB, 300 pages" in shown
    assert "file, 2.0 GiB at most" in shown


@pytest.mark.parametrize(("name", "text"), [("a.toml", "num-pages = 90\npage_size = 4\n"),
                                            ("a.yaml", "num-pages: 90\npage_size: 4\n")])  # fmt: skip
def test_flags_win_over_the_environment_and_that_over_the_file(name, text, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    assert "num_pages = 90 (from file)" in check("--config", str(file))
    shown = check("--config", str(file), FREEHOLD_NUM_PAGES="80")
    assert "num_pages = 80 (from environment)" in shown
    assert "page_size = 4 (from file)" in shown
    shown = check("--config", str(file), "--num-pages", "70", FREEHOLD_NUM_PAGES="80")
    assert "num_pages = 70 (from flag)" in shown


def test_a_key_of_the_file_that_is_no_option_is_refused(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("num_pagse = 90\n")
    assert "'num_pagse' is no option; did you mean 'num_pages'?" in refused("--config", str(file))
    file.write_text("num_pages = \n")
    assert "a.toml" in refused("--config", str(file))
    assert "nowhere.toml" in refused("--config", str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-pages", "0"), "num_pages must be at least 1, not 0"),
        (("--cache-pinned-share", "nan"), "cache_pinned_share must be between 0 and 1, not nan"),
        (("--watchdog-timeout", "inf"), "watchdog_timeout must be a positive number, not inf"),
        (("--schedule-policy", "random"), "schedule_policy must be one of ('fcfs', 'lpm', 'priority'), not 'random'"),
        (("--port", "70000"), "port must be between 0 and 65535, not 70000"),
        (("--session-store-recover",), "session_store_recover needs session_store"),
        (("--priority-scheduling-preemption-threshold", "2"), "needs schedule_policy 'priority'"),
    ],
)
def test_values_outside_their_limits_are_refused(arguments, message):
    assert message in refused(*arguments)


def test_secrets_are_not_shown():
    shown = _options(ServerConfig(api_key=("k1", "k2"), port=9), {"port": "flag"})
    assert shown["api_key"] == {"value": "***", "source": "argument"}
    assert shown["admin_api_key"] == {"value": None, "source": "default"}
    assert shown["port"] == {"value": 9, "source": "flag"}
