"""Token ids as bytes: the radix tree compares 100k of them at the speed of memory."""

from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4
"""Bytes of one token id: a native int32, as `array("i")` stores it."""


def encode_token_ids(ids: Sequence[int]) -> bytes:
    """Return the ids as native int32 bytes. Raises: OverflowError for an id outside int32."""
    return array("i", ids).tobytes()


def decode_token_ids(ids: bytes) -> list[int]:
    """Return the ids that `encode_token_ids` was given."""
    decoded = array("i")
    decoded.frombytes(ids)
    return decoded.tolist()


def common_prefix_units(key: bytes, other: bytes, other_start: int, unit_bytes: int) -> int:
    """Return how many whole units of `unit_bytes` `key` shares with `other` from byte `other_start` on.

    Bisects on slices, so each comparison is one memcmp and all copies together are at most one length of `key`.
    """
    same, limit = 0, min(len(key), len(other) - other_start) // unit_bytes
    while same < limit:
        middle = (same + limit + 1) // 2
        if other.startswith(key[same * unit_bytes : middle * unit_bytes], other_start + same * unit_bytes):
            same = middle
        else:
            limit = middle - 1
    return same
