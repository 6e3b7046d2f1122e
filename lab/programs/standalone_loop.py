"""The loop of a program that runs alone, in place of train.py's: `ladder.py show NAME --standalone`.

Batches are train.py's on one stream of tokens: the same windows in the same order.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanoladder import parallel
from nanoladder.data.batches import SHUFFLED, Batch, shuffle
from train import build_model, build_optimizer, build_scaler, learning_rate, set_up, train_step, training_batches

# -- 6. The loop


@dataclass(frozen=True)
class Config:
    """Keys that the command line may set."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    context_length: int = 512
    vocab_size: int = 50257
    batch_size: int = 32
    max_steps: int = 100
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_steps: int = 20
    seed: int = 1337


# Workers draw from their own generator: otherwise dropout would depend on their number.
WORKERS = {"generator": torch.Generator()}


@dataclass(frozen=True)
class TrainingBatches:
    """batches[step] is the Batch of that step, counted from 1. Each epoch has a new order and phase."""

    path: str  # of a file of token ids: uint16, or uint32 beyond 65,536 of them
    config: Config

    def __getitem__(self, step):
        dtype, T = np.uint16 if self.config.vocab_size <= 2**16 else np.uint32, self.config.context_length
        tokens = np.memmap(self.path, dtype, mode="r")
        n = max(1, (len(tokens) - T) // T)  # windows, as many at every phase
        n_phases, last, windows = min(T, len(tokens) - n * T), step * self.config.batch_size, []
        for sequence in range(last - self.config.batch_size, last):
            epoch, place = divmod(sequence, n)
            order, phase = shuffle(self.config.seed, epoch, n, n_phases, place // SHUFFLED)
            start = phase + int(order[place % SHUFFLED]) * T
            windows.append(tokens[start : start + T + 1])
        windows = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, T + 1)
        return Batch(windows[:, :-1], windows[:, 1:])

    def share(self, rank, world_size, positions):
        return Share(self, rank, world_size, positions)


@dataclass(frozen=True)
class Share:
    """A process's share of each batch: some of its sequences, and some of their positions."""

    batches: TrainingBatches
    rank: int
    world_size: int
    positions: torch.Tensor | None  # (T / n,); None: all

    def __getitem__(self, step):
        share = (tensor.chunk(self.world_size)[self.rank] for tensor in self.batches[step])
        return Batch(*(part if self.positions is None else part[:, self.positions] for part in share))


def train(path, config):
    """Prints the loss of each step, in nats per token."""
    device = set_up(config)
    model = build_model(config, device)
    optimizer = build_optimizer(model, config)
    scaler = build_scaler(config, device)
    for step, batch in enumerate(training_batches(path, config, 1, device), 1):
        loss, _ = train_step(model, optimizer, scaler, batch, learning_rate(step, config), config)
        print(f"step {step}: loss {float(loss)}")
    if config.ddp:
        parallel.destroy_process_group()


def main(argv):
    path, *words = argv or [""]
    if not Path(path).is_file():
        expected = "expected a file of token ids, as data/*/prepare.py and nanoGPT write them"
        print(f"error: no file {path!r}; {expected}: python {sys.argv[0]} TOKENS.bin", file=sys.stderr)
        sys.exit(2)
    given = dict(word.removeprefix("--").split("=") for word in words)
    train(path, Config(**{key: type(getattr(Config, key))(value) for key, value in given.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
