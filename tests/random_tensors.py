"""Tensors in every format that weights are stored in."""

import gguf
import numpy as np
import torch

from freehold.models.tensor import StoredTensor, TensorFormat

WRITTEN = {TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q5_0, TensorFormat.Q5_1, TensorFormat.Q8_0}


def stored(values: np.ndarray, kind: TensorFormat) -> StoredTensor:
    """Numbers [rows, columns] in a format; random ones where nobody writes it in Python."""
    rows, columns = values.shape
    if kind is TensorFormat.BF16:
        data = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().reshape(rows, -1)
    elif kind in (TensorFormat.F32, TensorFormat.F16):
        data = values.astype(np.float32 if kind is TensorFormat.F32 else np.float16).view(np.uint8)
    elif kind in WRITTEN:
        data = gguf.quantize(values, gguf.GGMLQuantizationType[kind.value])
    else:
        data = random_blocks(values.shape, kind)
    return StoredTensor(kind, rows, columns, data)


def random_blocks(shape: tuple[int, int], kind: TensorFormat) -> np.ndarray:
    """Of formats that nobody writes in Python: any bytes, with scales of a sensible size."""
    rng, (rows, columns) = np.random.default_rng(5), shape
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.value]]
    data = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    starts = {
        TensorFormat.Q4_K: (0, 2),
        TensorFormat.Q5_K: (0, 2),
        TensorFormat.Q6_K: (208,),
        TensorFormat.Q2_K: (80, 82),
        TensorFormat.Q3_K: (108,),
        TensorFormat.MXFP4: (),
    }
    if kind is TensorFormat.MXFP4:
        data[:, :, 0] = rng.integers(118, 124, data.shape[:2])
    for at in starts.get(kind, (0,)):
        scales = rng.uniform(0.001, 0.02, (rows, columns // block, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)
