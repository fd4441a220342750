"""Integer kernels compiled for a processor that is not here: as assembly, and as a program that an emulator runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import typeof
from numba.core.registry import cpu_target

from freehold.engine.cpu import integer_tiles, row_scaled_tiles

Weights = integer_tiles.Weights | row_scaled_tiles.Weights
Inputs = integer_tiles.Inputs | row_scaled_tiles.Inputs
Outputs = integer_tiles.Outputs

TRIPLE, FEATURES = "aarch64-linux-gnu", "+neon,+dotprod,+fullfp16"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
BYTE, I64 = ir.PointerType(ir.IntType(8)), ir.IntType(64)
# Arrays as their sizes and bytes, then the numbers, from a file; the result to the standard output.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
void kernel(PLACES, long, long, long, long, long);
int main(int argc, char **argv) {
    FILE *in = fopen(argv[1], "rb");
    void *arrays[COUNT]; long size, numbers[6];
    for (int i = 0; i < COUNT; i++) {
        if (fread(&size, 8, 1, in) != 1) return 1;
        arrays[i] = malloc(size + 64);
        if (size && fread(arrays[i], size, 1, in) != 1) return 2;
    }
    if (fread(numbers, 8, 6, in) != 6) return 3;
    for (long panel = 0; panel < numbers[3]; panel += numbers[5])
        kernel(ARRAYS, numbers[0], numbers[1], numbers[2], panel, 0);
    fwrite(arrays[COUNT - 1], 4, numbers[4] * numbers[2], stdout);
    return 0;
}
"""


def can_run() -> bool:
    return shutil.which(COMPILER) is not None and shutil.which(EMULATOR) is not None


def _tiles(weights: Weights):
    """The module whose kernels read these."""
    return integer_tiles if isinstance(weights, integer_tiles.Weights) else row_scaled_tiles


def _arrays(*values: Weights | Inputs | Outputs) -> list[np.ndarray]:
    return [field for value in values for field in value if isinstance(field, np.ndarray)]


def kernel(weights: Weights, inputs: Inputs, outputs: Outputs, rows: int) -> ir.Module:
    """A function `kernel` of the arrays of the records, then blocks, loads, width, panel and row."""
    context = cpu_target.target_context
    count, module = len(_arrays(weights, inputs, outputs)), ir.Module("kernel")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTE] * count + [I64] * 5), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    arrays, (blocks, loads, width, panel, row) = list(function.args[:count]), function.args[count:]

    def array(kind):
        made = context.make_array(kind)(context, builder)
        made.data = builder.bitcast(arrays.pop(0), made.data.type)
        return made._getvalue()

    def record(value, *numbers):
        kind = typeof(value)
        fields = [array(one) for one in kind.types if hasattr(one, "ndim")]
        return context.make_tuple(builder, kind, [*fields, *numbers])

    def numbers(value):
        return context.make_tuple(builder, typeof(value), [ir.Constant(I64, number) for number in value])

    of_weights = [blocks, loads, numbers(weights.isa)]
    if isinstance(weights, row_scaled_tiles.Weights):
        of_weights[2:2] = ir.Constant(I64, weights.offset), numbers(weights.form)
    onto = builder.ptrtoint(arrays[-1], I64), width, ir.Constant(I64, 1)
    values = [record(weights, *of_weights), record(inputs), record(outputs, width, *onto), panel, row]
    kinds = [typeof(weights), typeof(inputs), typeof(outputs), typeof(0), typeof(0)]
    _tiles(weights)._Emitter(context, builder, typeof(None)(*kinds), values, rows).emit()
    builder.ret_void()
    return module


def compiled(module: ir.Module) -> tuple[str, bytes]:
    """-> assembly, and an object file."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(features=FEATURES, opt=3, reloc="static")
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed), machine.emit_object(parsed)


def run(program: bytes, weights: Weights, inputs: Inputs, outputs: Outputs, rows: int, folder: Path) -> np.ndarray:
    """What the kernel adds to zeros [rows, width], on the emulated processor."""
    (folder / "kernel.o").write_bytes(program)
    arrays = _arrays(weights, inputs, outputs)
    places = ", ".join(f"arrays[{number}]" for number in range(len(arrays)))
    driver = DRIVER.replace("COUNT", str(len(arrays))).replace("ARRAYS", places)
    (folder / "driver.c").write_text(driver.replace("PLACES", ", ".join(["void*"] * len(arrays))))
    subprocess.run(
        [COMPILER, "-O1", "-static", "-o", "driver", "driver.c", "kernel.o"], cwd=folder, check=True, timeout=120
    )
    panels = -(-outputs.width // weights.isa.lanes)
    with open(folder / "data", "wb") as data:
        for array in arrays:
            data.write(np.int64(array.nbytes).tobytes() + array.tobytes())
        is_one = isinstance(weights, row_scaled_tiles.Weights)
        step = 1 if is_one else integer_tiles.panels_at_once(weights.isa.lanes, rows)
        numbers = [weights.blocks, weights.loads, outputs.width, panels, rows, step]
        data.write(np.array(numbers, np.int64).tobytes())
    out = subprocess.run(
        [EMULATOR, "-cpu", "max", "driver", "data"], cwd=folder, check=True, capture_output=True, timeout=120
    )
    return np.frombuffer(out.stdout, np.float32).reshape(rows, outputs.width)
