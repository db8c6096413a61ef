"""These tests run the kernels in Triton's interpreter, in fp32 (it computes bf16 wrongly); tests/gpu runs them on a card."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # Triton reads it when it is imported, for its own library is made of kernels too: where some other test has imported
    # it by now, it is imported once more. Its compiled part stays, because that cannot be initialised twice.
    early = [name for name in sys.modules if name.startswith("slipstream.engine.kernels.")]
    if early:  # compiled kernels by now, and no test here would find another
        raise RuntimeError(f"a test module collected before these imports {early[0]} at its top: import it in the test")
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a card the kernels are compiled: tests/gpu/test_kernels.py covers them")
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def with_scalar_index(tensor, scope):
        # The interpreter keeps scalars in arrays of one element, which numpy 2.5 no longer turns into an int by itself.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_scalar_index)
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny_qwen3():
    """Makes models in float32, all alike: 2 layers of width 32, 2 heads of 16 with one for keys and values, 64 ids."""
    from slipstream.engine.loader.dummy_loader import fill_dummy_weights
    from slipstream.engine.loader.model_config import ModelConfig
    from slipstream.engine.models.registry import build_model

    raw = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    }  # fmt: skip

    def make():
        cpu = torch.device("cpu")
        model = build_model(ModelConfig.from_dict(raw), max_position=64, dtype=torch.float32, device=cpu)
        fill_dummy_weights(model)
        model.finish()
        return model

    return make


@pytest.fixture
def on_host(tmp_path):
    """Compiles a kernel in CUDA C++ for the host: `on_host(files, defines, entry, fault)` is a library with what `entry`, C++,
    exports. `fault`: a piece of the kernel and what stands there instead.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    from slipstream.engine.kernels import dependent_launch

    package = Path(dependent_launch.__file__).parent

    def compile_for_host(files, defines, entry, fault=("", "")):
        kernel = "\n".join((package / file).read_text(encoding="utf-8") for file in files)
        assert fault[0] in kernel
        source = tmp_path / "kernel.cpp"
        names = ("cuda_on_host.hpp", "hopper_on_host.hpp")
        imitation = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)
        lines = [f"#define {name} {value}" for name, value in defines.items()]
        source.write_text("\n".join([*lines, imitation, kernel.replace(*fault), entry]), encoding="utf-8")
        library = tmp_path / f"kernel-{len(list(tmp_path.iterdir()))}.so"
        command = [compiler, "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-o", library, source]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))

    return compile_for_host
