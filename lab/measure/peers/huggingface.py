"""Hugging Face transformers: its GPT-2 under its Trainer."""

import accelerate  # noqa: F401 its Trainer needs it
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from nanoladder.checkpoint.interop import gpt2_config, gpt2_tensors
from nanoladder.data import count_workers

HALF = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


def train(task):
    """Trains until the clock ends it. Returns the setting as text."""
    task.clock.start()
    config, best = task.naive, {}
    workers = count_workers(task.config.num_workers, task.device)
    if task.best:  # what its guide to performance names, as far as it acts here
        best = {"torch_compile": True, **HALF.get(task.dtype, {}), "dataloader_num_workers": workers}
    if task.best and task.device.type == "cuda":
        # To compile, its arguments turn on TF32 by PyTorch's newer switch; the compiler fails if the older one differs.
        torch.set_float32_matmul_precision("high")
    arguments = TrainingArguments(
        output_dir=str(task.folder),
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        max_grad_norm=config.grad_clip,
        seed=config.seed,
        use_cpu=task.device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **best,
    )
    Timed(build_model(task), arguments, task=task).train()
    return ", ".join([transformers.__version__, *(f"{key}={value}" for key, value in best.items())])


def build_model(task):
    """A GPT-2 with the task's weights. If the config has no biases, the model's are zero and not trained."""
    ours = task.model()
    model = GPT2LMHeadModel(GPT2Config(**gpt2_config(ours.config, 0.0, None)))
    model.load_state_dict(gpt2_tensors(ours.config, ours.state_dict()), strict=False)  # the head is tied
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ours.config.bias or not name.endswith("bias"))
    return model


def named(batch):
    """A batch as the model's keyword arguments; its targets are shifted already."""
    return {"input_ids": batch.inputs, "labels": batch.targets, "shift_labels": batch.targets}


class Timed(Trainer):
    """A Trainer on the task's batches. Tells the clock of each backward's end, and ends with the step that it says."""

    def __init__(self, *args, task, **options):
        super().__init__(*args, **options)
        self.task = task

    def get_train_dataloader(self):
        workers, pinned = self.args.dataloader_num_workers, self.task.device.type == "cuda"
        return self.task.loader(collate_fn=named, num_workers=workers, pin_memory=pinned)

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.control.should_training_stop = self.task.clock.step(loss)
        return loss
