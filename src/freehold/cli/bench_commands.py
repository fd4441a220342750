"""`freehold bench`: the commands that measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated

import typer

from freehold.cli.command_line import address, fail, takes
from freehold.options import Limits, check_limits, option

bench_app = typer.Typer(help="Measure a server, or this machine.", no_args_is_help=True)

LOAD = "Load"
Model = Annotated[
    str | None,
    typer.Option(help="A GGUF file, a Hugging Face directory or a hub id. Default: SmolLM2-135M, fetched once."),
]


@dataclass(frozen=True)
class LoadOptions:
    """The load to put on a server. Raises ValueError."""

    url: str | None = option(None, "A running OpenAI-compatible server. Default: start one.", LOAD)
    concurrency: int = option(16, "Concurrent requests, without --request-rate.", LOAD, Limits(least=1))
    request_rate: float | None = option(None, "Requests a second, at random times (Poisson).", LOAD, Limits(above=0))
    trace: Path | None = option(None, "A trace to replay, with its own times and lengths.", LOAD)
    scale: int = option(32, "Divide the trace's lengths by this.", LOAD, Limits(least=1))
    speed: float = option(1.0, "Replay the trace this many times as fast.", LOAD, Limits(above=0))
    num_prompts: int = option(64, "Requests in all.", LOAD)
    input_len: int = option(256, "Prompt tokens.", LOAD)
    output_len: int = option(64, "Output tokens.", LOAD)
    shared_prefix: float = option(0.5, "Share of the prompt that all requests share.", LOAD, Limits(least=0, most=1))
    goodput: tuple[str, ...] = option((), "A latency objective in milliseconds: ttft:500, tpot:50 or e2el:5000.", LOAD)
    output: Path | None = option(None, "Write the figures here as JSON.", LOAD)
    seed: int = option(0, "Seed of the random prompts and times.", LOAD)

    def __post_init__(self) -> None:
        check_limits(self)


@bench_app.command("serve")
@takes(LoadOptions)
def bench_serve(chosen: LoadOptions) -> None:
    """Measure throughput, goodput, latencies and hit rate of a server: closed loop, at a rate, or replaying a trace."""
    from freehold.bench.load import Load
    from freehold.bench.serve import Objectives, bench_server

    try:
        if chosen.trace is not None:
            load = Load.trace(chosen.trace, chosen.scale, chosen.speed, chosen.num_prompts)
        else:
            concurrency = chosen.concurrency if chosen.request_rate is None else None
            load = Load.random(
                concurrency, chosen.num_prompts, chosen.input_len, chosen.output_len, chosen.shared_prefix, chosen.seed
            )
        if chosen.trace is None and chosen.request_rate is not None:
            load = load.at_rate(chosen.request_rate, chosen.seed)
        bench_server(
            None if chosen.url is None else address(chosen.url),
            load,
            Objectives.parse(list(chosen.goodput)),
            chosen.output,
        )
    except (ValueError, OSError) as error:
        fail(error)


PEER_HELP = "vllm, openvino, transformers, llama.cpp or llama.cpp-q4_0. Repeat it for several."


@bench_app.command("peers")
def bench_peers(
    peer: Annotated[list[str] | None, typer.Option(help=PEER_HELP)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one to warm up.")] = 3,
    workload: Annotated[list[str] | None, typer.Option(help="W1 to W5. Repeat it for several. Default: all.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write .json, .md and .png.")] = Path("peers"),
) -> None:
    """Compare five workloads with other engines, which are installed and started here."""
    from freehold.bench.peers.compare import run_peers

    try:
        code = run_peers(peer or [], rounds, workload or [], output)
    except (RuntimeError, ValueError, CalledProcessError) as error:
        fail(error)
    raise typer.Exit(code)


@bench_app.command("contention")
def bench_contention(
    peer: Annotated[list[str] | None, typer.Option(help=PEER_HELP)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one to warm up.")] = 3,
    output: Annotated[Path, typer.Option(help="Where to write the engines' logs.")] = Path("contention"),
) -> None:
    """Measure one stream and sixteen, alone and beside one and two busy processes; other engines in turns."""
    from freehold.bench.peers.contention import run_contention

    try:
        code = run_contention(peer or [], rounds, output)
    except (RuntimeError, ValueError, CalledProcessError) as error:
        fail(error)
    raise typer.Exit(code)


@bench_app.command("floor")
def bench_floor() -> None:
    """Compare this machine's speed with transformers'."""
    from freehold.bench.floor import run_floor

    raise typer.Exit(run_floor())


@bench_app.command("kernels")
def bench_kernels() -> None:
    """Show what each kernel reads and multiplies, and how near it is to what this machine can do."""
    from freehold.bench.kernels import run_kernels

    raise typer.Exit(run_kernels())


@bench_app.command("check")
def bench_check() -> None:
    """Fail if a workload is more than 10 % slower than the last time on this kind of processor."""
    from freehold.bench.check import run_check

    raise typer.Exit(run_check())


@bench_app.command("speculation")
def bench_speculation() -> None:
    """Compare prompt lookup with plain decoding, on repetitive and on ordinary prompts."""
    from freehold.bench.speculation import run_speculation

    raise typer.Exit(run_speculation())


@bench_app.command("structured")
def bench_structured() -> None:
    """Output bound to a schema beside output that is not: speed, masks, forced tokens, other clients, memory."""
    from freehold.bench.structured import run_structured

    raise typer.Exit(run_structured())


@bench_app.command("accuracy")
def bench_accuracy(model: Model = None) -> None:
    """Show how rounding of KV and inputs changes the output, against float32."""
    from freehold.bench.accuracy import run_accuracy

    raise typer.Exit(run_accuracy(model))


@bench_app.command("sessions")
def bench_sessions() -> None:
    """Measure what sessions cost and save."""
    from freehold.bench.sessions import run_sessions

    raise typer.Exit(run_sessions())


@bench_app.command("hybrid")
def bench_hybrid() -> None:
    """Measure windows and states: decoding behind a long context, and second turns."""
    from freehold.bench.hybrid import run_hybrid

    raise typer.Exit(run_hybrid())


@bench_app.command("tiers")
def bench_tiers() -> None:
    """Measure what host memory and a disk bring and cost, side by side with none."""
    from freehold.bench.tiers import run_tiers

    raise typer.Exit(run_tiers())


@bench_app.command("ledger")
def bench_ledger() -> None:
    """Measure what the ledger of pages costs."""
    from freehold.bench.ledger import run_ledger_cost

    raise typer.Exit(run_ledger_cost())


@bench_app.command("scheduler")
def bench_scheduler(
    peer: Annotated[str | None, typer.Option(help="vllm: measure its scheduler and KV manager, too.")] = None,
) -> None:
    """Measure scheduler and memory without a model: microseconds for a decode step."""
    from freehold.bench.scheduler import show_scheduler_cost

    try:
        if peer not in (None, "vllm"):
            raise ValueError(f"peer: {peer} is not known; there is vllm")
        show_scheduler_cost(peer == "vllm")
    except (ValueError, RuntimeError, CalledProcessError) as error:
        fail(error)
