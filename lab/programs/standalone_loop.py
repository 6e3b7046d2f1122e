"""The loop of a program that runs alone, in place of train.py's: `ladder.py show NAME --standalone`.

Batches are train.py's on one stream of tokens: the same windows in the same order.
"""

import argparse
import base64
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanoladder import parallel
from nanoladder.data.batches import SHUFFLED, Batch, shuffle
from train import (
    build_model,
    build_optimizer,
    build_scaler,
    evaluate,
    learning_rate,
    set_up,
    train_step,
    training_batches,
)

# -- 7. This file alone: its keys, its tokens, its loop


@dataclass(frozen=True)
class Config:
    """Keys that the command line may set."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    context_length: int = 512
    vocab_size: int = 0  # 0: the folder's
    batch_size: int = 32
    max_steps: int = 100
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_steps: int = 20
    seed: int = 1337
    log_interval: int = 10
    eval_interval: int = 50  # 0: never
    eval_windows: int = 64
    output: str = "model.pt"


def open_tokens(path, config):
    """Maps a file of token ids (n,): uint16, or uint32 beyond 65,536 of them."""
    return np.memmap(path, np.uint16 if config.vocab_size <= 2**16 else np.uint32, mode="r")


def cut_windows(tokens, starts, T):
    """Returns the windows of T + 1 tokens that begin at these places, as a Batch."""
    windows = np.stack([tokens[start : start + T + 1] for start in starts]).astype(np.int64)  # (B, T + 1)
    return Batch(torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:]))


# Workers draw from their own generator: otherwise dropout would depend on their number.
WORKERS = {"generator": torch.Generator()}


@dataclass(frozen=True)
class TrainingBatches:
    """batches[step] is the Batch of that step, counted from 1. Each epoch has a new order and phase."""

    path: Path
    config: Config

    def __getitem__(self, step):
        config, tokens = self.config, open_tokens(self.path, self.config)
        T = config.context_length
        n = max(1, (len(tokens) - T) // T)  # windows, as many at every phase
        n_phases, last, starts = min(T, len(tokens) - n * T), step * config.batch_size, []
        for sequence in range(last - config.batch_size, last):
            epoch, place = divmod(sequence, n)
            order, phase = shuffle(config.seed, epoch, n, n_phases, place // SHUFFLED)
            starts.append(phase + int(order[place % SHUFFLED]) * T)
        return cut_windows(tokens, starts, T)

    def share(self, rank, world_size, positions, _):
        return Share(self, rank, world_size, positions)


@dataclass(frozen=True)
class ValidationBatches:
    """Iterates over eval_windows evenly spaced windows, the same each time, in batches of equal size."""

    path: Path
    config: Config

    def __iter__(self):
        config, tokens = self.config, open_tokens(self.path, self.config)
        T = config.context_length
        n = max(1, (len(tokens) - T) // T)
        chosen, size = min(config.eval_windows, n), config.micro_batch_size or config.batch_size
        starts = [i * n // chosen * T for i in range(chosen)]
        for i in range(0, max(1, chosen - size + 1), size):
            yield cut_windows(tokens, starts[i : i + size], T)

    def share(self, rank, world_size, positions, _):
        return Share(self, rank, world_size, positions)


@dataclass(frozen=True)
class Share:
    """A process's share of each batch: some of its sequences, and some of their positions."""

    batches: TrainingBatches | ValidationBatches
    rank: int
    world_size: int
    positions: torch.Tensor | None  # (T / n,); None: all

    def __getitem__(self, step):
        return self.part_of(self.batches[step])

    def __iter__(self):
        return map(self.part_of, self.batches)  # pyright: ignore  of ValidationBatches

    def part_of(self, batch):
        parts = (tensor.chunk(self.world_size)[self.rank] for tensor in batch)
        return Batch(*(part if self.positions is None else part[:, self.positions] for part in parts))


def train(folder, config):
    """Trains a model on the tokens of a folder, and prints its losses, in nats per token."""
    device = set_up(config)
    model = build_model(config, device)
    optimizer = build_optimizer(model, config)
    scaler = build_scaler(config, device)
    for step, batch in enumerate(training_batches(folder / "train.bin", config, 1, device), 1):
        loss, _ = train_step(model, optimizer, scaler, batch, learning_rate(step, config), config)
        if step % config.log_interval == 0 or step == config.max_steps:
            print(f"step {step}: loss {loss:.4f}")
        if config.eval_interval and (step % config.eval_interval == 0 or step == config.max_steps):
            val_loss = evaluate(model, folder / "val.bin", config, device)
            print(f"step {step}: validation loss {val_loss:.4f}")
    if not (config.divides_weights or config.context_parallel > 1) and (not config.ddp or parallel.rank() == 0):
        torch.save(model.state_dict(), config.output)
        prompt = torch.from_numpy(open_tokens(folder / "val.bin", config)[:8].astype(np.int64)).to(device)
        print(f"saved {config.output}; a sample, from the first tokens of val.bin:\n")
        print(decode(sample(model, prompt, 100, config), folder))
    if config.ddp:
        parallel.destroy_process_group()


@torch.no_grad()
def sample(model, tokens, n, config):
    """Continues token ids (t,) by n more, each drawn with the probability that the model gives it. Returns (t + n,)."""
    model.eval()
    for _ in range(n):
        logits = model.logits(tokens[None, -config.context_length :])[0, -1]  # (V,)
        tokens = torch.cat([tokens, torch.multinomial(logits.float().softmax(dim=0), 1)])
    return tokens


def decode(tokens, folder):
    """Returns the text of token ids (t,) by tokenizer.tiktoken, whose lines are tokens in base64; else the ids."""
    path = folder / "tokenizer.tiktoken"
    if not path.exists():
        return tokens.tolist()
    table = [base64.b64decode(line.partition(b" ")[0]) for line in path.read_bytes().splitlines()]
    special = b"\n---\n"  # <|endoftext|> has no line
    return b"".join(table[i] if i < len(table) else special for i in tokens.tolist()).decode(errors="replace")


def main(argv):
    def refuse(message):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help="default: %(default)s")
    parser.error = refuse
    given = vars(parser.parse_args(argv))
    folder, meta = given.pop("folder"), {}
    for name in ("train.bin", "val.bin"):
        if not (folder / name).is_file():
            refuse(f"no {name} in {str(folder)!r}; expected a folder as data/*/prepare.py or nanoGPT writes it")
    if (folder / "meta.json").exists():
        meta = json.loads((folder / "meta.json").read_text())
    given["vocab_size"] = given["vocab_size"] or meta.get("vocab_size", 50257)
    config = Config(**given)
    for name in ("n_layer", "n_head", "n_embd", "context_length", "batch_size", "max_steps", "log_interval"):
        if given[name] < 1:
            refuse(f"{name}={given[name]}: expected at least 1")
    if config.vocab_size < (least := meta.get("vocab_size", 1)):
        refuse(f"vocab_size={config.vocab_size}: expected at least the folder's, {least}")
    if config.n_embd % config.n_head:
        refuse(f"n_embd={config.n_embd} does not divide among n_head={config.n_head} heads")
    if (n := len(open_tokens(folder / "val.bin", config))) <= config.context_length:
        refuse(f"context_length={config.context_length}: val.bin has {n} tokens; expected more")
    train(folder, config)


if __name__ == "__main__":
    main(sys.argv[1:])
