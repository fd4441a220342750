"""What `freehold bench serve` sends, and what it makes of the answers."""

import asyncio
import json
import time

import numpy as np
import pytest

from freehold.bench.client import Measured, Sample, measure
from freehold.bench.load import VOCABULARY, Load
from freehold.bench.serve import Objectives, summary


def test_random_prompts_share_what_they_should_and_repeat_themselves():
    load = Load.random(4, 3, 10, 5, 0.5, seed=1)
    first, second, _ = (one.prompt for one in load.requests)
    assert first[:5] == second[:5]
    assert first[5:] != second[5:]
    assert load == Load.random(4, 3, 10, 5, 0.5, seed=1) != Load.random(4, 3, 10, 5, 0.5, seed=2)
    assert all(token in VOCABULARY for token in first)


def test_a_rate_is_kept_on_average_by_independent_gaps():
    load = Load.random(None, 4000, 1, 1, 0.0).at_rate(20.0)
    gaps = np.diff([one.at for one in load.requests])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert load.requests[0].at == 0


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path):
    rows = [
        {"timestamp": 4000, "input_length": 1600, "output_length": 320, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 6000, "input_length": 1600, "output_length": 64, "hash_ids": [1, 2, 8, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    one, two = Load.trace(path, scale=32, speed=4, limit=None).requests
    assert (one.at, two.at) == (0.0, 0.5)
    assert (len(one.prompt), one.output_len, two.output_len) == (50, 10, 2)
    assert one.prompt[:32] == two.prompt[:32]
    assert one.prompt[32:] != two.prompt[32:]
    path.write_text("")
    with pytest.raises(ValueError, match="trace"):
        Load.trace(path, 32, 1, None)


def test_goodput_counts_the_requests_that_meet_every_objective():
    quick = Sample(0.1, [0.01] * 9, output_tokens=10, prompt_tokens=5)
    slow_start = Sample(0.9, [0.01] * 9, output_tokens=10, prompt_tokens=5)
    slow_tokens = Sample(0.1, [0.2] * 9, output_tokens=10, prompt_tokens=5)
    failed = Sample(error="HTTP 503")
    objectives = Objectives.parse(["ttft:500", "tpot:50"])
    figures = summary(Measured(2.0, [quick, slow_start, slow_tokens, failed]), objectives)
    assert figures["goodput, requests/s"] == 0.5
    assert figures["within the objectives"] == 0.25
    assert figures["time to first token p50, ms"] == pytest.approx(100)
    for wrong in ("ttft", "ttft:soon", "nothing:5"):
        with pytest.raises(ValueError, match="goodput"):
            Objectives.parse([wrong])


def test_an_open_loop_sends_what_is_due_whoever_waits(server):
    load = Load.random(None, 6, 32, 24, 0.0, seed=9).at_rate(50.0)
    started = time.monotonic()
    result = asyncio.run(measure(server, load))
    assert time.monotonic() - started >= load.requests[-1].at
    assert [sample.error for sample in result.samples] == [None] * 6
    assert all(sample.output_tokens == 24 and sample.first_token > 0 for sample in result.samples)


def test_time_in_our_own_queue_counts_for_a_request_that_was_due(server):
    """With one connection, requests due at once wait for each other, and their clocks run."""
    load = Load.random(1, 3, 32, 16, 0.0, seed=10).at_rate(1000.0)
    samples = asyncio.run(measure(server, load)).samples
    assert samples[2].first_token > samples[0].first_token + sum(samples[0].gaps)
