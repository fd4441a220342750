"""Flags of vLLM and SGLang that have another name here, or none yet."""

from __future__ import annotations

_MEMORY = "use --kv-cache-memory-bytes (such as 8GB) or --num-pages"
_TENSOR_PARALLEL = "tensor parallelism is not supported yet"
_QUANTIZATION = "the format of the file decides; --linear-compute and --kv-cache-dtype choose what is computed with"

HINTS = {
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--kv-cache-memory": _MEMORY,
    "--max-total-tokens": "use --num-pages",
    "--num-gpu-blocks-override": "use --num-pages",
    "--tensor-parallel-size": _TENSOR_PARALLEL,
    "--tp-size": _TENSOR_PARALLEL,
    "--tp": _TENSOR_PARALLEL,
    "--pipeline-parallel-size": "pipeline parallelism is not supported",
    "--data-parallel-size": "start several servers, and balance between them",
    "--model-path": "use --model",
    "--max-num-batched-tokens": "use --chunked-prefill-size",
    "--max-prefill-tokens": "use --chunked-prefill-size",
    "--enable-chunked-prefill": "prompts are always computed in chunks; --chunked-prefill-size sets their size",
    "--enable-prefix-caching": "the prefix cache is always on; --disable-radix-cache turns it off",
    "--no-enable-prefix-caching": "use --disable-radix-cache",
    "--scheduling-policy": "use --schedule-policy",
    "--quantization": _QUANTIZATION,
    "--dtype": _QUANTIZATION,
    "--speculative-config": "use --speculative-algorithm and --speculative-num-draft-tokens",
    "--speculative-num-steps": "use --speculative-num-draft-tokens",
    "--tokenizer-path": "the tokenizer comes with the model",
    "--tokenizer": "the tokenizer comes with the model",
    "--trust-remote-code": "models bring no code here",
    "--swap-space": "host memory for KV is not supported yet",
    "--enable-hierarchical-cache": "host memory for KV is not supported yet",
    "--enable-lora": "adapters are not supported",
    "--enable-auto-tool-choice": "tool calls are not supported yet",
}
