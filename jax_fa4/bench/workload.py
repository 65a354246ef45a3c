"""What is timed: one shape of self-attention, and what it costs in floating-point operations."""

from dataclasses import dataclass, replace

from jax_fa4 import masks
from jax_fa4.spec import AttentionSpec

TOKENS = 32_768  # per call on a GPU, as in the FlashAttention papers' tables
HIDDEN = 2_048  # heads times head dim


@dataclass(frozen=True)
class Workload:
    """Self-attention of q [batch, length, heads, head_dim].

    Attributes:
      kv_heads: key/value heads; as many as query heads if None.
      value_head_dim: of v; head_dim if None.
      window: keys seen to the left of each query, besides itself, under a causal mask; None for all.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool
    dtype: str
    kv_heads: int | None = None
    value_head_dim: int | None = None
    window: int | None = None

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and the output's cotangent."""
        rows = (self.batch, self.length)
        kv_heads, value_dim = self.kv_heads or self.heads, self.value_head_dim or self.head_dim
        keys = (*rows, kv_heads, self.head_dim)
        return (*rows, self.heads, self.head_dim), keys, (*rows, kv_heads, value_dim), (*rows, self.heads, value_dim)

    @property
    def forward_flops(self) -> float:
        """Two products per score that the mask keeps: length^2 of them per head, half of them if causal."""
        scores = self.length**2 / 2 if self.causal else self.length**2
        if self.window is not None:
            scores = self.length * (self.window + 1) - (self.window + 1) ** 2 / 2
        return 2.0 * self.batch * self.heads * scores * (self.head_dim + (self.value_head_dim or self.head_dim))

    def flops(self, direction: str) -> float:
        """Operations of ``"forward"``, ``"backward"`` (five products: 2.5 times forward) or ``"both"``."""
        return self.forward_flops * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    def spec(self) -> AttentionSpec:
        """What jax_fa4 calls this attention."""
        mask: masks.Mask = masks.Causal() if self.causal else masks.Full()
        if self.window is not None:
            mask &= masks.Window(self.window, None)
        return AttentionSpec(
            self.dtype, self.head_dim, self.value_head_dim or self.head_dim,
            group=self.heads // (self.kv_heads or self.heads), scale=self.head_dim**-0.5, mask=masks.canonical(mask),
        )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask = mask if self.window is None else f"window {self.window + 1}"
        heads = f"H{self.heads}" if self.kv_heads is None else f"H{self.heads}/{self.kv_heads}"
        dim = f"D{self.head_dim}" if self.value_head_dim is None else f"D{self.head_dim}/{self.value_head_dim}"
        return f"B{self.batch} S{self.length} {heads} {dim} {mask} {self.dtype}"


def constant_tokens(length: int, head_dim: int, causal: bool, dtype: str) -> Workload:
    """The papers' workload: 32k tokens and a hidden size of 2048, whatever the length."""
    return Workload(max(1, TOKENS // length), length, max(1, HIDDEN // head_dim), head_dim, causal, dtype)


def further(dtype: str) -> list[Workload]:
    """What the table leaves out, with as many tokens: grouped heads 8:1, a window, and D != E."""
    long = constant_tokens(16_384, 128, True, dtype)
    medium = constant_tokens(4_096, 128, True, dtype)
    return [
        replace(medium, kv_heads=2),
        replace(long, window=1023),
        *(replace(medium, head_dim=192, value_head_dim=128, causal=causal) for causal in (False, True)),
    ]
