"""Trains a GPT: python train.py config/x.py [more.py ...] [--key=value ...]"""

import dataclasses
import math
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from model import GPT, IGNORE
from nanoladder import checkpoint, machine, parallel
from nanoladder.config import load_config
from nanoladder.data.batches import TrainingBatches, find_folder, open_dataset, tokens_seen, validation_batches
from nanoladder.entry import run
from nanoladder.errors import BadInput
from nanoladder.optim import adamw8bit, batch_factor, lr_factor, norm_of_updates, other_optimizer, update_in_backward
from nanoladder.run import faults, memory, report, signals


def main(argv):
    config = load_config(argv)
    with memory.explained(config), machine.compiler_errors() if config.compile else nullcontext():
        faults.replay(config) if config.replay_step else train(config)


def train(config):
    """Runs the training that the config describes; everything it leaves behind is in config.out_dir."""
    device = set_up(config)
    chosen = machine.choices(config, device)
    meta, train_split, val_split = open_dataset(config.dataset, config.vocab_size, config.context_length)
    config = dataclasses.replace(config, vocab_size=meta["vocab_size"])
    if config.ddp:
        parallel.agree(dataclasses.asdict(config), "config")
        parallel.agree(train_split.fingerprint() | val_split.fingerprint(), "data")
        chosen |= parallel.choices(config)
    config = memory.settle(config, device, chosen)
    model, optimizer = build(config, device)
    progress = start_from(config, model, optimizer)
    if config.ddp:
        parallel.agree(progress, f"checkpoint in {config.out_dir}")
    prepare_out_dir(config, progress["step"])
    report.header(config, model, meta, chosen)
    peak_flops = report.peak_flops(device)

    clock = report.StepClock(device)
    first_step = progress["step"] + 1
    with (
        signals.Interrupts(config.save_every_minutes) as interrupts,
        checkpoint.Writer(config) as writer,
        report.Silent() if config.ddp and parallel.rank() else report.Report(config, progress["step"]) as logger,
    ):
        watch = faults.Watch(config, train_split, device, writer)
        clock.start(progress["step"])
        for step, batch in enumerate(training_batches(train_split, config, progress["step"], device), first_step):
            lr = learning_rate(step, config)
            loss, grad_norm = train_step(model, optimizer, batch, lr, config)
            progress["step"] = step
            progress["interval_loss"] += loss
            progress["interval_steps"] += 1
            if step == first_step:
                logger.first_step(clock.lap(step))

            saving = interrupts.save() or due(step, config.save_interval, config)
            watch.add(step, lr, loss, grad_norm)
            intervals = (config.log_interval, config.eval_interval)
            watch.look(optimizer, saving or any(due(step, interval, config) for interval in intervals))
            row = {}
            if due(step, config.log_interval, config):
                tokens = (tokens_seen(step, config) - tokens_seen(clock.step, config)) / max(1, step - clock.step)
                seconds = clock.lap(step)
                row = {
                    "train_loss": float(progress["interval_loss"]) / progress["interval_steps"],
                    "lr": lr,
                    "grad_norm": float(grad_norm),
                    "peak_memory_gb": report.peak_memory_gb(device),
                    **report.throughput(seconds, tokens, model.flops_per_token(), peak_flops),
                }
                progress |= {"interval_loss": 0.0, "interval_steps": 0}
            if due(step, config.eval_interval, config):
                with clock.paused():
                    row["val_loss"] = evaluate(model, val_split, config, device)
                    row |= report.bits_per_byte(row["val_loss"], meta)
            best = row.get("val_loss", math.inf) < progress["best_val_loss"]
            if best:
                progress["best_val_loss"] = row["val_loss"]
            if row:
                logger.log({"step": step, "tokens": tokens_seen(step, config), **row})
            if config.save_interval and (saving or best):
                with clock.paused():
                    writer.save(model, optimizer, progress, best)
            if interrupts.signal:
                break
    if config.ddp:
        parallel.stop()
    if interrupts.signal and step < config.max_steps:
        saved = f"saved in {config.out_dir}" if config.save_interval else "not saved, as save_interval=0"
        print(f"{interrupts.signal.name}: ended after step {step}, {saved}")
        sys.exit(128 + interrupts.signal)


def train_step(model, optimizer, batch, lr, config):
    """One optimizer step on one batch; every caller that trains or measures comes through here.

    batch: inputs and targets (B, T). Returns the mean loss over the batch's valid tokens and the global norm of the
    gradients before clipping. With several processes a batch is this one's share, loss and norm are of the whole.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    n_tokens = (batch[1] != IGNORE).sum()
    if config.ddp:
        n_tokens = parallel.mean(n_tokens)  # a process's mean, as losses and gradients are averaged over them too
    optimizer.zero_grad(set_to_none=config.set_to_none)
    total = 0.0
    parts = micro_batches(batch, config.micro_batch_size) if config.micro_batch_size else [batch]
    if config.ddp:
        parts = parallel.synchronize_last(model, parts)
    for inputs, targets in parts:
        with machine.autocast(config.dtype, inputs.device) if config.dtype != "float32" else nullcontext():
            loss_sum, _ = model(inputs, targets)
        loss = loss_sum / n_tokens
        if config.dtype == "float32":
            loss.backward()
        else:
            optimizer.scaler.scale(loss).backward()
        if config.micro_batch_size:
            total += loss.detach()  # the micro-batches' shares of the whole batch's mean
    if config.micro_batch_size:
        loss = total
    if config.dtype != "float32":
        optimizer.scaler.unscale_(optimizer)
    if config.optimizer_in_backward:
        grad_norm = norm_of_updates(optimizer)  # what follows finds no gradient to use
    else:
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    if config.ddp:
        loss, grad_norm = parallel.mean(loss.detach()), parallel.gathered(grad_norm)
    if faults.may_update(optimizer, loss, grad_norm):
        if config.dtype == "float32":
            optimizer.step()
        else:
            optimizer.scaler.step(optimizer)  # does what optimizer.step() does, unless the dtype is float16
            optimizer.scaler.update()
    return loss.detach().double() if config.lazy_metrics else loss.item(), grad_norm


def micro_batches(batch, size):
    """Cuts a batch into batches of `size` sequences."""
    return zip(*(part.split(size) for part in batch), strict=True)


def learning_rate(step, config):
    """Linear warm-up, then a cosine down to min_lr (Loshchilov & Hutter 2017). Steps count from 1: never 0."""
    peak, end = config.learning_rate * batch_factor(config), config.min_lr * batch_factor(config)
    if config.optimizer not in ("adamw", "adamw8bit"):
        peak, end = peak * lr_factor(config), end * lr_factor(config)
    decay_end = config.lr_decay_steps or config.max_steps
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if step >= decay_end:
        return end
    done = (step - config.warmup_steps) / (decay_end - config.warmup_steps)
    return end + (peak - end) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def evaluate(model, split, config, device):
    """Mean loss in nats over the fixed validation windows, dropout off."""
    model.eval()
    loss_sum, n_tokens = 0.0, 0
    rows = config.micro_batch_size or config.batch_size
    if config.ddp:
        rows = min(rows, config.batch_size // parallel.world_size())
        batches = validation_batches(split, config.eval_windows, rows, parallel.rank(), parallel.world_size())
    else:
        batches = validation_batches(split, config.eval_windows, rows)
    for inputs, targets in batches:
        with machine.autocast(config.dtype, device) if config.dtype != "float32" else nullcontext():
            batch_loss, batch_tokens = model(inputs.to(device), targets.to(device))
        loss_sum, n_tokens = loss_sum + batch_loss.double(), n_tokens + batch_tokens
    model.train()
    if config.ddp:
        loss_sum, n_tokens = parallel.total(loss_sum), parallel.total(n_tokens)
    return float(loss_sum / n_tokens)


def training_batches(split, config, start_step, device):
    """The batches of steps start_step + 1 to max_steps, inputs and targets (B, T) on the device."""
    if config.ddp:
        batches = TrainingBatches(split, config.batch_size, config.seed, parallel.rank(), parallel.world_size())
    else:
        batches = TrainingBatches(split, config.batch_size, config.seed)
    if config.micro_batch_size:
        batches = batches.growing(config.batch_warmup_steps, config.micro_batch_size)
    steps = range(start_step, config.max_steps)
    if config.num_workers == 0:
        return (tuple(part.to(device) for part in batches[step]) for step in steps)
    # A generator of its own: a DataLoader draws from the global one otherwise, and dropout then differs.
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        generator=torch.Generator(),
        num_workers=config.num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=signals.outlive,
    )
    return one_ahead(tuple(part.to(device, non_blocking=True) for part in batch) for batch in loader)


def one_ahead(items):
    """Yields the items, each one when the next is already made."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item
            item = following
        yield item


def build(config, device):
    """What a step needs: the model on the device and its optimizer."""
    model = GPT(config).to(device)
    torch.manual_seed(config.seed)  # of the dropout
    if config.compile and config.compile_scope == "model" and config.shard == "none":
        model.compile(mode=config.compile_mode, dynamic=False)  # in place: names and weights stay as they are
    elif config.compile:
        for block in model.blocks:  # as sharding gathers them
            block.compile(mode=config.compile_mode, dynamic=False)
    if config.ddp and parallel.world_size() > 1:
        torch.manual_seed(config.seed + parallel.rank())  # each process drops others
        if config.shard == "none":
            model = parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            parallel.fully_shard(model, config, device)
    optimizer = build_optimizer(model, config)
    if config.dtype != "float32":
        optimizer.scaler = machine.gradient_scaler(config.dtype, device)
    if config.optimizer_in_backward:
        update_in_backward(optimizer)
    return model, optimizer


def build_optimizer(model, config):
    """AdamW (Loshchilov & Hutter 2019) that decays only the matrices that are multiplied."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        multiplied = parameter.dim() == 2 and not name.endswith("position_embedding.weight")
        (decayed if multiplied else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw8bit":
        return adamw8bit(groups, config)
    if config.optimizer != "adamw":
        return other_optimizer(groups, model.blocks, config)
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        foreach=config.adamw_impl == "foreach",
        fused=config.adamw_impl == "fused",
    )


def set_up(config):
    """Process-wide settings, before any tensor is made. Returns the device."""
    if not config.ddp and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput("started by torchrun as several processes, which need ddp=True; expected `python train.py ...`")
    torch.set_flush_denormal(True)  # gradients fade into denormals, which a CPU handles up to 20 times slower
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(config.deterministic)
    torch.set_float32_matmul_precision(config.matmul_precision)
    device = machine.choose_device(config.device)
    if config.ddp:
        device = parallel.start(config, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.keep_memory:
        machine.keep_freed_memory(device)
    if config.attention not in ("matmul", "sdpa"):
        for name, enable in machine.ATTENTION_KERNELS.items():
            enable(name == config.attention)
    return device


def start_from(config, model, optimizer):
    """Fills model and optimizer as init_from says. Returns the progress: where the run stands."""
    progress = {"step": 0, "best_val_loss": math.inf, "interval_loss": 0.0, "interval_steps": 0}
    saved = checkpoint.found(Path(config.out_dir))
    if config.init_from == "resume" or (config.init_from == "auto" and saved):
        path, state = checkpoint.newest(config.out_dir)
        progress = checkpoint.resume(model, optimizer, state, path)
        if progress["step"] >= config.max_steps:
            print(f"{path} is at step {progress['step']}, max_steps={config.max_steps}: nothing is left to train")
    elif not config.overwrite and saved:
        raise BadInput(
            f"{config.out_dir} holds a run: --init_from=resume continues it, --overwrite=True replaces it, "
            "or choose another --out_dir"
        )
    elif config.init_from not in ("scratch", "auto"):
        checkpoint.load_weights(model, checkpoint.load(config.init_from), config.init_from)
    return progress


def prepare_out_dir(config, start_step):
    """Makes out_dir, with a copy of the dataset's tokenizer in it; a new run removes the one it replaces."""
    if config.ddp and parallel.rank():  # the first process makes it
        return
    folder = Path(config.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.clear(folder, start_step)
        for file in find_folder(config.dataset).glob("tokenizer.*"):
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise BadInput(f"out_dir={folder} cannot be written ({error}); choose another --out_dir") from None


def due(step, interval, config):
    """Whether an interval ends at this step; the last step ends every interval but 0, which means never."""
    return interval > 0 and (step % interval == 0 or step == config.max_steps)


if __name__ == "__main__":
    run(main)
