"""Device of this process, with its name, its attention kernels, its compiler and its peak FLOP/s."""

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch
from filelock import FileLock
from torch.nn.attention import SDPBackend

from nanoladder.errors import BadInput
from nanoladder.kernels import uses_blocks
from nanoladder.machine.precision import choose_dtype

# Switches of the kernels behind scaled_dot_product_attention.
ATTENTION_KERNELS = {
    "flash": torch.backends.cuda.enable_flash_sdp,  # the CPU's too
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}

# Dense peak TFLOP/s in bfloat16 (float16 on GPUs without it), with sums in float32, for which a GeForce takes twice as
# long as for sums in float16. The cards' are multiprocessors × boost clock × 512 FLOP, or × 1024 of professional ones.
# Names are PyTorch's. A device of a longer name, such as a Ti, needs an entry of its own; unlisted ones have no MFU.
PEAK_TFLOPS = {
    # NVIDIA's datasheets
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 149.7,
    "A10": 125,
    "A10G": 70,
    "V100": 125,
    "T4": 65,
    # NVIDIA's white papers on GA102 (2021, appendices A and C), Ada (2023, appendix A), RTX Blackwell (2025, appendix
    # A) and RTX Blackwell PRO (2025), "Peak FP16 Tensor TFLOPS with FP32 Accumulate", without sparsity
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "RTX 6000 Ada Generation": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 5070 Ti": 87.9,
    "RTX 5070": 61.7,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 4070 Ti": 80.2,
    "RTX 4070": 58.3,
    "RTX 3090 Ti": 80,
    "RTX 3090": 71,
    "RTX 3080 Ti": 68.2,
    "RTX 3080": 59.5,
    "RTX 3070 Ti": 43.5,
    "RTX 3070": 40.6,
    # Not in the white papers: computed from the multiprocessors and the clock on NVIDIA's product pages
    "RTX 5060 Ti": 47.4,  # 36 × 2.57 GHz
    "RTX 5060": 38.4,  # 30 × 2.50 GHz
    "RTX 4060 Ti": 44.1,  # 34 × 2.535 GHz
    "RTX 4060": 30.2,  # 24 × 2.46 GHz
    "RTX 3060 Ti": 32.4,  # 38 × 1.665 GHz
    "RTX 3060": 25.5,  # 28 × 1.777 GHz
    "RTX A5000": 111.1,  # 64 × 1.695 GHz
    # AMD's datasheets
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI300X": 1307.4,
}
VARIANT = r"( (Ti|SUPER|D|Max-Q|Laptop)|.* MIG|-\d+[ABCQ])\b"  # of a listed device; the last two are parts of one


def choose_device(name):
    """Returns the named device; "auto" is the GPU if there is one, else the CPU. Raises BadInput if it is missing."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found and found.type in ("cuda", "mps") else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if not device or device.type not in ("cpu", "cuda", "mps") or (device.type == "mps" and device.index):
        raise BadInput(f"device={name}: expected auto, cpu, cuda, cuda:N or mps")
    if device.type == "cpu":
        return device
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise BadInput(f"device={name}: it needs macOS on Apple silicon, with PyTorch for it; try --device=auto")
        return torch.device("mps")
    number = device.index or 0
    if number >= torch.cuda.device_count():
        raise BadInput(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices; try --device=auto")
    return torch.device("cuda", number)


def device_name(device):
    """Name of the device, as its maker calls it."""
    if device.type == "cuda":
        platform = f", ROCm {torch.version.hip}" if torch.version.hip else ""
        return torch.cuda.get_device_name(device) + platform
    if device.type == "mps":
        return f"{torch.backends.mps.get_name()}, {torch.backends.mps.get_core_count()} GPU cores"
    n = torch.get_num_threads()
    return f"CPU, {n} thread{'s' if n > 1 else ''}"


def lacks(device):
    """Describes the switches that have no effect on this device, and why; "" if all have."""
    if device.type != "cuda":
        return "TF32, pinned memory and CUDA graphs: they need CUDA"
    if not torch.version.hip and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"TF32: it needs compute capability 8.0 (Ampere), this GPU has {capability[0]}.{capability[1]}"
    return ""


def find_compiler(device):
    """Returns the name of the compiler behind torch.compile on this device. Raises BadInput if there is none."""
    if device.type == "mps":
        return "Metal shaders, which PyTorch calls a prototype"
    if device.type == "cuda":
        if not torch.version.hip and (capability := torch.cuda.get_device_capability(device)) < (7, 0):
            raise BadInput(
                "compile=True needs compute capability 7.0 (Volta) for triton, this GPU has "
                f"{capability[0]}.{capability[1]}; expected --compile=False"
            )
        if importlib.util.find_spec("triton") is None:
            raise BadInput("compile=True needs triton on a GPU; install it, or use --compile=False")
        found = next((c for c in (os.environ.get("CC"), "gcc", "clang") if c and shutil.which(c)), None)
        if found is None:
            raise BadInput("compile=True needs a C compiler for triton; install gcc, or use --compile=False")
        return f"triton and {found}"
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        raise BadInput(
            f"compile=True needs a C++ compiler, but {compiler} is missing; install {usual}, or use --compile=False"
        )
    return compiler


def attention_kernel(config, device):
    """Describes the attention kernel that this config uses. Raises BadInput if none supports it."""
    if config.attention == "matmul":
        return "matmul, the (T, T) matrix in memory"
    if config.attention == "blocks" and device.type != "cpu":
        raise BadInput(f"attention=blocks is for CPUs, and slow on {device.type}; expected --attention=sdpa")
    dtype = choose_dtype(config.dtype, device)
    if uses_blocks(config, device.type, dtype):
        case = f"in {dtype} with {config.context_length} tokens".replace("torch.", "")
        why = f"{case} they take less time than sdpa on a CPU" if config.attention == "auto" else "as requested"
        return f"blocks of queries, without the keys that the mask hides ({why})"
    if device.type == "mps":  # it has no choice of kernels to ask for
        if config.attention not in ("auto", "sdpa"):
            raise BadInput(f"attention={config.attention} has no kernel on mps; expected --attention=sdpa or matmul")
        return "sdpa on mps, in training with the (T, T) matrix in memory"
    shape = (1, config.n_head, config.context_length, config.n_embd // config.n_head)
    kernel = SDPBackend.ERROR
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # on a CPU, raises if no kernel is enabled
        warnings.simplefilter("ignore")  # PyTorch warns about each kernel that it rejects
        kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=config.dropout, is_causal=True))
    if kernel == SDPBackend.ERROR:
        raise BadInput(
            f"attention={config.attention} has no kernel for {q.dtype} with head width {shape[-1]} and "
            f"dropout={config.dropout} on {device.type}; expected one that does, such as attention=sdpa"
        )
    return f"{kernel.name.lower()} kernel"


def configure(config, device):
    """Applies process-wide PyTorch settings outside the ladder: denormals, determinism, attention kernels."""
    torch.set_flush_denormal(True)  # denormal gradients are up to 20 times slower on a CPU
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler: a second
        torch.use_deterministic_algorithms(config.deterministic)
    if config.compile:
        compile_tanh_fast()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.attention in ("flash", "cudnn", "efficient"):
        for name, enable in ATTENTION_KERNELS.items():
            enable(name == config.attention)


def compile_tanh_fast():
    """Makes compiled code for a CPU compute GELU's tanh by exp: by itself it takes 3 to 4 % of a step longer."""
    from torch._inductor import config  # imported late: it loads the compiler, a second

    if hasattr(config.cpp, "use_decompose_tanh"):
        config.cpp.use_decompose_tanh = True


def keep_cache_sound():
    """Makes torch.compile reuse only whole libraries, compiled for this CPU's vector instructions.

    By itself it looks at neither (PyTorch 2.13). A killed linker leaves a library empty, or without its first bytes:
    every later run fails, or does without vector instructions and does not say so. Code for AVX-512 from a cache that
    machines share runs with AVX2 without an error, on half of the numbers.
    """
    config, vectors = torch.compiler.config, torch.backends.cpu.get_cpu_capability()
    if vectors not in config.cache_key_tag:
        config.cache_key_tag += vectors
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # imported late: it loads the compiler, a second

    folder = Path(cache_dir())
    for library in folder.glob("*/*.so"):
        with contextlib.suppress(OSError):  # locked by who compiles it, or deleted by another process
            if is_cut_off(library):
                with FileLock(folder / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0):
                    if is_cut_off(library):  # nobody has completed it meanwhile
                        library.unlink()


def is_cut_off(library):
    """True if a linker was killed while it wrote the library: the first bytes are written last."""
    with open(library, "rb") as file:
        return not any(file.read(4))


def check(config, device):
    """Raises BadInput for a config that cannot run on this device. Sees to the cache of torch.compile."""
    attention_kernel(config, device)
    if config.compile:
        find_compiler(device)
        keep_cache_sound()
    if device.type == "mps" and config.checkpointing != "none" and config.dropout > 0:
        raise BadInput(  # without an error: https://github.com/pytorch/pytorch/issues/127676
            f"checkpointing={config.checkpointing} with dropout={config.dropout}: on mps PyTorch recomputes with other "
            "random numbers, and gradients would be wrong; expected --checkpointing=none or --dropout=0"
        )
    if choose_dtype(config.dtype, device) == torch.float16 and config.optimizer_in_backward:
        raise BadInput(
            f"optimizer_in_backward does not support float16, which dtype={config.dtype} is on this device; expected "
            "--dtype=float32, or --optimizer_in_backward=False"
        )


def peak_flops(device):
    """Dense half-precision FLOP/s of a CUDA device from its datasheet; None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = (peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b(?!{VARIANT})", name))
    return next((peak * 1e12 for peak in peaks), None)
