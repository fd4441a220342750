"""OpenVINO GenAI with continuous batching, behind `smallest_server`.

Run with the Python of the environment that has openvino-genai: `openvino_server.py FOLDER PORT TOKENS`. Imports nothing
of Freehold.
"""

# pyright: reportMissingImports=false

import itertools
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from smallest_server import serve

BYTES_A_GB = 1 << 30


def converted(folder: Path) -> Path:
    """Convert the model once to int8 weights in OpenVINO's format."""
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
    """One thread steps; request handlers wait for their tokens."""

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

    def encode(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt).input_ids.data[0].tolist() if isinstance(prompt, str) else prompt

    def submit(self, ids: list[int], count: int, deliver: Any) -> None:
        self._arrived.put((openvino.Tensor(np.array([ids], np.int64)), count, deliver))

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


if __name__ == "__main__":
    source, port, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    serve(Engine(converted(source), tokens), "openvino", port)
