"""These tests run the kernels in Triton's interpreter, in fp32 (it computes bf16 wrongly); tests/gpu runs them on a card."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: its own library is made of kernels too.
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a card the kernels are compiled: tests/gpu/test_kernels.py covers them")
    torch.set_num_threads(1)
    torch.manual_seed(0)
