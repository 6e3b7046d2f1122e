"""The preparation of a run, and Run, the object that does the housekeeping of a training run."""

import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nanoladder import checkpoint, files, machine, parallel
from nanoladder.arithmetic import flops_per_token
from nanoladder.config import Config
from nanoladder.data import full_shared_memory
from nanoladder.data.batches import Batch
from nanoladder.data.counting import counted_losses
from nanoladder.data.datasets import Dataset
from nanoladder.entry import outlast_output
from nanoladder.errors import BadInput, writing
from nanoladder.run import micro_batch
from nanoladder.run.clock import StepClock, time_product
from nanoladder.run.faults import Watch, explain_compiler_failure
from nanoladder.run.header import busy, data_line, print_header, print_lines
from nanoladder.run.metrics import Metrics, earlier_rows
from nanoladder.run.sample import print_text
from nanoladder.run.signals import Interrupted, Signals
from nanoladder.run.size import require_memory
from nanoladder.run.start import Start, find_start, say_rate, write_config

UNSCALED = torch.amp.GradScaler(enabled=False)
LOCK = ".lock"  # in out_dir, held by the process that trains there
FOREIGN = ("meta.json", "train.bin", "model*.safetensors", "pytorch_model*.bin")  # in folders of datasets and models


class Prepared(NamedTuple):
    """A run that can begin: what prepare() resolved and found, and the contexts that Run ends.

    tokenizer: for samples. rows: earlier rows of its metrics. counted: {name: loss} of counted predictions.
    """

    config: Config
    device: torch.device
    dataset: Dataset
    start: Start
    tokenizer: object
    rows: list
    counted: dict
    cpu_times: tuple | None  # at its start
    contexts: contextlib.ExitStack


def prepare(
    config: Config, dataset: Dataset, device: torch.device, learning_rate: Callable[[int, Config], float]
) -> Prepared:
    """Prepares a run and prints its header. Returns it, with numbers for vocab_size=0 and micro_batch_size=auto.

    Raises BadInput for all that can be refused before the model is built: a config that cannot run or resume, a model
    that cannot fit, samples without tokenizer, an out_dir that holds another run or cannot be read or written,
    processes of unequal config, data or checkpoint. From here on, the run holds its out_dir, and memory that runs out
    is an error if micro_batch_size=auto. learning_rate: the schedule, a function of step and config.
    """
    outlast_output()  # Ctrl-C at `train.py | tee log` ends tee at once, and the run has yet to save
    cpu_times, auto = machine.cpu_times(), config.micro_batch_size == "auto"
    config = dataclasses.replace(config, vocab_size=dataset.vocab_size)
    require_memory(config, device)
    attention = machine.check(config, device)
    parallel.require_agreement(dataclasses.asdict(config), "config")
    parallel.require_agreement(dataset.fingerprint(), "data")
    tokenizer = dataset.find_tokenizer() if config.sample_interval else None
    if config.sample_interval and tokenizer is None:
        raise BadInput(f"sample_interval: {config.dataset} has no tokenizer to write samples; --sample_interval=0")
    config = micro_batch.resolve_micro_batch(config)
    start = find_start(config, dataset, device)
    step = start.progress["step"]
    parallel.require_agreement(start.progress, f"checkpoint in {config.out_dir}")
    rows = earlier_rows(config.out_dir, step) if parallel.rank() == 0 else []
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(hold_out_dir(config, is_new=not step))
        print(start.message + say_rate(start, config, learning_rate), end="")
        print_header(config, device, attention)
        counted = {}
        if config.eval_interval and parallel.rank() == 0:
            counted = counted_losses(dataset, config)  # may take seconds
            machine.reset_peak_memory(device)  # the run's peak, not that of counting
        print_lines(data_line(config, dataset, counted))
        contexts.enter_context(machine.within_free_memory(device) if auto else contextlib.nullcontext())
        kept = contexts.pop_all()
    return Prepared(config, device, dataset, start, tokenizer, rows, counted, cpu_times, kept)


class Run:
    """Housekeeping of a training run: resumes, logs, saves, watches for faults, stops on a signal.

    prepared: by prepare(). In every step, call `log_step`, `log_evaluation` if `due`, and `save_if_due`. Leaving the
    `with` block explains torch.compile errors, and raises OutOfMemory for those of memory.
    """

    def __init__(
        self,
        prepared: Prepared,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler = UNSCALED,
    ) -> None:
        """Loads what the run starts from, and makes its out_dir ready. Raises BadInput."""
        config, start = prepared.config, prepared.start
        start.load(model, optimizer, scaler)
        prepare_out_dir(config, start, prepared.dataset)
        print_lines(busy(prepared.device, prepared.cpu_times))
        self.config, self.device, self.dataset = config, prepared.device, prepared.dataset
        self.model, self.optimizer, self.scaler, self.tokenizer = model, optimizer, scaler, prepared.tokenizer
        self.progress, self.contexts = start.progress, prepared.contexts
        self.first_step = self.progress["step"] + 1
        self.row, self.saving = {}, False  # of the current step: its metrics, and if a checkpoint is due
        self.clock, self.lap_start = StepClock(self.device), self.progress["step"]
        self.watch, self.signals = Watch(config, self.device, scaler), Signals()
        self.writer = checkpoint.Writer(config, start.origin, self.progress)
        self.metrics = Metrics(config, prepared.rows, prepared.counted) if parallel.rank() == 0 else None

    def __enter__(self):
        for context in (self.signals, self.writer, self.metrics):
            if context is not None:
                self.contexts.enter_context(context)
        return self

    # -- the steps

    def steps(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) up to max_steps, or until a signal ends the run."""
        batches, max_steps = iter(batches), self.config.max_steps
        if self.first_step > max_steps:
            print(f"nothing is left to train: step {self.first_step - 1} is done; --max_steps=N trains up to step N")
        elif self.config.compile:
            print("compiling: the first step may take minutes, less when the run starts again")
        for step in range(self.first_step, max_steps + 1):
            parallel.tell(step=step)
            self.clock.start()
            batch = self.wait_for_batch(batches)
            if batch is None:
                return
            self.progress["step"] = step
            self.row = {}
            yield step, batch
            if self.signals.received:
                return

    def wait_for_batch(self, batches):
        """Returns the next batch; None if a signal ended the wait for it. Then, or if the loader fails, saves first."""
        try:
            with self.signals.ending_wait():
                return next(batches)
        except (Interrupted, RuntimeError, OSError) as error:
            if parallel.world_size() == 1 and self.progress["step"] >= self.first_step and not self.saving:
                self.row, self.saving = {}, True
                self.save_if_due()
            if not isinstance(error, Interrupted):
                raise

    def due(self, interval: int) -> bool:
        """True if this step ends an interval of `interval` steps (0: never). The last step ends every interval."""
        step = self.progress["step"]
        return interval > 0 and (step % interval == 0 or step == self.config.max_steps)

    def log_step(self, lr: float, loss: torch.Tensor | float, grad_norm: torch.Tensor) -> None:
        """Records a training step, whose loss and grad_norm may still be on the device. Fills a row if one is due.

        Collective.
        """
        config, progress = self.config, self.progress
        step = progress["step"]
        progress["interval_loss"] += machine.double(loss) if torch.is_tensor(loss) else loss
        progress["interval_steps"] += 1
        if step == self.first_step:  # not timed with the others: it touches new memory and compiles
            print(f"first step: {self.clock.lap():.1f} s{', with compilation' if config.compile else ''}")
            self.lap_start = step
            parallel.limit_collectives(config)
        self.saving = self.signals.arrived() or self.due(config.save_interval)
        sampling = self.due(config.sample_interval)
        pausing = self.saving or sampling or self.due(config.log_interval) or self.due(config.eval_interval)
        self.watch.check(step, lr, loss, grad_norm, due=pausing)
        if self.due(config.log_interval):
            self.row |= {
                "train_loss": float(progress["interval_loss"]) / progress["interval_steps"],
                "lr": lr,
                "grad_norm": float(grad_norm),
                "peak_memory_gb": machine.peak_memory_gb(self.device),
                **self.throughput(step),
                **self.slowest_process(),
            }
            progress |= {"interval_loss": 0.0, "interval_steps": 0}
        if pausing:
            self.clock.stop()
        if sampling:
            print_text(step, self.model, self.tokenizer, config)

    def throughput(self, step):
        """Returns the throughput of the lap that ends with this step; mfu only if the device's peak is known."""
        n_steps, self.lap_start = step - self.lap_start, step
        seconds, tokens = self.clock.lap(), n_steps * self.config.batch_size * self.config.context_length
        if not n_steps:
            return {}
        rate, peak = tokens / seconds, machine.peak_flops(self.device)
        mfu = {"mfu": rate * flops_per_token(self.config) / (peak * parallel.world_size())} if peak else {}
        return {"step_ms": seconds / n_steps * 1e3, "tokens_per_s": rate, **mfu}

    def slowest_process(self):
        """Returns how fast the processes are, once rank 0 has heard from all; nothing elsewhere, or in a single one."""
        if parallel.world_size() == 1:
            return {}
        dtype = machine.choose_dtype(self.config.dtype, self.device)
        parallel.tell(product_ms=time_product(self.device, dtype))
        heard = parallel.heard("product_ms")
        if len(heard) < parallel.world_size():
            return {}
        slowest = max(heard, key=lambda rank: heard[rank])
        median = statistics.median(heard.values())
        return {"product_ms": median, "slowest_product_ms": heard[slowest], "slowest_rank": slowest}

    def log_evaluation(self, val_loss: float) -> None:
        """Adds the validation loss to this step's row, and its bits per byte unless nanoGPT wrote the dataset.

        Collective.
        """
        self.watch.check_evaluation(val_loss)
        self.row["val_loss"] = val_loss
        if bits := self.dataset.bits_per_nat:
            self.row["val_bpb"] = val_loss * bits

    def save_if_due(self) -> None:
        """Writes this step's metrics row, if any, and a checkpoint if one is due or the validation loss is the best.

        Collective.
        """
        progress, val_loss = self.progress, self.row.get("val_loss", math.inf)
        best = "val_loss" in self.row and self.writer.beats_best(val_loss)
        self.saving |= best
        due = self.config.save_interval and self.saving
        if due:
            self.watch.check_state(self.model, self.optimizer)
        if self.row and parallel.rank() == 0:
            tokens = progress["step"] * self.config.batch_size * self.config.context_length
            self.metrics.write({"step": progress["step"], "tokens": tokens, **self.row})
        if due:
            self.writer.save(self.model, self.optimizer, self.scaler, progress, val_loss)

    # -- the end

    def __exit__(self, kind, error, traceback):
        out_of_memory = error is not None and machine.is_out_of_memory(error)  # asked while memory is limited
        lost_peer = error is not None and parallel.explain_lost_peer(error)  # asked while the others wait
        try:
            self.contexts.__exit__(kind, error, traceback)
        finally:
            if error is None:  # even if this process exits, as a file could not be written
                self.watch.warn_at_end()
                parallel.destroy_process_group()
        if error is None:
            self.end_on_signal()
        elif lost_peer:
            sys.exit(1)
        else:
            self.print_newest_checkpoint()
            if out_of_memory:
                raise micro_batch.OutOfMemory(error, self.config, self.device) from None
            self.explain(error)

    def explain(self, error):
        """Ends the program if the compiler or the loader failed, or no thread or process could start."""
        if not self.signals.number:  # a signal may have killed the compiler
            explain_compiler_failure(error, self.config)
        if reason := full_shared_memory(error):
            sys.exit(f"error: {reason}")
        if machine.is_out_of_processes(error):
            sys.exit(
                f"error: no more threads or processes can start ({error}); expected a higher limit (ulimit -u, or a "
                "container's --pids-limit), or fewer of them: --num_workers=0"
            )

    def end_on_signal(self):
        """Exits with code 128 + n if signal n ended the run before its last step."""
        received, step = self.signals.received, self.progress["step"]
        if received and step < self.config.max_steps:
            print(f"{received.name}: ended after step {step}")
            self.print_newest_checkpoint()
            sys.exit(128 + received)

    def print_newest_checkpoint(self):
        """Says where a run that ended early would continue."""
        for path in checkpoint.list_checkpoints(Path(self.config.out_dir))[:1]:
            print(f"{path} is the newest checkpoint: --init_from=resume continues from it")


def hold_out_dir(config, is_new):
    """Returns a context manager in which other runs are kept out of out_dir, which is created if missing.

    Raises BadInput if out_dir cannot be written, is in use or, for a new run, holds a dataset or a model.
    """
    if parallel.rank():  # rank 0 does this
        return contextlib.nullcontext()
    folder = Path(config.out_dir)
    for path in (path for pattern in FOREIGN * is_new for path in sorted(folder.glob(pattern))):
        what = f"{path.name}, a dataset's or a model's, with its own tokenizer"
        raise BadInput(f"out_dir={folder} holds {what}; choose another --out_dir")
    with writing(f"out_dir={folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return files.hold(folder / LOCK)
        except BlockingIOError:
            raise BadInput(
                f"another run trains in out_dir={folder}; wait for it, or choose another --out_dir"
            ) from None


def prepare_out_dir(config, start, dataset):
    """Writes config.json and the dataset's tokenizer; restores the checkpoints as of the start. Raises BadInput."""
    if parallel.rank() == 0:
        folder = Path(config.out_dir)
        with writing(f"out_dir={folder}"):
            checkpoint.restore(folder, start.source if start.resumes else None, start.progress, start.former_best)
            dataset.save_tokenizer(folder)
            write_config(folder, config)
