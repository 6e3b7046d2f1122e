"""The state that each optimizer keeps of a weight: its shapes and bytes."""

import math

from nanoladder.config import Config
from nanoladder.optim.galore import rank_of

BLOCK, FEW = 256, 4096  # of 8-bit AdamW: numbers with a common scale; a smaller or uneven tensor's state is float32


def state_shapes(config: Config, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns {state name: its shape} of a weight in the config's optimizer; all are float32.

    An 8-bit tensor counts as a whole float32 one. shape: the weight's, whatever processes share it.
    """
    hidden = name.startswith("blocks.") and len(shape) == 2  # as in groups.hidden_and_rest
    if config.optimizer == "sgd":
        states = {"momentum_buffer": shape}
    elif config.optimizer == "lion":
        states = {"mean": shape}
    elif config.optimizer == "adafactor":
        states = {"row_var": (shape[0], 1), "col_var": (1, shape[1])} if len(shape) == 2 else {"variance": shape}
        states = {"step": (), **states}
    elif config.optimizer == "muon" and hidden:
        states = {"step": (), "momentum_buffer": shape}
    elif config.optimizer == "galore" and hidden:
        m, n = sorted(shape)
        r = rank_of(m)
        states = {"step": (), "basis": (m, r), "mean": (r, n), "square": (r, n)}
    else:
        states = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}  # AdamW
    return states


def count_state_bytes(config: Config, name: str, shape: tuple[int, ...]) -> float:
    """Number of bytes of a weight's state in the config's optimizer.

    In 8 bits, a moment is codes, a float32 scale of each BLOCK of them, and a float32 table of the 256 codes' values.
    """
    n, kept = math.prod(shape), state_shapes(config, name, shape)
    in_8_bits = {"exp_avg", "exp_avg_sq"} if config.optimizer == "adamw8bit" and n >= FEW and n % BLOCK == 0 else ()
    return sum(n + 4 * (n // BLOCK + 256) if key in in_8_bits else 4 * math.prod(kept[key]) for key in kept)
