"""Compiled kernels and their cache, with a compiler that only pretends. The real one is on the card: tests/gpu."""

import importlib
import logging
import stat
import sys
import types
from pathlib import Path

import pytest


class Compiler(types.ModuleType):
    """NVRTC as far as the package calls it: its machine code is as long as the source."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self.num_compiled = 0
        self.version = (13, 0)
        self.is_there = True

    def nvrtcVersion(self):  # the library's names
        if not self.is_there:
            raise RuntimeError("libnvrtc is not here")
        return (0, *self.version)

    def nvrtcCreateProgram(self, source, name, *_):
        return (0, source)

    def nvrtcCompileProgram(self, program, count, options):
        assert count == len(options)
        assert b"--gpu-architecture=sm_90a" in options
        self.num_compiled += 1
        return (6 if b"missing" in program else 0,)

    def nvrtcGetProgramLogSize(self, program):
        return (0, 1)

    def nvrtcGetProgramLog(self, program, buffer):
        assert len(buffer) > 1, "a byte alone is one that everybody shares"
        return (0,)

    def nvrtcGetCUBINSize(self, program):
        return (0, len(program))

    def nvrtcGetCUBIN(self, program, buffer):
        assert len(buffer) >= len(program)
        return (0,)

    def nvrtcDestroyProgram(self, program):
        return (0,)


class Driver(types.ModuleType):
    """The driver as far as a kernel is loaded by it: it takes what has the length of its source."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.loaded = []

    def cuCtxGetCurrent(self):
        return (0, 1)

    def cuModuleLoadData(self, code):
        if not code:
            return (200, None)
        self.loaded.append(code)
        return (0, "module")

    def cuModuleGetFunction(self, module, name):
        return (0, "function")

    def cuFuncSetAttribute(self, function, attribute, value):
        return (0,)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    made = Compiler()
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver, bindings.nvrtc = Driver(), made
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "slipstream.engine.kernels.nvrtc_kernel", raising=False)
    yield made
    sys.modules.pop("slipstream.engine.kernels.nvrtc_kernel", None)


@pytest.fixture
def cubin(compiler):
    return importlib.import_module("slipstream.engine.kernels.nvrtc_kernel").cubin


def test_a_kernel_is_compiled_once_for_each_source_and_each_define(compiler, cubin):
    for _ in range(3):
        cubin("one", "kernel", {"N": 1})
    assert compiler.num_compiled == 1
    cubin("one", "kernel", {"N": 2})
    cubin("two", "kernel", {"N": 1})
    assert compiler.num_compiled == 3
    compiler.version = (13, 1)
    cubin("one", "kernel", {"N": 1})
    assert compiler.num_compiled == 4, "another compiler makes other code"


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_no_more(compiler, cubin, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(cubin("one", "kernel", {})) == 3
    assert len(cubin("one", "kernel", {})) == 3
    assert compiler.num_compiled == 2


def test_nothing_half_written_is_left_in_the_cache(compiler, cubin, tmp_path):
    cubin("one", "kernel", {})
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    assert file.suffix == ".cubin"
    assert stat.S_ISREG(file.stat().st_mode)


def test_a_kernel_that_was_cut_short_in_the_cache_is_compiled_anew(compiler, cubin, tmp_path):
    module = sys.modules["slipstream.engine.kernels.nvrtc_kernel"]
    module.NvrtcKernel("one", "kernel", {}, shared_bytes=0)
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    file.write_bytes(b"")
    module.NvrtcKernel("one", "kernel", {}, shared_bytes=0)
    assert compiler.num_compiled == 2
    assert len(file.read_bytes()) == 3
    assert module.is_usable()


def test_what_does_not_compile_says_which_kernel(cubin):
    with pytest.raises(RuntimeError, match="kernel did not compile"):
        cubin("missing()", "kernel", {})


def test_without_a_compiler_kernels_are_done_without_and_the_log_says_so(compiler, cubin, caplog):
    module = sys.modules["slipstream.engine.kernels.nvrtc_kernel"]
    compiler.is_there = False
    with caplog.at_level(logging.WARNING):
        assert not module.is_usable()
    assert "libnvrtc is not here" in caplog.text


def test_the_source_is_part_of_the_package():
    import slipstream.engine.kernels as kernels

    folder = Path(kernels.__file__).parent
    assert 'extern "C" __global__' in (folder / "wgmma_gemm.cu").read_text(encoding="utf-8")
    assert "struct alignas(64) TensorMap" in (folder / "hopper.cuh").read_text(encoding="utf-8")
