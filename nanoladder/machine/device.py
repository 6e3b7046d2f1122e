"""This process's device: its name, attention kernels and peak FLOP/s."""

import contextlib
import dataclasses
import inspect
import os
import re
import warnings

import torch
from torch.nn.attention import SDPBackend

from nanoladder.config import Config
from nanoladder.config import check as check_config
from nanoladder.errors import BadInput
from nanoladder.machine.float8 import float8_obstacle
from nanoladder.machine.precision import choose_dtype, require_torchao
from nanoladder.private import attention_backend, compile_tanh_by_exp, compiled_libraries
from operators import uses_blocks

# Switches of the kernels behind scaled_dot_product_attention.
ATTENTION_KERNELS = {
    "flash": torch.backends.cuda.enable_flash_sdp,  # the CPU's too
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}

# Dense peak TFLOP/s in bfloat16 (float16 on GPUs without it), with float32 accumulation, which takes a GeForce
# twice as long as float16 accumulation. Names are PyTorch's. A longer name, such as a Ti's, needs an entry of its own;
# a device that is not listed has no MFU. From NVIDIA's datasheets:
PEAK_TFLOPS = {"H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "B200": 2250}
PEAK_TFLOPS |= {"A100": 312, "A10G": 70, "A10": 125, "L40S": 362, "L4": 121, "V100": 125, "T4": 65}
# From NVIDIA's white papers on GA102 (2021), Ada (2023) and RTX Blackwell (2025), appendices A and C: "Peak FP16 Tensor
# TFLOPS with FP32 Accumulate", without sparsity; the 4060's (24 × 2.46 GHz) and the 3060's (28 × 1.777 GHz) from the
# multiprocessors × clock of their product pages:
PEAK_TFLOPS |= {"RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 5070": 61.7}
PEAK_TFLOPS |= {"RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 4070": 58.3, "RTX 4060": 30.2}
PEAK_TFLOPS |= {"RTX 3090": 71, "RTX 3080": 59.5, "RTX 3070": 40.6, "RTX 3060": 25.5}
PEAK_TFLOPS |= {"RTX 6000 Ada Generation": 364.2, "RTX A6000": 154.8}
PEAK_TFLOPS |= {"AMD Instinct MI325X": 1307.4, "AMD Instinct MI300X": 1307.4}  # AMD's datasheets
VARIANT = r"( (Ti|SUPER|D|Max-Q|Laptop)|.* MIG|-\d+[ABCQ])\b"  # of a listed device; the last two are parts of one


def choose_device(name: str) -> torch.device:
    """Returns the named device; "auto" is the GPU if there is one, else the CPU. Raises BadInput if it is missing."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator and accelerator.type in ("cuda", "mps") else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise BadInput(f"device={name}: expected auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    n = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= n:
        raise BadInput(f"device={name}: this machine has {n} {device.type.upper()} devices; try --device=auto")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_name(device: torch.device) -> str:
    """Name of the device, as its maker calls it."""
    if device.type == "cuda":
        platform = f", ROCm {torch.version.hip}" if torch.version.hip else ""
        return torch.cuda.get_device_name(device) + platform
    if device.type == "mps":
        return f"{torch.backends.mps.get_name()}, {torch.backends.mps.get_core_count()} GPU cores"
    n = torch.get_num_threads()
    return f"CPU, {n} thread{'s' if n > 1 else ''}"


def attention_kernel(config: Config, device: torch.device) -> str:
    """Describes the attention kernel that this config uses. Raises BadInput if none supports it."""
    if config.attention == "matmul":
        return "matmul, the (T, T) matrix in memory"
    if config.attention == "blocks" and device.type != "cpu":
        raise BadInput(f"attention=blocks is for CPUs, and slow on {device.type}; expected --attention=sdpa")
    dtype = choose_dtype(config.dtype, device)
    if uses_blocks(config.attention, config.dropout, config.context_length, device, dtype):
        why = "here faster than sdpa" if config.attention == "auto" else "as requested"
        return f"blocks of queries, without the keys that the mask hides ({why})"
    if device.type == "mps":  # it has no choice of kernels to ask for
        if config.attention not in ("auto", "sdpa"):
            raise BadInput(f"attention={config.attention} has no kernel on mps; expected --attention=sdpa or matmul")
        return "sdpa on mps, in training with the (T, T) matrix in memory"
    shape = (1, config.n_head, config.context_length, config.n_embd // config.n_head)
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    kernel = SDPBackend.ERROR.value
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # on a CPU, raises if no kernel is enabled
        warnings.simplefilter("ignore")  # PyTorch warns about each kernel that it rejects
        kernel = attention_backend(q, dropout_p=config.dropout, is_causal=True)
    if kernel == SDPBackend.ERROR.value:
        raise BadInput(
            f"attention={config.attention} has no kernel for {q.dtype} with head width {shape[-1]} and "
            f"dropout={config.dropout} on {device.type}; expected one that does, such as attention=sdpa"
        )
    return "the kernel that PyTorch chooses" if kernel is None else f"{SDPBackend(kernel).name.lower()} kernel"


def configure(config: Config, device: torch.device) -> None:
    """Applies process-wide PyTorch settings outside the ladder: denormals, determinism, compiler, attention kernels."""
    torch.set_flush_denormal(True)  # denormal gradients are up to 20 times slower on a CPU
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler: a second
        torch.use_deterministic_algorithms(config.deterministic)
    if config.compile:
        compile_tanh_by_exp()
    else:
        leave_compiler_unloaded()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.attention in ("flash", "cudnn"):
        for name, enable in ATTENTION_KERNELS.items():
            enable(name == config.attention)


def leave_compiler_unloaded():
    """Lets PyTorch's optimizers work without the compiler, which takes one to two seconds to load on two cores.

    Their methods are wrapped to tell the compiler to leave them out, and the wrappers load it.
    """
    kinds = torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor  # AdamW's step is Adam's
    methods: list[tuple[type, str]] = [(kind, "step") for kind in kinds]
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        methods.append((torch.optim.Optimizer, name))
    for kind, name in methods:
        setattr(kind, name, torch.no_grad()(inspect.unwrap(getattr(kind, name))))


def keep_cache_sound() -> None:
    """Makes torch.compile reuse only whole libraries, compiled for this CPU's vector instructions.

    By itself it checks neither (PyTorch 2.13). A killed linker leaves a library empty, or without its first bytes:
    later runs fail, or silently do without vector instructions. AVX-512 code, from a cache shared by several machines,
    runs without an error on an AVX2 machine, but computes only half of the numbers.
    """
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    for library, lock in compiled_libraries():
        with contextlib.suppress(OSError), lock, open(library, "rb") as file:  # unless another process compiles it
            if not any(file.read(4)):  # the first bytes are written last
                library.unlink()


def check(config: Config, device: torch.device) -> str:
    """Raises BadInput for a config that cannot run on this device. Returns a description of its attention kernel.

    Also checks torch.compile's cache.
    """
    kernel = attention_kernel(config, device)
    if config.optimizer == "adamw8bit":
        require_torchao()
    if config.float8 and (obstacle := float8_obstacle(device)):
        raise BadInput(f"float8=True: {obstacle}; expected --float8=False")
    if config.compile:
        keep_cache_sound()
    if device.type == "mps" and config.activation_checkpointing != "none" and config.dropout > 0:
        raise BadInput(  # without an error: https://github.com/pytorch/pytorch/issues/127676
            f"activation_checkpointing={config.activation_checkpointing} with dropout={config.dropout}: on mps PyTorch "
            "recomputes with other random numbers, and gradients would be wrong; expected "
            "--activation_checkpointing=none or --dropout=0"
        )
    if config.dtype == "auto" and choose_dtype("auto", device) == torch.float16:  # which some keys refuse
        check_config(dataclasses.replace(config, dtype="float16"))
    return kernel


def peak_flops(device: torch.device) -> float | None:
    """Dense half-precision FLOP/s of a CUDA device from its datasheet; None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = (peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b(?!{VARIANT})", name))
    return next((peak * 1e12 for peak in peaks), None)
