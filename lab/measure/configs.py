"""The rows that a mode of profile.py measures: {name: Config, or the BadInput that explains why there is none}."""

import ast
import dataclasses
import itertools

import torch

from lab.measure.cli import command_line
from lab.measure.peers import task
from lab.measure.summary import row_below
from nanoladder.arithmetic import CUTS
from nanoladder.config import Config, apply, check, stage_names
from nanoladder.config.stages import fields, files, needs_several, stage_below, stage_path
from nanoladder.data import count_workers
from nanoladder.errors import BadInput
from nanoladder.machine import can_capture, choose_device, choose_dtype
from nanoladder.run import load_config
from operators import count_chunks, uses_blocks

AS_CONFIGURED = "as configured"  # the row of the unchanged config
ALONE = {"ddp": True, "shard": "none", **dict.fromkeys(CUTS, 1)}  # fields that have no effect in one process


def rows_of(options, words):
    """Returns the rows of a mode. All are compared with the first."""
    config = load_config(words)
    match options.mode:
        case "ladder":
            every = stage_rows(stage_names(), words)
            chosen = {name: every[name] for name in options.stages or stages_of(1)}
            is_a_stage = normal_form(config) in map(normal_form, every.values())
            return chosen if is_a_stage else chosen | {AS_CONFIGURED: config}
        case "vary" if options.vary == ["stages"]:
            return {AS_CONFIGURED: config, **dict(toggled(config, stage) for stage in stages_of(1)[1:])}
        case "vary":
            return {AS_CONFIGURED: config} | varied_rows(options.vary, words)
        case "peers":
            return stage_rows(["naive"], words) | dict.fromkeys([AS_CONFIGURED, *task.PEERS], config)
        case "scaling":
            counts = [n for n in range(1, options.processes + 1) if n == options.processes or n & (n - 1) == 0]
            return {str(n): changed(config, divided(config, options.dimension, n)) for n in counts}


def divided(config, dimension, n):
    """Returns the keys that divide a config among n processes along a dimension of --mode=scaling."""
    if dimension in ("data", "shard"):  # a batch for each process
        return {"batch_size": n * config.batch_size, "shard": "full" if dimension == "shard" else config.shard}
    return {f"{dimension}_parallel": n}


def stage_rows(names, words):
    """Returns the rows of these stages: the config at each."""
    return {name: loaded([*words, f"--stage={name}"]) for name in names}


def varied_rows(vary, words):
    """Returns a row for each combination of the values of --vary; config files compute with them."""
    merged = [dict(itertools.chain(*map(dict.items, part))) for part in itertools.product(*vary)]
    return {in_words(keys): loaded([*words, *command_line(keys)]) for keys in merged}


def loaded(words):
    """Returns the config of these arguments, or the BadInput that explains why there is none."""
    try:
        return load_config(words)
    except BadInput as error:
        return error


def toggled(config, stage):
    """Returns the row in which one stage is toggled: off if the config has it, else on."""
    (field,), path = fields(stage), stage_path(stage_below(stage))  # pyright: ignore
    below = [ast.literal_eval(fields(other)[field]) for other in path if field in fields(other)]
    if getattr(config, field) in below:
        return f"with {stage}", changed(config, {field: apply([files()[stage]], {}, vars(config))[field]})
    return f"without {stage}", changed(config, {field: below[-1]})


def changed(config: Config, changes: dict) -> Config | BadInput:
    """Returns the config with these changes, or the BadInput that explains why they are impossible."""
    config = dataclasses.replace(config, **changes)
    try:
        check(config)
    except BadInput as error:
        return error
    return config


def changes_from(config, base):
    """Returns {key: value} of the config where it differs from another one."""
    return {key: value for key, value in vars(config).items() if value != getattr(base, key)}


def trains_otherwise(config, base):
    """True if the configs train differently, not just faster or in less memory. AdamW in 8 bits counts as AdamW."""
    another_optimizer = config.optimizer.removesuffix("8bit") != base.optimizer.removesuffix("8bit")
    return another_optimizer or not changes_from(config, base).keys() <= {*fields("naive"), "optimizer"}


def in_words(changes):
    """Formats changes as text: attention=matmul, compile=False."""
    return ", ".join(f"{key}={value}" for key, value in changes.items())


def stages_of(n):
    """Returns the stages that can have an effect in n processes."""
    return [stage for stage in stage_names() if n > 1 or not needs_several(stage)]


def normal_form(config):
    """Returns the config's normal form, which is the same for configs that train alike in one process on this machine.

    A BadInput is returned as it is.
    """
    if isinstance(config, BadInput):
        return config
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    in_blocks = uses_blocks(config.attention, config.dropout, config.context_length, device, dtype)
    attention = "blocks" if in_blocks else config.attention.replace("auto", "sdpa")
    micro_batch_size = config.micro_batch_size % config.batch_size
    n_tokens = (micro_batch_size or config.batch_size) * config.context_length
    loss_chunks = count_chunks(config.loss_chunks, n_tokens, config.padded_vocab_size, config.n_embd)
    same = {"attention": attention, "micro_batch_size": micro_batch_size, "loss_chunks": loss_chunks}
    same["half_residual"] = config.half_residual and dtype != torch.float32
    same["num_workers"] = count_workers(config.num_workers, device)
    same["cuda_graph"] = config.cuda_graph and can_capture(config, device)
    return dataclasses.replace(config, **same, **ALONE)


def not_applicable(rows, options):
    """Returns {row: reason} of the rows not to measure: no valid config, or the same one as the row compared with."""
    mode, reasons, configs = options.mode, {}, {}
    for name, config in rows.items():
        if isinstance(config, BadInput):
            reasons[name] = str(config)
            continue
        if mode == "ladder" and config.float8 and choose_device(config.device).type == "cpu":
            reasons[name] = "not applicable: a CPU emulates float8"
            continue
        config = normal_form(config)
        compared = row_below(name, configs) if mode == "ladder" else next(iter(configs), None)
        if mode not in ("scaling", "peers") and compared and config == configs[compared]:
            reasons[name] = "not applicable: here it is the same as the row that it is compared with"
        configs[name] = config
    return reasons
