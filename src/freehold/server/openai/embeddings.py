"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from freehold.contract.arrays import Float32
from freehold.contract.errors import BadRequest, InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import EmbeddingBody
from freehold.server.requests.job import Generator, Job
from freehold.server.requests.prompt import tokens_of
from freehold.server.router import router
from freehold.server.served_models import ServedModels


def embedding_routes(engine: AsyncEngine, generator: Generator, models: ServedModels) -> APIRouter:
    routes = router()

    @routes.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> dict[str, Any]:
        """Return the final hidden state of the last token, or the mean of all, of length 1 unless `normalize` is
        false."""
        model, adapter = models.choose(body.model, body.lora_path)
        client, many = client_of(request), body.prompts
        generator.check_outputs(len(many), 1, "input")
        if body.dimensions not in (None, engine.info.hidden_size):
            raise InvalidParameter("dimensions", f"must be the model's, {engine.info.hidden_size}")
        prompts = await tokens_of(many, "input", engine)
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, pooling=body.pooling or "last")
        options = Options(body.priority or 0, client.namespace(body.cache_salt), body.timeout, adapter=adapter)
        outputs = await generator.gather(Job(f"embd-{uuid.uuid4().hex}", prompts, params, options, "input", client))
        if not all(output.embedding for output in outputs):
            raise BadRequest("the request was aborted", "input")
        vectors = [np.frombuffer(output.embedding, np.float32) for output in outputs]
        if body.normalize is not False:
            vectors = [_normalized(vector) for vector in vectors]
        count = sum(map(len, prompts))
        return {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format == "base64")}
                for i, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    return routes


def _normalized(vector: Float32) -> Float32:
    length = np.linalg.norm(vector)
    return vector / np.float32(length) if length else vector


def _encoded(vector: Float32, as_base64: bool) -> str | list[float]:
    return base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
