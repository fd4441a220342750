"""POST /v1/embeddings, as OpenAI's client asks for it."""

import httpx
import numpy as np
import pytest

from freehold import LLM

TEXTS = ["The cat sat on the mat.", "A kitten was sitting on a rug.", "Interest rates rose in March."]


@pytest.fixture(scope="module")
def expected():
    """By a engine of its own, of length 1."""
    with LLM() as llm:
        found = {pooling: llm.embed(TEXTS, pooling) for pooling in ("last", "mean")}
    return {pooling: [one / np.linalg.norm(one) for one in vectors] for pooling, vectors in found.items()}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_texts_get_their_embeddings_in_order(client, expected, pooling, encoding):
    answer = client.embeddings.create(model="", input=TEXTS, encoding_format=encoding, extra_body={"pooling": pooling})
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15
    for one, wanted in zip(answer.data, expected[pooling], strict=True):
        vector = one.embedding
        if isinstance(vector, str):
            import base64

            vector = np.frombuffer(base64.b64decode(vector), np.float32)
        np.testing.assert_allclose(vector, wanted, atol=1e-6)


def test_one_text_token_ids_and_lengths(server, client, expected):
    single = client.embeddings.create(model="", input=TEXTS[0]).data[0].embedding
    np.testing.assert_allclose(single, expected["last"][0], atol=1e-6)
    ids = httpx.post(f"{server}/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    for given in (ids, [ids]):
        found = client.embeddings.create(model="", input=given).data[0].embedding
        np.testing.assert_allclose(found, single, atol=1e-6)
    raw = client.embeddings.create(model="", input=TEXTS[0], extra_body={"normalize": False}).data[0].embedding
    assert np.linalg.norm(raw) > 2
    np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), single, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [99999999]}, "input"),
        ({"input": "a " * 20_000}, "input"),
        ({"input": ["a"] * 1000}, "input"),
        ({"input": "a", "dimensions": 64}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_has_no_embedding_is_refused(server, fields, param):
    answer = httpx.post(f"{server}/v1/embeddings", json=fields, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
