"""Generation with a cache gives the tokens of running the whole window each time; sampling obeys its options."""

import copy
import math

import pytest
import torch
from conftest import needs_gpu
from gpts import END, N_VOCAB, TOKENIZER, random_gpt, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoladder.errors import BadInput
from nanoladder.infer import CachedGPT, Prompt, Sampling, Text, generate
from nanoladder.infer.generate import draw

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.3, top_p=0.9)


@torch.no_grad()
def uncached(gpt, prompt, n, sampling=GREEDY, seed=0):
    """Generates up to n tokens after the prompt. Each runs the whole window and computes all of its logits."""
    size, device = gpt.config.context_length, gpt.norm.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    window, found = prompt[-size:], []
    while len(found) < n:
        if len(window) > size:
            window = window[-((size + 1) // 2) :]
        logits = gpt.logits(torch.tensor([window], device=device))[0, -1, :N_VOCAB]
        token = int(logits.argmax()) if sampling.temperature == 0 else int(draw(logits, sampling, generator))
        if token == END:
            break
        window.append(token)
        found.append(token)
    return found


def cached(gpt, prompts, lengths, sampling=GREEDY, seeds=None, n_tokens=None, compile=False):
    """Generates up to lengths[i] tokens after each prompt, in one batch."""
    generators = [torch.Generator(gpt.norm.weight.device).manual_seed(seed) for seed in seeds or [0] * len(prompts)]
    starts = [Prompt(tuple(prompt)) for prompt in prompts]
    texts = [Text(TOKENIZER, *each) for each in zip(starts, generators, lengths, strict=True)]
    model = CachedGPT(gpt, len(texts), n_tokens or gpt.config.context_length, compile)
    for _ in generate(model, texts, sampling):
        pass
    return [text.tokens[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@given(data=st.data())
def test_each_text_of_a_batch_equals_that_generated_alone(data):
    """With prompts of any length, some equal, texts that end early, and windows that move at different times."""
    context_length = data.draw(st.integers(1, 9))
    keys = {
        "bias": data.draw(st.booleans()),
        "pad_vocab_to": data.draw(st.sampled_from([1, 64])),
        "attention": data.draw(st.sampled_from(["matmul", "sdpa"])),
        **dict.fromkeys(["key_offset", "smear"], data.draw(st.booleans())),
    }
    sampling = data.draw(st.sampled_from([GREEDY, SAMPLED, Sampling(0.9, top_k=5)]))
    token = st.integers(0, END - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=2 * context_length), min_size=1, max_size=4))
    prompts += data.draw(st.lists(st.sampled_from(prompts), max_size=2))
    lengths = [data.draw(st.integers(1, 3 * context_length)) for _ in prompts]
    seeds = [data.draw(st.integers(0, 3)) for _ in prompts]
    found = cached(random_gpt(context_length, **keys), prompts, lengths, sampling, seeds)
    gpt = random_gpt(context_length, **keys)
    cases = zip(prompts, lengths, seeds, strict=True)
    assert found == [uncached(gpt, prompt, n, sampling, seed) for prompt, n, seed in cases]


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])  # CUDA graphs, while windows move between their replays
def test_tokens_on_a_gpu(compile):
    prompts, gpt = [random_tokens(n, seed=n) for n in (3, 8, 1)], random_gpt(8, bias=True, pad_vocab_to=64).cuda()
    for batch in (prompts, prompts[:1]):
        expected = [uncached(gpt, prompt, 30, SAMPLED) for prompt in batch]
        assert cached(copy.deepcopy(gpt), batch, [30] * len(batch), SAMPLED, compile=compile) == expected


def test_an_end_of_text_token_ends_only_its_own_text():
    gpt = random_gpt(8)
    gpt.token_embedding.weight.data[END] *= 1.5
    prompts = [[token] for token in range(20)]
    expected = [uncached(gpt, prompt, 20) for prompt in prompts]
    sizes = set(map(len, expected))
    assert 20 in sizes and len(sizes) > 2
    assert cached(gpt, prompts, [20] * len(prompts)) == expected


def watched(gpt):
    """Lists that collect the shapes (B, T) of the model's input tokens, and the head's numbers of positions."""
    shapes, rows = [], []
    gpt.token_embedding.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    gpt.head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    return shapes, rows


def test_a_token_costs_one_position():
    gpt = random_gpt(20)
    shapes, rows = watched(gpt)
    cached(gpt, [random_tokens(9, seed=1), random_tokens(6, seed=2)], [5, 5], SAMPLED)
    assert shapes == [(2, 9)] + 4 * [(2, 1)] and rows == 5 * [2]


def test_only_texts_whose_window_moves_run_it_again():
    gpt = random_gpt(6)
    shapes, rows = watched(gpt)
    cached(gpt, [random_tokens(6), random_tokens(3)], [3, 3])
    assert shapes == [(2, 6), (2, 1), (1, 3), (2, 1)] and rows == [2, 2, 1, 2]
    del shapes[:]
    cached(gpt, [random_tokens(6), random_tokens(8)], [3, 3])  # both at once
    assert shapes == [(2, 6), (2, 3), (2, 1)]


def test_logits_that_are_not_finite_are_an_error():
    gpt = random_gpt(8, pad_vocab_to=64)
    gpt.norm.weight.data[3] = torch.nan
    with pytest.raises(BadInput, match="not finite in float32"):
        cached(gpt, [[1, 2]], [3])


# -- drawing


def candidates(logits, sampling):
    """{token: weight} of the tokens that can be drawn."""
    found = []

    def every(weights, n, generator):
        found.extend(weights[weights > 0].tolist())
        return weights.nonzero()[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", every)
        tokens = draw(logits, sampling, None).tolist()
    return dict(zip(tokens, found, strict=True))


numbers = st.floats(-40, 40, width=32) | st.sampled_from([-torch.inf, -1e30, 0.0, 1.0, 1e4])


@settings(max_examples=100)
@given(
    logits=st.lists(numbers, min_size=1, max_size=40).filter(lambda logits: max(logits) > -1e20),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 3.0]),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.001, 1) | st.just(1.0),
)
def test_the_nucleus_equals_that_of_a_full_sort(logits, temperature, top_k, top_p):
    """The candidates are the likeliest tokens, as many as reach top_p of the total of the top_k likeliest."""
    weights = candidates(torch.tensor(logits), Sampling(temperature, top_k, top_p))
    exact = [float(x) for x in torch.tensor(logits)]
    powers = [math.exp((x - max(exact)) / temperature) for x in exact]
    ranked = sorted((power / sum(powers) for power in powers), reverse=True)[: top_k or None]
    before = [sum(ranked[:place]) / sum(ranked) for place in range(len(ranked))]
    least, most = (
        sum(total < top_p + slack and p > 1e-300 for total, p in zip(before, ranked, strict=True))
        for slack in (-1e-9, 1e-9)
    )
    assert max(least, 1) <= len(weights) <= max(most, 1)
    assert sorted(weights.values(), reverse=True) == pytest.approx(ranked[: len(weights)], rel=1e-6)
    for token, weight in weights.items():
        assert weight == pytest.approx(powers[token] / sum(powers), rel=1e-6)


def test_a_long_tail_counts_in_the_total():
    """The candidates reach top_p of the total probability; half of the rest lies in a tail that is not sorted."""
    tail = [0.05 / 10000] * 10000
    weights = candidates(torch.tensor([0.0095] * 100 + tail).log(), Sampling(top_p=0.9))
    assert len(weights) == 95  # 0.9 / 0.0095


def test_top_k_takes_k_of_equally_likely_tokens():
    assert set(candidates(torch.tensor([1.0, 0, 1, 0, 1]), Sampling(top_k=3))) == {0, 2, 4}
