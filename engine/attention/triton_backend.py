"""Attention by this package's Triton kernels: paged prefill, and split-KV decode whose split the device decides. Nothing
is planned on the host, so a step costs it two launches, and whole forwards can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import MisuseError
from ..kernels.decode_attention import decode_attention
from ..kernels.decode_plan import DecodeWorkspace, make_decode_workspace, plan_decode
from ..kernels.prefill_attention import FEW_ROWS, LONG_TOKENS, prefill_attention
from .backend import AttentionCapabilities, AttentionPlan, AttentionSpec, GraphBucket

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch


class TritonBackend:
    """`AttentionBackend` for head sizes that are powers of two, on CUDA.

    In row-invariant mode no sequence is split; prefill adds keys in the same blocks whatever the step's shape.
    """

    capabilities = AttentionCapabilities(
        name="triton",
        dtypes=None,
        row_invariant=True,
        page_sizes=None,
        head_dims=frozenset((16, 32, 64, 128, 256)),
        graph_modes=frozenset(("full", "breakable")),
        needs_host_plan=False,
        fill_length=0,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._workspace: DecodeWorkspace = make_decode_workspace(
            max_rows=2 * spec.num_rows,  # the largest step is warmed up as the power of two above it
            num_q_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            device=spec.device,
            row_invariant=spec.row_invariant,
        )
        self._state: TritonGraphState | None = None
        self._compile_blocking()

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        first = batch.num_decode
        query_start = batch.query_start_loc[first:]
        if extend and first:
            query_start = query_start - first  # decode rows bring one token each, and are not among the extend queries
        plan = _TritonPlan(
            spec=self._spec,
            workspace=self._workspace,
            page_table=batch.kv_loc.page_table,
            decode_rows=batch.rows[:first],
            decode_lens=batch.seq_lens[:first],
            extend_rows=batch.rows[first:],
            extend_lens=batch.seq_lens[first:],
            query_start=query_start,
        )
        if decode:
            plan.plan_decode()
        return plan

    def graph_state(self, max_rows: int, max_tokens: int, page_table: torch.Tensor) -> TritonGraphState:
        del max_tokens  # nothing here grows with the tokens
        self._state = TritonGraphState.make(max_rows, page_table)
        return self._state

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        state = self._graph_state()
        rows, seq_lens = state.rows[: bucket.num_rows], state.seq_lens[: bucket.num_rows]
        plan = self._plan(state.page_table, rows, seq_lens, state.query_start[: bucket.num_rows + 1])
        if bucket.num_rows == bucket.num_tokens:
            plan.plan_decode()
        return plan

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch) -> None:
        state, num_rows = self._graph_state(), batch.num_rows
        state.rows[:num_rows].copy_(batch.rows)
        state.seq_lens[:num_rows].copy_(batch.seq_lens)
        state.query_start[: num_rows + 1].copy_(batch.query_start_loc)
        if num_rows < bucket.num_rows:
            padded = slice(num_rows, bucket.num_rows)
            state.rows[padded].zero_()
            state.seq_lens[padded].fill_(self.capabilities.fill_length)
            # Without queries: they start where the last row ends.
            state.query_start[num_rows + 1 : bucket.num_rows + 1].fill_(batch.num_tokens)

    def _compile_blocking(self) -> None:
        """Run every variant of the kernels once, on no work: after the start nothing may compile."""
        spec = self._spec
        zeros = torch.zeros(2 * spec.num_rows + 1, dtype=torch.int32, device=spec.device)
        most = max(LONG_TOKENS, 2 * spec.num_rows)
        queries = torch.zeros((most, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        num_rows = 1
        while num_rows < 2 * spec.num_rows:
            plan = self._plan(zeros[:1, None], zeros[:num_rows], zeros[:num_rows], zeros[: num_rows + 1])
            plan.plan_decode()
            plan.decode(queries[:num_rows], 0)
            if num_rows in (1, 2 * FEW_ROWS):
                plan.extend(queries, 0)
                plan.extend(queries[:1], 0)
            num_rows *= 2

    def _plan(
        self, page_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor
    ) -> _TritonPlan:
        """A plan whose halves serve the same rows."""
        return _TritonPlan(
            spec=self._spec,
            workspace=self._workspace,
            page_table=page_table,
            decode_rows=rows,
            decode_lens=seq_lens,
            extend_rows=rows,
            extend_lens=seq_lens,
            query_start=query_start,
        )

    def _graph_state(self) -> TritonGraphState:
        if self._state is None:
            raise MisuseError("graph_state must be called before a capture")
        return self._state


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonGraphState:
    """What captured attention reads of its step. Shapes: rows, seq_lens [max_rows] int32; query_start [max_rows + 1]
    int32. Padded rows have row 0, length 0 and no queries. The page table is leased.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    page_table: torch.Tensor

    @classmethod
    def make(cls, max_rows: int, page_table: torch.Tensor) -> TritonGraphState:
        def column(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=page_table.device)

        return cls(
            rows=column(max_rows),
            seq_lens=column(max_rows),
            query_start=column(max_rows + 1),
            page_table=page_table,
        )

    @property
    def num_bytes(self) -> int:
        return 4 * (3 * self.rows.shape[0] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TritonPlan:
    """The arrangement of one step or one captured forward. Shapes as in the kernels."""

    spec: AttentionSpec
    workspace: DecodeWorkspace
    page_table: torch.Tensor
    decode_rows: torch.Tensor
    decode_lens: torch.Tensor
    extend_rows: torch.Tensor
    extend_lens: torch.Tensor
    query_start: torch.Tensor

    def plan_decode(self) -> None:
        plan_decode(self.decode_lens, self.workspace)

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        pool = self.spec.kv_pool
        return decode_attention(
            q,
            pool.keys[layer],
            pool.values[layer],
            self.page_table,
            self.decode_rows,
            self.decode_lens,
            self.workspace,
            out=out,
        )

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        pool = self.spec.kv_pool
        return prefill_attention(
            q,
            pool.keys[layer],
            pool.values[layer],
            self.page_table,
            self.extend_rows,
            self.query_start,
            self.extend_lens,
            max_rows=self.spec.num_rows,
            out=q.new_empty(q.shape) if out is None else out,
        )
