"""Hugging Face transformers: its GPT-2 under its Trainer."""

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lab.peers.task import Sequences
from nanoladder.checkpoint.huggingface import their_config, their_tensors

HALF = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


def train(task):
    """Trains until the clock ends it. Returns the setting in words."""
    task.clock.start()
    config, best = task.naive, {}
    if task.best:  # what its guide to performance names, as far as it acts here
        best = {"torch_compile": True, **HALF.get(task.dtype, {}), "dataloader_num_workers": task.config.num_workers}
    if task.best and task.device.type == "cuda":
        # To compile, its arguments turn on TF32 by PyTorch's newer switch; the compiler fails if the older one differs.
        torch.set_float32_matmul_precision("high")
    arguments = TrainingArguments(
        output_dir=str(task.folder),
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.weight_decay,
        adam_beta2=config.beta2,
        max_grad_norm=config.grad_clip,
        seed=config.seed,
        use_cpu=task.device.type == "cpu",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # shift_labels is none of the forward's own parameters
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **best,
    )
    Timed(build_model(task), arguments, train_dataset=Sequences(task), data_collator=collate, clock=task.clock).train()
    return ", ".join([transformers.__version__, *(f"{key}={value}" for key, value in best.items())])


def build_model(task):
    """A GPT-2 with the task's weights. Its biases, if the config has none, are zero and not trained."""
    ours = task.model()
    model = GPT2LMHeadModel(GPT2Config(**their_config(ours.config, 0.0, None)))
    model.load_state_dict(their_tensors(ours.config, ours.state_dict()), strict=False)  # the head is tied
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ours.config.bias or not name.endswith("bias"))
    return model


def collate(pairs):
    """The batch of pairs of inputs and targets; targets are shifted already."""
    inputs, targets = map(torch.stack, zip(*pairs, strict=True))
    return {"input_ids": inputs, "labels": targets, "shift_labels": targets}


class Timed(Trainer):
    """A Trainer that tells the clock of each backward's end, and ends with the step at which the clock says so."""

    def __init__(self, *args, clock, **options):
        super().__init__(*args, **options)
        self.clock = clock

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.control.should_training_stop = self.clock.step(loss)
        return loss
