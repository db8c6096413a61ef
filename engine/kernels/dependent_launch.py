# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Programmatic dependent launch: the next kernel of a stream starts while the last one drains.

The rule that keeps it safe, here and in any kernel added later: **every program calls `wait_for_inputs` exactly once,
before it touches anything that an earlier kernel of the step wrote or reads, and `release_dependents` only after that.**
So when a kernel runs ahead of its wait, everything up to two kernels earlier has finished and is visible; only weights,
and what was written at least two kernels before, may be read ahead of the wait.
"""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""The interpreter knows no dependent launch: kernels then run one after another and nothing needs to wait."""

DEPENDENT = not INTERPRETED
"""What launchers pass as `PDL` and `launch_pdl`."""


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, PDL: tl.constexpr):
    """Asks for the lines behind a block of pointers; the block's values are not read."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
