"""The time of a decode step in vLLM's scheduler and KV cache manager, without a model.

Run with the Python of the environment that has vLLM: `vllm_scheduler.py FOLDER PROMPT STEPS SEQUENCES...` prints
{sequences: microseconds} as JSON on the last line. Imports nothing of Freehold.
"""

# pyright: reportMissingImports=false

import json
import random
import statistics
import sys
import time

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PAGE = 16


def decode_step_us(folder: str, sequences: int, prompt: int, steps: int) -> float:
    limit = prompt + steps + 64
    pages = sequences * (limit // PAGE + 2) + 1
    config = EngineArgs(
        model=folder,
        hf_overrides={"max_position_embeddings": limit},
        max_model_len=limit,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences * prompt, limit),
        block_size=PAGE,
        enable_prefix_caching=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = pages
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=PAGE)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(PAGE, hash_function)
    params = SamplingParams(temperature=0, max_tokens=steps + 32, ignore_eos=True)
    rng = random.Random(0)
    for i in range(sequences):
        tokens = [rng.randrange(2, 1000) for _ in range(prompt)]
        scheduler.add_request(Request(str(i), tokens, params, None, block_hasher=hasher))
    times = []
    while len(times) < steps:
        started = time.perf_counter()
        planned = scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        sampled = [[7] for _ in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        scheduler.update_from_output(planned, output)
        if len(names) == sequences and planned.total_num_scheduled_tokens == sequences:
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    folder, prompt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({count: decode_step_us(folder, int(count), prompt, steps) for count in sys.argv[4:]}))
