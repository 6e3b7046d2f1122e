"""The methods of generation write the same tokens."""

from collections import Counter

import pytest
import torch
from transformers import GPT2LMHeadModel

from lab import sampling, sampling_methods
from lab.sampling_methods import Cached, Recompute
from model import GPT
from nanoladder import checkpoint

SIZES = dict(zip(sampling.SIZES, sampling.MODELS["tiny"], strict=True))
N_ROWS, N_PROMPT, N_NEW = 3, 9, 12


@pytest.fixture
def gpt():
    return GPT(sampling_methods.gpt_config(SIZES)).eval()


def writer_of(name, gpt, folder):
    """A method's writer of a GPT, for texts of N_PROMPT + N_NEW tokens."""
    kind, keywords = sampling_methods.METHODS[name]
    writer, n_tokens = kind.__new__(kind), N_PROMPT + N_NEW
    if kind is Recompute:
        writer.gpt = gpt
    elif kind is Cached:
        writer.take(gpt, N_ROWS, n_tokens, **keywords)
    else:
        checkpoint.huggingface.write(folder, {"config": vars(gpt.config), "model": gpt.state_dict()})
        writer.take(GPT2LMHeadModel.from_pretrained(folder), n_tokens, **keywords)
    return writer


def written(writer, **options):
    """The tokens that a writer puts after the same prompts, round by round."""
    prompts, rounds = torch.randint(300, (N_ROWS, N_PROMPT), generator=torch.Generator().manual_seed(1)), []
    writer.write(prompts, N_NEW, rounds.append, **options)
    return rounds


@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        "cached",
        pytest.param("cached, compiled", marks=pytest.mark.nightly),
        pytest.param("transformers, compiled", marks=pytest.mark.nightly),
    ],
)
def test_every_method_writes_the_same_tokens(name, gpt, tmp_path):
    expected = written(writer_of("recompute", gpt, tmp_path))
    assert [len(tokens) for tokens in expected] == N_NEW * [N_ROWS]
    assert written(writer_of(name, gpt, tmp_path)) == expected


@pytest.mark.parametrize("name", ["transformers", "cached"])
def test_rounds_after_keys_and_values_that_nothing_computed_run_no_prompt(name, gpt, tmp_path):
    writer, lengths = writer_of(name, gpt, tmp_path), Counter()
    embedding = gpt.token_embedding if name == "cached" else writer.model.transformer.wte
    embedding.register_forward_pre_hook(lambda _, inputs: lengths.update([inputs[0].shape[1]]))
    assert len(written(writer, cached=True)) == N_NEW
    assert lengths.keys() == {1} and lengths[1] >= N_NEW - 1


def test_random_weights_are_those_of_the_model_with_tied_ones_once():
    ours = sampling_methods.build_gpt(SIZES, torch.bfloat16, torch.device("cpu"))
    assert ours.head.weight is ours.token_embedding.weight
    for (name, weight), expected in zip(ours.named_parameters(), GPT(ours.config).parameters(), strict=True):
        assert weight.shape == expected.shape and weight.dtype == torch.bfloat16, name
        assert 0.01 < weight.float().std() < 0.03, name
    assert sampling_methods.weight_bytes(SIZES, "bfloat16") == sum(weight.nbytes for weight in ours.parameters())
    assert sampling_methods.bytes_of(ours, ours.position_embedding) == 2 * (ours.n_params - 64 * 32)
