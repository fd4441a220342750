"""The smallest OpenAI-compatible server around the continuous batching of transformers.

Run with the Python of the environment that has it: `transformers_server.py FOLDER PORT TOKENS`.
Imports nothing of Freehold.
"""

# pyright: reportMissingImports=false

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

PAGE = 256
WARM_PROMPT, WARM_TOKENS = 64, 4


class Engine:
    def __init__(self, folder: str, tokens: int):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        paged = ContinuousBatchingConfig(page_size=PAGE, num_blocks=tokens // PAGE)
        self._manager = model.eval().init_continuous_batching(greedy, paged)
        self._numbers = itertools.count()
        self._manager.start()
        warm = self._manager.add_request([1] * WARM_PROMPT, max_new_tokens=WARM_TOKENS, streaming=True)
        for output in self._manager.request_id_iter(warm):
            if output.is_finished():
                break

    def encode(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def submit(self, ids: list[int], count: int, deliver: Any) -> None:
        """`deliver` is called in the event loop, with all tokens so far, and whether they are all."""
        name = str(next(self._numbers))
        self._manager.register_result_handler(
            name, lambda output: deliver((list(output.generated_tokens), output.is_finished()))
        )
        self._manager.add_request(ids, request_id=name, max_new_tokens=count, streaming=True)


def application(engine: Engine) -> Starlette:
    async def health(request: Any) -> Any:
        return JSONResponse({})

    async def models(request: Any) -> Any:
        return JSONResponse({"data": [{"id": "transformers"}]})

    async def completions(request: Any) -> Any:
        body = await request.json()
        ids, arrived = engine.encode(body["prompt"]), asyncio.Queue()
        engine.submit(ids, body["max_tokens"], arrived.put_nowait)

        async def events() -> AsyncIterator[str]:
            shown, is_last, tokens = "", False, []
            while not is_last:
                tokens, is_last = await arrived.get()
                text = engine.tokenizer.decode(tokens)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text[len(shown) :]}]})}\n\n"
                shown = text
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    source, port, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    uvicorn.run(application(Engine(source, tokens)), port=port, log_level="warning")
