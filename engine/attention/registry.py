"""Which attention backends there are, and which one a setting means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError
from .torch_native_backend import TorchNativeBackend

if TYPE_CHECKING:
    from ..config import AttentionBackendName
    from .backend import AttentionBackend, AttentionSpec

_BACKENDS: Final[dict[str, Callable[[AttentionSpec], AttentionBackend]]] = {
    "torch": TorchNativeBackend,
}


def make_backend(name: AttentionBackendName, spec: AttentionSpec, *, field: str) -> AttentionBackend:
    """The backend that setting `field` names, bound to `spec`; "auto" takes the fastest there is.

    Raises ConfigError naming `field` if it is not available or cannot serve the pool.
    """
    resolved = "torch" if name == "auto" else name
    make = _BACKENDS.get(resolved)
    if make is None:
        raise ConfigError(f"{field} {name!r} is not available; there is {', '.join(_BACKENDS)}", field=field)
    backend = make(spec)
    refusal = backend.capabilities.refusal(page_size=spec.kv_pool.page_size, head_dim=spec.head_dim)
    if refusal is not None:
        raise ConfigError(f"{field}: {refusal}", field=field)
    return backend
