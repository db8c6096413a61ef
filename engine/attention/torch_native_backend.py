"""Attention by torch's own operators: gathers pages, then scaled dot product attention. The reference for the other
backends.

Decode rows of similar length share one call, padded to the longest and masked; the query heads of a KV head are
folded into the query length, so that no key is repeated. Extend rows run in blocks of queries against the keys up to
the block's end, which skips what is masked anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import MisuseError
from .backend import AttentionCapabilities, AttentionPlan, AttentionSpec, GraphBucket, GraphState

if TYPE_CHECKING:
    from ..forward.forward_batch import ForwardBatch
    from ..forward.kv_pool import KVPool

# Measured on a Zen 4 core: 64 beats 32 and 128 at 128…2,048 tokens.
_QUERY_BLOCK: Final = 64
# A group of decode rows is closed when the next row is under half its longest, unless all are short: a call costs as
# much as some hundred keys.
_SHORT_TOKENS: Final = 128

_NAME: Final = "torch"


class TorchNativeBackend:
    """`AttentionBackend` for any page size, head size and device. It can stand in a graph's gaps, not inside: shapes
    follow the lengths of the step.
    """

    capabilities = AttentionCapabilities(
        name=_NAME,
        dtypes=None,
        row_invariant=True,
        page_sizes=None,
        head_dims=None,
        graph_modes=frozenset(("breakable",)),
        needs_host_plan=True,
        fill_length=1,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._masks = _CausalMasks(spec)

    def prepare(self, batch: ForwardBatch, *, decode: bool, extend: bool) -> AttentionPlan:
        _clear_begun_pages(self._spec.kv_pool, batch)
        lengths = [prior + new for prior, new in zip(batch.prefix_lens_cpu, batch.num_new_cpu, strict=True)]
        if self._spec.row_invariant:
            return _TokenPlan(self._spec, batch, lengths)
        decoding = _plan_decode(self._spec, batch, lengths[: batch.num_decode]) if decode else ()
        extending = _plan_extend(batch) if extend else ()
        return _TorchPlan(self._spec, self._masks, decoding, extending)

    def graph_state(self, largest: GraphBucket, page_table: torch.Tensor) -> GraphState:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")

    def prepare_capture(self, bucket: GraphBucket) -> AttentionPlan:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")

    def prepare_replay(self, bucket: GraphBucket, batch: ForwardBatch, *, decode: bool, extend: bool) -> None:
        raise MisuseError(f"attention backend {_NAME!r} cannot stand inside a graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows served by one call.

    Shapes: members [n] int64, their positions in the batch, or None for all of them in order; pages [n * P] int32;
    mask [n, 1, 1, length] additive, or None if all rows have exactly `length` tokens.
    """

    num_rows: int
    length: int
    members: torch.Tensor | None
    pages: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExtendGroup:
    """`num_rows` neighbouring extend rows of the same prefix and the same number of new tokens, at tokens [start,
    end) of the extend part.
    """

    num_rows: int
    prefix: int
    num_new: int
    start: int
    end: int
    pages: torch.Tensor


class _TorchPlan:
    """The arrangement of one step."""

    def __init__(
        self,
        spec: AttentionSpec,
        masks: _CausalMasks,
        decoding: Sequence[_DecodeGroup],
        extending: Sequence[_ExtendGroup],
    ) -> None:
        self._spec = spec
        self._masks = masks
        self._decoding = decoding
        self._extending = extending

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(self._decoding) == 1:
            decoded = self._decode_group(q, layer, self._decoding[0])
            return decoded if out is None else out.copy_(decoded)
        if out is None:
            out = q.new_empty(q.shape)
        for group in self._decoding:
            if group.members is not None:
                out.index_copy_(0, group.members, self._decode_group(q.index_select(0, group.members), layer, group))
        return out

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = q.new_empty(q.shape)
        for group in self._extending:
            self._extend_group(q[group.start : group.end], out[group.start : group.end], layer, group)
        return out

    def _decode_group(self, q: torch.Tensor, layer: int, group: _DecodeGroup) -> torch.Tensor:
        spec = self._spec
        keys, values = spec.kv_pool.gather(layer, group.pages, group.num_rows)
        folded = q.reshape(group.num_rows, spec.num_kv_heads, -1, spec.head_dim)
        attended = _attend(
            folded,
            keys[:, : group.length].transpose(1, 2),
            values[:, : group.length].transpose(1, 2),
            group.mask,
        )
        return attended.reshape(group.num_rows, spec.num_heads, spec.head_dim)

    def _extend_group(self, q: torch.Tensor, out: torch.Tensor, layer: int, group: _ExtendGroup) -> None:
        spec = self._spec
        gathered = spec.kv_pool.gather(layer, group.pages, group.num_rows)
        keys, values = (part.transpose(1, 2) for part in gathered)
        by_row = (group.num_rows, group.num_new, spec.num_heads, spec.head_dim)
        queries, target = q.reshape(by_row).transpose(1, 2), out.view(by_row)
        for first in range(0, group.num_new, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, group.num_new)
            num_keys = group.prefix + last
            attended = _attend(
                queries[:, :, first:last],
                keys[:, :, :num_keys],
                values[:, :, :num_keys],
                self._masks.block(num_queries=last - first, num_keys=num_keys),
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            target[:, first:last] = attended.transpose(1, 2)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention under an additive mask, of any alignment. Shapes as in torch."""
    attend = functional.scaled_dot_product_attention
    if not q.is_cuda:
        return attend(q, keys, values, attn_mask=mask, enable_gqa=enable_gqa)
    # The fused kernels for CUDA misread masks that are windows of a larger one.
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, keys, values, attn_mask=mask, enable_gqa=enable_gqa)


class _CausalMasks:
    """Views of one strip of zeros and minus infinities: every block's mask is a window of it.

    Shape of the strip: [_QUERY_BLOCK, max_model_len + _QUERY_BLOCK]; row i allows the columns up to max_model_len + i.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self._origin = spec.max_model_len
        shape = (_QUERY_BLOCK, spec.max_model_len + _QUERY_BLOCK)
        blocked = torch.full(shape, float("-inf"), dtype=spec.dtype, device=spec.device)
        self._strip = blocked.triu_(spec.max_model_len + 1)

    def block(self, *, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """The additive mask of the last `num_queries` of `num_keys` positions. Shapes: [num_queries, num_keys]; None
        if nothing is masked.
        """
        if num_queries == 1:
            return None
        start = self._origin - (num_keys - num_queries)
        return self._strip[:num_queries, start : start + num_keys]


class _TokenPlan:
    """Row-invariant mode: every token on its own, against exactly its keys, in calls whose shapes its position alone
    decides.
    """

    def __init__(self, spec: AttentionSpec, batch: ForwardBatch, lengths: Sequence[int]) -> None:
        self._spec = spec
        self._first_extend = batch.num_decode
        self._num_new = batch.num_new_cpu
        self._lengths = lengths
        self._pages = [
            batch.kv_loc.pages_of(batch.rows[i : i + 1], length).view(-1) for i, length in enumerate(lengths)
        ]

    def decode(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._rows(q, layer, range(self._first_extend), out)

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._rows(q, layer, range(self._first_extend, len(self._lengths)), out)

    def _rows(self, q: torch.Tensor, layer: int, rows: range, out: torch.Tensor | None) -> torch.Tensor:
        spec = self._spec
        if out is None:
            out = q.new_empty(q.shape)
        token = 0
        for row in rows:
            gathered = spec.kv_pool.gather(layer, self._pages[row], 1)
            keys, values = (part.transpose(1, 2) for part in gathered)
            for length in range(self._lengths[row] - self._num_new[row] + 1, self._lengths[row] + 1):
                attended = functional.scaled_dot_product_attention(
                    q[token].reshape(1, spec.num_kv_heads, -1, spec.head_dim),
                    keys[:, :, :length],
                    values[:, :, :length],
                )
                out[token] = attended.view(spec.num_heads, spec.head_dim)
                token += 1
        return out


def _plan_decode(spec: AttentionSpec, batch: ForwardBatch, lengths: Sequence[int]) -> tuple[_DecodeGroup, ...]:
    """Cut the decode rows into groups in which padding at most doubles the keys read."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for index in order:
        if groups:
            longest = lengths[groups[-1][0]]
            if 2 * lengths[index] >= longest or longest <= _SHORT_TOKENS:
                groups[-1].append(index)
                continue
        groups.append([index])
    if len(groups) == 1:
        return (_decode_group(spec, batch, lengths, None),)
    return tuple(_decode_group(spec, batch, lengths, group) for group in groups)


def _decode_group(
    spec: AttentionSpec, batch: ForwardBatch, lengths: Sequence[int], group: Sequence[int] | None
) -> _DecodeGroup:
    chosen = [lengths[index] for index in group] if group is not None else lengths
    longest = max(chosen)
    rows, seq_lens = batch.rows[: len(lengths)], batch.seq_lens[: len(lengths)]
    members = None
    if group is not None:
        members = torch.tensor(group, dtype=torch.int64).to(spec.device, non_blocking=True)
        rows, seq_lens = rows.index_select(0, members), seq_lens.index_select(0, members)
    pages = batch.kv_loc.pages_of(rows, longest)
    mask = None
    if min(chosen) != longest:
        columns = torch.arange(longest, dtype=torch.int32, device=spec.device)
        hidden = columns >= seq_lens[:, None]
        mask = torch.zeros(hidden.shape, dtype=spec.dtype, device=spec.device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        # A page beyond a row's end is another row's, or stale: page 0 stands in, as what is read must be finite.
        pages = pages.masked_fill(hidden[:, :: spec.kv_pool.page_size], 0)
    return _DecodeGroup(
        num_rows=len(chosen),
        length=longest,
        members=members,
        pages=pages.view(-1),
        mask=mask,
    )


def _clear_begun_pages(pool: KVPool, batch: ForwardBatch) -> None:
    """Zero the pages that rows begin in this step and do not fill. Masked keys and values are multiplied by zero, which
    hides anything but the NaN that a failed row may have left in its pages.
    """
    size = pool.page_size
    begun: list[torch.Tensor] = []
    for index, (prior, new) in enumerate(zip(batch.prefix_lens_cpu, batch.num_new_cpu, strict=True)):
        last = (prior + new) // size  # the page that the row's next token goes to
        if last * size >= prior and (prior + new) % size:
            begun.append(batch.kv_loc.page_table[:, last].index_select(0, batch.rows[index : index + 1]))
    if begun:
        pool.clear(torch.cat(begun))


def _plan_extend(batch: ForwardBatch) -> tuple[_ExtendGroup, ...]:
    """Join neighbouring extend rows of equal shape."""
    shapes = list(zip(batch.prefix_lens_cpu, batch.num_new_cpu, strict=True))
    groups: list[_ExtendGroup] = []
    start, first = 0, batch.num_decode
    for (prefix, num_new), same in groupby(shapes[first:]):
        num_rows = len(list(same))
        rows = batch.rows[first : first + num_rows]
        end = start + num_rows * num_new
        groups.append(
            _ExtendGroup(
                num_rows=num_rows,
                prefix=prefix,
                num_new=num_new,
                start=start,
                end=end,
                pages=batch.kv_loc.pages_of(rows, prefix + num_new).view(-1),
            )
        )
        start, first = end, first + num_rows
    return tuple(groups)
