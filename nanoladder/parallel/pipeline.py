"""Pipeline parallelism: each process has some of the blocks, and micro-batches pass through the processes in turn.

A stage is a run of consecutive blocks. The first stage embeds; the last has the final norm, the head and the loss. With
the schedule 1f1b every process has one stage; with interleaved it has two, and stage s is on process s % p. The
schedules are torch.distributed.pipelining's.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model import GPT
from nanoladder.arithmetic import STAGES, block_flops, micro_batch_size
from nanoladder.machine import choose_dtype
from nanoladder.parallel.mesh import local, mesh

TIED, COPY = "token_embedding.weight", "head.weight"  # one weight on the first stage, its copy on the last


def apply_pipeline_parallel(model: GPT) -> Any:
    """Returns this process's stages of a GPT as a Pipeline. Returns the model unless several processes share it."""
    return Pipeline(model) if mesh().sizes.pipeline > 1 else model


class Stage(GPT):
    """Some of the blocks of a GPT, under their numbers in the whole, with its first or last layers if they belong here.

    It maps token ids (B, T), or the activations (B, T, C) of the stage before, to activations, or on the last stage to
    the summed loss (). K and √n in `activation_checkpointing` count the stage's own blocks.
    """

    def __init__(self, model, blocks, is_first, is_last):
        nn.Module.__init__(self)  # not GPT's, which would make a whole model
        self.config, self.is_last = model.config, is_last
        self.blocks = nn.ModuleList()
        for number in blocks:
            self.blocks.add_module(str(number), model.blocks[number])
        self.token_embedding = model.token_embedding if is_first else nn.Identity()
        self.position_embedding = model.position_embedding if is_first else Zero()
        self.dropout = model.dropout if is_first else nn.Identity()
        self.norm = model.norm if is_last else nn.Identity()
        if is_last:
            self.head = model.head

    def forward(self, x, targets=None):
        dtype = choose_dtype(self.config.dtype, x.device)
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):  # not around a schedule's backward
            return super().forward(x, targets) if self.is_last else self.hidden(x)  # pyright: ignore


class Zero(nn.Module):
    """Position embedding of activations that already contain it."""

    def forward(self, positions):
        return 0.0


class Pipeline(nn.Module):
    """The stages of one process, `parts`, with the names, the parameters' names and the config of the whole GPT."""

    def __init__(self, model):
        super().__init__()
        n, place = mesh().sizes.pipeline, mesh().place.pipeline
        self.config, self.n_params = model.config, model.n_params
        cut = cut_blocks(model.config, n)  # the blocks of every stage
        self.n_stages = len(cut)
        self.numbers = range(place, self.n_stages, n)  # of this process's stages
        self.has_first, self.has_last = place == 0, place == n - 1
        self.parts = nn.ModuleList(Stage(model, cut[i], i == 0, i == self.n_stages - 1) for i in self.numbers)
        self.shape = None  # of the batch that the schedule is for

    def forward_backward(self, batch, n_tokens):
        """Adds the gradients of the summed loss / n_tokens of a Batch, micro-batch by micro-batch.

        Returns the loss () times the number of processes of the pipeline on the last one, 0 on the others, so that the
        mean over all processes is the loss. n_tokens: valid tokens of the batch, () on its device.
        """
        loss = self.pass_through(batch.inputs, batch.targets, n_tokens)
        self.add_tied_gradients()
        return loss

    def forward(self, tokens, targets):
        """Token ids and targets (B, T) -> summed loss (), as forward_backward returns it; without gradients."""
        return self.pass_through(tokens, targets, 1)

    def pass_through(self, tokens, targets, n_tokens):
        """Runs the schedule; only its forwards unless gradients are enabled. Returns the loss of forward_backward."""
        if self.shape != tokens.shape:
            self.shape, self.schedule = tokens.shape, self.make_schedule(tokens)
        self.n_tokens, losses = n_tokens, []
        inputs = (tokens,) if self.has_first else ()
        outputs = {"target": targets, "targets": targets} if self.has_last else {}
        run = self.schedule.step if torch.is_grad_enabled() else self.schedule.eval
        run(*inputs, **outputs, losses=losses, return_outputs=False)
        nothing = torch.zeros((), device=tokens.device)
        return sum((loss.detach() for loss in losses), nothing) * mesh().sizes.pipeline

    def make_schedule(self, inputs):
        """The schedule of batches of inputs (B, T), in micro-batches."""
        from torch.distributed import pipelining  # here, because it takes a second that other runs save

        rows = min(micro_batch_size(self.config, mesh().sizes), len(inputs))
        tokens = torch.empty(rows, inputs.shape[1], dtype=torch.int64, device="meta")
        sent = self.sent(tokens).requires_grad_()
        stages = []
        for number, part in zip(self.numbers, self.parts, strict=True):
            shapes: dict = {  # given, because DDP and FSDP2 do not support the trial by which they are found out
                "input_args": tokens if number == 0 else sent,
                "output_args": torch.empty((), device="meta") if part.is_last else sent,
            }
            stage = pipelining.PipelineStage(part, number, self.n_stages, inputs.device, group=group(), **shapes)
            stages.append(stage)
        options = {"n_microbatches": len(inputs) // rows, "scale_grads": False}
        options["loss_fn"] = lambda loss, targets: loss / self.n_tokens
        if self.config.pipeline_schedule == "1f1b":
            return pipelining.Schedule1F1B(stages[0], **options)
        return pipelining.ScheduleInterleaved1F1B(stages, **options)

    def sent(self, tokens):
        """The activations that a stage sends for tokens (B, T), on the meta device."""
        B, T = tokens.shape
        if self.config.tensor_parallel > 1:  # each process sends its part of the sequence
            T = T // mesh().sizes.tensor
        dtype = torch.float32
        if self.config.half_residual:
            dtype = choose_dtype(self.config.dtype, torch.device(mesh().device_type))
        return torch.empty(B, T, self.config.n_embd, dtype=dtype, device="meta")

    @torch.no_grad()
    def add_tied_gradients(self):
        """Adds up the gradients of the tied weight on the first and the last stage, on both. Collective."""
        if not (self.has_first or self.has_last):
            return
        weight = self.parts[0].token_embedding.weight if self.has_first else self.parts[-1].head.weight
        gradient, peer = local(weight.grad), mesh().sizes.pipeline - 1 if self.has_first else 0
        other = torch.empty_like(gradient)
        exchange = [
            dist.P2POp(dist.isend, gradient, group=group(), group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group(), group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradient += other

    # -- the interface of the whole model

    @property
    def blocks(self):
        """The blocks of this process."""
        return nn.ModuleList(block for part in self.parts for block in part.blocks.children())

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.split(".", 2)[2], parameter  # without parts.N.

    def state_dict(self, **options):
        return {name: value for part in self.parts for name, value in part.state_dict(**options).items()}


def group():
    """The processes that share the blocks with this one."""
    return mesh().weights["pipeline"].get_group()


def cut_blocks(config, n_processes):
    """Cuts the blocks into stages, so that the slowest one is as fast as it can be. Returns a range for each stage.

    Counts floating-point operations; the head's, padding included, are on the last stage.
    """
    n_others = STAGES[config.pipeline_schedule] * n_processes - 1
    head = 6 * config.n_embd * config.padded_vocab_size / block_flops(config)  # in blocks

    def slowest(n_last):
        return max(n_last + head, math.ceil((config.n_layer - n_last) / n_others))

    n_last = min(range(1, config.n_layer - n_others + 1), key=slowest)
    ends = [round((config.n_layer - n_last) * i / n_others) for i in range(n_others + 1)]
    return [range(*pair) for pair in pairwise([*ends, config.n_layer])]
