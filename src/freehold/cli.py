"""The command line. Imports what a command needs when it runs: `freehold --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated, Any

import typer

from freehold import __version__
from freehold.command_line import Commands, ConfigFile, address, fail, sources, takes
from freehold.config import MEMORY, EngineConfig
from freehold.options import Limits, check_limits, option
from freehold.server.config import ServerConfig

app = typer.Typer(
    help="Freehold serves large language models from KV memory in which every page has one owner.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    cls=Commands,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"freehold {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


bench_app = typer.Typer(help="Measure a server, or this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

CORRECTNESS, PLANNING, LOAD = "Correctness", "Capacity planning", "Load"

Model = Annotated[
    str | None,
    typer.Option(help="A GGUF file, a Hugging Face directory or a hub id. Default: SmolLM2-135M, fetched once."),
]
ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")]
Url = Annotated[str, typer.Option(help="A running server.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]


@app.command(epilog="Each flag has an environment variable: FREEHOLD_PORT for --port.")
@takes(EngineConfig, ServerConfig)
def serve(
    config: EngineConfig,
    http: ServerConfig,
    context: typer.Context,
    model_name: ModelArgument = None,
    config_file: ConfigFile = None,
    strict_audit: Annotated[
        bool, typer.Option("--strict-audit", help="Recount all pages after every step.", rich_help_panel=MEMORY)
    ] = False,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API. Needs no flags."""
    from freehold.server.launch import run_server

    try:
        code = run_server(_chosen(config, model_name, strict_audit), http, sources(context))
    except ValueError as error:
        fail(error)
    raise typer.Exit(code)


@app.command(epilog="Takes the flags, the variables and the file of `freehold serve`.")
@takes(EngineConfig, ServerConfig)
def check(
    config: EngineConfig,
    http: ServerConfig,
    context: typer.Context,
    model_name: ModelArgument = None,
    config_file: ConfigFile = None,
) -> None:
    """Validate a configuration, print the memory plan, and exit. No weights are loaded."""
    from freehold.memory_plan import plan_memory
    from freehold.models.loading.resolve import open_checkpoint, resolve_model
    from freehold.terminal import show_plan

    try:
        chosen = _chosen(config, model_name)
        show_plan(plan_memory(chosen, open_checkpoint(resolve_model(chosen.model))), sources(context))
    except (ValueError, OSError) as error:
        fail(error)


def _chosen(config: EngineConfig, model_name: str | None, strict_audit: bool = False) -> EngineConfig:
    interval = 1 if strict_audit else config.audit_interval
    return replace(config, model=config.model or model_name, audit_interval=interval)


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.2,
    url: Annotated[str | None, typer.Option(help="Talk to a running server instead.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="FREEHOLD_API_KEY")] = None,
) -> None:
    """Talk to a model in this terminal. Each turn shows what it found in the cache, and its speed."""
    import httpx

    from freehold.chat import Chat, LocalModel, RemoteModel
    from freehold.sampling_params import SamplingParams
    from freehold.terminal import console

    try:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        if url is not None:
            Chat(RemoteModel(address(url), api_key, params), system, console, console.input).run()
            return
        with _engine(model) as llm:
            Chat(LocalModel(llm, params), system, console, console.input).run()
    except (httpx.HTTPError, ValueError) as error:
        fail(error)


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

    from freehold.llm import LLM

    try:
        with Console(stderr=True).status("Loading the model ..."):
            return LLM(model)
    except (ValueError, FileNotFoundError) as error:
        fail(error)


@app.command()
def inspect(
    server: Annotated[str | None, typer.Argument(metavar="[URL]", help="The same as --url.")] = None,
    url: Url = "http://127.0.0.1:8000",
    page: Annotated[int | None, typer.Option(help="Explain one page.")] = None,
    group: Annotated[int, typer.Option(help="The number of the page's cache group.")] = 0,
    request: Annotated[str | None, typer.Option(help="What a request, running or ended, went through.")] = None,
    prompt: Annotated[str | None, typer.Option(help="How much of a prompt is cached, and why no more.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's (admin) key.")] = None,
) -> None:
    """Ask a running server who holds its memory, and why."""
    import httpx

    from freehold.terminal import show_answer, show_memory

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=address(server or url), headers=headers, timeout=30) as client:
            if request is not None:
                answer = client.get(f"/debug/requests/{request}")
            elif prompt is not None:
                answer = client.post("/debug/miss", json={"prompt": prompt})
            else:
                answer = client.get("/debug/memory", params={} if page is None else {"page": page, "group": group})
        body = answer.json()
        if answer.status_code != 200:
            raise ValueError(body["error"]["message"])
    except (httpx.HTTPError, ValueError) as error:
        fail(error)
    show_memory(body) if request is None and prompt is None else show_answer(body)


@dataclass(frozen=True)
class SimulateOptions:
    """What to simulate: one of matrix, exhaustive, cell, scenario and trace."""

    matrix: bool = option(False, "Check every cell of the matrix.", CORRECTNESS)
    seeds: int = option(3, "Seeds for each cell.", CORRECTNESS)
    first_seed: int = option(0, "The first seed.", CORRECTNESS)
    jobs: int = option(2, "Processes.", CORRECTNESS)
    minutes: float | None = option(None, "Run for this long: with new seeds, or deeper with --exhaustive.", CORRECTNESS)
    exhaustive: bool = option(False, "Check every order of events in small worlds, for --minutes (10).", CORRECTNESS)
    cell: str | None = option(None, "Run one cell, such as overlap:16:ngram:fcfs:tight, with --seed.", CORRECTNESS)
    seed: int = option(0, "Seed of the cell.", CORRECTNESS)
    scenario: Path | None = option(None, "Run a scenario that was saved after a violation.", CORRECTNESS)
    trace: Path | None = option(
        None, "A trace: Mooncake or agent sessions (JSON lines), Azure (CSV); .gz, .zst.", PLANNING
    )
    scale: int = option(32, "Divide the trace's lengths and blocks by this.", PLANNING)
    limit: int | None = option(None, "Maximum number of requests to replay.", PLANNING)
    page_size: int = option(16, "Tokens in a page.", PLANNING)
    num_pages: int = option(4096, "Pages of KV memory.", PLANNING)
    max_running_requests: int = option(64, "Maximum number of running requests.", PLANNING)
    schedule_policy: str = option("fcfs", "fcfs, lpm or priority.", PLANNING)
    eviction_policy: str = option("reuse", "reuse, lru, lfu, fifo or priority.", PLANNING)
    step_ms: float = option(10.0, "Milliseconds that every step takes.", PLANNING)
    token_us: float = option(50.0, "Microseconds that each token of a step adds.", PLANNING)

    @property
    def server(self) -> EngineConfig:
        """The simulated one. Raises ValueError."""
        return EngineConfig(
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running_requests=self.max_running_requests,
            max_queued_requests=1 << 20,
            schedule_policy=self.schedule_policy,
            eviction_policy=self.eviction_policy,
        )


@app.command()
@takes(SimulateOptions)
def simulate(chosen: SimulateOptions) -> None:
    """Run the real scheduler and memory on an engine that checks every read, or on a trace to plan capacity."""
    try:
        code = _plan_capacity(chosen, chosen.trace) if chosen.trace is not None else _check_correctness(chosen)
    except (ValueError, OSError) as error:
        fail(error)
    raise typer.Exit(code)


def _plan_capacity(chosen: SimulateOptions, trace: Path) -> int:
    from freehold.planning.command import simulate_trace
    from freehold.planning.replay import Speed

    speed = Speed(chosen.step_ms / 1e3, chosen.token_us / 1e6)
    return simulate_trace(trace, chosen.scale, chosen.limit, chosen.server, speed)


def _check_correctness(chosen: SimulateOptions) -> int:
    from freehold.simulation import command
    from freehold.simulation.scenario import Cell, Scenario

    if chosen.scenario is not None:
        return command.simulate_one(Scenario.from_json(chosen.scenario.read_text()))
    if chosen.cell is not None:
        return command.simulate_one(Scenario.generate(Cell.parse(chosen.cell), chosen.seed))
    if chosen.exhaustive:
        return command.simulate_exhaustive(chosen.minutes or command.EXHAUSTIVE_MINUTES, chosen.jobs)
    if chosen.matrix or chosen.minutes is not None:
        run = command.MatrixRun(chosen.seeds, chosen.first_seed, chosen.jobs, chosen.minutes)
        return command.simulate_matrix(run)
    raise ValueError("say what to simulate: --matrix, --exhaustive, --cell, --scenario or --trace")


@app.command()
def demo() -> None:
    """Serve the bundled model to several clients at once, and show where its memory went."""
    from freehold.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


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


@bench_app.command("peers")
def bench_peers(
    peer: Annotated[list[str] | None, typer.Option(help="vllm, openvino or llama.cpp. Repeat it for several.")] = None,
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


@bench_app.command("floor")
def bench_floor() -> None:
    """Compare this machine's speed with transformers'."""
    from freehold.bench.floor import run_floor

    raise typer.Exit(run_floor())


@bench_app.command("speculation")
def bench_speculation() -> None:
    """Compare prompt lookup with plain decoding, on repetitive and on ordinary prompts."""
    from freehold.bench.speculation import run_speculation

    raise typer.Exit(run_speculation())


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


if __name__ == "__main__":
    app()
