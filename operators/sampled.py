"""Cross-entropy over a part of the vocabulary: the tokens that are targets, and others drawn at random.

Source: Jean et al. 2015, "On Using Very Large Target Vocabulary" (https://arxiv.org/abs/1412.2007).
"""

import math

import torch

from operators.loss import backward, empty_gradients, keep_gradients
from operators.register import register
from operators.softmax import IGNORED, softmax_, target_columns


def sampled_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    n_vocab: int,
    n_others: int,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Estimates the summed cross-entropy () of the logits `hidden @ weight.T`, in nats, float32.

    hidden (N, C), weight (V, C), targets (N,); ignore_index and n_vocab as in head_loss. Only the tokens among the
    targets and n_others of the rest have logits. The others are drawn anew for each call, from PyTorch's generator, and
    stand for all of the rest: their logits are raised by the log of how many each stands for, so that the sum of
    exponentials is right on average. With n_others of n_vocab or more it is the exact loss.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return operator(hidden, weight, targets, n_vocab, n_others, ignore_index, needs_grad)[0]


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    n_vocab: int,
    n_others: int,
    ignore_index: int,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator. Returns the loss and the gradients of hidden and weight: empty if not needs_grad."""
    is_target = torch.zeros(n_vocab, dtype=torch.bool, device=hidden.device)
    is_target[targets[targets != ignore_index]] = True
    own, rest = is_target.nonzero()[:, 0], is_target.logical_not().nonzero()[:, 0]
    others = rest[torch.randperm(len(rest), device=rest.device)[:n_others]]
    tokens = torch.cat([own, others])  # (n,)
    raised = hidden.new_zeros(len(tokens), dtype=torch.float32)
    raised[len(own) :] = math.log(max(1, len(rest)) / max(1, len(others)))
    places = torch.zeros_like(is_target, dtype=torch.long)
    places[tokens] = torch.arange(len(tokens), device=tokens.device)
    ignored = targets == ignore_index
    columns = target_columns(torch.where(ignored, targets, places[targets.clamp(min=0)]), ignore_index, 0, len(tokens))
    rows = weight[tokens].to(hidden.dtype)
    logits = hidden @ rows.T  # (N, n)
    log_sums, picked = torch.empty(2, len(hidden), device=hidden.device)
    softmax_(logits, columns, log_sums, picked, len(tokens), overwrite=needs_grad, raised=raised)
    loss = log_sums.sub_(picked).masked_fill_(columns == IGNORED, 0.0).sum()
    if not needs_grad:
        return loss, hidden.new_empty(0), weight.new_empty(0)
    d_weight = torch.zeros_like(weight).index_copy_(0, tokens, (logits.T @ hidden).to(weight.dtype))
    return loss, logits @ rows, d_weight


def empty_results(hidden, weight, targets, n_vocab, n_others, ignore_index, needs_grad):
    return empty_gradients(hidden, weight, needs_grad)


operator = register("nanoladder::sampled_head_loss", compute, empty_results, backward, keep_gradients)
