"""The decode forward of the Llama family as a short chain of fused kernels: what decode graphs are captured from.

    ids, positions, slots ── prologue (embedding) ── plan ── 28 × [ qkv · attention · o · gate-up · down ] ── LM head

With few rows a layer is five kernels: norm + qkv, rotation + KV write + attention, o + residual, norm + gate-up +
SiLU·mul, down + residual. With more rows some of these become two: `kernels.linear` knows which pay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..forward.forward_output import ForwardOutput, TokenStates
from ..kernels.decode_attention import RopeInputs, decode_attention
from ..kernels.decode_plan import DecodeWorkspace, make_decode_workspace, plan_decode
from ..kernels.linear import linear
from ..kernels.paged_decode import has_paged_decode
from ..kernels.small_gemm import SplitWorkspace, make_split_workspace
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
            has_paged=has_paged_decode(pool.keys[0], config.num_heads // config.num_kv_heads),
        )
        # Of the decoder, not of a graph's pool: padded rows compute with what is here, which nobody reads.
        self._attended = torch.zeros(
            max_rows, config.num_heads, config.head_dim, dtype=model.embedding.dtype, device=device
        )
        self._split: SplitWorkspace = make_split_workspace(max_features=config.hidden_size, device=device)

    @staticmethod
    def serves(model: LlamaForCausalLM) -> bool:
        """Whether the fused kernels compute all of this model: no biases, a power-of-two head size, 16-bit weights."""
        config = model.config
        has_bias = config.attention_bias or config.attention_output_bias or config.mlp_bias
        head_fits = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
        return not has_bias and head_fits and model.embedding.dtype in (torch.bfloat16, torch.float16)

    def forward(self, step: DecodeRows, inputs: StepInputs) -> ForwardOutput:
        """Compute one step for the rows in `step`."""
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
        for index, layer in enumerate(model.stack):
            self._layer(index, layer, residual, step.rows, inputs)
        logits = self._linear(residual, model.lm_head.weight, norm=model.norm.weight)
        return ForwardOutput(logits=logits, states=TokenStates(residual=residual))

    def _layer(
        self, index: int, layer: DecoderLayer, residual: torch.Tensor, rows: torch.Tensor, inputs: StepInputs
    ) -> None:
        """One decoder layer; `residual` [B, hidden] is updated in place."""
        attention, mlp = layer.attention, layer.mlp
        qkv = self._linear(residual, attention.qkv.weight, norm=layer.input_norm.weight)
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
            out=self._attended[: residual.shape[0]],
        )
        self._linear(attended.view(residual.shape[0], -1), attention.o.weight, add_to=residual)
        activated = self._linear(residual, mlp.gate_up.weight, norm=layer.mlp_norm.weight, gated=True)
        self._linear(activated, mlp.down.weight, add_to=residual)

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear(x, weight, self._split, norm=norm, eps=self._eps, gated=gated, add_to=add_to)
