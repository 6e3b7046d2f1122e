"""Size of a model and its training state, in parameters and bytes, before anything is built."""

from typing import NamedTuple

from nanoladder import machine, optim, parallel
from nanoladder.errors import BadInput


def count_parameters(config):
    """Number of parameters of a config's GPT, without the vocabulary's padding. A tied weight counts once."""
    C, V = config.n_embd, config.vocab_size
    n_values = -(-config.n_layer // 2) if config.value_embedding else 0
    n_tables = 2 + n_values - config.tie_embeddings
    n_positions = config.context_length if config.position == "learned" else 0
    vectors = n_tables * V + n_positions + config.smear
    return config.n_layer * count_block(config) + vectors * C + n_values + count_norm(config)


def count_block(config):
    """Number of parameters of one block."""
    return matrices_of_block(config) + 9 * config.n_embd * config.bias + 2 * count_norm(config) + 2 * config.x0_skip


def matrices_of_block(config):
    """Number of parameters in the matrices of one block: qkv 3·C², proj C², fc 4·C², proj 4·C²."""
    return 12 * config.n_embd**2


def count_norm(config):
    return config.n_embd * (1 + (config.bias and config.norm == "layer"))


class StateBytes(NamedTuple):
    """Bytes of one process's training state, the mean of those that share it. A step needs activations besides."""

    weights: int
    gradients: int
    optimizer: int


def state_bytes(config):
    """Returns the StateBytes of a config in this process: all that is alive when the optimizer steps."""
    padding = config.padded_vocab_size - config.vocab_size
    n = count_parameters(config) + padding * config.n_embd
    in_matrices, elsewhere = optim.STATE_BYTES[config.optimizer]
    n_matrices = config.n_layer * matrices_of_block(config)
    state = n_matrices * in_matrices + (n - n_matrices) * elsewhere + 4 * n * config.ema
    mesh = parallel.mesh()
    n_sharing = mesh.sizes.pipeline * mesh.sizes.tensor * mesh.n_sharing
    gradients = 0 if config.optimizer_in_backward else 4 * n
    return StateBytes(*(round(part / n_sharing) for part in (4 * n, gradients, state)))


def require_memory(config, device):
    """Raises BadInput if the training state alone exceeds the device's whole memory."""
    total = machine.total_memory(device)
    if sum(state_bytes(config)) > total:
        raise BadInput(
            f"n_layer={config.n_layer}, n_embd={config.n_embd}, vocab_size={config.vocab_size}: "
            f"{count_parameters(config):,} parameters take {describe_state(config)}, but {device.type} has "
            f"{in_gb(total)} for this process; expected a smaller --n_layer or --n_embd, --optimizer=adafactor, or "
            "several devices with --shard=full (docs/memory.md)"
        )


def describe_state(config):
    """Describes the StateBytes of a config."""
    state = state_bytes(config)
    return (
        f"{in_gb(sum(state))} before activations: weights {in_gb(state.weights)}, gradients {in_gb(state.gradients)}, "
        f"{config.optimizer} {in_gb(state.optimizer)}"
    )


def in_gb(n_bytes):
    """Formats bytes in GB (1e9 bytes), or in MB if there are fewer."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"
