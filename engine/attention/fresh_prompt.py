"""Attention of a step that is one prompt without a prefix, over the keys and values that the step itself has made.

They lie one after the other there, which FlashAttention-3 reads a fifth faster than pages. Its tiles run on behind the end of
a prompt: what stands there weighs nothing, but must be finite, for a NaN would not be nothing. That is why there is one
prompt only: behind it is padding, and not somebody whose numbers went wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .backend import AttentionSpec
from .pinned_plan import NUM_PLACES, Copied


class FreshKV(NamedTuple):
    """Where each layer leaves the keys and values of a step's tokens beside the pool. Shapes: [T, Hk, D] each."""

    keys: torch.Tensor
    values: torch.Tensor

    def first(self, num_tokens: int) -> FreshKV:
        return FreshKV(self.keys[:num_tokens], self.values[:num_tokens])


@runtime_checkable
class ServesFreshPrompts(Protocol):
    """A backend that has a faster way for such steps inside a graph."""

    def fresh_prompt(self, max_tokens: int) -> FreshPrompt | None:
        """None if it has not with this pool. `max_tokens`: of a step."""
        ...


class FreshPrompt:
    """FlashAttention-3 of FlashInfer, planned for each replay from pinned memory that rotates. Home: the compute lane."""

    def __init__(self, spec: AttentionSpec, workspace: torch.Tensor, max_tokens: int) -> None:
        """`workspace`: FlashInfer's own, which steps use one after the other."""
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        shape = (max_tokens, spec.num_kv_heads, spec.head_dim)
        self.kv = FreshKV(*(torch.zeros(shape, dtype=spec.dtype, device=spec.device) for _ in range(2)))
        self._spec = spec
        starts = [torch.zeros(2, dtype=torch.int32, device=spec.device) for _ in range(2)]
        self._wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=starts[0],
            kv_indptr_buf=starts[1],
            backend="fa3",
        )
        own: torch.Tensor = self._wrapper._pin_memory_int_workspace_buffer
        self._pinned = [own, *(torch.empty_like(own, pin_memory=True) for _ in range(NUM_PLACES - 1))]
        self._starts = [torch.zeros(2, dtype=torch.int32, pin_memory=True) for _ in range(NUM_PLACES)]
        self._copied = [Copied() for _ in range(NUM_PLACES)]
        self._turn = 0
        # The first plan fixes the most tokens there can be, and with it the places of everything in the workspace.
        self.plan_padding(max_tokens)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.kv)

    def plan_padding(self, num_tokens: int) -> None:
        """For a capture. Stops the host."""
        torch.cuda.synchronize(self._spec.device)
        self.plan(num_tokens)
        torch.cuda.synchronize(self._spec.device)

    def plan(self, num_tokens: int) -> None:
        """For a replay, on the current stream. Raises MisuseError for more steps than can be open."""
        copied, starts = self._copied[self._turn], self._starts[self._turn]
        copied.check()
        starts[1] = num_tokens
        # FlashInfer has one pinned buffer a wrapper, and would write over what the step before has not copied yet.
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        spec = self._spec
        self._wrapper.plan(
            starts,
            starts,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            causal=True,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        copied.record()
        self._turn = (self._turn + 1) % NUM_PLACES

    def extend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `AttentionPlan` has it; q of as many tokens as were planned last."""
        if out is None:
            out = q.new_empty(q.shape)
        # No dependent launch: FlashInfer's kernels do not keep the rule of this package's.
        self._wrapper.run(q, *self.kv.first(q.shape[0]), out=out, enable_pdl=False)
        return out
