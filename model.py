"""GPT-2 (Radford et al. 2019): embeddings, attention, MLP, loss. Pure tensor code.

Position embeddings are learned, blocks are pre-norm, GELU is the tanh approximation, and the output head is tied to
the token embedding; the rungs of config/recipe/ change this.

Shapes: B sequences, T tokens each, C channels (n_embd), nh heads of hs channels, V vocabulary.
"""

import math
from collections.abc import Iterable
from functools import partial
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from operators import attend_in_blocks, count_chunks, head_loss, sampled_loss, uses_blocks
from operators.private import attention_kernels, scaled_mm

IGNORE = -100  # target of a padded position; contributes no loss and no gradient


class Rotary(nn.Module):
    """Rotates pairs of channels by angles that grow with the position (Su et al. 2021), (B, nh, T, hs) -> the same.

    A query's product with a key then depends on the distance between them alone.
    """

    def __init__(self, config):
        super().__init__()
        hs = config.n_embd // config.n_head
        angles = torch.outer(torch.arange(config.context_length), 10_000.0 ** (-torch.arange(0, hs, 2) / hs))
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, hs / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[2]
        return self.rotate(x, self.cos[:T], self.sin[:T])

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=3)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=3).type_as(x)


class Previous(nn.Module):
    """The vectors of the position before, (..., T, C) -> the same; zeros before the first position."""

    def forward(self, x):
        return F.pad(x, (0, 0, 1, -1))


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017), (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        if config.attention == "matmul":
            T = config.context_length
            self.register_buffer("future", torch.ones(T, T, dtype=torch.bool).triu(1), persistent=False)
        if config.position == "rotary":
            self.rotary = Rotary(config)
        if config.key_offset:
            self.previous = Previous()

    def forward(self, x, value_term=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=2)  # (B, T, C)
        if self.config.value_embedding:
            v = (v + value_term).type_as(q)
        q, k, v = (part.view(B, T, -1, C // self.config.n_head).transpose(1, 2) for part in (q, k, v))  # (B, nh, T, hs)
        if self.config.qk_norm:  # the factor scales the scores by 1.44; CUDA's autocast normalizes in float32
            q, k = ((1.2 * F.rms_norm(part, part.shape[-1:])).type_as(v) for part in (q, k))
        if self.config.position == "rotary":
            q, k = self.rotary(q), self.rotary(k)
        if self.config.key_offset:  # a query that matches a token gets the value of the token after it
            k = self.previous(k)
        y = self.attend(q, k, v)  # (B, nh, T, hs)
        if self.config.exclusive_attention:  # a position's own value is in its residual stream already
            own = F.normalize(v.float(), dim=3)
            y = (y - (y * own).sum(dim=3, keepdim=True) * own).type_as(v)
        return self.dropout(self.proj(y.transpose(1, 2).flatten(2)))

    def attend(self, q, k, v):
        if self.config.attention == "matmul":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, nh, T, T)
            scores = scores.masked_fill(self.future[: q.shape[2], : q.shape[2]], -math.inf)
            return self.dropout(scores.softmax(dim=-1)) @ v
        if self.config.attention != "sdpa":
            T = self.config.context_length
            if uses_blocks(self.config.attention, self.config.dropout, T, q.device, q.dtype):
                return attend_in_blocks(q, k, v)
        dropout = self.config.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """Linear layer to 4C, activation, linear layer back to C, (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.fc(x).relu().square() if self.config.activation == "relu2" else F.gelu(self.fc(x), approximate="tanh")
        return self.dropout(self.proj(x))


class Block(nn.Module):
    """Pre-norm transformer block: each sublayer adds to the residual stream, (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        if config.x0_skip:
            self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, embedded=None, own_value=None):
        if self.config.x0_skip:
            x = self.lambdas[0] * x + self.lambdas[1] * embedded
        x = x + self.attention(self.attention_norm(x), value_term=own_value)
        return x + self.mlp(self.mlp_norm(x))


def run_blocks(blocks, x):
    for block in blocks:
        x = block(x)
    return x


# Selective checkpointing keeps the outputs of matrix products and attention kernels, and recomputes the rest.
aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default, scaled_mm]
KEPT = [*PRODUCTS, torch.ops.nanoladder.attend.default, *attention_kernels]
KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, KEPT)


class GPT(nn.Module):
    """Decoder-only transformer of the config's n_layer, n_head, n_embd, context_length and vocab_size."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.n_embd)
        if config.value_embedding:
            self.value_blocks = range(config.n_layer)[::-2]  # the last block, and every second one before it
            tables = [nn.Embedding(config.vocab_size, config.n_embd) for _ in self.value_blocks]
            self.value_embeddings = nn.ModuleList(tables)
            self.value_lambdas = nn.Parameter(torch.full([len(tables)], 0.5))
        if config.smear:
            self.smear = nn.Parameter(torch.full([config.n_embd], 0.2))
            self.previous = Previous()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight  # tied (Press & Wolf 2017)
        self.n_params = sum(parameter.numel() for parameter in self.parameters())  # the tied weight counts once
        self.init_weights(self.named_parameters())
        if config.pad_vocab_to > 1:
            self.pad_vocabulary(-config.vocab_size % config.pad_vocab_to)

    def init_weights(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Initializes as GPT-2: normal(0, 0.02), divided by √(2 · n_layer) for projections into the residual stream.

        With zero_init these projections are zeros, and so is an untied head: all tokens are then equally likely.
        """
        for name, parameter in named:
            generator = torch.Generator().manual_seed(crc32(f"{self.config.seed} {name}".encode()))  # one per name
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer), generator=generator)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            if self.config.zero_init and name.endswith(("proj.weight", "head.weight")):
                nn.init.zeros_(parameter)

    def pad_vocabulary(self, n_rows: int) -> None:
        """Appends n_rows zero rows to the head's weight; their logits are -∞, so their probability is 0."""
        self.head.weight = weight = nn.Parameter(F.pad(self.head.weight.detach(), (0, 0, 0, n_rows)))
        if self.config.tie_embeddings:
            self.token_embedding.weight = weight
        if n_rows:
            del self.head.bias
            bias = torch.zeros(len(weight)).index_fill(0, torch.arange(self.config.vocab_size, len(weight)), -math.inf)
            self.head.register_buffer("bias", bias, persistent=False)  # a constant, not saved

    def hidden(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) -> normalized final hidden states (B, T, C)."""
        x = self.token_embedding(tokens)
        if self.config.embedding_norm:
            x = F.rms_norm(x, x.shape[-1:])
        if self.config.smear:
            x = x + self.smear * self.previous(x)
        if self.config.position == "learned":
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        if self.config.half_residual and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        blocks = self.blocks
        if self.config.x0_skip:
            blocks = [partial(block, embedded=x) for block in blocks]
        if self.config.value_embedding:
            values = self.embed_values(tokens)
            blocks = [partial(block, own_value=value) for block, value in zip(blocks, values, strict=True)]
        if self.config.activation_checkpointing == "none":
            for block in blocks:
                x = block(x)
        elif self.config.activation_checkpointing == "sqrt":  # √n segments of √n blocks (Chen et al. 2016)
            size = round(math.sqrt(len(blocks)))
            for i in range(0, len(blocks), size):
                x = recompute(run_blocks, blocks[i : i + size], x, use_reentrant=False)
        elif self.config.activation_checkpointing == "selective":
            for block in blocks:
                x = recompute(block, x, use_reentrant=False, context_fn=KEEP_PRODUCTS)
        elif self.config.activation_checkpointing == "every:1":
            for block in blocks:
                x = recompute(block, x, use_reentrant=False)
        else:
            every = int(self.config.activation_checkpointing.removeprefix("every:"))
            for i, block in enumerate(blocks):
                x = block(x) if i % every else recompute(block, x, use_reentrant=False)
        return self.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) -> logits of the next token at every position (B, T, V)."""
        return self.head(self.hidden(tokens))

    def embed_values(self, tokens):
        """A term of each block's values (Zhou et al. 2024): (B, T, C) in value_blocks, 0 in the others."""
        values = [0.0] * len(self.blocks)
        for i, block in enumerate(self.value_blocks):
            values[block] = self.value_lambdas[i] * self.value_embeddings[i](tokens)
        return values

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Token ids and targets (B, T) -> summed loss () in nats; targets of IGNORE do not count.

        A sum, not a mean: the caller divides once, by the token count of all batches.
        """
        hidden, flat = self.hidden(tokens).flatten(0, 1), targets.flatten()  # (BT, C), (BT,)
        weight = self.head.weight  # (V, C)
        if self.config.sampled_softmax and self.training:
            return sampled_loss(hidden, weight, flat, self.config.vocab_size, self.config.sampled_softmax, IGNORE)
        if self.config.loss_chunks and (n := count_chunks(self.config.loss_chunks, len(flat), *weight.shape)):
            return head_loss(hidden, weight, flat, self.config.vocab_size, n, IGNORE, float8=self.config.float8)
        logits = self.head(hidden).float()  # (BT, V)
        return F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")
