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
from ..kernels.graph_rows import GraphRows, graph_rows
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
        self._slots: GraphRows | None = None
        self._page_table: torch.Tensor | None = None
        self._compile_blocking()

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        first = batch.num_decode
        query_start = batch.query_start_loc[first:]
        if extend and first:
            query_start = query_start - first  # decode rows bring one token each, and are not among the extend queries
        return self._plan(
            batch.kv_loc.page_table,
            GraphRows(
                decode_rows=batch.rows[:first],
                decode_lens=batch.seq_lens[:first],
                extend_rows=batch.rows[first:],
                extend_lens=batch.seq_lens[first:],
                query_start=query_start,
            ),
        )

    def graph_state(self, largest: GraphBucket, page_table: torch.Tensor) -> GraphRows:
        if self._slots is not None:
            raise MisuseError("graphs of this backend read the state that was made first")
        self._slots = GraphRows.make(
            num_decode=largest.num_decode, num_extend=largest.num_extend, device=self._spec.device
        )
        self._page_table = page_table
        return self._slots

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        slots, page_table = self._slots, self._page_table
        if slots is None or page_table is None:
            raise MisuseError("graph_state must be called before a capture")
        rows = GraphRows(
            decode_rows=slots.decode_rows[: bucket.num_decode],
            decode_lens=slots.decode_lens[: bucket.num_decode],
            extend_rows=slots.extend_rows[: bucket.num_extend],
            extend_lens=slots.extend_lens[: bucket.num_extend],
            query_start=slots.query_start[: bucket.num_extend + 1],
        )
        return self._plan(page_table, rows)

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch, *, decode: bool, extend: bool) -> None:
        if self._slots is None:
            raise MisuseError("graph_state must be called before a replay")
        graph_rows(
            batch.rows, batch.seq_lens, batch.query_start_loc, batch.num_decode, batch.num_tokens, out=self._slots
        )

    def _compile_blocking(self) -> None:
        """Run every variant of the kernels once, on no work: after the start nothing may compile."""
        spec = self._spec
        most = max(LONG_TOKENS, 2 * spec.num_rows)
        queries = torch.zeros((most, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        page_table = spec.empty_page_table()
        num_rows = 1
        while num_rows < 2 * spec.num_rows:
            plan = self._plan(page_table, GraphRows.make(num_decode=num_rows, num_extend=num_rows, device=spec.device))
            plan.decode(queries[:num_rows], 0)
            if num_rows in (1, 2 * FEW_ROWS):
                plan.extend(queries, 0)
                plan.extend(queries[:1], 0)
            num_rows *= 2

    def _plan(self, page_table: torch.Tensor, rows: GraphRows) -> _TritonPlan:
        return _TritonPlan(spec=self._spec, workspace=self._workspace, page_table=page_table, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TritonPlan:
    """The arrangement of one step or one captured forward."""

    spec: AttentionSpec
    workspace: DecodeWorkspace
    page_table: torch.Tensor
    rows: GraphRows

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        rows, pool = self.rows, self.spec.kv_pool
        num_rows = rows.decode_rows.shape[0]
        if layer == 0:  # one plan for all layers, and in a graph a part of it
            plan_decode(rows.decode_lens, self.workspace)
        return decode_attention(
            q[:num_rows],
            pool.keys[layer],
            pool.values[layer],
            self.page_table,
            rows.decode_rows,
            rows.decode_lens,
            self.workspace,
            out=None if out is None else out[:num_rows],
        )

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        pool = self.spec.kv_pool
        return prefill_attention(
            q,
            pool.keys[layer],
            pool.values[layer],
            self.page_table,
            self.rows.extend_rows,
            self.rows.query_start,
            self.rows.extend_lens,
            max_rows=2 * self.spec.num_rows,  # the largest step is warmed up as the power of two above it
            row_invariant=self.spec.row_invariant,
            out=q.new_empty(q.shape) if out is None else out,
        )
