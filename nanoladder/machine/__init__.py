"""What this machine can do: its device, its native dtype, its kernels and compilers, and its memory."""

import contextlib
import ctypes
import importlib.util
import logging
import os
import platform
import re
import resource
import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from nanoladder.errors import BadInput

GLIBC = platform.libc_ver()[0] == "glibc"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
ATTENTION_KERNELS = {
    "flash": torch.backends.cuda.enable_flash_sdp,  # the switch of the CPU's kernel too
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


def choose_device(name):
    """auto -> the GPU if there is one, else the CPU. Raises BadInput for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device={name}: expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device={name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    number = device.index or 0
    if number >= torch.cuda.device_count():
        raise BadInput(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices; try --device=auto")
    return torch.device("cuda", number)


def choose_dtype(name, device):
    """auto -> bfloat16 where it is native, else float16 on a GPU and float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def autocast(name, device):
    """The context of a forward: its products are in half precision, where that is native."""
    dtype = choose_dtype(name, device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def gradient_scaler(name, device):
    """Scales the loss, lest small gradients vanish in float16, and skips steps that overflow; else does nothing."""
    return torch.amp.GradScaler(device.type, enabled=choose_dtype(name, device) == torch.float16)


def keep_freed_memory(device):
    """Lets later allocations reuse freed memory. Acts on what is allocated after it, for the whole process."""
    if device.type == "cuda":
        set_allocator("expandable_segments:True")
    elif GLIBC:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap never shrinks


def free_memory(device):
    """Bytes that this process can take: of a GPU's memory, or of the machine's its part of the processes here."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        free = proc_bytes("/proc/meminfo", "MemAvailable")
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" is no limit
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = re.search(r"^anon (\d+)$", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
        free = min(free, most - int(used[1]))
    free //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            free = min(free, most - proc_bytes("/proc/self/status", field))
    return max(0, free)


def limit_memory(device, size):
    """Lets this process take `size` more bytes and no more: of a GPU, or of Linux's memory; elsewhere does nothing."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
        return
    with contextlib.suppress(OSError):
        most = proc_bytes("/proc/self/status", "VmData") + int(size)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def proc_bytes(path, field):
    """A field of /proc, which counts in KiB, in bytes; OSError where there is none."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def out_of_memory(text):
    """Whether an error's text says that memory could not be had: of a GPU, of a CPU, of Python or of a thread."""
    return re.search(r"out of memory|allocate memory|not enough memory|bad_alloc|ALLOC_FAILED|MemoryError", text)


def set_allocator(settings):
    """Sets the allocator of a GPU's memory, by the name that this PyTorch has for it."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


def find_compiler(device):
    """What torch.compile generates code with here. Raises BadInput if a part of it is missing."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise BadInput("compile=True needs triton on a GPU; install it, or go without: --compile=False")
        found = next((c for c in (os.environ.get("CC"), "gcc", "clang") if c and shutil.which(c)), None)
        if found is None:
            raise BadInput("compile=True needs a C compiler for triton; install gcc, or go without: --compile=False")
        return f"triton and {found}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BadInput(f"compile=True needs a C++ compiler and {compiler} is missing; install g++, or --compile=False")
    return compiler


@contextlib.contextmanager
def compiler_errors():
    """Ends the program in one line where torch.compile fails."""
    try:
        yield
    except BadInput:
        raise  # before the next line imports all of torch._dynamo
    except torch._dynamo.exc.TorchDynamoException as error:
        if out_of_memory(str(error)):
            raise RuntimeError(f"out of memory while compiling: {error}") from None
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"error: torch.compile failed: {reason}; --compile=False goes without it")


def eight_bit_library(device):
    """The package that has 8-bit optimizer states here, torchao or bitsandbytes. Raises BadInput if neither does."""
    logging.disable(logging.WARNING)  # torchao names kernels that this machine has not
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash")  # it is compiled all the same
    try:
        importlib.import_module("torchao.optim")
    except ImportError:
        if device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
            return "bitsandbytes"
        raise BadInput(
            "optimizer=adamw8bit needs torchao; install it: python -m pip install torchao, or go without: "
            "--optimizer=adamw"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return "torchao"


def attention_kernel(config, device):
    """The kernel that computes attention here. Raises BadInput if the one asked for cannot."""
    if config.attention == "matmul":
        return "matmul, the (T, T) matrix in memory"
    shape = (1, config.n_head, config.context_length, config.n_embd // config.n_head)
    kernel = SDPBackend.ERROR
    q = torch.empty(shape, device=device, dtype=choose_dtype(config.dtype, device), requires_grad=True)
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # a CPU raises where no kernel is left
        warnings.simplefilter("ignore")  # why a kernel is not taken
        kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=config.dropout, is_causal=True))
    if kernel == SDPBackend.ERROR:
        raise BadInput(
            f"attention={config.attention} has no kernel for {q.dtype} with head width {shape[-1]} and "
            f"dropout={config.dropout} on {device.type}; expected one that has, such as attention=sdpa"
        )
    return f"{kernel.name.lower()} kernel"


def optimizer(config):
    """The optimizer, and what it makes of the learning rate."""
    from nanoladder.optim import lr_factor  # which imports this file

    if config.optimizer == "adamw":
        return f"AdamW, {config.adamw_impl}"
    return f"{config.optimizer}, at {lr_factor(config):g} of learning_rate"


def choices(config, device):
    """What is chosen on this machine and why, for the header. Raises BadInput for what cannot run here."""
    on_gpu = device.type == "cuda"
    dtype = choose_dtype(config.dtype, device)
    if dtype == torch.float16 and config.optimizer_in_backward:
        raise BadInput(
            "optimizer_in_backward takes no float16, which dtype=auto is on this GPU; expected --dtype=float32, "
            "or --optimizer_in_backward=False"
        )
    if config.dtype != "auto":
        why = "as asked"
    else:
        why = f"bfloat16 is {'' if dtype == torch.bfloat16 else 'not '}native here"
    chosen = {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "dtype": f"{dtype} ({why})".removeprefix("torch."),
        "attention": attention_kernel(config, device),
        "optimizer": optimizer(config),
        "compile": "off",
        "memory": "freed memory goes back to the system",
    }
    if config.compile:
        scope = "block" if config.shard != "none" else config.compile_scope
        chosen["compile"] = f"the {scope}, mode {config.compile_mode}, by {find_compiler(device)}"
    if config.keep_memory and on_gpu:
        chosen["memory"] = "freed memory is kept, in expandable segments"
    elif config.keep_memory and GLIBC:
        chosen["memory"] = "freed memory is kept, by glibc's mallopt"
    elif config.keep_memory:
        chosen["memory"] = "keep_memory does nothing here: it needs glibc or CUDA"
    if not on_gpu:
        chosen["no effect"] = "TF32, pinned memory and CUDA graphs: they need a GPU"
    return chosen
