"""Generation: whole windows first, then one token at a time, sampled with temperature, top-k and top-p."""

from typing import NamedTuple

import torch

from nanoladder.machine import double


class Sampling(NamedTuple):
    """Parameters for sampling tokens."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # only from the k likeliest; 0: from all
    top_p: float = 1.0  # only from the likeliest that reach this probability together


USUAL = Sampling(temperature=0.8, top_p=0.95)  # of sample.py, unless told otherwise


@torch.inference_mode()
def generate(model, texts, sampling):
    """Adds a token to every text that has not ended, round by round until all have. Yields after each round.

    model: a CachedGPT with a row for each Text. A text sees its window, at most its last n_tokens tokens. A full window
    moves forward, so that half of it is free. Raises BadInput if the logits are not finite.
    """
    size = model.n_tokens
    starts = [max(0, len(text.tokens) - size) for text in texts]  # of the windows
    logits = model.prefill([text.tokens[-size:] for text in texts], [*range(len(texts))])
    while True:
        for text, row in zip(texts, logits, strict=True):
            if not text.ended:
                text.add(int(draw(row[: text.n_vocab], sampling, text.generator)))
        yield
        going = [row for row, text in enumerate(texts) if not text.ended]
        lengths = [len(text.tokens) - start for text, start in zip(texts, starts, strict=True)]
        full = [row for row in going if lengths[row] > size]
        if not going:
            return
        if len(full) < len(going):
            logits = model.step([text.tokens[-1] for text in texts], [min(n, size) - 1 for n in lengths])
        for row in full:
            starts[row] = len(texts[row].tokens) - (size + 1) // 2
        if full:  # after the step: it wrote in every row
            logits[full] = model.prefill([texts[row].tokens[starts[row] :] for row in full], full)


def draw(logits, sampling, generator):
    """Samples one token id () from logits (V,): temperature, then top-k, then top-p (Holtzman et al. 2020)."""
    if sampling.temperature == 0:
        return logits.argmax()
    probabilities = torch.softmax((double(logits) - logits.max()) / sampling.temperature, dim=-1)
    total = 1.0
    if sampling.top_k:
        probabilities, tokens = probabilities.topk(min(sampling.top_k, len(probabilities)))
        total = probabilities.sum()
    else:  # all tokens less likely than this have less than 1 - top_p together; sorting the others is far cheaper
        tokens = (probabilities >= (1 - sampling.top_p) / len(probabilities)).nonzero()[:, 0]
        probabilities, order = probabilities[tokens].sort(descending=True)
        tokens = tokens[order]
    before = probabilities.cumsum(0) - probabilities  # total probability of more likely tokens
    probabilities[1:][before[1:] >= sampling.top_p * total] = 0
    return tokens[torch.multinomial(probabilities, 1, generator=generator)]
