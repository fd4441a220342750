"""`freehold bench kernels`: what each kernel reads and multiplies, relative to this machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.bench.machine import machine
from freehold.bench.roofs import BYTES, FLOATS, HALVES, WORDS, bandwidth, products, times
from freehold.contract.arrays import Float32, Int64
from freehold.engine.cpu.backend import CpuBackend, Matrix
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.cpu.isa import ISAS, available, integer_sets
from freehold.engine.cpu.program import Now
from freehold.engine.cpu.row_operations import norm_columns
from freehold.engine.cpu.row_scaled import DIGITS, TILED, RowScaledMatrix
from freehold.models.backend import AttentionTensors, CachePlace
from freehold.models.families.rotary import base_frequencies
from freehold.models.quantize import Quantizer
from freehold.models.spec import Attention, CacheLayout, Rotary
from freehold.models.tensor import StoredTensor, TensorFormat

ROWS, COLUMNS = 3072, 768  # of a matrix; rows of inputs:
INPUTS = (1, 16, 256)
COLD_BYTES = 64 << 20  # of matrices used in turns, so that none stays in a cache
REPEATS = 5
HEADS, KV_HEADS, SIZE, PAGE = 9, 3, 64, 16
# Sequences, tokens of each, and positions before them.
LOOKS = {"decode, 1 x 1,500": (1, 1, 1500), "decode, 16 x 500": (16, 1, 500), "512 after 1,024": (1, 512, 1024)}
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Work:
    """A kernel with its inputs: bytes to read and write, and multiplications to do, with their kind."""

    name: str
    isa: str
    bytes: float
    operations: float
    kind: str
    run: Callable[[], object]


def run_kernels() -> int:
    """Print the table. Return exit code 0."""
    console, device = Console(width=110), CpuDevice()
    device.prepare_thread()
    with console.status("Measuring, about a minute ..."):
        speed = bandwidth()
        peaks = {(isa, kind): products(isa, kind) for isa in available() for kind in (BYTES, WORDS, FLOATS, HALVES)}
        shown = [(work, statistics.median(times(work.run, REPEATS))) for work in _all()]
    _print_roofs(console, speed, peaks)
    table = Table("kernel", "instructions", "us", "MB", "million products", "bound by", "of the roof",
                  title=f"Kernels on {machine()}")  # fmt: skip
    for work, seconds in shown:
        of_memory, of_products = work.bytes / speed, work.operations / peaks[work.isa, work.kind]
        bound = "memory" if of_memory > of_products else "products"
        table.add_row(
            work.name, work.isa, f"{1e6 * seconds:,.0f}", f"{work.bytes / 1e6:.2f}", f"{work.operations / 1e6:,.1f}",
            bound, f"{max(of_memory, of_products) / seconds:.0%}",
        )  # fmt: skip
    console.print(table)
    return 0


def _print_roofs(console: Console, speed: float, peaks: dict[tuple[str, str], float]) -> None:
    table = Table("instructions", *(f"{kind}, billion/s" for kind in (BYTES, WORDS, FLOATS, HALVES)),
                  title=f"Roofs: {speed / 1e9:.1f} GB/s of memory, and products")  # fmt: skip
    for isa in available():
        numbers = (peaks[isa, kind] / 1e9 for kind in (BYTES, WORDS, FLOATS, HALVES))
        table.add_row(isa, *(f"{number:,.0f}" if number else "-" for number in numbers))
    console.print(table)


def _all() -> Iterator[Work]:
    for isa in integer_sets():
        for kind, inputs in (("Q4_1", "int8"), ("Q4_1", "int16"), ("Q4_K", "int8"), ("Q8_0", "int16")):
            yield from _linear(TensorFormat(kind), inputs, isa)
    for kind in ("Q4_1", "BF16", "F32"):
        yield from _linear(TensorFormat(kind), "float32", "portable")
    for kind in KV_BYTES:
        for isa in ("portable", *({"amx", "avx512-bf16"} & {*available()} if kind == "bfloat16" else ())):
            yield from _attention(kind, isa)
    yield from _by_row()


def _backend(inputs: str, isa: str, caches: list[GroupCache]) -> CpuBackend:
    return CpuBackend(caches, 1e-5, 2048, inputs, isa=ISAS[isa])


def _linear(kind: TensorFormat, inputs: str, isa: str) -> Iterator[Work]:
    backend, tensor = _backend(inputs, isa, []), _tensor(kind)
    one = backend.pack([tensor])
    matrices: list[Matrix] = [one] + [backend.pack([tensor]) for _ in range(COLD_BYTES // _bytes(one))]
    what = {"int8": BYTES, "int16": WORDS, "float32": FLOATS}[inputs]
    for count in INPUTS:
        products = count * ROWS * COLUMNS
        if isinstance(one, RowScaledMatrix):  # of digits: tile registers split those of weights as well
            what, products = BYTES, products * DIGITS * (DIGITS if isa == "amx" and count >= TILED else 1)
        x = np.random.default_rng(0).standard_normal((count, COLUMNS)).astype(np.float32)
        out, turns = np.zeros((count, ROWS), np.float32), iter(range(1 << 30))

        def run(x: Float32 = x, out: Float32 = out, turns: Iterator[int] = turns) -> None:
            matrices[next(turns) % len(matrices)].multiply(Now(), x, out)

        size = _bytes(one) + x.nbytes + 2 * out.nbytes
        yield Work(f"product, {kind} x {inputs}, {count} rows", isa, size, products, what, run)


def _tensor(kind: TensorFormat) -> StoredTensor:
    tensor = StoredTensor.of(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32))
    if kind is TensorFormat.BF16:
        halves = (tensor.data.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return StoredTensor(kind, ROWS, COLUMNS, halves)
    return tensor if kind is TensorFormat.F32 else Quantizer(kind).convert(tensor)


def _bytes(matrix: Matrix) -> int:
    return sum(array.nbytes for array in vars(matrix).values() if isinstance(array, np.ndarray))


def _attention(kind: str, isa: str) -> Iterator[Work]:
    layer = Attention(HEADS, KV_HEADS, SIZE, Rotary(tuple(base_frequencies(1e4, SIZE).tolist())))
    for name, (sequences, tokens, before) in LOOKS.items():
        pages = -(-(before + tokens) // PAGE)
        cache = GroupCache(CacheLayout(None, False, False, ((0, 0),), (layer.cache,)), sequences * pages, PAGE, kind)
        backend = _backend("int16", isa, [cache])
        attend = backend.attention(CachePlace(0, 0), layer, AttentionTensors())
        table = np.arange(1, 1 + sequences * pages, dtype=np.int32).reshape(sequences, pages)
        rows: Int64 = np.arange(sequences)
        batch = CpuBatch.of(table, PAGE, rows, np.full(sequences, before), np.full(sequences, tokens))
        width = (HEADS + 2 * KV_HEADS) * SIZE
        qkv = np.random.default_rng(0).standard_normal((sequences * tokens, width)).astype(np.float32)
        seen = sequences * (before + tokens)
        pairs = sequences * sum(range(before + 1, before + tokens + 1)) * HEADS
        size = seen * 2 * KV_HEADS * SIZE * KV_BYTES[kind] + 2 * qkv.nbytes

        def run(attend=attend, qkv: Float32 = qkv, batch: CpuBatch = batch) -> object:
            return attend(qkv, [batch])

        yield Work(
            f"attention, {kind}, {name}", isa, size, 2 * pairs * SIZE, FLOATS if isa == "portable" else HALVES, run
        )


def _by_row() -> Iterator[Work]:
    x = np.random.default_rng(0).standard_normal((16384, COLUMNS)).astype(np.float32)
    norm = np.ones(COLUMNS, np.float32)
    yield Work("norm, 16,384 rows", "portable", 2 * x.nbytes, x.size, FLOATS,
               lambda: norm_columns(Now(), x, 0, norm, 1e-5))  # fmt: skip
    table = _backend("int16", "portable", []).pack([_tensor(TensorFormat.Q8_0)])
    tokens = np.arange(256, dtype=np.int32)
    yield Work("embedding, 256 tokens of Q8_0", "portable", 256 * COLUMNS * 5, 256 * COLUMNS, FLOATS,
               lambda: table.gather(Now(), tokens))  # fmt: skip
