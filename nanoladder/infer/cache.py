"""The KV cache: attention keeps the keys and values of a text, so that a new token costs one position, not all.

The rows of the cache are texts of different lengths. Each begins at position 0 of its row, so none is padded on the
left; entries right of a text's last token are masked, and overwritten as the text grows.
"""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from model import GPT
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.infer.linear import multiply_single_rows, store_by_columns
from nanoladder.private import keep_address

FEW = 3  # up to this many rows, MKL is faster with column-major weights


class CachedGPT:
    """A GPT with a cache for n_rows texts of up to n_tokens tokens each; for inference only.

    Replaces the model's attention, positions and previous vectors from outside. compile: compile the one-token step.
    """

    def __init__(self, gpt: GPT, n_rows: int, n_tokens: int, compile: bool = False) -> None:
        self.gpt, self.n_rows, self.n_tokens = gpt.eval(), n_rows, n_tokens
        config, like = gpt.config, gpt.norm.weight
        self.device = like.device
        shape = (n_rows, config.n_head, n_tokens, config.n_embd // config.n_head)
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in gpt.blocks]  # keys, values
        self.kept = []  # vectors of each text's last token
        self.rows = self.positions = self.visible = self.ends = None  # of the current call
        if config.smear:
            self.keep(gpt.previous, like.new_zeros(n_rows, 1, config.n_embd))
        if config.position == "learned":
            positions = gpt.position_embedding.weight
            gpt.position_embedding.forward = lambda _: F.embedding(self.positions, positions)  # pyright: ignore
        for block, layer in zip(gpt.blocks, self.layers, strict=True):
            block.attention.attend = partial(self.attend, *layer)  # pyright: ignore
            block.attention.future = None  # pyright: ignore  the mask of attention=matmul is not needed
            if config.position == "rotary":
                block.attention.rotary.forward = partial(self.rotate, block.attention.rotary)
            if config.key_offset:
                self.keep(block.attention.previous, like.new_zeros(shape)[:, :, :1])
        if compile:
            self.compile()
        elif self.device.type == "cpu" and like.dtype == torch.float32 and n_rows <= FEW:
            store_by_columns(gpt)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compiles the step, on a GPU into CUDA graphs, and runs it often enough for them to be captured."""
        machine.keep_cache_sound()
        multiply_single_rows(self.gpt)
        for tensor in [*itertools.chain(*self.layers), *self.kept]:
            keep_address(tensor)
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        self.next_logits = torch.compile(self.next_logits, mode=mode, dynamic=False, fullgraph=True)
        for _ in range(3):
            self.step([0] * self.n_rows, [0] * self.n_rows)

    def attend(self, keys, values, q, k, v):
        """Caches k and v. Attends to them alone if they begin the text, else to all visible entries of the cache.

        keys, values: the layer's cache (n_rows, nh, n_tokens, hs). q, k, v: (B, nh, T, hs) -> the same.
        """
        keys[self.rows, :, self.positions] = k.transpose(1, 2)
        values[self.rows, :, self.positions] = v.transpose(1, 2)
        if self.visible is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Not SDPA: on a CPU its bfloat16 kernel takes five times as long for a single query.
        scores = q / math.sqrt(q.shape[-1]) @ keys.transpose(-2, -1)  # (n_rows, nh, 1, n_tokens)
        return scores.masked_fill(~self.visible, -math.inf).softmax(dim=-1) @ values

    def rotate(self, rotary, x):
        """Rotary's forward, at the positions of the current call: (B, nh, T, hs) -> the same."""
        cos, sin = (part[self.positions][:, None] for part in (rotary.cos, rotary.sin))  # (B, 1, T, hs / 2)
        return rotary.rotate(x, cos, sin)

    def keep(self, previous, last):
        """Makes a Previous return the previous step's vectors, as a step has one position. last: (n_rows, ..., C)."""
        self.kept.append(last)
        previous.forward = partial(self.previous, previous.forward, last)

    def previous(self, forward, last, x):
        """Previous's forward, (B, ..., T, C) -> the same, which keeps the vectors of each text's last token."""
        if self.visible is None:  # the text begins
            ends = self.ends.view(-1, *[1] * (x.dim() - 1)).expand_as(x[..., :1, :])
            last[self.rows[:, 0]] = x.gather(-2, ends)
            return forward(x)
        before = last.clone()
        last.copy_(x)
        return before

    def prefill(self, windows, rows):
        """Runs windows, lists of 1 to n_tokens token ids, as new texts in these rows, one for each window.

        Returns the logits of each window's next token, (len(rows), V). Raises BadInput if they are not finite.
        """
        hidden = self.run_windows(windows, rows)
        return self.finite_logits(hidden[torch.arange(len(rows)), self.ends])

    def last_logits(self, window, n):
        """Runs a window in row 0. Returns the logits after each of its last n tokens, (n, V); else as prefill."""
        return self.finite_logits(self.run_windows([window], [0])[0, -n:])

    def run_windows(self, windows, rows):
        """Runs windows as new texts in these rows. Returns hidden vectors (B, T, C); shorter ones end in padding."""
        tokens = pad_sequence([torch.tensor(window) for window in windows], batch_first=True)  # (B, T)
        self.rows = torch.tensor(rows, device=self.device)[:, None]
        self.positions = torch.arange(tokens.shape[1], device=self.device)[None]
        self.visible = None
        self.ends = torch.tensor([len(window) - 1 for window in windows], device=self.device)
        return self.gpt.hidden(tokens.to(self.device))

    def finite_logits(self, hidden):
        """Hidden vectors (n, C) -> logits (n, V). Raises BadInput if they are not finite."""
        logits = self.gpt.head(hidden)
        if not logits[:, : self.gpt.config.vocab_size].isfinite().all():
            dtype = str(logits.dtype).removeprefix("torch.")
            raise BadInput(f"the logits are not finite in {dtype}; expected --dtype=float32, or other weights")
        return logits

    def step(self, tokens, positions):
        """Runs one more token in every row; ids and positions are lists of n_rows. Returns logits (n_rows, V)."""
        return self.next_logits(*torch.tensor([tokens, positions], device=self.device).unsqueeze(-1))

    def next_logits(self, tokens, positions):
        """Token ids and their positions (n_rows, 1) -> logits (n_rows, V)."""
        self.rows, self.positions = torch.arange(self.n_rows, device=self.device)[:, None], positions
        self.visible = torch.arange(self.n_tokens, device=self.device) <= positions[:, None, :, None]  # (B, 1, 1, S)
        return self.gpt.head(self.gpt.hidden(tokens)[:, -1])
