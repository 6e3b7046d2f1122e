"""The GPT: embeddings, attention, MLP, loss. Pure maths on tensors.

The architecture is GPT-2's (Radford et al. 2019): learned positions, normalization before each sublayer,
tanh-form GELU, the output head tied to the token embedding.

Shapes: B sequences, T tokens each, C channels (n_embd), nh heads of hs channels, V vocabulary.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

IGNORE = -100  # the target of a padded position, which has neither loss nor gradient


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

    def forward(self, x):
        B, T, C = x.shape
        heads = (B, T, self.config.n_head, C // self.config.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(C, dim=-1))  # (B, nh, T, hs)
        if self.config.attention == "matmul":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, nh, T, T)
            scores = scores.masked_fill(self.future[:T, :T], -math.inf)
            y = self.dropout(scores.softmax(dim=-1)) @ v  # (B, nh, T, hs)
        else:
            dropout = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.proj(y))


class MLP(nn.Module):
    """Two layers with a GELU in between, four times as wide inside, (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.fc(x)
        if self.config.compile:  # 1 + tanh(u) = 2·sigmoid(2u); compiled for a CPU, sigmoid is faster than tanh
            x = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        else:
            x = F.gelu(x, approximate="tanh")
        return self.dropout(self.proj(x))


class Block(nn.Module):
    """A transformer block: each sublayer reads the normalized stream and adds to it."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def run_blocks(blocks, x):
    for block in blocks:
        x = block(x)
    return x


# Selective checkpointing keeps the outputs of matrix products and of attention kernels.
aten = torch.ops.aten
KEPT = [aten.mm.default, aten.addmm.default, aten.bmm.default] + [
    getattr(aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, KEPT)


class ChunkedLoss(torch.autograd.Function):
    """Head and summed cross-entropy, one chunk of the N tokens at a time, with the gradients computed on the way.

    hidden (N, C), weight (V, C), bias (V,) without gradient or None, targets (N,) -> loss (), in float32.
    No tensor is larger than the logits of a chunk (N / chunks, V), the head's weight or the hidden states.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, chunks):
        loss_sum = torch.zeros((), device=hidden.device)
        wanted = ctx.needs_input_grad[0]  # not in evaluation
        d_hidden, d_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if wanted else (hidden, None)
        pieces = hidden.chunk(chunks), targets.chunk(chunks), d_hidden.chunk(chunks)
        for h, target, d_h in zip(*pieces, strict=True):
            output = F.linear(h, weight, bias)  # (n, V)
            logits = output.float()
            log_sum = logits.logsumexp(dim=-1, keepdim=True)  # (n, 1)
            valid, target = (target != IGNORE)[:, None], target.clamp(min=0)[:, None]  # (n, 1)
            # Not in place: compiled by torch 2.11, all gradients would be 0 (pytorch issue 180642).
            loss_sum = loss_sum + ((log_sum - logits.gather(1, target)) * valid).sum()
            if wanted:  # the gradient of a logit: its probability, less 1 for the target's
                logits.sub_(log_sum).exp_().scatter_add_(1, target, -torch.ones_like(log_sum)).mul_(valid)
                d_logits = logits.to(output.dtype)
                d_h.copy_(d_logits @ weight)
                d_weight += d_logits.T @ h
                del d_logits
            del output, logits  # before the next chunk's are made
        ctx.save_for_backward(d_hidden, d_weight)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None, None


class GPT(nn.Module):
    """A decoder-only transformer. `config` gives the shape: n_layer, n_head, n_embd, context_length, vocab_size."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.context_length, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight  # tied (Press & Wolf 2017)
        self.n_params = sum(parameter.numel() for parameter in self.parameters())  # the tied head counts once
        self.init_weights()
        if config.pad_vocab_to > 1:
            self.pad_vocabulary(-config.vocab_size % config.pad_vocab_to)
        if config.checkpointing.startswith("every:"):
            self.every = int(config.checkpointing.removeprefix("every:"))

    def init_weights(self):
        """GPT-2's: normal(0, 0.02); projections onto the residual stream are smaller by √(number of additions)."""
        generator = torch.Generator().manual_seed(self.config.seed)  # its own: independent of what was drawn before
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=residual_std, generator=generator)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def pad_vocabulary(self, n_rows):
        """Adds rows of zeros to the tied embedding and head; their logits are -∞, so they never get probability."""
        weight = nn.Parameter(F.pad(self.head.weight.detach(), (0, 0, 0, n_rows)))
        self.head.weight = self.token_embedding.weight = weight
        if n_rows:
            del self.head.bias
            bias = torch.zeros(len(weight)).index_fill(0, torch.arange(self.config.vocab_size, len(weight)), -math.inf)
            self.head.register_buffer("bias", bias, persistent=False)  # no gradient, not in checkpoints

    def hidden(self, tokens):
        """Token ids (B, T) -> the normalized last hidden states (B, T, C)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        if self.config.checkpointing == "none":
            for block in self.blocks:
                x = block(x)
        elif self.config.checkpointing == "sqrt":  # √n segments of √n blocks (Chen et al. 2016)
            size = round(math.sqrt(len(self.blocks)))
            for i in range(0, len(self.blocks), size):
                x = recompute(run_blocks, self.blocks[i : i + size], x, use_reentrant=False)
        elif self.config.checkpointing == "selective":
            for block in self.blocks:
                x = recompute(block, x, use_reentrant=False, context_fn=KEEP_PRODUCTS)
        else:
            for i, block in enumerate(self.blocks):
                x = block(x) if i % self.every else recompute(block, x, use_reentrant=False)
        return self.norm(x)

    def logits(self, tokens):
        """Token ids (B, T) -> scores of every next token (B, T, V)."""
        return self.head(self.hidden(tokens))

    def forward(self, tokens, targets):
        """Token ids and targets (B, T) -> summed loss in nats; a target of IGNORE does not count.

        A sum, not a mean, so that a loss over several batches is divided once, by the tokens of all.
        """
        hidden, flat = self.hidden(tokens).flatten(0, 1), targets.flatten()  # (BT, C), (BT,)
        if self.config.loss_chunks:
            return ChunkedLoss.apply(hidden, self.head.weight, self.head.bias, flat, self.config.loss_chunks)
        logits = self.head(hidden).float()  # (BT, V)
        return F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")
