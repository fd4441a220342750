"""The conversation in the terminal."""

import io
import json

import httpx
import pytest
from rich.console import Console

from freehold.cli.chat import Chat, Counts, RemoteModel
from freehold.contract.sampling_params import SamplingParams


class Parrot:
    """Repeats what was said last; `interrupts` when it has said one word."""

    def __init__(self):
        self.asked = []
        self.interrupts = False
        self.was_left = False

    def answer(self, messages):
        self.asked.append(messages)
        try:
            for word in messages[-1]["content"].split():
                yield f"{word} "
                if self.interrupts:
                    raise KeyboardInterrupt
            if "wrong" in messages[-1]["content"]:
                raise ValueError("that was refused")
            yield Counts(5, 3, 2)
        finally:
            self.was_left = True


def run(lines: list, partner=None, system=None) -> tuple[list, str]:
    """A conversation with these inputs, of which exceptions are raised -> (what the partner was asked, the screen)."""
    partner = partner or Parrot()
    rest, screen = list(lines), io.StringIO()

    def read(prompt):
        if not rest:
            raise EOFError
        line = rest.pop(0)
        if isinstance(line, type):
            raise line
        return line

    Chat(partner, system, Console(file=screen, width=200), read).run()
    return partner.asked, screen.getvalue()


def contents(messages: list) -> list[str]:
    return [message["content"] for message in messages]


def test_a_conversation_goes_on():
    asked, screen = run(["one two", "", "three"], system="be brief")
    assert [contents(messages) for messages in asked] == [
        ["be brief", "one two"], ["be brief", "one two", "one two ", "three"]
    ]  # fmt: skip
    assert "3 of 5 prompt tokens cached" in screen


def test_ctrl_c_stops_the_answer_and_not_the_conversation():
    parrot = Parrot()
    parrot.interrupts = True
    asked, screen = run(["one two", "three"], parrot)
    assert parrot.was_left
    assert contents(asked[1]) == ["one two", "one ", "three"], "what was said before stays"
    assert "stopped" in screen


def test_ctrl_c_at_the_prompt_says_how_to_end():
    asked, screen = run([KeyboardInterrupt, "one"])
    assert len(asked) == 1
    assert "Ctrl-D ends" in screen


def test_commands():
    asked, screen = run(["one", "/reset", "two", "/system be kind", "three", "/help", "/what", "/quit", "four"])
    assert [contents(messages) for messages in asked] == [["one"], ["two"], ["be kind", "three"]]
    assert "/system TEXT" in screen
    assert "there is no command /what" in screen


def test_a_turn_that_was_refused_has_not_happened():
    asked, screen = run(["wrong", "right"])
    assert contents(asked[1]) == ["right"]
    assert "that was refused" in screen


def test_with_a_server(monkeypatch):
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    said = [{"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [], "usage": usage}]
    events = [*map(json.dumps, said), "[DONE]"]

    def serve(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer key":
            return httpx.Response(401, json={"error": {"message": "wrong or missing API key"}})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "small"}]})
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=httpx.MockTransport(serve), **options))
    params = SamplingParams(temperature=0, max_tokens=5)
    remote = RemoteModel("http://server", "key", params)
    assert list(remote.answer([{"role": "user", "content": "a"}])) == ["Hi", Counts(9, 4, 1)]
    with pytest.raises(ValueError, match="wrong or missing API key"):
        RemoteModel("http://server", None, params)
