"""Self-attention of one layer: projections, q and k norms, rotation, KV write, and the backend in the middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import MisuseError
from ..loader.weight_target import WeightTarget
from .fused import is_fused
from .linear import Linear
from .norm import RMSNorm
from .rotary import TorchRotation

if TYPE_CHECKING:
    from ..forward.forward_context import ForwardContext
    from ..loader.model_config import ModelConfig
    from .rotary import Rotation


class Attention(nn.Module):
    """Grouped-query attention over the paged pool, in two halves: what needs all tokens, and what computes each by itself."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self._eps = config.rms_norm_eps
        self.qkv = Linear(
            config.hidden_size, self.q_size + 2 * self.kv_size, bias=config.attention_bias, dtype=dtype, device=device
        )
        self.o = Linear(self.q_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype, device=device)
        self.q_norm = self._head_norm(config, dtype, device)
        self.k_norm = self._head_norm(config, dtype, device)
        self._rope_kv_write: Callable[..., torch.Tensor] | None = None
        if is_fused(device, dtype):
            from ..kernels.rope_kv_write import rope_kv_write

            self._rope_kv_write = rope_kv_write

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Checkpoint names below the block's prefix."""
        targets: dict[str, WeightTarget] = {}
        starts = {"q_proj": 0, "k_proj": self.q_size, "v_proj": self.q_size + self.kv_size}
        sizes = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        for leaf in ("weight", "bias"):
            merged, out = getattr(self.qkv, leaf), getattr(self.o, leaf)
            if merged is not None:
                for name, start in starts.items():
                    targets[f"{name}.{leaf}"] = WeightTarget(param=merged, row_start=start, num_rows=sizes[name])
            if out is not None:
                targets[f"o_proj.{leaf}"] = WeightTarget(param=out)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                targets[f"{name}.weight"] = WeightTarget(param=norm.weight)
        return targets

    def attend(self, x: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """The first half, which writes the pool. Shapes: [T, hidden] → [T, Hq, D]."""
        return ctx.attention.forward(self._rotate_and_store(self.qkv(x), rotation, ctx), self.layer)

    def project(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """The other half, token by token, added to `residual` in place. Shapes: [T, Hq, D], [T, hidden]."""
        self.o.add_product(attended.view(-1, self.q_size), residual)

    def _rotate_and_store(self, qkv: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """Rotate q and k, write k and v to their slots, return q [T, Hq, D], in `ctx.queries` if there are any."""
        if self._rope_kv_write is not None:
            return self._rope_kv_write(
                qkv,
                rotation.positions,
                ctx.slots,
                rotation.table,
                ctx.kv_pool.keys[self.layer],
                ctx.kv_pool.values[self.layer],
                num_q_heads=self.num_heads,
                q_norm=None if self.q_norm is None else self.q_norm.weight,
                k_norm=None if self.k_norm is None else self.k_norm.weight,
                eps=self._eps,
                out=ctx.queries,
                fresh=ctx.fresh,
            )
        if not isinstance(rotation, TorchRotation):
            raise MisuseError("torch's operators need a rotation of their own")
        num_tokens = qkv.shape[0]
        num_qk = self.num_heads + self.num_kv_heads
        heads = qkv.view(num_tokens, num_qk + self.num_kv_heads, self.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), 1)
        qk = rotation.apply(qk)
        ctx.kv_pool.key_slots[self.layer].index_copy_(0, ctx.slots, qk[:, self.num_heads :])
        ctx.kv_pool.value_slots[self.layer].index_copy_(0, ctx.slots, v)
        if ctx.fresh is not None:
            ctx.fresh.keys.copy_(qk[:, self.num_heads :])
            ctx.fresh.values.copy_(v)
        q = qk[:, : self.num_heads]
        return q if ctx.queries is None else ctx.queries.copy_(q)

    def _head_norm(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
