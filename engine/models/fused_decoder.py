"""The decode forward of the Llama family as a short chain of fused kernels: what decode graphs are captured from.

    ids, positions, slots ── prologue (embedding) ── plan ── 28 × [ qkv · attention · o · gate-up · down ] ── LM head

With few rows a layer is five kernels: norm + qkv, rotation + KV write + attention, o + residual, norm + gate-up +
SiLU·mul, down + residual. With more rows the products are cuBLAS's, and norm and SiLU·mul are kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernels.decode_attention import RopeInputs, decode_attention
from ..kernels.decode_plan import DecodeWorkspace, make_decode_workspace, plan_decode
from ..kernels.gemv import gemv
from ..kernels.matrix_choice import Gemv, SmallGemm, choose
from ..kernels.rmsnorm import rmsnorm
from ..kernels.silu_mul import silu_mul
from ..kernels.small_gemm import SplitWorkspace, make_split_workspace, small_gemm
from ..kernels.step_prologue import StepInputs, step_prologue

if TYPE_CHECKING:
    from ..forward.kv_pool import KVPool
    from ..forward.row_state import RowState
    from .llama import DecoderLayer, LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """What a captured decode forward reads of its step: rows [B] int32, num_rows [1] int32, on the device, static."""

    rows: torch.Tensor
    num_rows: torch.Tensor


class FusedDecoder:
    """Runs `model` for rows with one token each. Everything it touches is static, so it can be captured.

    Home: the compute lane. Lifetime: as long as model, pool and row state.
    """

    def __init__(
        self, model: LlamaForCausalLM, pool: KVPool, rows: RowState, *, max_rows: int, row_invariant: bool
    ) -> None:
        config = model.config
        self._model = model
        self._pool = pool
        self._rows = rows
        self._eps = config.rms_norm_eps
        device = model.embedding.device
        self._attention: DecodeWorkspace = make_decode_workspace(
            max_rows=max_rows,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
            row_invariant=row_invariant,
        )
        qkv_features = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        widest = max(qkv_features, config.hidden_size, 2 * config.intermediate_size)
        self._split: SplitWorkspace = make_split_workspace(max_features=widest, device=device)

    @staticmethod
    def serves(model: LlamaForCausalLM) -> bool:
        """Whether the fused kernels compute all of this model: no biases, a power-of-two head size, 16-bit weights."""
        config = model.config
        has_bias = config.attention_bias or config.attention_output_bias or config.mlp_bias
        head_fits = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
        return not has_bias and head_fits and model.embedding.dtype in (torch.bfloat16, torch.float16)

    def forward(self, step: DecodeRows, inputs: StepInputs) -> torch.Tensor:
        """Compute one step for the rows in `step`. Shapes: → logits [B, vocab] of the model's dtype."""
        model = self._model
        num_rows = step.rows.shape[0]
        residual = torch.empty(
            num_rows, model.config.hidden_size, dtype=model.embedding.dtype, device=model.embedding.device
        )
        step_prologue(
            step.rows,
            step.num_rows,
            self._rows.relay.table,
            self._rows.lengths,
            self._rows.page_table,
            self._pool.page_size,
            inputs,
            embedding=model.embedding,
            hidden=residual,
        )
        plan_decode(inputs.seq_lens, self._attention)
        for index, layer in enumerate(model.layers):
            self._layer(index, layer, residual, step.rows, inputs)  # type: ignore[arg-type]  # ModuleList forgets its element type
        return self._product(residual, model.lm_head.weight, norm=model.norm.weight)

    def _layer(
        self, index: int, layer: DecoderLayer, residual: torch.Tensor, rows: torch.Tensor, inputs: StepInputs
    ) -> None:
        """One decoder layer; `residual` [B, hidden] is updated in place."""
        attention, mlp = layer.attention, layer.mlp
        qkv = self._product(residual, attention.qkv.weight, norm=layer.input_norm.weight)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        attended = decode_attention(
            qkv,
            self._pool.keys[index],
            self._pool.values[index],
            self._rows.page_table,
            rows,
            inputs.seq_lens,
            self._attention,
            rope=RopeInputs(
                cos_sin=self._model.rotary.table,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                eps=self._eps,
            ),
            ahead=True,
        )
        self._product(attended.view(residual.shape[0], -1), attention.o.weight, add_to=residual)
        activated = self._gated(residual, mlp.gate_up.weight, layer.mlp_norm.weight)
        self._product(activated, mlp.down.weight, add_to=residual)

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`norm(x) @ weight.T`, returned, or added to `add_to`. Shapes: x [B, K], weight [N, K] → [B, N]."""
        choice = choose(weight.shape[0], weight.shape[1], x.shape[0], gated=False, split_allowed=norm is None)
        adds = add_to is not None
        if isinstance(choice, Gemv):
            return gemv(
                x, weight, out=add_to, norm=norm, eps=self._eps, add=adds,
                rows_per_program=choice.rows_per_program, num_warps=choice.num_warps,
            )  # fmt: skip
        if isinstance(choice, SmallGemm):
            return small_gemm(
                x, weight, choice.config, workspace=self._split, out=add_to, norm=norm, eps=self._eps, add=adds
            )
        if norm is not None:
            x = rmsnorm(x, norm, self._eps)
        if add_to is not None:
            return add_to.addmm_(x, weight.t())
        return torch.mm(x, weight.t())

    def _gated(self, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `norm(x)`. Shapes: x [B, H], weight [2 F, H] → [B, F]."""
        choice = choose(weight.shape[0] // 2, weight.shape[1], x.shape[0], gated=True, split_allowed=False)
        if isinstance(choice, Gemv):
            return gemv(
                x, weight, norm=norm, eps=self._eps, silu_mul=True,
                rows_per_program=choice.rows_per_program, num_warps=choice.num_warps,
            )  # fmt: skip
        if isinstance(choice, SmallGemm):
            return small_gemm(x, weight, choice.config, norm=norm, eps=self._eps, silu_mul=True)
        return silu_mul(torch.mm(rmsnorm(x, norm, self._eps), weight.t()))
