"""Codes of weights as vectors that meet inputs: what a kernel does with a load of a form of codes (`code_forms`)."""

from typing import Any

from llvmlite import ir

from freehold.engine.cpu.code_forms import Nibbles
from freehold.engine.cpu.vectors import I8, I16, I64, constant, splat


class CodeVectors:
    """Emits loads of codes. They are the first array of a kernel's weights (`records`)."""

    def __init__(self, records: Any, form: Any, lanes: int, offset: Any):
        """`offset`: what codes are larger by in memory, an integer of LLVM."""
        self._records, self._form, self._offset = records, form, offset
        self._bytes, self._words = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
        self._lanes = lanes
        self.loads = 16 if form.bits == 8 else 4  # of a block
        self.load_bytes = (2 if form.bits == 8 else 4) * lanes
        self.block_bytes = 4 * form.bits * lanes
        self.each = 2 if isinstance(form, Nibbles) else 16 // self.loads  # vectors of a load

    def of(self, block_at, load) -> list[Any]:
        """The vectors of load number `load` of the block that begins at byte `block_at`: bytes of four columns of each
        lane if codes are `Nibbles`, else words of two, in the order of columns."""
        builder = self._records.builder
        at = self._records.linear(block_at, (load, self.load_bytes))
        if isinstance(self._form, Nibbles):
            raw = self._load(at, self._bytes)
            return [builder.and_(raw, constant(raw.type, 15)), builder.lshr(raw, constant(raw.type, 4))]
        if self._form.bits == 8:
            return [builder.sext(self._load(at, ir.VectorType(I8, 2 * self._lanes)), self._words)]
        lower = self._load(at, self._words)
        numbers = [self._and(builder.lshr(lower, constant(self._words, 4 * k)), 15) for k in range(4)]
        if self._form.bits > 4:
            numbers = [builder.or_(*both) for both in zip(numbers, self._upper(block_at, load), strict=True)]
        offset = splat(builder, builder.trunc(self._offset, I16), self._words)
        return [builder.sub(number, offset) for number in numbers]

    def _load(self, at, kind):
        return self._records.builder.load(self._records.at(0, 0, at, kind), align=1)

    def _and(self, value, mask: int):
        return self._records.builder.and_(value, constant(value.type, mask))

    def _upper(self, block_at, load) -> list[Any]:
        """What the four vectors of a load have above their lower four bits."""
        builder, records, bits = self._records.builder, self._records, self._form.bits - 4
        first = records.linear((load, 4 * bits))  # bit, of those of all words behind each other
        word = builder.lshr(first, ir.Constant(I64, 4))
        found = self._load(records.linear(block_at, 16 * self._lanes, (word, 4 * self._lanes)), self._words)
        shift = builder.trunc(builder.and_(first, ir.Constant(I64, 15)), I16)
        found = builder.lshr(found, splat(builder, shift, self._words))
        return [self._and(self._shifted(found, 4 - bits * k), (1 << bits) - 1 << 4) for k in range(4)]

    def _shifted(self, value, left: int):
        by = constant(value.type, abs(left))
        return self._records.builder.shl(value, by) if left >= 0 else self._records.builder.lshr(value, by)
