"""What an attention backend is: its capabilities, its eager half, and the half that serves graphs.

A step is planned once (`prepare`) and the plan then serves every layer: `decode` for the rows with one token,
`extend` for the others.
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
    """What a backend can serve. `None` for sizes and dtypes means any.

    `graph_modes`: how forwards that contain it can be captured: "full" with it inside, planned by the last three
    methods of the backend; "breakable" with it in the gaps, planned by `prepare`; empty if they cannot.
    `needs_host_plan`: plans from the host's lengths, so that a replay costs host time. `fill_length`: the sequence
    length that padded rows carry in a graph. `row_invariant`: whether it keeps that promise of the spec.
    """

    name: str
    dtypes: frozenset[torch.dtype] | None
    row_invariant: bool
    page_sizes: frozenset[int] | None
    head_dims: frozenset[int] | None
    graph_modes: frozenset[GraphMode]
    needs_host_plan: bool
    fill_length: int

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve such a pool, or None."""
        page_size, head_dim = spec.kv_pool.page_size, spec.head_dim
        if self.page_sizes is not None and page_size not in self.page_sizes:
            return f"attention backend {self.name!r} serves page sizes {sorted(self.page_sizes)}, not {page_size}"
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"attention backend {self.name!r} serves head dims {sorted(self.head_dims)}, not {head_dim}"
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            dtypes = ", ".join(sorted(map(str, self.dtypes)))
            return f"attention backend {self.name!r} serves {dtypes}, not {spec.dtype}"
        if spec.row_invariant and not self.row_invariant:
            return f"attention backend {self.name!r} is not row-invariant"
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

    def empty_page_table(self) -> torch.Tensor:
        """Row 0 alone, all page 0, as wide as the real one: kernels are compiled for what a width is divisible by."""
        width = -(-self.max_model_len // self.kv_pool.page_size)
        return torch.zeros((1, width), dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBucket:
    """The shape of one captured forward, padding included: slots for decode rows, slots for extend rows, tokens.

    A decode row's token is at its slot's index; the extend rows' tokens follow those of the decode rows that there are.
    """

    num_decode: int
    num_extend: int
    num_tokens: int


class AttentionPlan(Protocol):
    """One step's arrangement, shared by its layers. By the time it is asked, the layer's new keys and values are in
    the pool. The result is in `out` where given.
    """

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of the decode rows. Shapes: q [num_decode, Hq, D] (heads contiguous) → [num_decode, Hq, D]
        contiguous.
        """
        ...

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of the extend rows, each after its prefix. Shapes: q [tokens of those rows, Hq, D] → the
        same, contiguous.
        """
        ...


class GraphState(Protocol):
    """Static buffers of a backend for all buckets. Written on the compute lane only, in launch order."""

    @property
    def num_bytes(self) -> int: ...


class AttentionBackend(Protocol):
    """Attention over one pool. Everything runs on the compute lane.

    The last three serve graph runners, and are called only if "full" is among the graph modes in `capabilities`.
    """

    @property
    def capabilities(self) -> AttentionCapabilities: ...

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        """Plan the decode rows, the extend rows, or both; asks nothing of the device. Lifetime of the plan: the
        step.
        """
        ...

    def graph_state(self, largest: GraphBucket, page_table: torch.Tensor) -> GraphState:
        """Make the buffers that all buckets share; once, or MisuseError. `page_table`: leased from the row state."""
        ...

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        """A plan over the static buffers, made before the capture. It takes q and `out` of all tokens: `decode` serves
        the slots for decode rows and leaves zeros in those that are padded, so it must come before `extend`.
        """
        ...

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch, *, decode: bool, extend: bool) -> None:
        """Fill the static buffers for the decode rows of `batch`, its extend rows, or both; padded slots get the fill
        length.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttention:
    """The plans of one step's two halves, possibly of different backends."""

    num_decode: int
    decode_plan: AttentionPlan | None
    extend_plan: AttentionPlan | None

    def forward(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of all tokens of the step, in `out` where given. Shapes: q [T, Hq, D] → [T, Hq, D] contiguous."""
        if self.extend_plan is None:
            return self.decode_plan.decode(q, layer, out) if self.decode_plan is not None else q
        if self.decode_plan is None:
            return self.extend_plan.extend(q, layer, out)
        if out is None:
            out = q.new_empty(q.shape)
        self.decode_plan.decode(q[: self.num_decode], layer, out[: self.num_decode])
        self.extend_plan.extend(q[self.num_decode :], layer, out[self.num_decode :])
        return out


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
