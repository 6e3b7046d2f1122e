"""Numerical faults: a step whose loss or gradients are not finite changes nothing, is named, and can be replayed."""

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path

import torch

from nanoladder import checkpoint, files, machine, parallel
from nanoladder.data.batches import TrainingBatches
from nanoladder.errors import BadInput

LOOK = 100  # steps after which a GPU is waited for, where no interval ends before
SMALLEST_SCALE = 1.0  # a scale below it: the gradients themselves overflow float16


def may_update(optimizer, loss, grad_norm):
    """Whether to apply the update: not if the loss or the norm of the gradients is not finite.

    On a GPU nobody waits for the answer: a fused kernel finds it on the device, and any other is run. Either way
    nothing is saved after such a step.
    """
    if checkpoint.scales(optimizer):  # a scaler skips such a step, and goes on with a smaller scale
        return True
    finite = torch.isfinite(loss + grad_norm)
    if finite.device.type == "cpu":
        return bool(finite)
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).float()  # what GradScaler tells the kernel in the same way
    return True


class Watch:
    """The losses and norms since the last look, which may be on a GPU still: looking waits for it, so it is rare.

    A norm of exactly 0 is a fault, too: nothing would be learned. No model gets there; a compiler's bug did.
    """

    def __init__(self, config, split, device, writer):
        self.config, self.split, self.device, self.writer = config, split, device, writer
        self.steps = []

    def add(self, step, lr, loss, grad_norm):
        self.steps.append((step, lr, loss, grad_norm))

    def look(self, optimizer, due):
        """Ends the run, naming the step, if one since the last look was faulty; `due`: look in any case."""
        if not (due or self.device.type == "cpu" or len(self.steps) >= LOOK):
            return
        scale = optimizer.scaler.get_scale() if checkpoint.scales(optimizer) else None
        for step, lr, loss, grad_norm in self.steps:
            loss, grad_norm = float(loss), float(grad_norm)
            if not math.isfinite(loss) or not (scale or math.isfinite(grad_norm)) or grad_norm == 0:
                self.stop(step, lr, loss, grad_norm, scale)
        if scale and scale < SMALLEST_SCALE:
            self.stop(step, lr, loss, grad_norm, scale)
        self.steps.clear()

    def stop(self, step, lr, loss, grad_norm, scale):
        if parallel.rank() > 0:
            sys.exit(1)  # the first process says it
        config = self.config
        batch = list(windows(self.split, config, step))
        values = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "scale": scale}
        path = Path(config.out_dir, "fault.json")
        text = json.dumps({**values, "dataset": config.dataset, "windows_and_phases": batch})
        with contextlib.suppress(OSError):
            files.write(path, text + "\n")
        self.writer.wait()
        try:
            last, state = checkpoint.newest(config.out_dir)
            good = f"{last}, step {state['progress']['step']}, is the last good checkpoint"
        except BadInput:
            good = "there is no checkpoint"
        named = ", ".join(str(window) for window, _ in batch[:4]) + (", ..." if len(batch) > 4 else "")
        fault = f"loss {loss}, gradient norm {grad_norm}, learning rate {lr:.3g}"
        if scale is not None:
            fault += f", loss scale {scale:.3g}" + ", which collapsed" * (scale < SMALLEST_SCALE)
        causes = f"learning_rate={config.learning_rate} too high, too short a warm-up, damaged data"
        if grad_norm == 0:
            causes = f"torch {torch.__version__} loses the gradients (try --compile=False), or weights that are all 0"
        sys.exit(
            f"error: stopped at step {step}: {fault}; batch of windows {named} ({path} has all). Nothing was saved "
            f"since: {good}. Likely causes: {causes}. "
            f"To see where it begins: python {shlex.join(sys.argv)} --replay_step={step}"
        )


def windows(split, config, step):
    """The (window, phase) of every sequence of a step's batch."""
    batches = TrainingBatches(split, config.batch_size, config.seed)
    return batches.growing(config.batch_warmup_steps, config.micro_batch_size).windows(step - 1)


def replay(config):
    """Trains again up to config.replay_step, from the newest checkpoint before it, and looks into that step.

    Prints the loss of its sequences and where the first values come up that are not finite. Writes nothing.
    """
    import train  # both import this module
    from nanoladder.run import memory

    device = train.set_up(config)
    meta, split, _ = train.open_dataset(config.dataset, config.vocab_size, config.context_length)
    decay_end = config.lr_decay_steps or config.max_steps
    config = dataclasses.replace(config, vocab_size=meta["vocab_size"], lr_decay_steps=decay_end)
    config = memory.settle(config, device, {})
    model, optimizer = train.build(config, device)
    start = start_before(config, model, optimizer)
    print(f"replaying steps {start + 1} to {config.replay_step}, from {f'step {start}' if start else 'the beginning'}")
    config = dataclasses.replace(config, max_steps=config.replay_step)
    for step, batch in enumerate(train.training_batches(split, config, start, device), start + 1):
        lr = train.learning_rate(step, config)
        if step < config.replay_step:
            train.train_step(model, optimizer, batch, lr, config)
    with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
        print_sequences(model, batch, windows(split, config, step))
        found = look_inside(model)
        loss, grad_norm = train.train_step(model, optimizer, batch, lr, config)
    print(f"step {step}: loss {float(loss)}, gradient norm {float(grad_norm)}, learning rate {lr:.3g}")
    for where, names in found.items():
        print(f"not finite in the {where}: {', '.join(names[:4]) or 'nothing'}{', ...' * (len(names) > 4)}")


def start_before(config, model, optimizer):
    """Resumes from the newest checkpoint before config.replay_step, or begins as the run did. Returns the step."""
    for path in checkpoint.found(Path(config.out_dir)):
        with contextlib.suppress(checkpoint.Damaged):
            state = checkpoint.load(path)
            if state["progress"]["step"] < config.replay_step:
                return checkpoint.resume(model, optimizer, state, path)["step"]
    if config.init_from not in ("scratch", "resume", "auto"):
        checkpoint.load_weights(model, checkpoint.load(config.init_from), config.init_from)
    return 0


@torch.no_grad()
def print_sequences(model, batch, windows):
    """The mean loss of every sequence of a batch, without dropout, the highest first."""
    model.eval()
    losses = []
    for inputs, targets, (window, phase) in zip(*batch, windows, strict=False):  # rows below are padding
        with machine.autocast(model.config.dtype, inputs.device):
            loss_sum, n_tokens = model(inputs[None], targets[None])
        losses.append((float(loss_sum / n_tokens), window, phase))
    model.train()
    for loss, window, phase in sorted(losses, key=lambda row: math.inf if math.isnan(row[0]) else row[0])[:-9:-1]:
        print(f"  loss {loss:.4f}  window {window}, phase {phase}")


def look_inside(model):
    """The modules and the parameters' gradients that are not finite in the next step, in the order of their making."""
    found = {"forward": [], "backward": []}

    def note(where, name, tensors):
        if name not in found[where] and not all(tensor.isfinite().all() for tensor in tensors):
            found[where].append(name)

    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, inputs, output, name=name or "loss": note(
                "forward", name, output if isinstance(output, tuple) else (output,)
            )
        )
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note("backward", name, (p.grad,)))
    return found
