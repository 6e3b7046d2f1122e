"""A GPT as a model of transformers, which export.py folds together with model.py; not imported here."""

from functools import partial

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from model import GPT, Rotary


class NanoladderConfig(PretrainedConfig):
    """The model's sizes, as in config.json; everything else is in the code."""

    model_type = "nanoladder"
    attribute_map = {  # transformers' name: ours
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "context_length",
    }
    keys_to_ignore_at_inference = ["past_key_values"]


class NanoladderForCausalLM(PreTrainedModel, GenerationMixin):
    """The GPT with a cache of transformers, which keeps keys and values of all tokens, in order.

    It takes over the GPT's attention, positions and previous vectors from outside. The cache keeps keys as they are
    before an offset, and embeddings as the keys of one more layer: the vectors before a token are then those of the
    token before, however a cache is reordered or cropped.
    """

    config_class = NanoladderConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _tied_weights_keys = {"model.head.weight": "model.token_embedding.weight"}  # if config.tie_word_embeddings

    def __init__(self, config):
        super().__init__(config)
        self.model = GPT(config)
        self.cache = self.positions = self.is_text = self.visible = None  # of the call that runs
        config.num_hidden_layers = config.n_layer  # of the cache
        if config.smear:
            config.num_hidden_layers += 1
            self.model.previous.forward = self.previous
        if config.position == "learned":
            self.model.position_embedding.forward = self.embed_positions
        for layer, block in enumerate(self.model.blocks):
            block.attention.attend = partial(self.attend, layer)
            if config.position == "rotary":
                block.attention.rotary.forward = partial(self.rotate, block.attention.rotary)
            if config.key_offset:
                block.attention.previous = torch.nn.Identity()  # attend() moves the keys on
        self.post_init()

    def _init_weights(self, module):
        """Fills in angles, which no file holds. The GPT has initialized the weights."""
        if self.config.position == "rotary" and isinstance(module, Rotary):
            fresh = Rotary(self.config)
            module.cos, module.sin = fresh.cos.to(module.cos.device), fresh.sin.to(module.sin.device)

    def get_input_embeddings(self):
        return self.model.token_embedding

    def get_output_embeddings(self):
        return self.model.head

    @can_return_tuple
    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **options,
    ):
        """Token ids (B, T) after those in the cache -> logits (B, T, V), the cache and, with labels, the mean loss.

        attention_mask: (B, S), of the tokens in the cache too; 0 at padding, which may be on the left. labels: (B, T),
        moved by one here; -100 does not count. logits_to_keep: number of last positions; 0: all. Options: the loss's.
        Raises ValueError for another kind of cache or shape of the mask, or S above context_length.
        """
        if not isinstance(past_key_values, DynamicCache | None):
            raise ValueError(f"a {type(past_key_values).__name__} as past_key_values; expected a DynamicCache")
        (B, T), start = input_ids.shape, past_key_values.get_seq_length() if past_key_values is not None else 0
        if (S := start + T) > self.config.context_length:
            raise ValueError(f"{S} tokens; expected at most context_length={self.config.context_length}")
        mask = input_ids.new_ones(B, S) if attention_mask is None else attention_mask
        if mask.shape != (B, S):
            raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}; expected {(B, S)}")
        if past_key_values is None and (not self.training if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        self.cache, self.is_text = past_key_values, mask[:, None, start:, None].bool()  # (B, 1, T, 1)
        self.positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:] if position_ids is None else position_ids
        pairs = torch.ones(T, S, dtype=torch.bool, device=mask.device)
        # (B, 1, T, S); padding sees itself, as a softmax over nothing is not a number
        self.visible = pairs.tril(start) & (mask[:, None, None].bool() | pairs.triu(start))
        hidden = self.model.hidden(input_ids)[:, -logits_to_keep:]
        self.cache = self.positions = self.is_text = self.visible = None
        logits = self.model.head(hidden)
        loss = labels if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss, logits, past_key_values)

    def attend(self, layer, q, k, v):
        """Attends to all that is visible, (B, nh, T, hs) -> the same."""
        k, v = self.extend(layer, k, v)
        if self.config.key_offset:
            k = F.pad(k, (0, 0, 1, -1))
        dropout = self.config.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, dropout_p=dropout)

    def extend(self, layer, k, v):
        """Adds keys and values (B, nh, T, hs) to the cache, if there is one. Returns all tokens' keys and values."""
        k = k * self.is_text  # zeros before the first token
        return (k, v) if self.cache is None else self.cache.update(k, v, layer)

    def previous(self, x):
        """Previous's forward, of embeddings (B, T, C), which the cache keeps."""
        kept, _ = self.extend(self.config.n_layer, x[:, None], x[:, None, :, :0])
        return F.pad(kept[:, 0], (0, 0, 1, -1))[:, -x.shape[1] :]

    def embed_positions(self, _):
        """The position embedding's forward, at the positions of the call that runs: (B, T, C)."""
        return F.embedding(self.positions, self.model.position_embedding.weight)

    def rotate(self, rotary, x):
        """Rotary's forward, at the positions of the call that runs: (B, nh, T, hs) -> the same."""
        cos, sin = (part[self.positions][:, None] for part in (rotary.cos, rotary.sin))  # (B, 1, T, hs / 2)
        return rotary.rotate(x, cos, sin)


NanoladderForCausalLM.register_for_auto_class("AutoModelForCausalLM")  # save_pretrained writes this file too
