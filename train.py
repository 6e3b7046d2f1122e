"""Trains a GPT: python train.py config/x.py [more.py ...] [--stage=NAME] [--key=value ...]

Read from top to bottom: each section uses only sections above it, and the loop at the end uses them all. `python
ladder.py show naive` prints the program without any optimization; `python ladder.py diff amp` prints the lines that
one stage changes.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

from model import GPT
from nanoladder import data, machine, optim, parallel
from nanoladder.config import Config
from nanoladder.entry import run_script
from nanoladder.run import Run, halve_micro_batch, load_config, prepare

# -- 1. The machine


def set_up(config: Config) -> torch.device:
    """Applies process-wide settings, before any tensor is created. Returns this process's device."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    device = parallel.init_process_group(config, machine.choose_device(config.device))
    machine.configure(config, device)
    if config.keep_memory:
        machine.keep_freed_memory(device)
    return device


# -- 2. The batches: a pure function of (seed, step); inputs and targets are (B, T)


def training_batches(split: data.Split, config: Config, first_step: int, device: torch.device) -> Iterator[data.Batch]:
    """Returns an iterator over the batches of steps first_step to max_steps, on the device."""
    batches = parallel.share(data.TrainingBatches(split, config))
    steps = range(first_step, config.max_steps + 1)
    if config.num_workers == 0:
        return (batches[step].to(device) for step in steps)
    pinned = device.type == "cuda"
    loader = DataLoader(
        batches,
        batch_size=None,  # an item is a batch
        sampler=steps,
        num_workers=data.count_workers(config.num_workers, device),
        pin_memory=pinned,
        **data.WORKERS,
    )
    return data.prefetch(batch.to(device, non_blocking=pinned) for batch in loader)


# -- 3. The model


def build_model(config: Config, device: torch.device) -> GPT:
    model = parallel.build(GPT, config, device) if config.divides_weights else GPT(config).to(device)
    if config.float8:
        machine.use_float8(model.blocks)
    if config.pipeline_parallel > 1:
        model = parallel.apply_pipeline_parallel(model)
    if config.tensor_parallel > 1:
        parallel.apply_tensor_parallel(model)
    if config.context_parallel > 1:
        parallel.apply_context_parallel(model)
    if config.compiles_blocks:
        for block in model.blocks:  # between blocks, weights or activations are exchanged
            block.compile(dynamic=False)
    elif config.compile:
        model.compile(dynamic=False)  # in place: parameters keep their names
    if config.divides_weights:
        parallel.fully_shard(model)
        parallel.init_shards(model, device)  # each process draws its part of the weights
    elif config.ddp and parallel.world_size() > 1:
        model = parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(config.seed + parallel.rank())  # dropout differs between processes
    return model  # pyright: ignore  wrapped or not, as a GPT


# -- 4. The optimizer and its schedule


def build_optimizer(model: GPT, config: Config) -> Optimizer:
    """Builds the optimizer. Weight decay (Loshchilov & Hutter 2019) covers matrices, not norms, biases or positions."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        multiplied = parameter.dim() == 2 and not name.endswith("position_embedding.weight")
        (decayed if multiplied else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.has_rates:
        groups = optim.with_rates(groups, model, config)
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            foreach=False,
            fused=config.adamw_impl == "fused",
        )
    elif config.optimizer == "muon":
        optimizer = optim.build_muon(groups, model, config)
    else:
        optimizer = optim.build(groups, model, config)
    if config.optimizer_in_backward:
        optim.update_in_backward(optimizer)
    return optimizer


def build_scaler(config: Config, device: torch.device) -> GradScaler:
    """Scales float16's loss up, so that small gradients do not underflow (Micikevicius et al. 2018)."""
    return torch.amp.GradScaler(device.type, enabled=machine.choose_dtype(config.dtype, device) == torch.float16)


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then decay to min_lr, by a cosine (Loshchilov & Hutter 2017). Steps count from 1."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    end = config.lr_decay_steps or config.max_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    share = min(2.0, 4 - 4 * progress) if config.schedule == "trapezoid" else 1 + math.cos(math.pi * progress)
    return config.min_lr + (config.learning_rate - config.min_lr) * share / 2


# -- 5. The step: shared by training, measuring and replaying


def train_step(
    model: GPT, optimizer: Optimizer, scaler: GradScaler, batch: data.Batch, lr: float, config: Config
) -> tuple[Tensor | float, Tensor]:
    """Applies one update. Returns the batch's mean loss over valid tokens and the gradient norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0) if config.scales_lr else lr
    optimizer.zero_grad(set_to_none=config.set_to_none)
    if config.cuda_graph and machine.can_capture(config, batch.inputs.device):
        loss = machine.replay(forward_backward, model, scaler, batch, config)
    else:
        loss = forward_backward(model, scaler, batch, config)
    scaler.unscale_(optimizer)
    if config.optimizer_in_backward:  # the gradients are already applied and freed
        grad_norm = optim.norm_of_updates(optimizer)
    elif config.ddp:
        grad_norm = parallel.clip_grad_norm_(model, config.grad_clip or math.inf)
    else:
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    if optim.check_finite(optimizer, loss + grad_norm, scaler):  # not after a loss or gradient that is not finite
        scaler.step(optimizer)
    scaler.update()
    return loss if config.lazy_metrics else loss.item(), grad_norm


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """A context in which matrices are multiplied in half precision; in float32 if the device has none."""
    dtype = machine.choose_dtype(config.dtype, device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def forward_backward(model: GPT, scaler: GradScaler, batch: data.Batch, config: Config) -> Tensor:
    """Computes the gradients of the batch's mean loss. Returns the loss, in nats per token."""
    n_tokens = parallel.all_reduce_mean(batch.n_tokens)  # a mean, because losses and gradients are averaged too
    if config.pipeline_parallel > 1 and parallel.world_size() > 1:
        return parallel.all_reduce_mean(model.forward_backward(batch, n_tokens))  # pyright: ignore  a Pipeline
    if config.micro_batch_size:
        loss = 0.0
        for part in parallel.synchronize_last(model, batch.split(config.micro_batch_size)):
            with autocast(config, part.inputs.device):
                part_loss = model(part.inputs, part.targets) / n_tokens
            scaler.scale(part_loss).backward()
            loss += part_loss.detach()
    else:
        with autocast(config, batch.inputs.device):
            loss = model(batch.inputs, batch.targets) / n_tokens
        scaler.scale(loss).backward()
    return parallel.all_reduce_mean(loss.detach())


# -- 6. The loop


@torch.no_grad()
def evaluate(model: GPT, split: data.Split, config: Config, device: torch.device) -> float:
    """Returns the mean loss, in nats per token, over the fixed validation windows, without dropout."""
    model.eval()
    loss_sum, n_tokens = 0.0, 0
    for batch in parallel.share(data.ValidationBatches(split, config)):
        batch = batch.to(device)
        with autocast(config, device):
            loss_sum += model(batch.inputs, batch.targets).item()
        n_tokens += batch.n_tokens.item()
    model.train()
    return parallel.add(loss_sum) / parallel.add(n_tokens)


def train(config: Config) -> None:
    """Trains a model as configured. Writes everything to config.out_dir."""
    device = set_up(config)
    dataset = data.open_dataset(config)
    prepared = prepare(config, dataset, device, learning_rate)  # refuses what cannot run, before anything is built
    config = prepared.config  # with numbers for vocab_size=0 and micro_batch_size=auto
    model = build_model(config, device)
    optimizer = build_optimizer(model, config)
    scaler = build_scaler(config, device)
    with Run(prepared, model, optimizer, scaler) as run:  # resumes, logs, saves, watches for faults, stops on a signal
        for step, batch in run.steps(training_batches(dataset.train, config, run.first_step, device)):
            lr = learning_rate(step, config)
            loss, grad_norm = train_step(model, optimizer, scaler, batch, lr, config)
            run.log_step(lr, loss, grad_norm)
            if run.due(config.eval_interval):
                run.log_evaluation(evaluate(model, dataset.val, config, device))
            run.save_if_due()


def main(argv: list[str]) -> None:
    config = load_config(argv or ["--usage"])
    while config:
        try:
            return train(config)
        except Exception as error:
            if not machine.is_out_of_memory(error):
                raise
            config = halve_micro_batch(config, error)  # of auto; None, explained, if that does not help
    sys.exit(3)


if __name__ == "__main__":
    run_script(main)
