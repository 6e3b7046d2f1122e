"""Log-probabilities of the targets in rows of tokens, computed in batches divided among the processes."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from model import GPT, IGNORE
from nanoladder import machine, parallel
from nanoladder.errors import BadInput

LOGITS = 2**26  # computed at a time: 268 MB in float32


class Scores(NamedTuple):
    """Scores of n rows, the same in every process and for any number of processes."""

    log_probs: np.ndarray  # (n,) float64: sum over the row's targets, in nats
    greedy: np.ndarray  # (n,) bool: each target is the likeliest token at its position


class LogProbs(nn.Module):
    """Log-probability of each target under a GPT."""

    def __init__(self, model):
        super().__init__()
        self.model = model.eval()

    def forward(self, inputs, targets):
        """Token ids and targets (B, T) -> log-probabilities (B, T) in nats, and True where the target is the likeliest.

        At a target of IGNORE they are 0 and True, and no logits are computed.
        """
        log_probs = torch.zeros(targets.shape, device=targets.device)
        likeliest = torch.ones_like(targets, dtype=torch.bool)
        counted = targets != IGNORE
        hidden, ids = self.model.hidden(inputs)[counted], targets[counted]  # (N, C), (N,)
        size = max(1, LOGITS // self.model.config.padded_vocab_size)
        parts = [self.score_positions(*part) for part in zip(hidden.split(size), ids.split(size), strict=True)]
        log_probs[counted], likeliest[counted] = map(torch.cat, zip(*parts, strict=True))
        return log_probs, likeliest

    def score_positions(self, hidden, ids):
        """Hidden states (N, C) and targets (N,) -> log-probabilities (N,), and True if the target is likeliest (N,)."""
        logits = self.model.head(hidden).float()  # (N, V)
        log_probs = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)
        return log_probs, logits.argmax(1) == ids


class Scorer:
    """Scores rows of tokens with a model on its device, in batches of at most batch_tokens tokens (or one row)."""

    def __init__(self, model: GPT, dtype: str, device: torch.device, batch_tokens: int) -> None:
        self.log_probs, self.dtype = LogProbs(model.to(device)), machine.choose_dtype(dtype, device)
        self.device, self.batch_tokens = device, batch_tokens

    @torch.inference_mode()
    def score(self, name, lengths, read):
        """Returns the Scores of n rows. Labels its progress bar `name`. Collective.

        lengths: (n,) tokens in each row. read: indices of B rows -> inputs and targets, two int64 arrays (B, T); beyond
        a row's length, targets are IGNORE.
        """
        batches = schedule(lengths, self.batch_tokens)
        rank, n_processes = parallel.rank(), parallel.world_size()
        mine, scored = batches[rank::n_processes], []
        total = int(sum(lengths[rows].sum() for rows in mine))
        quiet = None if rank == 0 else True
        with tqdm(total=total, desc=name, unit="token", unit_scale=True, disable=quiet, dynamic_ncols=True) as progress:
            for rows in mine:
                inputs, targets = (torch.from_numpy(ids[:, : lengths[rows[0]]]).to(self.device) for ids in read(rows))
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                    log_probs, likeliest = self.log_probs(inputs, targets)
                scored.append((rows, log_probs.cpu().double().sum(1).numpy(), likeliest.all(1).cpu().numpy()))
                progress.update(int(lengths[rows].sum()))
        scores = Scores(np.empty(len(lengths)), np.empty(len(lengths), bool))
        for rows, log_probs, greedy in (batch for share in parallel.gather_objects(scored) for batch in share):
            scores.log_probs[rows], scores.greedy[rows] = log_probs, greedy
        if not np.isfinite(scores.log_probs).all():
            raise BadInput(
                f"{name}: the model's log-probabilities are not finite; expected finite weights, and a --dtype in "
                "which nothing overflows, such as float32"
            )
        return scores


def schedule(lengths, batch_tokens):
    """Returns a list of batches, each an array of row indices, sorted by length to minimize padding.

    A batch fits in batch_tokens with all rows padded to its first, the longest. No row is shorter than 4/5 of that, so
    at most a fifth is padding. The longest rows come first, so that a lack of memory shows in the first batch.
    """
    order, batches = np.argsort(-lengths, kind="stable"), []
    ordered, start = lengths[order], 0
    while start < len(order):
        n_fit = batch_tokens // int(ordered[start])
        n_similar = np.searchsorted(-ordered[start:], -0.8 * ordered[start], side="right")
        batches.append(order[start : start + max(1, min(n_fit, int(n_similar)))])
        start += len(batches[-1])
    return batches


def perplexity(nats):
    """Returns exp(nats), or None if that is too large for a float."""
    return math.exp(nats) if nats < 700 else None
