"""Agent frameworks run their loops against the bundled model. It is small: what it has to say is bound, not trusted."""

import asyncio
from typing import Literal

import agents
import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "SmolLM2-135M-Instruct"


class Place(BaseModel):
    """A place on a map."""

    city: str = Field(max_length=12)
    zone: Literal["CET", "UTC"]
    floor: int = Field(ge=0, le=9)


@pytest.fixture
def model(server):
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{server}/v1", api_key="none"))


@pytest.mark.parametrize("output", [Place, NativeOutput(Place)], ids=["as a tool", "as a format"])
def test_pydantic_ai_gets_an_object_of_its_type(model, output):
    agent = Agent(model, output_type=output, instructions="Answer briefly.", retries=0)
    result = agent.run_sync("Where is Paris?", model_settings={"temperature": 0, "max_tokens": 200})
    assert isinstance(result.output, Place)
    assert result.usage.output_tokens > 5


def test_pydantic_ai_calls_a_tool_and_goes_on_with_what_it_gave(model):
    agent, called = Agent(model, retries=0), []

    @agent.tool_plain
    def time_in(zone: Literal["CET", "UTC"]) -> str:
        called.append(zone)
        return "12:30"

    def settings(context) -> dict:
        choice = "none" if called else "required"
        return {"temperature": 0, "max_tokens": 60, "tool_choice": choice, "parallel_tool_calls": False}

    result = agent.run_sync("What time is it in Paris?", model_settings=settings)
    assert called
    assert set(called) <= {"CET", "UTC"}
    assert [type(message).__name__ for message in result.all_messages()] == ["ModelRequest", "ModelResponse"] * 2
    assert isinstance(result.output, str)


def test_pydantic_ai_streams_text(model):
    async def run() -> tuple[list[str], str]:
        agent = Agent(model)
        async with agent.run_stream("Say hello.", model_settings={"temperature": 0, "max_tokens": 20}) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            return pieces, await result.get_output()

    pieces, whole = asyncio.run(run())
    assert len(pieces) > 3
    assert "".join(pieces) == whole


@pytest.fixture(params=["responses", "chat"])
def runner(server, request):
    """`openai-agents` over one of its two APIs: (agent's options, prompt) -> the result."""
    agents.set_tracing_disabled(True)
    kind = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[request.param]

    def run(prompt: str, tool_choice=None, **options):
        async def inside():
            async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
                settings = agents.ModelSettings(temperature=0, max_tokens=120, tool_choice=tool_choice)
                model = kind(model=MODEL, openai_client=client)
                agent = agents.Agent(name="one", model=model, model_settings=settings, **options)
                return await agents.Runner.run(agent, prompt, max_turns=3)

        return asyncio.run(inside())

    return run


def test_openai_agents_call_a_tool_and_answer_with_what_it_gave(runner):
    called = []

    @agents.function_tool
    def time_in(zone: Literal["CET", "UTC"]) -> str:
        """The time in a zone."""
        called.append(zone)
        return "It is 12:30."

    result = runner("What time is it?", tool_choice="required", tools=[time_in])
    assert called
    assert [type(item).__name__ for item in result.new_items] == [
        *["ToolCallItem"] * len(called), *["ToolCallOutputItem"] * len(called), "MessageOutputItem"
    ]  # fmt: skip
    assert isinstance(result.final_output, str)
    assert result.final_output


def test_openai_agents_get_an_object_of_their_type(runner):
    assert isinstance(runner("Where is Paris?", output_type=Place).final_output, Place)
