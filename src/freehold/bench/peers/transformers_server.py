"""transformers with continuous batching, behind `smallest_server`.

Run with the Python of the environment that has it: `transformers_server.py FOLDER PORT TOKENS`. Imports nothing of
Freehold.
"""

# pyright: reportMissingImports=false

import itertools
import sys
from typing import Any

import torch
from smallest_server import serve
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

PAGE = 256
WARM_PROMPT, WARM_TOKENS = 64, 4


class Engine:
    def __init__(self, folder: str, tokens: int):
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
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

    def encode(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def submit(self, ids: list[int], count: int, deliver: Any) -> None:
        name, given = str(next(self._numbers)), 0

        def take(output: Any) -> None:
            nonlocal given
            deliver(list(output.generated_tokens[given:]))
            given = len(output.generated_tokens)
            if output.is_finished():
                deliver(None)

        self._manager.register_result_handler(name, take)
        self._manager.add_request(ids, request_id=name, max_new_tokens=count, streaming=True)


if __name__ == "__main__":
    source, port, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve(Engine(source, tokens), "transformers", port)
