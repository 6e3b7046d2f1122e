"""Building a model that no process ever holds whole.

Its matrices begin on the meta device, as shapes without numbers, and are cut there. Then each process draws every
matrix as a single process would, one at a time, and keeps its part. Besides the parts, only one whole matrix is in
memory.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook as on_buffer
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from model import GPT
from nanoladder.config import Config
from nanoladder.parallel.full_state import copy_part
from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import COPY, TIED
from nanoladder.parallel.tensor import place_gradients


def build(kind: Callable[[Config], GPT], config: Config, device: torch.device) -> GPT:
    """Returns the module kind(config), on the device. If processes share the weights, its matrices are on meta."""
    if not mesh().is_divided:
        return kind(config).to(device)

    def place(module, name, parameter):
        if not parameter.is_meta:  # else it is tied to one that has been placed
            return nn.Parameter(parameter.to("meta" if parameter.dim() == 2 else device))

    with on_parameter(place), on_buffer(lambda module, name, buffer: buffer.to(device)):  # pyright: ignore
        return kind(config)


@torch.no_grad()
def init_shards(model: GPT, device: torch.device) -> None:
    """Draws this process's part of every matrix that build() has left on the meta device, in place.

    The values equal a single process's, bit for bit, however the model is cut.
    """
    if not mesh().is_divided:
        return
    for part in getattr(model, "parts", [model]):  # of a pipeline
        allocate(part, device)
        for name, parameter in part.named_parameters():
            if parameter.dim() == 2:
                name = TIED if part.config.tie_embeddings and name == COPY else name
                copy_part(draw(part, name, parameter.shape), parameter, name)
        if mesh().sizes.tensor > 1:
            place_gradients(part)


def allocate(module, device):
    """Replaces a module's parameters on the meta device by uninitialized ones on the device."""
    named = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta}
    made = {p: nn.Parameter(torch.empty_like(p, device=device)) for p in named.values()}  # a tied one once
    module.load_state_dict({name: made[p] for name, p in named.items()}, strict=False, assign=True)


def draw(model, name, shape):
    """Returns a matrix as a single process initializes it; rows that pad the vocabulary are 0."""
    whole = torch.zeros(shape)
    padded = name == COPY or (name == TIED and model.config.tie_embeddings)
    model.init_weights([(name, whole[: model.config.vocab_size] if padded else whole)])
    return whole
