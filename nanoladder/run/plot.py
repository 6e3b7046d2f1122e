"""Curves of a run, loss.png."""

import warnings

from nanoladder import files


def plot(rows, path, title):
    """Plots loss, learning rate and throughput over steps to a PNG. rows: one dict of metrics per logged step."""
    from matplotlib.figure import Figure  # loads slowly; unlike pyplot, needs no screen and keeps no figure

    def draw(axis, key, **style):
        if curve := [(row["step"], row[key]) for row in rows if key in row]:
            axis.plot(*zip(*curve, strict=True), **style)

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplot_mosaic("LLR;LLT")
    draw(axes["L"], "train_loss", label="train", color="tab:blue", linewidth=1.2)
    draw(axes["L"], "val_loss", label="validation", color="tab:orange", marker="o", markersize=4)
    last = next((row for row in reversed(rows) if "val_loss" in row), None)
    note = f": validation {last['val_loss']:.3f} at step {last['step']}" if last else ""
    axes["L"].set_title(title + note, parse_math=False)  # a folder's name, which may have a $
    axes["L"].set(xlabel="step", ylabel="loss (nats per token)")
    if axes["L"].lines:
        axes["L"].legend()
    draw(axes["R"], "lr", color="tab:green")
    axes["R"].set(title="learning rate", xlabel="step", ylim=(0, None))
    draw(axes["T"], "tokens_per_s", color="tab:red")
    axes["T"].set(title="tokens per second", xlabel="step", ylim=(0, None))
    for axis in axes.values():
        axis.grid(alpha=0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # such characters become boxes
        files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
