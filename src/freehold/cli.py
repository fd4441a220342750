"""The command line. Imports what a command needs when it runs: `freehold --help` is quick."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated, Any

import typer

from freehold import __version__

app = typer.Typer(
    help="Freehold serves large language models from KV memory in which every page has one owner.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure a server, or this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str | None,
    typer.Option(help="A GGUF file, a Hugging Face directory or a hub id. Default: SmolLM2-135M, fetched once."),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
Url = Annotated[str, typer.Option(help="A running server.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]


def _fail(error: Exception) -> typer.Exit:
    typer.secho(f"freehold: {error}", fg="red", err=True)
    return typer.Exit(1)


@app.command()
def serve(
    model_name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The name that /v1/models gives.")] = None,
    page_size: Annotated[int, typer.Option("--page-size", "--block-size", help="Tokens a page.")] = 16,
    num_pages: Annotated[int | None, typer.Option(help="Pages of KV memory. Default: as the next.")] = None,
    kv_cache_memory_bytes: Annotated[int, typer.Option(help="KV memory, if --num-pages is not given.")] = 1 << 30,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", "--context-length", help="Prompt and output together.")
    ] = None,
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", "--max-num-seqs", help="Requests in a batch at most.")
    ] = 64,
    max_queued_requests: Annotated[int, typer.Option(help="Waiting requests at most; more get 503.")] = 4096,
    chunked_prefill_size: Annotated[int, typer.Option(help="Prompt tokens a step at most.")] = 512,
    target_itl_ms: Annotated[
        float | None,
        typer.Option(help="Cut prompts smaller, so that decoding requests have a token so often."),
    ] = None,
    schedule_policy: Annotated[str, typer.Option(help="fcfs, lpm (longest prefix match) or priority.")] = "fcfs",
    max_overtaken: Annotated[
        int, typer.Option(help="Later requests that may be admitted before one that waits; then it goes first.")
    ] = 64,
    eviction_policy: Annotated[
        str, typer.Option("--eviction-policy", "--radix-eviction-policy", help="reuse, lru, lfu, fifo or priority.")
    ] = "reuse",
    disable_overlap_schedule: Annotated[bool, typer.Option("--disable-overlap-schedule")] = False,
    disable_radix_cache: Annotated[bool, typer.Option("--disable-radix-cache")] = False,
    audit_interval: Annotated[int, typer.Option(help="Recount all pages every k steps; 0: only when idle.")] = 0,
    forward_retract_interval: Annotated[int, typer.Option(help="For tests: retract every k steps.")] = 0,
    strict_audit: Annotated[
        bool, typer.Option("--strict-audit", help="Recount all pages after every step; end at the first that differs.")
    ] = False,
    cache_tenant_quota: Annotated[
        float | None, typer.Option(help="Share of the pool; tenants (cache_salt) that cache more are evicted first.")
    ] = None,
    cache_retained_share: Annotated[float, typer.Option(help="Share of the pool that hints may retain.")] = 0.5,
    cache_pinned_share: Annotated[float, typer.Option(help="Share of the pool that operators may pin.")] = 0.25,
    linear_compute: Annotated[
        str, typer.Option(help="What inputs of quantized weights are rounded to: float32 (not at all), int16 or int8.")
    ] = "int16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or int8 (with scales): what keys and values are kept as.")
    ] = "bfloat16",
    num_threads: Annotated[int | None, typer.Option(help="Threads of the kernels. Default: one a core.")] = None,
    priority_scheduling_preemption_threshold: Annotated[
        int | None, typer.Option(help="With policy priority: preempt requests whose priority is lower by this.")
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds until a request is ended.")] = None,
    waiting_timeout: Annotated[float | None, typer.Option(help="Seconds that it may wait to be scheduled.")] = None,
    running_timeout: Annotated[float | None, typer.Option(help="Seconds that it may run.")] = None,
    watchdog_timeout: Annotated[float, typer.Option(help="Seconds until a step is taken for lost.")] = 300.0,
    speculative_algorithm: Annotated[
        str | None, typer.Option(help="ngram (prompt lookup) or draft (a second, smaller model).")
    ] = None,
    speculative_num_draft_tokens: Annotated[int, typer.Option(help="Draft tokens a step and request at most.")] = 8,
    speculative_draft_model_path: Annotated[str | None, typer.Option(help="Default: the model itself.")] = None,
    speculative_draft_layers: Annotated[int | None, typer.Option(help="Draft with the first layers only.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Asked of every client; several may be given, to tell clients apart.")
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(help="Asked for flushing, pins, pausing, new weights, debug routes, and sessions of others."),
    ] = None,
    session_store: Annotated[str | None, typer.Option(help="SQLite file in which sessions survive restarts.")] = None,
    log_level: Annotated[str, typer.Option(help="Of the HTTP server.")] = "warning",
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API. Needs no flags."""
    options = {name: value for name, value in locals().items() if name not in _NOT_OF_THE_ENGINE}
    options["model"] = model or model_name
    if strict_audit:
        options["audit_interval"] = 1
    from freehold.errors import ModelUnavailable
    from freehold.server.access.keys import Keys
    from freehold.server.launch import ServerOptions, run_server

    try:
        keys = Keys(tuple(api_key or ()), admin_api_key)
        http = ServerOptions(host, port, served_model_name, session_store, keys, log_level)
        code = run_server(options, http)
    except (ValueError, ModelUnavailable) as error:
        raise _fail(error) from error
    raise typer.Exit(code)


_NOT_OF_THE_ENGINE = (
    "strict_audit",
    "model_name",
    "host",
    "port",
    "served_model_name",
    "api_key",
    "admin_api_key",
    "session_store",
    "log_level",
)


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.2,
) -> None:
    """Talk to a model in this terminal. Each turn shows what it found in the cache, and its speed."""
    from freehold.terminal import chat_loop

    with _engine(model) as llm:
        chat_loop(llm, system, max_tokens, temperature)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="Prompts, or - to read one a line from stdin.")],
    model: Model = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
) -> None:
    """Complete prompts offline, all at once."""
    from freehold.terminal import generate_all

    with _engine(model) as llm:
        generate_all(llm, prompts, max_tokens, temperature)


def _engine(model: str | None) -> Any:
    from rich.console import Console

    from freehold.errors import ModelUnavailable
    from freehold.llm import LLM

    try:
        with Console(stderr=True).status("Loading the model ..."):
            return LLM(model)
    except (ModelUnavailable, ValueError, FileNotFoundError) as error:
        raise _fail(error) from error


@app.command()
def inspect(
    url: Url = "http://127.0.0.1:8000",
    page: Annotated[int | None, typer.Option(help="Explain one page.")] = None,
    request: Annotated[str | None, typer.Option(help="What a request, running or ended, went through.")] = None,
    prompt: Annotated[str | None, typer.Option(help="How much of a prompt is cached, and why no more.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's (admin) key.")] = None,
) -> None:
    """Ask a running server who holds its memory, and why."""
    import httpx

    from freehold.terminal import show_answer, show_memory

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            if request is not None:
                answer = client.get(f"/debug/requests/{request}")
            elif prompt is not None:
                answer = client.post("/debug/miss", json={"prompt": prompt})
            else:
                answer = client.get("/debug/memory", params={} if page is None else {"page": page})
        body = answer.json()
        if answer.status_code != 200:
            raise ValueError(body["error"]["message"])
    except (httpx.HTTPError, ValueError) as error:
        raise _fail(error) from error
    show_memory(body) if request is None and prompt is None else show_answer(body)


@app.command()
def simulate(
    matrix: Annotated[bool, typer.Option("--matrix", help="Every cell of the matrix, with many seeds.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds for each cell.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    minutes: Annotated[
        float | None, typer.Option(help="Go on until the time is up: with fresh seeds, or deeper with --exhaustive.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Every order of events in small worlds, for --minutes (10).")
    ] = False,
    cell: Annotated[
        str | None, typer.Option(help="One cell, such as overlap:16:ngram:fcfs:tight, with --seed.")
    ] = None,
    seed: int = 0,
    scenario: Annotated[Path | None, typer.Option(help="A scenario saved after a violation.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace: Mooncake or agent sessions (JSON lines), Azure (CSV); .gz, .zst.")
    ] = None,
    scale: Annotated[int, typer.Option(help="Divide the trace's lengths and blocks by this.")] = 32,
    limit: Annotated[int | None, typer.Option(help="Requests of the trace at most.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    num_pages: Annotated[int, typer.Option(help="Pages of the simulated server.")] = 4096,
    max_running_requests: Annotated[int, typer.Option(help="Requests in a batch at most.")] = 64,
    schedule_policy: Annotated[str, typer.Option(help="fcfs, lpm or priority.")] = "fcfs",
    eviction_policy: Annotated[str, typer.Option(help="reuse, lru, lfu, fifo or priority.")] = "reuse",
    step_ms: Annotated[float, typer.Option(help="Of a step, whatever it computes.")] = 10.0,
    token_us: Annotated[float, typer.Option(help="And for each token in it.")] = 50.0,
) -> None:
    """Run the real scheduler and memory on an engine that checks every read, or on a trace to plan capacity."""
    from freehold.config import EngineConfig
    from freehold.planning import command as planning
    from freehold.planning.replay import Speed
    from freehold.simulation import command
    from freehold.simulation.scenario import Cell, Scenario

    try:
        if trace is not None:
            config = EngineConfig(
                page_size=page_size,
                num_pages=num_pages,
                max_running_requests=max_running_requests,
                max_queued_requests=1 << 20,
                schedule_policy=schedule_policy,
                eviction_policy=eviction_policy,
            )
            speed = Speed(step_ms / 1e3, token_us / 1e6)
            code = planning.simulate_trace(trace, scale, limit, config, speed)
        elif scenario is not None:
            code = command.simulate_one(Scenario.from_json(scenario.read_text()))
        elif cell is not None:
            code = command.simulate_one(Scenario.generate(Cell.parse(cell), seed))
        elif exhaustive:
            code = command.simulate_exhaustive(minutes or command.EXHAUSTIVE_MINUTES, jobs)
        elif matrix or minutes is not None:
            code = command.simulate_matrix(command.MatrixRun(seeds, first_seed, jobs, minutes))
        else:
            raise ValueError("say what to simulate: --matrix, --exhaustive, --cell, --scenario or --trace")
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    raise typer.Exit(code)


@app.command()
def demo() -> None:
    """Serve the bundled model to several clients at once, and show where its memory went."""
    from freehold.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str | None, typer.Option(help="A running OpenAI-compatible server. Default: start one.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once, without a rate.")] = 16,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second, at random times (Poisson).")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace to replay, with its own times and lengths.")] = None,
    scale: Annotated[int, typer.Option(min=1, help="Lengths of the trace are divided by this.")] = 32,
    speed: Annotated[float, typer.Option(min=0.001, help="The trace is replayed so many times as fast.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(help="Requests in all.")] = 64,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 256,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 64,
    shared_prefix: Annotated[float, typer.Option(min=0, max=1, help="Share of the prompt common to all.")] = 0.5,
    goodput: Annotated[
        list[str] | None, typer.Option(help="An objective, like ttft:500, tpot:50 or e2el:5000 (ms); repeat it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
    seed: int = 0,
) -> None:
    """Throughput, goodput, latencies and hit rate of a server: closed loop, at a rate, or replaying a trace."""
    from freehold.bench.load import Load
    from freehold.bench.serve import Objectives, bench_server

    try:
        if trace is not None:
            load = Load.trace(trace, scale, speed, num_prompts)
        elif request_rate is not None:
            load = Load.random(None, num_prompts, input_len, output_len, shared_prefix, seed).at_rate(
                request_rate, seed
            )
        else:
            load = Load.random(concurrency, num_prompts, input_len, output_len, shared_prefix, seed)
        bench_server(url, load, Objectives.parse(goodput or []), output)
    except (ValueError, OSError) as error:
        raise _fail(error) from error


@bench_app.command("peers")
def bench_peers(
    peer: Annotated[list[str] | None, typer.Option(help="vllm, openvino or llama.cpp; repeat it.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one to warm up.")] = 3,
    workload: Annotated[list[str] | None, typer.Option(help="W1 to W5; repeat it. Default: all.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write .json, .md and .png.")] = Path("peers"),
) -> None:
    """Five workloads beside other engines, installed and started here, in turns in one run."""
    from freehold.bench.peers.compare import run_peers

    try:
        code = run_peers(peer or [], rounds, workload or [], output)
    except (RuntimeError, ValueError, CalledProcessError) as error:
        raise _fail(error) from error
    raise typer.Exit(code)


@bench_app.command("floor")
def bench_floor() -> None:
    """This machine's speed beside transformers', in one run."""
    from freehold.bench.floor import run_floor

    raise typer.Exit(run_floor())


@bench_app.command("speculation")
def bench_speculation() -> None:
    """Prompt lookup against plain decoding, on repetitive and on ordinary prompts."""
    from freehold.bench.speculation import run_speculation

    raise typer.Exit(run_speculation())


@bench_app.command("accuracy")
def bench_accuracy(model: Model = None) -> None:
    """What faster ways to compute change in the output, against float32."""
    from freehold.bench.accuracy import run_accuracy

    raise typer.Exit(run_accuracy(model))


@bench_app.command("sessions")
def bench_sessions() -> None:
    """What sessions cost and save."""
    from freehold.bench.sessions import run_sessions

    raise typer.Exit(run_sessions())


@bench_app.command("ledger")
def bench_ledger() -> None:
    """What the always-on ledger of pages costs."""
    from freehold.bench.ledger import run_ledger_cost

    raise typer.Exit(run_ledger_cost())


@bench_app.command("scheduler")
def bench_scheduler(
    peer: Annotated[str | None, typer.Option(help="vllm: its scheduler and KV manager beside ours.")] = None,
) -> None:
    """Microseconds that scheduler and memory spend on a decode step, without a model."""
    from freehold.bench.scheduler import show_scheduler_cost

    try:
        if peer not in (None, "vllm"):
            raise ValueError(f"peer: {peer} is not known; there is vllm")
        show_scheduler_cost(peer == "vllm")
    except (ValueError, RuntimeError, CalledProcessError) as error:
        raise _fail(error) from error


if __name__ == "__main__":
    app()
