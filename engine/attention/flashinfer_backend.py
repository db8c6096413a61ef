"""Attention by FlashInfer: FlashAttention-3 for prompts on Hopper, FlashAttention-2 with tensor cores for decode and all
else, planned from the host's lengths.

A plan is written to pinned memory and copied to the device; both belong to the step until its copies are through, so
they rotate among as many places as steps can be open.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from ..errors import MisuseError
from ..kernels.page_lists import page_lists
from .backend import AttentionCapabilities, AttentionPlan, AttentionSpec, GraphBucket, GraphState
from .fresh_prompt import FreshPrompt
from .pinned_plan import NUM_PLACES, Copied

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch

Kernel = Literal["fa2", "fa3"]

_NAME: Final = "flashinfer"
_WORKSPACE_BYTES: Final = 128 << 20  # what FlashInfer recommends: partial results of split sequences
# Queries a row from which on FlashAttention-3 pays: its tiles are 128 queries of one head, and it never splits keys.
_FA3_MIN_QUERIES: Final = 65


def is_installed() -> bool:
    """Whether FlashInfer can be imported."""
    return importlib.util.find_spec(_NAME) is not None


def is_prebuilt(kernel: Kernel, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashInfer has this kernel compiled: shipped with it, or in its cache from an earlier run."""
    from flashinfer.jit import env, get_batch_prefill_uri

    uri = get_batch_prefill_uri(kernel, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)
    return any((folder / uri / f"{uri}.so").exists() for folder in (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR))


def serves_prebuilt(spec: AttentionSpec) -> bool:
    """Whether the backend can serve `spec` without compiling anything."""
    fits = FlashInferBackend.capabilities.refusal(spec) is None
    return fits and is_installed() and is_prebuilt("fa2", spec.head_dim, spec.dtype)


class FlashInferBackend:
    """`AttentionBackend` for 16-bit pools on CUDA. With FlashAttention-3 the extend rows can stand inside a graph, whose
    kernel walks a list that is planned anew for each replay; all else stands in the gaps.

    Kernels that are not prebuilt are compiled when it is made, which can take a minute; FlashAttention-3, which takes
    longest, is then done without. Raises MisuseError if a step is planned while all places are in use.
    """

    capabilities = AttentionCapabilities(
        name=_NAME,
        dtypes=frozenset((torch.bfloat16, torch.float16)),
        row_invariant=False,
        page_sizes=None,
        head_dims=frozenset((64, 128)),
        graph_modes=frozenset(("breakable",)),
        needs_host_plan=True,
        fill_length=1,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        is_hopper = torch.cuda.get_device_capability(spec.device) == (9, 0)
        has_fa3 = is_hopper and is_prebuilt("fa3", spec.head_dim, spec.dtype)
        kernels: tuple[Kernel, ...] = ("fa2", "fa3") if has_fa3 else ("fa2",)
        self._long: Kernel = kernels[-1]
        if has_fa3:
            self.capabilities = replace(self.capabilities, graph_modes=frozenset(("full", "breakable")), fill_length=0)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._workspace = workspace
        self._places = [_Place(spec, workspace, kernels) for _ in range(NUM_PLACES)]
        self._graph: _GraphPlans | None = None
        self._turn = 0
        for place in self._places:
            place.load_blocking()

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        place = self._places[self._turn]
        place.check_free()
        self._turn = (self._turn + 1) % NUM_PLACES
        first = batch.num_decode
        decode_run = place.plan("fa2", _Rows.of(batch, 0, first), part=0) if decode else None
        extend_run = None
        if extend:
            rows = _Rows.of(batch, first, batch.num_rows)
            kernel: Kernel = self._long if max(rows.num_new) >= _FA3_MIN_QUERIES else "fa2"
            extend_run = place.plan(kernel, rows, part=1)
        place.close()
        return _FlashInferPlan(spec=self._spec, decode_wrapper=decode_run, extend_wrapper=extend_run)

    def graph_state(self, largest: GraphBucket, page_table: torch.Tensor) -> GraphState:
        if self._long != "fa3":
            raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph without FlashAttention-3")
        if self._graph is not None:
            raise MisuseError("graphs of this backend read the state that was made first")
        self._graph = _GraphPlans(self._spec, self._workspace, largest, page_table)
        return self._graph

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        graph = self._graph_plans()
        graph.plan_padding(bucket.num_tokens)
        return _FlashInferPlan(spec=self._spec, decode_wrapper=None, extend_wrapper=graph.wrapper)

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch, *, decode: bool, extend: bool) -> None:
        if decode:
            raise MisuseError(f"attention backend {_NAME!r} has no decode inside a graph")
        self._graph_plans().plan(_Rows.of(batch, batch.num_decode, batch.num_rows), first_token=batch.num_decode)

    def fresh_prompt(self, max_tokens: int) -> FreshPrompt | None:
        return FreshPrompt(self._spec, self._workspace, max_tokens) if self._long == "fa3" else None

    def _graph_plans(self) -> _GraphPlans:
        if self._graph is None:
            raise MisuseError("graph_state must be called before a capture")
        return self._graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of one half of a step: on the device, and their tokens on the host."""

    page_table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    num_new: Sequence[int]
    num_prior: Sequence[int]

    @classmethod
    def of(cls, batch: ForwardBatch, first: int, end: int) -> _Rows:
        return cls(
            page_table=batch.kv_loc.page_table,
            rows=batch.rows[first:end],
            seq_lens=batch.seq_lens[first:end],
            num_new=batch.num_new_cpu[first:end],
            num_prior=batch.prefix_lens_cpu[first:end],
        )

    @property
    def lengths(self) -> list[int]:
        return [prior + new for prior, new in zip(self.num_prior, self.num_new, strict=True)]

    def list_pages(self, spec: AttentionSpec, out: torch.Tensor) -> None:
        """The rows' pages into `out`, one row after the other."""
        page_size = spec.kv_pool.page_size
        page_lists(
            self.page_table,
            self.rows,
            self.seq_lens,
            page_size,
            out,
            max_pages=max(_num_pages(spec, self.lengths)),
            max_rows=spec.num_rows,
        )


class _Place:
    """What the plan of one step is written to. Parts: 0 for the decode rows, 1 for the extend rows."""

    def __init__(self, spec: AttentionSpec, workspace: torch.Tensor, kernels: Sequence[Kernel]) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._spec = spec
        # A wrapper a part as well as a kernel, for a plan is part of its wrapper.
        uses: tuple[tuple[int, Kernel], ...] = ((0, "fa2"), *((1, kernel) for kernel in kernels))
        self._wrappers: dict[tuple[int, Kernel], Any] = {
            use: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=use[1]) for use in uses
        }
        self._columns = [_pinned_columns(spec.num_rows) for _ in range(2)]
        self._copied = Copied()

    def check_free(self) -> None:
        """Raises MisuseError if the copies of an earlier plan may still read this place."""
        self._copied.check()

    def close(self) -> None:
        """All copies of the step's plan have been enqueued."""
        self._copied.record()

    def load_blocking(self) -> None:
        """Use every wrapper once, on page 0: modules are loaded, or compiled, and buffers made."""
        spec = self._spec
        one = torch.ones(1, dtype=torch.int32, device=spec.device)
        rows = _Rows(page_table=spec.empty_page_table(), rows=one - 1, seq_lens=one, num_new=(1,), num_prior=(0,))
        query = torch.zeros((1, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        for part, kernel in self._wrappers:
            wrapper = self.plan(kernel, rows, part=part)
            wrapper.run(query, (spec.kv_pool.keys[0], spec.kv_pool.values[0]), out=query.clone(), enable_pdl=False)
            torch.cuda.synchronize(spec.device)

    def plan(self, kernel: Kernel, rows: _Rows, *, part: int) -> Any:
        """A wrapper planned for these rows."""
        wrapper = self._wrappers[part, kernel]
        lengths = rows.lengths
        pages = torch.empty(sum(_num_pages(self._spec, lengths)), dtype=torch.int32, device=self._spec.device)
        rows.list_pages(self._spec, pages)
        _plan(wrapper, self._spec, self._columns[part], pages, rows.num_new, lengths)
        return wrapper


class _GraphPlans:
    """One plan that all captured forwards read, at fixed addresses, rewritten before each replay from pinned memory that
    rotates.
    """

    def __init__(
        self, spec: AttentionSpec, workspace: torch.Tensor, largest: GraphBucket, page_table: torch.Tensor
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._spec = spec
        self._num_slots = largest.num_extend

        def column(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=spec.device)

        self._pages = column(largest.num_extend * page_table.shape[1])
        self.wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=column(largest.num_extend + 1),
            paged_kv_indptr_buf=column(largest.num_extend + 1),
            paged_kv_indices_buf=self._pages,
            paged_kv_last_page_len_buf=column(largest.num_extend),
            backend="fa3",
        )
        own: torch.Tensor = self.wrapper._pin_memory_int_workspace_buffer
        self._pinned = [own, *(torch.empty_like(own, pin_memory=True) for _ in range(NUM_PLACES - 1))]
        self._columns = [_pinned_columns(largest.num_extend) for _ in range(NUM_PLACES)]
        self._copied = [Copied() for _ in range(NUM_PLACES)]
        self._turn = 0
        # The first plan fixes the most tokens there can be, and with it the places of everything in the workspace.
        self.plan_padding(largest.num_tokens)

    @property
    def num_bytes(self) -> int:
        return 4 * self._pages.numel()

    def plan_padding(self, num_tokens: int) -> None:
        """For a capture: one row of so many tokens, all on page 0. Stops the host."""
        torch.cuda.synchronize(self._spec.device)
        self._pages.zero_()
        self._plan((num_tokens,), (num_tokens,), first_token=0)
        torch.cuda.synchronize(self._spec.device)

    def plan(self, rows: _Rows, *, first_token: int) -> None:
        """For a replay. The extend rows' tokens begin at `first_token`."""
        rows.list_pages(self._spec, self._pages)
        self._plan(rows.num_new, rows.lengths, first_token=first_token)

    def _plan(self, num_new: Sequence[int], lengths: Sequence[int], *, first_token: int) -> None:
        copied, columns = self._copied[self._turn], self._columns[self._turn]
        copied.check()
        # FlashInfer has one pinned buffer a wrapper, and would write over what the step before has not copied yet.
        self.wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        self._turn = (self._turn + 1) % NUM_PLACES
        padding = (0,) * (self._num_slots - len(num_new))
        pages = self._pages[: sum(_num_pages(self._spec, lengths))]
        all_new, all_lengths = (*num_new, *padding), (*lengths, *padding)
        _plan(self.wrapper, self._spec, columns, pages, all_new, all_lengths, first_token=first_token)
        copied.record()


def _pinned_columns(num_rows: int) -> torch.Tensor:
    """Query and page starts [num_rows + 1], tokens in the last page and tokens [num_rows], in pinned memory."""
    return torch.empty((4, num_rows + 1), dtype=torch.int32, pin_memory=True)


def _num_pages(spec: AttentionSpec, lengths: Sequence[int]) -> list[int]:
    shift = spec.kv_pool.page_size.bit_length() - 1
    return [length + (1 << shift) - 1 >> shift for length in lengths]


def _plan(
    wrapper: Any,
    spec: AttentionSpec,
    columns: torch.Tensor,
    pages: torch.Tensor,
    num_new: Sequence[int],
    lengths: Sequence[int],
    *,
    first_token: int = 0,
) -> None:
    """Plan `wrapper` for rows of so many new tokens and tokens, whose pages are or will be in `pages`."""
    page_size, num_rows = spec.kv_pool.page_size, len(lengths)
    query_start = [*accumulate(num_new, initial=first_token)]
    page_start = [*accumulate(_num_pages(spec, lengths), initial=0)]
    last_page = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    for column, values in zip(columns, (query_start, page_start, last_page, lengths), strict=True):
        column[: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
    wrapper.plan(
        columns[0, : num_rows + 1],
        columns[1, : num_rows + 1],
        pages,
        columns[2, :num_rows],
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        page_size,
        causal=True,
        q_data_type=spec.dtype,
        kv_data_type=spec.dtype,
        max_token_per_sequence=max(num_new),  # else FlashInfer looks for it in Python
        seq_lens=columns[3, :num_rows],  # pinned, where FlashInfer's own would not be
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlashInferPlan:
    """The wrappers of one step's halves."""

    spec: AttentionSpec
    decode_wrapper: Any
    extend_wrapper: Any

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(self.decode_wrapper, q, layer, out)

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._run(self.extend_wrapper, q, layer, out)

    def _run(self, wrapper: Any, q: torch.Tensor, layer: int, out: torch.Tensor | None) -> torch.Tensor:
        pool = self.spec.kv_pool
        if out is None:  # FlashInfer would fill its own with zeros
            out = q.new_empty(q.shape)
        # No dependent launch: FlashInfer's kernels do not keep the rule of this package's.
        wrapper.run(q, (pool.keys[layer], pool.values[layer]), out=out, enable_pdl=False)
        return out
