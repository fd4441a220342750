"""The registers of an instruction set, and products of integers in them."""

from llvmlite import ir

from freehold.engine.cpu.isa import WITH_VNNI, Avx2, Neon
from freehold.engine.cpu.vectors import F16, F32, I8, I16, I32, call, constant, joined, pairwise, slice_of


class IntegerVectors:
    def __init__(self, isa: type):
        self.isa, lanes = isa, isa().lanes
        self.lanes = lanes
        self.bytes, self.words = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
        self.ints, self.floats, self.halves = (ir.VectorType(kind, lanes) for kind in (I32, F32, F16))

    @property
    def byte_total(self) -> ir.VectorType:
        """What products of bytes are added up as in a block: without an instruction for more, words are enough."""
        return self.ints if self.isa in (*WITH_VNNI, Neon) else self.words

    def add_bytes(self, builder, total, weights, inputs):
        """total + bytes of 0 .. 15 times signed ones, added two by two or four by four."""
        if self.isa in WITH_VNNI:
            return self._vnni(builder, "vpdpbusd", total, weights, inputs)
        if self.isa is Avx2:
            return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.ub.sw", self.words, [weights, inputs]))
        if self.isa is Neon:
            return self._dot(builder, total, weights, inputs)
        wide = ir.VectorType(I16, self.bytes.count)
        product = builder.mul(builder.zext(weights, wide), builder.sext(inputs, wide))
        return builder.add(total, pairwise(builder, product, builder.add))

    def integers(self, builder, total):
        """A total of a block."""
        return total if total.type == self.ints else self._sums_of_pairs(builder, total, constant(self.words, 1))

    def add_words(self, builder, total, weights, inputs):
        """total + words of `weights` times words of `inputs`, added two by two."""
        if self.isa in WITH_VNNI:
            return self._vnni(builder, "vpdpwssd", total, weights, inputs)
        return builder.add(total, self._sums_of_pairs(builder, weights, inputs))

    def _vnni(self, builder, name, total, weights, inputs):
        a, b = (builder.bitcast(one, self.ints) for one in (weights, inputs))
        return call(builder, f"llvm.x86.avx512.{name}.{32 * self.lanes}", self.ints, [total, a, b])

    def _dot(self, builder, total, weights, inputs):
        """Both factors are signed: weights of four bits are never negative."""
        halves = [
            [slice_of(builder, one, one.type.count // 2, half) for one in (total, weights, inputs)] for half in range(2)
        ]
        name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(I32, 4)
        return joined(builder, *(call(builder, name, kind, arguments) for arguments in halves))

    def _sums_of_pairs(self, builder, a, b):
        if self.isa is Avx2:
            return call(builder, "llvm.x86.avx2.pmadd.wd", self.ints, [a, b])
        if self.isa is Neon:
            fours = [self._products_of_words(builder, a, b, number) for number in range(a.type.count // 4)]
            name = "llvm.aarch64.neon.addp.v4i32"
            return joined(builder, *(call(builder, name, fours[0].type, fours[i : i + 2]) for i in (0, 2)))
        wide = ir.VectorType(I32, self.words.count)
        return pairwise(builder, builder.mul(builder.sext(a, wide), builder.sext(b, wide)), builder.add)

    def _products_of_words(self, builder, a, b, number):
        """Of four, from `4 * number` on: one instruction."""
        wide = ir.VectorType(I32, 4)
        return builder.mul(*(builder.sext(slice_of(builder, one, 4, number), wide) for one in (a, b)))
