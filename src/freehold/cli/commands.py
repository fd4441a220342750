"""The command line. Imports what a command needs when it runs: `freehold --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freehold import __version__
from freehold.cli.bench_commands import Model, bench_app
from freehold.cli.cache_commands import cache_app
from freehold.cli.command_line import Commands, ConfigFile, ServingCommand, address, fail, sources, takes
from freehold.config import MEMORY, EngineConfig
from freehold.options import Limits, check_limits, option
from freehold.server.config import ServerConfig

if TYPE_CHECKING:
    import httpx

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


app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")

CORRECTNESS, PLANNING = "Correctness", "Capacity planning"

ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")]
Url = Annotated[str, typer.Option(help="A running server.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]


@app.command(cls=ServingCommand, epilog="Each flag has an environment variable: FREEHOLD_PORT for --port.")
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


@app.command(cls=ServingCommand, epilog="Takes the flags, the variables and the file of `freehold serve`.")
@takes(EngineConfig, ServerConfig)
def check(
    config: EngineConfig,
    http: ServerConfig,
    context: typer.Context,
    model_name: ModelArgument = None,
    config_file: ConfigFile = None,
) -> None:
    """Validate a configuration, print the memory plan, and exit. No weights are loaded, no storage is opened."""
    from freehold.cli.terminal import show_plan
    from freehold.runtime import assembly
    from freehold.runtime.tier_plan import check_tiers
    from freehold.server.launch import check_options

    try:
        check_options(http)
        plan = assembly.check(_chosen(config, model_name))
        show_plan(plan, check_tiers(plan.config, plan) or (), sources(context))
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

    from freehold.cli.chat import Chat, LocalModel, RemoteModel
    from freehold.cli.terminal import console
    from freehold.contract.sampling_params import SamplingParams

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
    from freehold.cli.terminal import generate_all

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

    from freehold.cli.terminal import show_answer, show_memory

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    place = address(server or url)
    try:
        with httpx.Client(base_url=place, headers=headers, timeout=30) as client:
            if request is not None:
                answer = client.get(f"/debug/requests/{request}")
            elif prompt is not None:
                answer = client.post("/debug/miss", json={"prompt": prompt})
            else:
                answer = client.get("/debug/memory", params={} if page is None else {"page": page, "group": group})
    except httpx.HTTPError as error:
        fail(OSError(f"{place} does not answer: {error}"))
    body = _body(place, answer)
    show_memory(body) if request is None and prompt is None else show_answer(body)


def _body(place: str, answer: httpx.Response) -> Any:
    """End the program with the server's error, or if it is another kind of server."""
    try:
        body = answer.json()
        error = None if answer.status_code == 200 else body["error"]["message"]
    except (ValueError, KeyError, TypeError):
        error = f"{place} answers, but it is no Freehold server"
    if error is not None:
        fail(ValueError(error))
    return body


@dataclass(frozen=True)
class SimulateOptions:
    """What to simulate: one of matrix, exhaustive, cell, scenario and trace."""

    matrix: bool = option(False, "Check every cell of the matrix.", CORRECTNESS)
    seeds: int = option(3, "Seeds for each cell.", CORRECTNESS, Limits(least=1))
    first_seed: int = option(0, "The first seed.", CORRECTNESS)
    jobs: int = option(2, "Processes.", CORRECTNESS, Limits(least=1))
    minutes: float | None = option(
        None, "Stop after this long. --matrix goes on with new seeds until then, --exhaustive deeper.", CORRECTNESS,
        Limits(above=0),
    )  # fmt: skip
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
    hicache_ratio: float = option(
        0.0, "Host memory for KV, as a multiple of the device's. 0: none.", PLANNING, Limits(least=0)
    )
    hicache_write_policy: str = option(
        "write_through", "write_through, write_through_selective or write_back.", PLANNING
    )
    step_ms: float = option(10.0, "Milliseconds that every step takes.", PLANNING)
    token_us: float = option(50.0, "Microseconds that each token of a step adds.", PLANNING)

    def __post_init__(self) -> None:
        check_limits(self)

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
            enable_hierarchical_cache=self.hicache_ratio > 0,
            hicache_ratio=self.hicache_ratio or 1.0,
            hicache_write_policy=self.hicache_write_policy,
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
    from freehold.cli.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    app()
