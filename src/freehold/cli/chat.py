"""A conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from rich.console import Console

from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM, Completion

Messages = list[dict[str, Any]]

HELP = """[dim]/system TEXT   begin anew with this system prompt
/reset         forget the conversation, keep the system prompt
/help          this
/quit          end (so does Ctrl-D); Ctrl-C stops an answer[/dim]"""


@dataclass(frozen=True)
class Counts:
    """What an answer was made of."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Partner(Protocol):
    """Who answers. Yields the answer piece by piece, and last its counts; leaving early ends it."""

    def answer(self, messages: Messages) -> Iterator[str | Counts]: ...


class LocalModel:
    """The model of an LLM. Raises ValueError if it has no chat template."""

    def __init__(self, llm: LLM, params: SamplingParams):
        self._llm = llm
        self._params = params
        if llm.tokenizer.chat_template is None:
            raise ValueError("the model has no chat template: use `freehold generate`")

    def answer(self, messages: Messages) -> Iterator[str | Counts]:
        for piece in self._llm.stream(self._llm.render(messages), self._params):
            if isinstance(piece, Completion):
                yield Counts(piece.prompt_tokens, piece.cached_tokens, len(piece.token_ids))
            else:
                yield piece


class RemoteModel:
    """The model of an OpenAI-compatible server. Raises httpx.HTTPError, or ValueError with the server's words."""

    def __init__(self, url: str, api_key: str | None, params: SamplingParams):
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=600.0))
        models = self._client.get("/v1/models")
        _check(models)
        self._body = {
            "model": models.json()["data"][0]["id"],
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def answer(self, messages: Messages) -> Iterator[str | Counts]:
        with self._client.stream("POST", "/v1/chat/completions", json={**self._body, "messages": messages}) as response:
            if response.status_code != 200:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if event["choices"]:
                    yield event["choices"][0]["delta"].get("content") or ""
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    yield Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        error = response.json().get("error", {}) if "json" in response.headers.get("content-type", "") else {}
        raise ValueError(error.get("message") or f"the server answered {response.status_code}")


class Chat:
    """Reads turns until the end of input."""

    def __init__(self, partner: Partner, system: str | None, console: Console, read: Callable[[str], str]):
        self._partner = partner
        self._system = system
        self._console = console
        self._read = read
        self._messages: Messages = []
        self._reset()

    def run(self) -> None:
        self._console.print("[dim]/help lists the commands, Ctrl-D ends the conversation.[/dim]")
        while True:
            try:
                text = self._read("[bold cyan]you>[/bold cyan] ").strip()
            except EOFError:
                return self._console.print()
            except KeyboardInterrupt:
                self._console.print("[dim]Ctrl-D ends the conversation.[/dim]")
                continue
            if text == "/quit":
                return None
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name == "/system":
            self._system = argument.strip() or None
        if name in ("/system", "/reset"):
            self._reset()
            self._console.print("[dim]The conversation begins anew.[/dim]")
            return
        if name != "/help":
            self._console.print(f"there is no command {name}", markup=False)
        self._console.print(HELP)

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _turn(self, text: str) -> None:
        """Take a turn. One that fails has not happened; one that is stopped keeps what was said."""
        asked: Messages = [*self._messages, {"role": "user", "content": text}]
        try:
            said = self._show(self._partner.answer(asked))
        except (httpx.HTTPError, ValueError) as error:
            self._console.print(str(error), style="red", markup=False)
        else:
            self._messages = [*asked, {"role": "assistant", "content": said}]

    def _show(self, pieces: Iterator[str | Counts]) -> str:
        started, first, said = time.monotonic(), None, ""
        try:
            with closing(pieces):  # pyright: ignore[reportArgumentType]
                for piece in pieces:
                    first = first or time.monotonic()
                    if isinstance(piece, Counts):
                        self._show_counts(piece, first - started, time.monotonic() - first)
                    else:
                        said += piece
                        self._console.out(piece, end="")
                        sys.stdout.flush()
        except KeyboardInterrupt:
            self._console.print("\n[dim]stopped[/dim]")
        return said

    def _show_counts(self, counts: Counts, first_s: float, rest_s: float) -> None:
        self._console.print(
            f"\n[dim]{counts.cached_tokens} of {counts.prompt_tokens} prompt tokens cached · first token after "
            f"{first_s:.2f} s · {counts.output_tokens / max(rest_s, 1e-9):.0f} tokens/s[/dim]"
        )
