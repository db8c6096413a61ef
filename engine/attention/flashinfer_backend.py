"""Attention by FlashInfer: FlashAttention-3 for prompts on Hopper, FlashAttention-2 with tensor cores for decode and all
else, planned from the host's lengths.

A plan is written to pinned memory and copied to the device; both belong to the step until its copies are through, so
they rotate among as many places as steps can be open.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from ..errors import MisuseError
from ..kernels.page_lists import page_lists
from .backend import AttentionCapabilities, AttentionPlan, AttentionSpec, GraphBucket, GraphState

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch

Kernel = Literal["fa2", "fa3"]

_NAME: Final = "flashinfer"
# Steps that can be open at once, as in the staging ring.
_NUM_PLACES: Final = 3
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
    """`AttentionBackend` for 16-bit pools on CUDA. In a graph it stands in the gaps.

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
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._places = [_Place(spec, workspace, kernels) for _ in range(_NUM_PLACES)]
        self._turn = 0
        for place in self._places:
            place.load_blocking()

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        place = self._places[self._turn]
        place.check_free()
        self._turn = (self._turn + 1) % _NUM_PLACES
        first = batch.num_decode
        decode_run = place.plan("fa2", _Rows.of(batch, 0, first), part=0) if decode else None
        extend_run = None
        if extend:
            rows = _Rows.of(batch, first, batch.num_rows)
            kernel: Kernel = self._long if max(rows.num_new) >= _FA3_MIN_QUERIES else "fa2"
            extend_run = place.plan(kernel, rows, part=1)
        place.close()
        return _FlashInferPlan(spec=self._spec, decode_wrapper=decode_run, extend_wrapper=extend_run)

    def graph_state(self, max_rows: int, max_tokens: int, page_table: torch.Tensor) -> GraphState:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch) -> None:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")


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


class _Place:
    """What the plan of one step is written to. Parts: 0 for the decode rows, 1 for the extend rows."""

    def __init__(self, spec: AttentionSpec, workspace: torch.Tensor, kernels: Sequence[Kernel]) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._spec = spec
        self._shift = spec.kv_pool.page_size.bit_length() - 1
        # A wrapper a part as well as a kernel, for a plan is part of its wrapper.
        uses: tuple[tuple[int, Kernel], ...] = ((0, "fa2"), *((1, kernel) for kernel in kernels))
        self._wrappers: dict[tuple[int, Kernel], Any] = {
            use: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=use[1]) for use in uses
        }
        # Of each part: query and page starts [rows + 1], tokens in the last page and tokens [rows].
        self._columns = torch.empty((2, 4, spec.num_rows + 1), dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()
        self._in_use = False

    def check_free(self) -> None:
        """Raises MisuseError if the copies of an earlier plan may still read this place."""
        if self._in_use and not self._copied.query():
            raise MisuseError(f"attention was planned for more than {_NUM_PLACES} steps that have not run")
        self._in_use = False

    def close(self) -> None:
        """All copies of the step's plan have been enqueued."""
        self._copied.record()
        self._in_use = True

    def load_blocking(self) -> None:
        """Use every wrapper once, on page 0: modules are loaded, or compiled, and buffers made."""
        spec = self._spec
        one = torch.ones(1, dtype=torch.int32, device=spec.device)
        rows = _Rows(page_table=one[:, None] - 1, rows=one - 1, seq_lens=one, num_new=(1,), num_prior=(0,))
        query = torch.zeros((1, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        for part, kernel in self._wrappers:
            wrapper = self.plan(kernel, rows, part=part)
            wrapper.run(query, (spec.kv_pool.keys[0], spec.kv_pool.values[0]), out=query.clone(), enable_pdl=False)
            torch.cuda.synchronize(spec.device)

    def plan(self, kernel: Kernel, rows: _Rows, *, part: int) -> Any:
        """A wrapper planned for these rows."""
        spec, shift = self._spec, self._shift
        num_new = rows.num_new
        lengths = [prior + new for prior, new in zip(rows.num_prior, num_new, strict=True)]
        num_pages = [(length - 1 >> shift) + 1 for length in lengths]
        last_page = [(length - 1 & (1 << shift) - 1) + 1 for length in lengths]
        page_start = [0, *accumulate(num_pages)]
        columns = self._columns[part]
        for column, values in zip(columns, ([0, *accumulate(num_new)], page_start, last_page, lengths), strict=True):
            column[: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
        num_rows = len(lengths)
        pages = torch.empty(page_start[-1], dtype=torch.int32, device=spec.device)
        page_lists(
            rows.page_table,
            rows.rows,
            rows.seq_lens,
            1 << shift,
            pages,
            max_pages=max(num_pages),
            max_rows=spec.num_rows,
        )
        wrapper = self._wrappers[part, kernel]
        wrapper.plan(
            columns[0, : num_rows + 1],
            columns[1, : num_rows + 1],
            pages,
            columns[2, :num_rows],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            1 << shift,
            causal=True,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
            max_token_per_sequence=max(num_new),  # else FlashInfer looks for it in Python
            seq_lens=columns[3, :num_rows],  # pinned, where FlashInfer's own would not be
        )
        return wrapper


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
