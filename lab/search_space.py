"""Search space of --mode=tune: the changes to try from a config on.

No change touches the model, the batch of an update, or the optimizer: a step is the same but for its time and memory.
"""

import math

from nanoladder.parallel import divide, micro_batch_sizes


def candidates(config, machine):
    """The changes {key: value} to try, in the order of what they are likely to gain. machine: as of devices.describe().

    Some have the config's own values. Micro-batches come half and twice as large as they are.
    """
    on_gpu, rows = bool(machine["gpu"]), config.micro_batch_size or config.batch_size
    sizes = [size for size in micro_batch_sizes(config, divide(config, 1)) if size in (rows // 2, 2 * rows)]
    dtypes = ["bfloat16"] * machine["native_bfloat16"] + ["float16"] * on_gpu + ["float32"]  # others are emulated
    dtype = dtypes[0] if config.dtype == "auto" else config.dtype
    padding = [n for n in (1, 8, 64, 128) if n * math.ceil(config.vocab_size / n) != config.padded_vocab_size]
    values = [
        # CUDA graphs launch all kernels of a pass at once: the most that a small model has to gain on a GPU
        ("compile_mode", ("reduce-overhead",) if on_gpu else ()),
        # On a GPU the formula, which writes the (T, T) matrix to memory, hardly ever wins
        ("attention", ("sdpa", "flash", "cudnn", "efficient", "matmul") if on_gpu else ("matmul", "sdpa", "blocks")),
        ("compile", (False, True)),
        ("compile_scope", ("model", "block")),
        ("micro_batch_size", sizes),
        ("checkpointing", ("none",)),
        ("dtype", [name for name in dtypes if name != dtype]),
        ("keep_memory", (True, False)),
        ("adamw_impl", ("forloop", "foreach", "fused") if config.optimizer == "adamw" else ()),
        ("num_workers", [n for n in (0, 1, 2, 4, 8) if n <= max(2, machine["threads"])]),
        ("loss_chunks", (0, 2, 8, 32)),
        ("set_to_none", (True, False)),
        ("lazy_metrics", (True, False)),
        ("matmul_precision", ("highest", "high", "medium")),
        ("pad_vocab_to", padding),
        ("compile_mode", ("default", "max-autotune-no-cudagraphs", *["max-autotune"] * on_gpu)),  # minutes, so last
    ]
    pairs = [(key, value) for key, each in values for value in each]
    return [{"compile": True, key: value} if key.startswith("compile_") else {key: value} for key, value in pairs]
