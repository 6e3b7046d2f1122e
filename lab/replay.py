"""Repeats a step of a run and finds sequences, modules, gradients and weights that are not finite.

    python -m lab.replay config/x.py --step=N [--key=value ...]

Takes the arguments with which the run was started. Trains again up to that step, from the newest checkpoint before it,
and writes nothing.
"""

import dataclasses
import math
from pathlib import Path

import torch

import train
from nanoladder import checkpoint, data, parallel
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.run import load_config, micro_batch
from nanoladder.run.start import check_data, new_start

SHOWN_SEQUENCES, SHOWN_NAMES = 8, 4  # at most


def main(argv):
    usage = "python -m lab.replay config/x.py [more.py ...] --step=N [--key=value ...]"
    parser = Parser(prog="python -m lab.replay", usage=usage, allow_abbrev=False)
    parser.add_argument("--step", type=int, required=True, help="the step to look into, counted from 1")
    options, config_argv = parser.parse_known_args(argv)
    config = load_config(config_argv, vars(options))
    if not 1 <= options.step <= config.max_steps:
        raise BadInput(f"--step={options.step}: not a step of this run; expected 1 to max_steps={config.max_steps}")
    replay(config, options.step)
    parallel.destroy_process_group()


def replay(config, step):
    """Trains again up to a step, then prints the loss of its sequences and where numbers cease to be finite."""
    device = train.set_up(config)
    split = (dataset := data.open_dataset(config)).train
    decay_end = config.lr_decay_steps or config.max_steps
    config = dataclasses.replace(config, vocab_size=dataset.vocab_size, lr_decay_steps=decay_end, max_steps=step)
    config = micro_batch.resolve_micro_batch(config)
    model = train.build_model(config, device)
    optimizer, scaler = train.build_optimizer(model, config), train.build_scaler(config, device)
    start = resume_before(step, config, dataset, model, optimizer, scaler)
    print(f"replaying steps {start + 1} to {step}, from {f'step {start}' if start else 'the beginning'}")
    for number, batch in enumerate(train.training_batches(split, config, start + 1, device), start + 1):
        lr = train.learning_rate(number, config)
        if number < step:
            train.train_step(model, optimizer, scaler, batch, lr, config)
    with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
        print_sequences(model, batch, data.TrainingBatches(split, config).windows(step), config)
        not_finite = find_not_finite(model)
        eager = dataclasses.replace(config, cuda_graph=False)  # nor does a captured graph
        loss, grad_norm = train.train_step(model, optimizer, scaler, batch, lr, eager)
    not_finite["update"] = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    print(f"step {step}: loss {float(loss)}, gradient norm {float(grad_norm)}, learning rate {lr:.3g}")
    for stage, names in not_finite.items():
        more = ", ..." if len(names) > SHOWN_NAMES else ""
        print(f"not finite in the {stage}: {', '.join(names[:SHOWN_NAMES]) or 'nothing'}{more}")


def resume_before(step, config, dataset, model, optimizer, scaler):
    """Resumes from the newest checkpoint before a step, or starts as the run did. Returns the step resumed from."""
    for path in checkpoint.list_checkpoints(Path(config.out_dir)):
        state = checkpoint.load(path)
        if state["progress"]["step"] < step:
            print(check_data(config, dataset.fingerprint(), state, path), end="")
            checkpoint.check_resumes(config, state, path, next(model.parameters()).device)
            checkpoint.resume(model, optimizer, scaler, state, path)
            return state["progress"]["step"]
    new_start(config, dataset).load(model, optimizer, scaler)
    return 0


@torch.no_grad()
def print_sequences(model, batch, windows, config):
    """Prints the mean loss of the sequences of a batch, without dropout, the highest first."""
    model.eval()
    losses = []
    for inputs, targets, (window, phase) in zip(*batch, windows, strict=False):  # rows beyond windows are padding
        sequence = data.Batch(inputs[None], targets[None])
        with train.autocast(config, inputs.device):
            losses.append((float(model(*sequence) / sequence.n_tokens), window, phase))
    model.train()
    losses.sort(key=lambda row: math.inf if math.isnan(row[0]) else row[0], reverse=True)
    for loss, window, phase in losses[:SHOWN_SEQUENCES]:
        print(f"  loss {loss:.4f}  window {window}, phase {phase}")


def find_not_finite(model):
    """Hooks that fill {"forward": modules, "backward": parameters} in the next step, in the order of computation.

    A module is listed if its output is not finite, a parameter if its gradient is not.
    """
    not_finite = {"forward": [], "backward": []}

    def check(stage, name, *tensors):
        if name not in not_finite[stage] and not all(tensor.isfinite().all() for tensor in tensors):
            not_finite[stage].append(name)

    for name, module in model.named_modules():

        def check_output(_, inputs, output, name=name or "loss"):
            check("forward", name, *(output if isinstance(output, tuple) else (output,)))

        module.register_forward_hook(check_output)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: check("backward", name, p.grad))
    return not_finite


if __name__ == "__main__":
    run_script(main)
