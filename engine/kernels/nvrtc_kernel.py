"""A CUDA C++ kernel: compiled by NVRTC, kept in the user's cache folder, launched on the current stream.

For what Triton cannot say. Needs `cuda-bindings` and NVRTC, which the CUDA builds of torch bring along.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from ..loader.cache_folder import cache_root

_logger = logging.getLogger(__name__)
_ARCH = "sm_90a"

Argument = ctypes.c_int | ctypes.c_void_p | ctypes.Array[ctypes.c_char] | ctypes.Structure


class NvrtcError(RuntimeError):
    """A kernel did not compile, load or launch."""


def is_usable() -> bool:
    """Whether a kernel compiles and loads here: NVRTC's library is found, and the driver takes what it makes."""
    try:
        NvrtcKernel('extern "C" __global__ void nothing() {}', "nothing", {}, shared_bytes=0)
    except RuntimeError as error:
        _logger.warning("kernels in CUDA C++ are done without: %s", error)
        return False
    return True


class NvrtcKernel:
    """One compiled kernel, loaded for the current device.

    `source` is CUDA C++ with one `extern "C" __global__` function `name`; `defines` are given to its preprocessor. The
    first use on a machine compiles (about a second); later ones read the result from the cache.

    Lifetime: the process. Raises NvrtcError with the compiler's words where it does not compile.
    """

    def __init__(self, source: str, name: str, defines: Mapping[str, object], *, shared_bytes: int) -> None:
        _make_context_current()
        try:
            self._module = _checked(driver.cuModuleLoadData(cubin(source, name, defines)))
        except NvrtcError:  # what is in the cache may have been cut short
            self._module = _checked(driver.cuModuleLoadData(cubin(source, name, defines, anew=True)))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared_bytes = shared_bytes
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def max_clusters(self, threads: int, cluster: int) -> int:
        """How many clusters of this many CTAs the device holds at once."""
        config = self._config(cluster, threads, cluster)
        return int(_checked(driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def launch(self, grid: int, threads: int, cluster: int, arguments: Sequence[Argument]) -> None:
        """Launch `grid` CTAs on the current stream, ahead of the end of the kernel before it (`dependent_launch`)."""
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        config = self._config(grid, threads, cluster, stream=torch.cuda.current_stream().cuda_stream)
        _checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _config(self, grid: int, threads: int, cluster: int, *, stream: int = 0) -> driver.CUlaunchConfig:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = driver.CUstream(stream)
        ids = driver.CUlaunchAttributeID
        early, together = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        together.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
        config.attrs, config.numAttrs = [early, together], 2
        return config


def tensor_map(tensor: torch.Tensor, *box: int) -> ctypes.Array[ctypes.c_char]:
    """What the bulk copy engine must know of `tensor`, 16-bit, its last dimension contiguous and the others 16-byte aligned, to
    load boxes of this shape with a 128-byte swizzle. What lies outside reads as zero. Valid while the tensor's memory is.
    """
    return _encoded(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), box)


@lru_cache(
    maxsize=4096
)  # a model's weights and pool, whose maps never change; what is shown of other memory soon leaves
def _encoded(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_char]:
    types = driver.CUtensorMapDataType
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if dtype == torch.bfloat16
            else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            len(box),
            address,
            [driver.cuuint64_t(size) for size in shape[::-1]],
            [driver.cuuint64_t(stride * 2) for stride in strides[-2::-1]],
            [driver.cuuint32_t(size) for size in box[::-1]],
            [driver.cuuint32_t(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.create_string_buffer(ctypes.string_at(int(made.getPtr()), 128), 128)


def cubin(source: str, name: str, defines: Mapping[str, object], *, anew: bool = False) -> bytes:
    """Machine code for `source`, from the cache, or compiled into it: if need be, or `anew`."""
    version = _checked(nvrtc.nvrtcVersion())
    options = [f"--gpu-architecture={_ARCH}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines.items())]
    key = hashlib.sha256("\0".join([source, repr(version), *options]).encode()).hexdigest()[:32]
    path = cache_root() / "kernels" / f"{name}-{key}.cubin"
    if not anew:
        with suppress(OSError):
            return path.read_bytes()
    made = _compile(source, name, options)
    with suppress(OSError):  # a cache that cannot be written costs the next start a compilation
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(made)
            whole.replace(path)
    return made


def _compile(source: str, name: str, options: Sequence[str]) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _buffer(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        if int(result) != 0:
            raise NvrtcError(f"{name} did not compile: {log.rstrip(bytes(1)).decode(errors='replace')}")
        size = _checked(nvrtc.nvrtcGetCUBINSize(program))
        made = _buffer(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, made))
        return made[:size]
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _make_context_current() -> None:
    """On a thread that has asked nothing of the device yet, the driver knows no context; torch uses the primary one."""
    if int(_checked(driver.cuCtxGetCurrent())) == 0:
        device = _checked(driver.cuDeviceGet(torch.cuda.current_device()))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))


def _buffer(size: int) -> bytes:
    """Bytes that the library may write into: never one of the short ones that the interpreter keeps for everybody."""
    return bytes(size + 64)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value that a call of the bindings returned beside its status."""
    status, *values = answer
    if int(status) != 0:
        raise NvrtcError(repr(status))
    return values[0] if len(values) == 1 else tuple(values) if values else None
