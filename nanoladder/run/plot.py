"""Curves of a run, loss.png."""

from nanoladder import files


def plot(rows, path, title):
    """Plots the losses over the steps to a PNG. rows: one dict of metrics per logged step."""
    from matplotlib.figure import Figure  # loads slowly; unlike pyplot, needs no screen and keeps no figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("train_loss", "train", "-"), ("val_loss", "validation", "o-")):
        found = [row for row in rows if key in row]
        axes.plot([row["step"] for row in found], [row[key] for row in found], style, label=label, markersize=4)
        title += f", {label} {found[-1][key]:.3f}" if found else ""
    axes.set_title(title, parse_math=False)  # a folder's name, which may have a $
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))
