"""Generation: whole windows first, then one token at a time, sampled with temperature, top-k and top-p."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from nanoladder.infer.cache import CachedGPT
from nanoladder.infer.healing import crossing_logits
from nanoladder.infer.text import Text
from nanoladder.machine import double


class Sampling(NamedTuple):
    """Parameters for sampling tokens."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # only from the k likeliest; 0: from all
    top_p: float = 1.0  # only from the likeliest that reach this probability together


USUAL = Sampling(temperature=0.8, top_p=0.95)  # sample.py's defaults


@torch.inference_mode()
def generate(model: CachedGPT, texts: list[Text], sampling: Sampling) -> Iterator[None]:
    """Adds a token to every text that has not ended, round by round until all have. Yields after each round.

    model: a CachedGPT with a row for each Text. A text sees its window, at most its last n_tokens tokens. A full window
    moves forward, so that half of it is free. A first token that crosses the end of its prompt (healing.py) replaces
    tokens, so that the window runs again. Raises BadInput if the logits are not finite.
    """
    size = model.n_tokens
    starts = [max(0, text.prompt.longest - size) for text in texts]  # of the windows
    crossing = cache(crossing_logits)  # once for all samples of a prompt
    healed = {text: crossing(model, text.prompt, text.n_vocab) for text in texts if text.prompt.splits}
    windows = [text.tokens[start:] for text, start in zip(texts, starts, strict=True)]
    logits = model.prefill(windows, [*range(len(texts))])
    while True:
        crossed = []
        for row, text in enumerate(texts):
            if not text.ended:
                choices = logits[row, : text.n_vocab]
                if text in healed:
                    choices = torch.cat([double(choices), double(choices).logsumexp(dim=-1) + healed.pop(text)])
                choice = int(draw(choices, sampling, text.generator))
                if text.add(choice):
                    crossed.append(row)
        yield
        active = [row for row, text in enumerate(texts) if not text.ended]
        lengths = [len(text.tokens) - start for text, start in zip(texts, starts, strict=True)]
        full = [row for row in active if lengths[row] > size]
        rerun = [row for row in active if row in full or row in crossed]
        if not active:
            return
        if len(rerun) < len(active):
            logits = model.step([text.tokens[-1] for text in texts], [min(n, size) - 1 for n in lengths])
        for row in full:
            starts[row] = len(texts[row].tokens) - (size + 1) // 2
        if rerun:  # after the step: it wrote in every row
            logits[rerun] = model.prefill([texts[row].tokens[starts[row] :] for row in rerun], rerun)


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
