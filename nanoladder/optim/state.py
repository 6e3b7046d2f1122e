"""What each optimizer keeps of a weight."""

from nanoladder.optim.galore import rank_of


def state_shapes(config, name, shape):
    """Returns {state name: its shape} of a weight in the config's optimizer; all are float32.

    Those of 8-bit AdamW that are stored in 8 bits count as whole. shape: the weight's, whatever processes share it.
    """
    hidden = name.startswith("blocks.") and len(shape) == 2  # as in groups.hidden_and_rest
    if config.optimizer == "sgd":
        states = {"momentum_buffer": shape}
    elif config.optimizer == "lion":
        states = {"mean": shape}
    elif config.optimizer == "adafactor":
        states = {"row_var": (shape[0], 1), "col_var": (1, shape[1])} if len(shape) == 2 else {"variance": shape}
        states["step"] = ()
    elif config.optimizer == "muon" and hidden:
        states = {"step": (), "momentum_buffer": shape}
    elif config.optimizer == "galore" and hidden:
        m, n = sorted(shape)
        r = rank_of(m)
        states = {"step": (), "basis": (m, r), "mean": (r, n), "square": (r, n)}
    else:
        states = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}  # AdamW
    return states | ({"average": shape} if config.ema else {})
