"""Command lines of other engines start a server here, or are told why not."""

import pytest

from freehold.cli.foreign_flags import GRANTED, HINTS, LIMITED, RENAMED, VALUES, WITHOUT_EFFECT, ForeignFlag, translated
from freehold.config import EngineConfig
from freehold.options import options_of
from freehold.server.config import ServerConfig

OPTIONS = [*options_of(EngineConfig), *options_of(ServerConfig)]
OURS = {flag for one in OPTIONS for flag in (f"--{one.name.replace('_', '-')}", *one.flags)}
SWITCHES = {f"--{one.name.replace('_', '-')}" for one in OPTIONS if one.type is bool}


def test_what_has_another_name_is_something_here_and_nothing_is_said_twice():
    assert set(RENAMED.values()) | set(VALUES) <= OURS
    tables = [set(RENAMED), set(GRANTED), set(LIMITED), set(HINTS), set(WITHOUT_EFFECT), OURS, {"--swap-space"}]
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("--model-path here --tp 1 --scheduling-policy priority", "--model here --schedule-policy priority"),
        ("--model-path=here -c=9 -np 3", "--model=here --max-model-len=9 --max-running-requests 3"),
        ("--enable-auto-tool-choice --tool-call-parser pythonic", "--tool-call-parser pythonic"),
        ("--enable-lora=true --enable-hierarchical-cache=1", "--enable-lora --enable-hierarchical-cache"),
        ("--enable-lora=False --no-enable-lora --no-enable-prefix-caching", "--disable-radix-cache"),
        ("--swap-space 4", "--enable-hierarchical-cache --hicache-size 4GiB"),
        ("--swap-space=0 --enable-chunked-prefill=True", ""),
        ("--tool-call-parser qwen25 --kv-cache-dtype=auto", "--tool-call-parser hermes --kv-cache-dtype bfloat16"),
        ("--max-lora-rank 64 --hicache-mem-layout=page_first --dp 1 --port 1", "--port 1"),
        (
            '--allowed-origins ["*","b"] --allowed-origins c',
            "--allowed-origins * --allowed-origins b --allowed-origins c",
        ),
        ("--tool-call-parser", "--tool-call-parser"),
        ("--port 1 -- --tp 2", "--port 1 -- --tp 2"),
    ],
)
def test_flags_are_translated(given, taken):
    assert translated(given.split(), SWITCHES) == taken.split()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size can't be 2 here: a model is computed by one process"),
        ("--tp", "--tp can't be empty here"),
        ('--allowed-origins ["a"', "is no list in JSON"),
        ("--dtype=float16", "--dtype can't be float16 here"),
        ("--enable-lora=perhaps", "--enable-lora is true or false, not perhaps"),
        ("--enable-chunked-prefill=false", "--enable-chunked-prefill can't be turned off here"),
    ],
)
def test_what_can_not_be_followed_is_refused(given, said):
    with pytest.raises(ForeignFlag, match=said):
        translated(given.split(), SWITCHES)
