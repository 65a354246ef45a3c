"""What is timed: one shape of self-attention, and what it costs in floating-point operations."""

from dataclasses import dataclass

TOKENS = 32_768  # per call on a GPU, as in the FlashAttention papers' tables
HIDDEN = 2_048  # heads times head dim


@dataclass(frozen=True)
class Workload:
    """Self-attention of [batch, length, heads, head_dim] arrays with as many key/value heads."""

    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def forward_flops(self) -> float:
        """Two products of length x length x head_dim per head; a causal mask needs half of them."""
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return full / 2 if self.causal else full

    def flops(self, direction: str) -> float:
        """Operations of ``"forward"``, ``"backward"`` (five products: 2.5 times forward) or ``"both"``."""
        return self.forward_flops * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"B{self.batch} S{self.length} H{self.heads} D{self.head_dim} {mask} {self.dtype}"


def constant_tokens(length: int, head_dim: int, causal: bool, dtype: str) -> Workload:
    """The papers' workload: 32k tokens and a hidden size of 2048, whatever the length."""
    return Workload(max(1, TOKENS // length), length, max(1, HIDDEN // head_dim), head_dim, causal, dtype)
