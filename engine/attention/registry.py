"""Which attention backends there are, and which ones the settings mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from ..errors import ConfigError
from .torch_native_backend import TorchNativeBackend

if TYPE_CHECKING:
    from ..config import AttentionBackendName
    from .backend import AttentionBackend, AttentionSpec
    from .flashinfer_backend import FlashInferBackend
    from .triton_backend import TritonBackend

Phase = Literal["decode", "prefill"]


def make_backends(
    spec: AttentionSpec, *, decode: AttentionBackendName, prefill: AttentionBackendName
) -> tuple[AttentionBackend, AttentionBackend]:
    """The backends that the settings `decode_attention` and `prefill_attention` name, bound to `spec`: one object if
    both are the same. Raises ConfigError naming the setting if a backend is not available or cannot serve the pool.
    """
    decode_name = resolve_name(decode, spec, phase="decode")
    prefill_name = resolve_name(prefill, spec, phase="prefill")
    decode_backend = make_backend(decode_name, spec, field="decode_attention")
    if prefill_name == decode_name:
        return decode_backend, decode_backend
    return decode_backend, make_backend(prefill_name, spec, field="prefill_attention")


def resolve_name(name: AttentionBackendName, spec: AttentionSpec, *, phase: Phase) -> AttentionBackendName:
    """What "auto" stands for: the fastest backend that is there and serves `spec` without compiling for minutes."""
    if name != "auto":
        return name
    if spec.device.type != "cuda" or spec.dtype not in (torch.bfloat16, torch.float16):
        return "torch"
    if phase == "prefill":
        from .flashinfer_backend import serves_prebuilt

        if serves_prebuilt(spec):
            return "flashinfer"
    from .triton_backend import TritonBackend

    return "torch" if TritonBackend.capabilities.refusal(spec) else "triton"


def make_backend(name: AttentionBackendName, spec: AttentionSpec, *, field: str) -> AttentionBackend:
    """The backend `name`, which is not "auto", bound to `spec`. Raises ConfigError naming `field` if it is not
    available or cannot serve the pool.
    """
    kind = _backend_class(name, spec, field)
    refusal = kind.capabilities.refusal(spec)
    if refusal is not None:
        raise ConfigError(f"{field}: {refusal}", field=field)
    return kind(spec)


def _backend_class(
    name: AttentionBackendName, spec: AttentionSpec, field: str
) -> type[TorchNativeBackend] | type[TritonBackend] | type[FlashInferBackend]:
    if name == "torch":
        return TorchNativeBackend
    if spec.device.type != "cuda":
        raise ConfigError(f"{field} {name!r} needs a CUDA device; there is torch", field=field)
    if name == "triton":
        from .triton_backend import TritonBackend

        return TritonBackend
    from .flashinfer_backend import FlashInferBackend, is_installed

    if not is_installed():
        raise ConfigError(f"{field} {name!r} is not available: flashinfer-python is not installed", field=field)
    return FlashInferBackend
