"""The smallest OpenAI-compatible server around OpenVINO GenAI's continuous batching.

Run with the Python of the environment that has openvino-genai: `openvino_server.py FOLDER PORT TOKENS`.
Imports nothing of Freehold.
"""

# pyright: reportMissingImports=false

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

BYTES_A_GB = 1 << 30


def converted(folder: Path) -> Path:
    """The model with int8 weights in OpenVINO's format, made once."""
    target = folder.parent / f"{folder.name}-openvino-int8"
    if not (target / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
        from transformers import AutoTokenizer

        config = OVWeightQuantizationConfig(bits=8)
        OVModelForCausalLM.from_pretrained(folder, export=True, quantization_config=config).save_pretrained(target)
        AutoTokenizer.from_pretrained(folder).save_pretrained(target)
        tokenizer, detokenizer = _converted_tokenizers(target)
        openvino.save_model(tokenizer, target / "openvino_tokenizer.xml")
        openvino.save_model(detokenizer, target / "openvino_detokenizer.xml")
    return target


def _converted_tokenizers(folder: Path) -> Any:
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    return convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)


class Engine:
    """One thread steps; handlers of requests wait for their tokens."""

    def __init__(self, folder: Path, tokens: int):
        config = openvino_genai.SchedulerConfig()
        config.num_kv_blocks = tokens // 32  # blocks of 32 tokens on the CPU
        config.enable_prefix_caching = True
        config.dynamic_split_fuse = True
        config.max_num_seqs = 64
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), config, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._arrived = queue.SimpleQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(ids)

    def encode(self, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt).input_ids
        return openvino.Tensor(np.array([prompt], np.int64))

    def submit(self, ids: Any, count: int, deliver: Any) -> None:
        """`deliver` is called with lists of token ids, at last with None."""
        self._arrived.put((ids, count, deliver))

    def _run(self) -> None:
        running = {}
        while True:
            while not running or not self._arrived.empty():
                ids, count, deliver = self._arrived.get()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = count
                config.ignore_eos = True
                config.do_sample = False
                number = next(self._numbers)
                running[number] = (self._pipeline.add_request(number, ids, config), deliver)
            self._pipeline.step()
            for number, (handle, deliver) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        deliver(list(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    deliver(None)
                    del running[number]


def application(engine: Engine) -> Starlette:
    async def health(request: Any) -> Any:
        return JSONResponse({})

    async def models(request: Any) -> Any:
        return JSONResponse({"data": [{"id": "openvino"}]})

    async def completions(request: Any) -> Any:
        body = await request.json()
        ids, count = engine.encode(body["prompt"]), body["max_tokens"]
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()
        engine.submit(ids, count, lambda tokens: loop.call_soon_threadsafe(arrived.put_nowait, tokens))

        async def events() -> AsyncIterator[str]:
            output, shown = [], ""
            while (tokens := await arrived.get()) is not None:
                output += tokens
                text = engine.decode(output)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text[len(shown) :]}]})}\n\n"
                shown = text
            usage = {"prompt_tokens": ids.get_shape()[1], "completion_tokens": len(output)}
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
    source, port, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    uvicorn.run(application(Engine(converted(source), tokens)), port=port, log_level="warning")
