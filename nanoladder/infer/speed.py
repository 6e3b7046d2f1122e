"""Speed of generation beside its limit, the memory: each round reads every weight and the cache once."""

import time

import torch

# A copy is more bytes than the caches of a processor hold. The best of a few takes a tenth of a second; lab/limits.py,
# whose rate a whole step is held against, copies for seconds and takes the median.
COPIED, TRIALS = 2**27, 5  # bytes


def bytes_per_round(model):
    """Bytes that a round of a CachedGPT reads: weights, of the position embedding next to nothing, and the cache."""
    tensors = [*sum(model.layers, ()), *model.gpt.parameters(), *model.gpt.buffers()]
    return sum(tensor.nbytes for tensor in tensors) - model.gpt.position_embedding.weight.nbytes


def copy_rate(device):
    """Bytes per second that a large copy reads and writes, the best of TRIALS."""
    source = torch.ones(COPIED // 4, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(TRIALS):
        start = time.perf_counter()
        target.copy_(source)[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED / min(seconds)


@torch.inference_mode()
def greedy_rate(model, n_tokens):
    """Tokens per second of a CachedGPT that continues a prompt of one token by the n_tokens likeliest, in every row."""
    logits = model.prefill([[0]] * model.n_rows, [*range(model.n_rows)])
    start = time.perf_counter()
    for position in range(1, n_tokens + 1):
        logits = model.step(logits.argmax(1).tolist(), [position] * model.n_rows)
    logits.argmax(1).tolist()  # waits for the device
    return model.n_rows * n_tokens / (time.perf_counter() - start)


def describe_speed(model, n_tokens, n_rounds, seconds):
    """One line: tokens per second, and the share of the copy rate that n_rounds in that time reached."""
    rate, limit = bytes_per_round(model) * n_rounds / seconds, copy_rate(model.device)
    return (
        f"{n_tokens / seconds:,.1f} tokens/s; weights and cache read at {rate / 1e9:,.3g} GB/s, "
        f"{rate / limit:.0%} of the {limit / 1e9:,.3g} GB/s of a copy"
    )
