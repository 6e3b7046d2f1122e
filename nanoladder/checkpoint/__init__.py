"""Checkpoints: saved atomically in the background; loaded exactly, or refused in one line.

A checkpoint is one safetensors file, readable by any tool for that format. Its tensors:

    <weight>                      a weight under its plain name; a tied weight once, as token_embedding.weight
    optimizer/<weight>/<state>    optimizer state of that weight; an 8-bit tensor is stored as parts: <state>/codes, ...
    generators/<device>           random generator states, one row per process

Its metadata, all entries but the last in JSON, is the rest of the same tree:

    format_version                5
    config                        every key
    tokenizer                     sha256 of its tokens and ids; empty if the data have no tokenizer
    data                          number of tokens and digest of train.bin and val.bin
    progress                      step, best_val_loss, best_step, interval_loss, interval_steps
    scaler                        state of float16's gradient scaler; else empty
    optimizer, generators         non-tensor state
    sha256                        digest of everything else in the file, by format.digest

Tensors are stored whole, so any number of processes, sharded or not, can resume from a file. If processes divide the
model, the file is an index of slices.py: the tensors lie beside it, in a file of each process. A run's folder holds
last.safetensors (the newest), best.safetensors (the lowest validation loss) and the most recent checkpoints as
step_00000250.safetensors and so on. These are hard links: one file may have up to three names.

Files: format.py defines the layout, slices.py that of divided models, save.py writes them, load.py reads them and
models from elsewhere, which interop.py translates. shape.py has the keys that fix a model's shape, folder.py lists a
run's files, state.py converts optimizer and generators to plain tensors and back. Not here: atomic writes
(nanoladder/files.py), and which process has which part of a tensor (nanoladder/parallel).
"""

from nanoladder.checkpoint.folder import BEST, best_or_last, former_best, list_checkpoints, restore
from nanoladder.checkpoint.load import (
    add_source,
    build_gpt,
    check_resumes,
    check_shape,
    check_tokenizer,
    load,
    load_gpt,
    load_model,
    load_weights,
    newest,
    resume,
    shape_of,
    source_of,
    tokenizer_of,
)
from nanoladder.checkpoint.save import Writer, find_not_finite, gather_weights, snapshot
from nanoladder.checkpoint.shape import SHAPE, config_of
from nanoladder.checkpoint.state import generator_states, set_generator_states
