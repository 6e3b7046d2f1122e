"""The code of a trained model for transformers: model.py, folded by the model's config, and modeling.py."""

import dataclasses

from lab.programs.bundle import read
from lab.programs.edits import split
from lab.programs.fold import fold, merge
from nanoladder.checkpoint.interop import CUSTOM_KEYS
from nanoladder.config import Config

TITLE = "A model of nanoladder for transformers: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)"
PLAIN = {"attention": "sdpa", "activation_checkpointing": "none", "loss_chunks": 0, "pad_vocab_to": 1}
CALLED = "model.get_input_embeddings, model.get_output_embeddings"  # by transformers


def modeling(config: Config) -> str:
    """Returns the source of a model's code, which needs only torch and transformers; config.json has CUSTOM_KEYS."""
    values = dataclasses.asdict(dataclasses.replace(config, **PLAIN))
    program = merge({"model": read("model.py"), "modeling": read("lab/programs/modeling.py")}, TITLE) + CALLED
    *statements, _ = split(fold(program, {key: repr(value) for key, value in values.items() if key not in CUSTOM_KEYS}))
    return "".join(statements)
