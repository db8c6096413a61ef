"""What an attention backend is: its capabilities, its eager half, and the half that serves graphs.

A step is planned once (`prepare`) and the plan then serves every layer: `decode` for the rows with one token, `extend` for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..config import GraphMode
    from ..forward.forward_batch import ForwardBatch
    from ..forward.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """What a backend can serve. `None` for sizes means any.

    `graph_modes`: how forwards that contain it can be captured; empty if they cannot. `needs_host_plan`: plans from the host's lengths, so
    that a replay costs host time. `fill_length`: the sequence length that padded rows carry in a graph.
    """

    name: str
    page_sizes: frozenset[int] | None
    head_dims: frozenset[int] | None
    graph_modes: frozenset[GraphMode]
    needs_host_plan: bool
    fill_length: int

    def refusal(self, *, page_size: int, head_dim: int) -> str | None:
        """Why this backend cannot serve such a pool, or None."""
        if self.page_sizes is not None and page_size not in self.page_sizes:
            return f"attention backend {self.name!r} serves page sizes {sorted(self.page_sizes)}, not {page_size}"
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"attention backend {self.name!r} serves head dims {sorted(self.head_dims)}, not {head_dim}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a backend is bound to when it is made.

    `row_invariant`: a row's result must not depend on its batch-mates, nor on how its tokens are cut into steps.
    Units: `max_model_len` in tokens; `num_rows` without row 0.
    """

    kv_pool: KVPool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    max_model_len: int
    row_invariant: bool
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBucket:
    """The shape of one captured forward. Padded rows and tokens included."""

    num_rows: int
    num_tokens: int


class AttentionPlan(Protocol):
    """One step's arrangement, shared by its layers. By the time it is asked, the layer's new keys and values are in the pool."""

    def decode(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the decode rows. Shapes: q [num_decode, Hq, D] (heads contiguous) → [num_decode, Hq, D] contiguous."""
        ...

    def extend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Causal attention of the extend rows, each after its prefix. Shapes: q [tokens of those rows, Hq, D] → the same, contiguous."""
        ...


class GraphState(Protocol):
    """Static buffers of a backend for all buckets. Written on the compute lane only, in launch order."""

    @property
    def num_bytes(self) -> int: ...


class AttentionBackend(Protocol):
    """Attention over one pool. Everything runs on the compute lane.

    The last three serve graph runners, and are called only for the graph modes in `capabilities`.
    """

    @property
    def capabilities(self) -> AttentionCapabilities: ...

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        """Plan the decode rows, the extend rows, or both; asks nothing of the device. Lifetime of the plan: the step."""
        ...

    def graph_state(self, max_rows: int, max_tokens: int) -> GraphState:
        """Make, once, the buffers that all buckets share."""
        ...

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        """A plan over the static buffers for a forward that is being captured."""
        ...

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch) -> None:
        """Fill the static buffers for `batch`, padding its tail with the fill length."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttention:
    """The plans of one step's two halves, possibly of different backends."""

    num_decode: int
    decode_plan: AttentionPlan | None
    extend_plan: AttentionPlan | None

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of all tokens of the step. Shapes: q [T, Hq, D] → [T, Hq, D] contiguous."""
        if self.extend_plan is None:
            return self.decode_plan.decode(q, layer) if self.decode_plan is not None else q
        if self.decode_plan is None:
            return self.extend_plan.extend(q, layer)
        decoded = self.decode_plan.decode(q[: self.num_decode], layer)
        return torch.cat((decoded, self.extend_plan.extend(q[self.num_decode :], layer)))


def prepare_step(decode: AttentionBackend, extend: AttentionBackend, batch: ForwardBatch) -> StepAttention:
    """Plan `batch` with the backend chosen for each half."""
    has_decode, has_extend = batch.mode.has_decode, batch.mode.has_extend
    if decode is extend:
        plan = decode.prepare(batch, decode=has_decode, extend=has_extend)
        decode_plan = extend_plan = plan
    else:
        decode_plan = decode.prepare(batch, decode=has_decode, extend=False)
        extend_plan = extend.prepare(batch, decode=False, extend=has_extend)
    return StepAttention(
        num_decode=batch.num_decode,
        decode_plan=decode_plan if has_decode else None,
        extend_plan=extend_plan if has_extend else None,
    )
