"""The comparison with other engines: its report, and engines that hold their breath."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from freehold.bench.check import last_figures, losses
from freehold.bench.client import Sample
from freehold.bench.peers.compare import run_peers
from freehold.bench.peers.peer import Model, Peer
from freehold.bench.peers.report import markdown, plot
from freehold.bench.peers.result import Result
from freehold.bench.peers.served import Served
from freehold.bench.workloads import WORKLOADS, latency

W1, W4 = WORKLOADS[0], WORKLOADS[3]


def result(name: str, tokens: float, seconds: float, is_ours: bool = False) -> Result:
    figures = {"W1": {W1.unit: tokens, "first token p50, ms": 5.0}, "W4": {W4.unit: seconds}}
    spread = {name: {unit: (value - 1, value + 1) for unit, value in of.items()} for name, of in figures.items()}
    return Result(name, "int8", figures, spread, 1.5, 1.9, 3.0, is_ours)


def test_ratios_are_over_the_best_peer_whichever_way_is_better():
    results = [
        result("freehold", 100, 5, True),
        result("fastest", 110, 4, True),
        result("a", 40, 20),
        result("b", 50, 30),
    ]
    table, is_met = markdown("machine", 3, [W1, W4], results)
    lines = table.splitlines()
    assert any(
        line.startswith("| W1") and "| 100.0 (99.0 to 101.0) |" in line and "**2.00 x** | **2.20 x** | 1.7 x" in line
        for line in lines
    )
    assert any(line.startswith("| W4") and "**4.00 x** | **5.00 x** | 2.5 x" in line for line in lines)
    assert is_met
    assert not markdown("machine", 3, [W1, W4], [result("freehold", 80, 5, True), *results[1:]])[1], (
        "1.6 x is not enough"
    )


def test_a_loss_of_speed_is_seen_beside_the_last_figures_of_the_same_machine(tmp_path):
    history = tmp_path / "check.jsonl"
    assert last_figures(history, "a") == {}
    lines = [("a", 9.0), ("a", 10.0), ("b", 20.0)]
    history.write_text("".join(json.dumps({"machine": kind, "figures": {"W1": value}}) + "\n" for kind, value in lines))
    before = last_figures(history, "a")
    assert before == {"W1": 10.0}
    assert losses({"W1": 9.1, "W2": 1.0}, before) == []
    assert losses({"W1": 8.9}, before) == ["W1"]


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot(tmp_path / "speed.png", [W1, W4], [result("freehold", 100, 5), result("a", 40, 20)])
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_latency_of_samples():
    samples = [Sample(first_token=0.1 * i, gaps=[0.01 * i] * 2) for i in range(1, 11)]
    figures = latency(samples)
    assert figures["first token p50, ms"] == pytest.approx(600)
    assert figures["between tokens p95, ms"] == pytest.approx(100)


@pytest.mark.parametrize(("names", "workloads"), [(["nobody"], []), ([], ["W9"])])
def test_unknown_names_are_refused(names, workloads, tmp_path):
    with pytest.raises(ValueError, match="is not known; there are"):
        run_peers(names, 1, workloads, tmp_path / "x")


def comes_to_be(condition) -> bool:
    """A signal takes effect a moment after it is sent."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_frozen_engine_does_not_run_until_it_is_awake(tmp_path):
    peer = Peer("other", "", (), lambda python, model, port, tokens: [sys.executable, "-c", HEALTHY, str(port)])
    served = Served(peer, Model(Path(), Path()), 0, tmp_path / "log")
    try:
        (process,) = served._family()
        served.freeze()
        assert comes_to_be(lambda: process.status() == psutil.STATUS_STOPPED)
        with served.awake():
            assert comes_to_be(lambda: process.status() != psutil.STATUS_STOPPED)
        assert comes_to_be(lambda: process.status() == psutil.STATUS_STOPPED)
        assert served.peak_memory() > 1 << 20
        assert served.cpu_seconds() > 0
    finally:
        served.close()
    assert not psutil.pid_exists(process.pid)


def test_an_engine_that_does_not_start_says_where_its_output_is(tmp_path):
    peer = Peer("broken", "", (), lambda python, model, port, tokens: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"broken: the server ended with code 3.*log"):
        Served(peer, Model(Path(), Path()), 0, tmp_path / "log")


def test_roofs_of_products(monkeypatch):
    """Sets with tiles and with avx512-bf16's instruction multiply bfloat16, the others don't."""
    from freehold.bench import roofs
    from freehold.engine.cpu.device import CpuDevice
    from freehold.engine.cpu.isa import available

    CpuDevice().prepare_thread()
    monkeypatch.setattr(roofs, "REPEATS", 2)
    best = available()[-1]
    found = {kind: roofs.products(best, kind) for kind in (roofs.BYTES, roofs.WORDS, roofs.FLOATS, roofs.HALVES)}
    assert (found.pop(roofs.HALVES) > 0) == (best in ("avx512-bf16", "amx"))
    assert all(1e9 < speed < 1e15 for speed in found.values())


def test_what_a_product_must_read_and_multiply():
    from freehold.bench.kernels import COLUMNS, INPUTS, ROWS, _linear
    from freehold.models.tensor import TensorFormat

    works = list(_linear(TensorFormat.F32, "float32", "portable"))
    assert [work.operations for work in works] == [rows * ROWS * COLUMNS for rows in INPUTS]
    assert works[0].bytes == 4 * (ROWS * COLUMNS + COLUMNS + 2 * ROWS)
    for work in works:
        work.run()
