"""Device memory whose addresses are fixed before its size is: a reserved range, backed from its start as far as wanted.

CUDA graphs keep the addresses of what they touch. A pool that is reserved first and backed last can be captured into them
while it is still small, and then be given all the memory that the captures have left.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Final

import torch

from .errors import MisuseError

_DEVICE_LOCATION: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED_ALLOCATION: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Driver:
    """The four calls of the CUDA driver that this needs."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise torch.OutOfMemoryError(f"{name}: out of device memory")
        if status != 0:
            raise RuntimeError(f"{name} failed with CUDA error {status}")


class _Range:
    """The driver's side of a reserved range, apart from the object whose end gives it back."""

    def __init__(self, driver: _Driver, address: int, num_bytes: int) -> None:
        self.driver = driver
        self.address = address
        self.num_bytes = num_bytes
        self.pieces: list[tuple[int, int, int]] = []  # (offset, bytes, handle)

    def release(self) -> None:
        """Unmap and give back. The device is waited for: something may still run that was launched over the range."""
        torch.cuda.synchronize()
        for offset, size, handle in self.pieces:
            self.driver.call("cuMemUnmap", ctypes.c_uint64(self.address + offset), ctypes.c_size_t(size))
            self.driver.call("cuMemRelease", ctypes.c_uint64(handle))
        self.pieces = []
        self.driver.call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.num_bytes))


class ReservedMemory:
    """`num_bytes` of address space on `device`, of which the first `backed_bytes` can be used.

    `whole` is a uint8 tensor over all of it; only its backed beginning may be touched. Lifetime: the memory is unmapped and
    given back when this object and every tensor over it are gone.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the device's context must exist before the driver is asked
        driver = _Driver()
        self._properties = _AllocationProperties()
        self._properties.type = _PINNED_ALLOCATION
        self._properties.location = _Location(_DEVICE_LOCATION, device.index or 0)
        granularity = ctypes.c_size_t()
        driver.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(_RECOMMENDED),
        )
        self.device = device
        self.granularity = granularity.value
        self.num_bytes = -(-num_bytes // self.granularity) * self.granularity
        self.backed_bytes = 0
        address = ctypes.c_uint64()
        driver.call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self.num_bytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._range = _Range(driver, address.value, self.num_bytes)
        weakref.finalize(
            self, self._range.release
        ).atexit = False  # a process that ends gives everything back by itself

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        # torch keeps this object alive as long as any tensor over it.
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._range.address, False), "version": 3}

    def whole(self) -> torch.Tensor:
        """A tensor [num_bytes] uint8 over the range. Its beginning must be backed before this is called."""
        return torch.as_tensor(self, device=self.device)

    def back(self, num_bytes: int) -> None:
        """Make the first `num_bytes` usable, rounded up to whole pieces. Never takes any back.

        Raises: torch.OutOfMemoryError, with what was backed before still usable; MisuseError beyond the range.
        """
        wanted = -(-num_bytes // self.granularity) * self.granularity
        if wanted > self.num_bytes:
            raise MisuseError(f"{wanted} bytes asked for of a range of {self.num_bytes}")
        more = wanted - self.backed_bytes
        if more <= 0:
            return
        call = self._range.driver.call
        handle = ctypes.c_uint64()
        size = ctypes.c_size_t(more)
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        start = ctypes.c_uint64(self._range.address + self.backed_bytes)
        call("cuMemMap", start, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._range.pieces.append((self.backed_bytes, more, handle.value))
        access = _AccessDescription(self._properties.location, _READ_WRITE)
        call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.backed_bytes = wanted
