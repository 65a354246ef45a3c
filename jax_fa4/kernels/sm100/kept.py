"""Which of a thread's scores a mask keeps, as words of bits.

They are found before the scores come, which then take the registers: a user's predicate needs some too. And a word
moves to many predicates at once.
"""

from collections.abc import Callable, Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from jax_fa4.kernels.common.softmax import NEG_INF

BITS = 32
"""Scores of a word."""


def interval(low: Int32 | None, high: Int32, first: Int32) -> Uint32:
    """The word of scores first, first + 1, ... of which those in [low, high) are kept; `low` None: from the start."""
    word = _bits_below(high - first)
    return word if low is None else word & ~_bits_below(low - first)


def where(conditions: Callable[[int], Iterable[Boolean]]) -> Uint32:
    """The word of scores i that meet all `conditions(i)`."""
    word = Uint32(0)
    for i in range(BITS):
        keep = Boolean(True)
        for condition in conditions(i):
            keep = keep & condition
        word = word | Uint32(cutlass.select_(keep, Uint32(1 << i), Uint32(0)))
    return word


@cute.jit
def same_ids(row_id: Int32, key_ids: list[Int32]):
    """The words of the keys that have the row's id; lane l brings its row's id, and that of key l of each word.

    The few ids that the warp's rows have are looked for one after the other, each in all keys at once.
    """
    words = [Uint32(0) for _ in key_ids]
    left = Uint32(0xFFFFFFFF)  # rows whose id is still to be looked for
    while left != 0:
        sought = cute.arch.shuffle_sync(row_id, cute.arch.popc((left & -left) - 1))
        same = row_id == sought
        for i in cutlass.range_constexpr(len(words)):
            found = Uint32(cute.arch.vote_ballot_sync(key_ids[i] == sought))
            words[i] = Uint32(cutlass.select_(same, found, words[i]))
        left = left & ~Uint32(cute.arch.vote_ballot_sync(same))
    return words


def keep(values: cute.Tensor, word: Uint32) -> None:
    """Sets the values whose bit is not set to -inf."""
    for i in range(BITS):
        values[i] = Float32(cutlass.select_((word & (1 << i)) != 0, values[i], Float32(NEG_INF)))


def end_block(number: Int32) -> None:
    """Ends a basic block by a branch that is never taken, as `number` is not negative.

    The assembler interleaves all that is independent within a block; with a user's function that is all of a thread's
    loads and divisions, more than there are registers.
    """
    cute.arch.inline_ptx("{ .reg .pred p; setp.lt.s32 p, {$r0}, 0; @p exit; }", read_only_args=[number])


def _bits_below(count: Int32) -> Uint32:
    """A word with its lowest `count` bits set: none if negative, all from 32 on (shl gives 0 there)."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(1), Uint32(cutlass.max(count, Int32(0)))],
    ) - Uint32(1)
