"""Methods of generation: sample.py's, nanoGPT's and transformers'.

Each is built from the model's sizes, a batch, the tokens of a text, a dtype and a device, and writes tokens.
"""

import contextlib
from unittest.mock import patch

import tiktoken
import torch
from torch import nn

from model import GPT
from nanoladder import infer
from nanoladder.checkpoint import config_of
from nanoladder.infer.speed import bytes_per_round

NOISE = 2**20  # different weights


class Cached:
    """sample.py's: nanoladder.infer."""

    def __init__(self, sizes, batch, n_tokens, dtype, device, compile=False, quantize=False):
        gpt = build_gpt(sizes, dtype, device)
        if quantize:
            infer.quantize(gpt)
        self.take(gpt, batch, n_tokens, compile)

    def take(self, gpt, batch, n_tokens, compile=False):
        self.model = infer.CachedGPT(gpt, batch, n_tokens, compile)
        self.tokenizer = numbers(gpt.config.vocab_size)

    def bytes_read(self, length):
        return bytes_per_round(self.model)

    def write(self, prompts, n_new, put, cached=False):
        """Calls put(tokens) after each of n_new rounds. prompts: ids (B, T). cached: all but the last count as run."""
        texts = [infer.Text(self.tokenizer, prompt, None, n_new) for prompt in prompts.tolist()]
        skipped = patch.object(self.model, "prefill", lambda windows, rows: prompts.new_zeros(len(rows), 1))
        with skipped if cached else contextlib.nullcontext():
            for _ in infer.generate(self.model, texts, infer.Sampling(temperature=0)):
                put([text.tokens[-1] for text in texts])


class Recompute:
    """nanoGPT's: the whole window for each token. So did sample.py before it had a cache."""

    def __init__(self, sizes, batch, n_tokens, dtype, device):
        self.gpt = build_gpt(sizes, dtype, device)

    def bytes_read(self, length):
        return bytes_of(self.gpt, self.gpt.position_embedding)

    @torch.inference_mode()
    def write(self, prompts, n_new, put, cached=False):
        for _ in range(n_new):
            logits = self.gpt.head(self.gpt.hidden(prompts[:, -self.gpt.config.context_length :])[:, -1])
            prompts = torch.cat([prompts, logits.argmax(-1, keepdim=True)], dim=1)
            put(prompts[:, -1].tolist())


class Transformers:
    """Hugging Face's generate with its cache; compiled, with a static one, which generate compiles on GPUs unasked."""

    def __init__(self, sizes, batch, n_tokens, dtype, device, compile=False):
        from transformers import GPT2Config, GPT2LMHeadModel

        theirs = {"n_positions": sizes["context_length"], "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(**{key: value for key, value in sizes.items() if key != "context_length"}, **theirs)
        self.take(with_random_weights(lambda: GPT2LMHeadModel(config), dtype, device), n_tokens, compile)

    def take(self, model, n_tokens, compile=False):
        from transformers import CompileConfig, DynamicCache, StaticCache

        self.model, self.options = model.eval(), {"disable_compile": not compile}
        self.new_cache = lambda: DynamicCache(config=model.config)
        if compile:
            self.new_cache = lambda: StaticCache(config=model.config, max_cache_len=n_tokens)
            self.options = {"compile_config": CompileConfig()}
            self.options["compile_config"]._compile_all_devices = True  # a CPU too

    def bytes_read(self, length):
        size = self.model.config
        cache = 2 * size.n_layer * size.n_embd * self.batch * length * self.model.dtype.itemsize
        return bytes_of(self.model, self.model.transformer.wpe) + cache

    def write(self, prompts, n_new, put, cached=False):
        self.batch, size, cache = len(prompts), self.model.config, self.new_cache()
        if cached:
            shape = (len(prompts), size.n_head, prompts.shape[1] - 1, size.n_embd // size.n_head)
            keys = 0.02 * torch.randn(shape, device=prompts.device).to(self.model.dtype)
            for layer in range(size.n_layer):
                cache.update(keys, keys, layer)
        self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=n_new,
            do_sample=False,
            past_key_values=cache,
            streamer=Streamer(put),
            **self.options,
        )


class Streamer:
    """Passes the tokens that generate streams on, but not the prompts, which come first."""

    def __init__(self, put):
        self.pass_on, self.begun = put, False

    def put(self, tokens):
        if self.begun:
            self.pass_on(tokens.tolist())
        self.begun = True

    def end(self):
        pass


METHODS = {
    "recompute": (Recompute, {}),
    "transformers": (Transformers, {}),
    "cached": (Cached, {}),
    "cached, compiled": (Cached, {"compile": True}),
    "int8, compiled": (Cached, {"compile": True, "quantize": True}),
    "transformers, compiled": (Transformers, {"compile": True}),
}


# -- models


def gpt_config(sizes):
    return config_of({"config": {**sizes, "bias": True, "pad_vocab_to": 1}})


def build_gpt(sizes, dtype, device):
    return with_random_weights(lambda: GPT(gpt_config(sizes)), dtype, device).eval()


def with_random_weights(build, dtype, device):
    """The module that build() returns, for inference, its weights NOISE random numbers over and over.

    They cost the time of a copy. Initializing a GPT-2 XL would take a minute.
    """
    with torch.device("meta"):
        model = build()
    noise, made = (0.02 * torch.randn(NOISE)).to(device, dtype), {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:  # a tied one once
                n = parameter.numel()
                weight = noise.repeat(-(-n // NOISE))[:n].view(parameter.shape)
                made[parameter] = nn.Parameter(weight, requires_grad=False)
            setattr(module, name, made[parameter])
    return model


def bytes_of(model, positions):
    """Bytes of a model's weights without those of its position embedding, of which a token reads a row."""
    return sum(parameter.nbytes for parameter in model.parameters()) - positions.weight.nbytes


def weight_bytes(sizes, dtype):
    with torch.device("meta"):
        return GPT(gpt_config(sizes)).n_params * getattr(torch, dtype).itemsize


def numbers(n_vocab):
    """A tokenizer of so many tokens that no text ends."""
    tokens = {bytes([number]) if number < 256 else number.to_bytes(3, "big"): number for number in range(n_vocab)}
    return tiktoken.Encoding("numbers", pat_str=r"[\s\S]", mergeable_ranks=tokens, special_tokens={})
