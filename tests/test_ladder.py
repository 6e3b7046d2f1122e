"""Every stage trains the same model, and its mechanism is active."""

import functools
import math
import multiprocessing
import os

import pytest
import torch
from conftest import RECIPE, build, needs_gpu, replace, spy, whole, with_torchao, write_state
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from processes import python
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ladder
import model
import train
from nanoladder import checkpoint, data, machine, parallel
from nanoladder.config import Config, stage_files, stage_names, stages
from nanoladder.config.stages import RECIPE_DIR, needs_several, tree
from nanoladder.data import Batch
from nanoladder.errors import BadInput
from nanoladder.run import header, load_config, metrics
from operators import loss

STAGES = stage_names()
ALONE = [stage for stage in STAGES if not needs_several(stage)]  # tests/lab/programs/test_diffs.py trains the others
STEPS = 20
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context_length": 16, "vocab_size": 60, "batch_size": 8}
TINY |= {"device": "cpu", "max_steps": STEPS, "warmup_steps": 2, "learning_rate": 3e-3}
GPU_SIZES = {"n_embd": 128, "context_length": 64}  # heads of 64: cuDNN has no attention kernel for every head of 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Dataset of 4000 tokens below 60, each 1, 2 or 3 above the previous one (mod 60): there is something to learn."""
    folder = tmp_path_factory.mktemp("data")
    ids = (torch.randint(1, 4, (4000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 60).numpy()
    for split in ("train", "val"):
        ids.astype("uint16").tofile(folder / f"{split}.bin")
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes loss_chunks=auto split the losses of tiny models, too."""
    monkeypatch.setattr(loss, "FEW_BYTES", 2048)
    monkeypatch.setattr(loss, "TOKENS_PER_CHANNEL", 2)


@pytest.fixture
def tiny(dataset):
    """Makes a tiny Config from stage files and keys: tiny("naive", "flash", dropout=0.1)."""

    def make(*stages, **keys):
        files = [str(stage_files(stage)[-1]) for stage in stages]
        keys = TINY | {"dataset": dataset} | keys
        return load_config(files + [f"--{key}={value}" for key, value in keys.items()])

    return make


def begin(config):
    """The model, the optimizer and the scaler of a config, in a process set up for it."""
    return build(config, train.set_up(config))


def step(config, state, targets=None):
    """Runs a training step on random tokens, which are also the targets by default. Returns its loss and norm."""
    tokens = torch.randint(60, (config.batch_size, config.context_length), generator=torch.Generator().manual_seed(1))
    return train.train_step(*state, Batch(tokens, tokens if targets is None else targets), 1e-3, config)


def trajectory(config):
    """Trains with the real parts of train.py; returns the losses, gradient norms and final weights."""
    device = train.set_up(config)
    split = data.open_dataset(config).train
    gpt, *rest = build(config, device)
    losses, norms = [], []
    for step, batch in enumerate(train.training_batches(split, config, 1, device), 1):
        loss, norm = train.train_step(gpt, *rest, batch, train.learning_rate(step, config), config)
        losses.append(float(loss))
        norms.append(float(norm))
    return torch.tensor(losses), torch.tensor(norms), {name: p.detach().cpu() for name, p in gpt.named_parameters()}


cached_trajectory = functools.cache(trajectory)  # once for each config

# Largest difference of a loss over 20 steps. 0: bit-identical, including gradient norms and final weights.
TOLERANCE = dict.fromkeys(ALONE[1:], 1e-4) | {"amp": 5e-3, "float8": 5e-3}
TOLERANCE |= dict.fromkeys(["set_to_none", "lazy_metrics", "loader", "allocator", "tf32"], 0)
TOLERANCE |= dict.fromkeys(["cuda_graph", "checkpointing", "half_residual"], 0)  # after naive, which is in float32


def agree(a, b, tolerance):
    """Asserts that losses, gradient norms and final weights of two runs agree; the weights by relative error."""
    for ours, theirs in zip(a, b, strict=True):
        if tolerance == 0:
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    torch.testing.assert_close(a[0], b[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(a[1], b[1], atol=0, rtol=10 * tolerance)
    for name in b[2]:
        error = (a[2][name][: len(b[2][name])] - b[2][name][: len(a[2][name])]).norm()
        assert error <= 20 * tolerance * b[2][name].norm(), name


@pytest.mark.parametrize("keys", [{"learning_rate": 0, "min_lr": 0}, {"seed": 1}, {"weight_decay": 9}])
def test_agree_rejects_another_training(tiny, keys):
    """The comparison must detect these differences."""
    with pytest.raises(AssertionError):
        agree(cached_trajectory(tiny("naive", **keys)), cached_trajectory(tiny("naive")), max(TOLERANCE.values()))


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=[pytest.mark.slow] * (name == "compile")) for name in ALONE[1:]]
)
def test_a_stage_alone_trains_the_same_model(tiny, traced, stage):
    agree(cached_trajectory(tiny("naive", stage)), cached_trajectory(tiny("naive")), TOLERANCE[stage])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["compile", "chunked_loss", "checkpointing"])
def test_the_compiled_model_has_the_gradients_of_the_eager_one(tiny, traced, stage):
    """In float32, so that rounding hides no error, and with padding."""

    def gradients(**keys):
        gpt, *_ = begin(tiny(stage=stage, dtype="float32", **keys))
        tokens = torch.randint(60, (8, 16), generator=torch.Generator().manual_seed(1))
        targets = tokens.roll(-1, 1)
        targets[0, 1:] = model.IGNORE
        gpt(tokens, targets).backward()
        return {name: parameter.grad for name, parameter in gpt.named_parameters()}

    torch.testing.assert_close(gradients(), gradients(compile=False), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_stage_changes_one_field_that_naive_turns_off(stage):
    (field,) = stages.fields(stage)
    assert field in stages.fields("naive")


def test_the_list_draws_every_stage_on_its_branch(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # so that reasons continue on further lines
    ladder.main([])
    first, second = capsys.readouterr().out.split("\n\n")
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 80
    lines, rungs = ([line[:22].rstrip() for line in text.splitlines()[1:]] for text in (first, second))
    lines = [line for line in lines if line.lstrip("│ ")]  # without those that continue a reason
    assert [line.lstrip("├│└ ") for line in lines] == STAGES
    assert [line.lstrip("├└ ").split()[0] for line in rungs if line[:17].lstrip("│ ")] == stage_names(RECIPE_DIR)
    assert {"cuda_graph", "├ checkpointing", "│ grad_accumulation", "│ low_memory_optimizer"} <= set(lines)


def test_branches_are_drawn_beside_one_another(monkeypatch):
    below = {"a": None, "b": "a", "c": "b", "d": "c", "e": "b", "f": "e", "g": "e", "h": "e"}
    monkeypatch.setattr(stages, "stage_names", lambda folder: list(below))
    monkeypatch.setattr(stages, "stage_below", below.get)
    monkeypatch.setattr(stages, "named_below", (below | {"b": None}).get)  # the trunk is a and b
    drawn = [branch + name for branch, name in tree()]
    assert drawn == ["a", "b", "├ c", "│ d", "└ e", "  ├ f", "  ├ g", "  └ h"]


def test_the_trunk_ends_at_the_default_config():
    *_, top = (name for lines, name in tree() if not lines)
    assert replace(load_config([f"--stage={top}"]), ddp=True) == Config()


class Operators(TorchDispatchMode):
    """Records the names of operators that run, and the numbers of elements of the tensors that they return."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.nanoladder.chunked_loss.default:
            with self:
                return loss.compute(*args)  # runs its operations, as the operator is opaque
        outputs = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.sizes |= {leaf.numel() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        return outputs


def operators_of_a_step(config):
    state = begin(config)
    with Operators() as operators:
        step(config, state)
    return operators


@pytest.mark.parametrize("stage, dropped", [("naive", False), ("set_to_none", True)])
def test_set_to_none_has_no_gradients_during_the_forward(tiny, monkeypatch, stage, dropped):
    seen = []
    spy(monkeypatch, model.GPT, "hidden", lambda gpt, _: seen.append([p.grad is None for p in gpt.parameters()]))
    trajectory(tiny(stage=stage, max_steps=3))
    assert [all(step) for step in seen] == [True, dropped, dropped]  # there is none before the first step


def test_lazy_metrics_reads_no_loss_in_a_step(tiny):
    """_local_scalar_dense reads a value for Python, and waits for the device."""
    reads = [
        operators_of_a_step(tiny("naive", stage)).names.count("_local_scalar_dense")
        for stage in ("naive", "lazy_metrics")
    ]
    assert reads[0] - reads[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage, workers", [("naive", 0), ("loader", 2)])
def test_loader_makes_batches_in_worker_processes_and_leaves_the_generator_alone(tiny, stage, workers):
    config = tiny("naive", stage, num_workers=workers)
    before = torch.get_rng_state()
    others = set(multiprocessing.active_children())  # of a test before, which may take seconds to end
    batches = iter(train.training_batches(data.open_dataset(config).train, config, 1, torch.device("cpu")))
    next(batches)
    assert len(set(multiprocessing.active_children()) - others) == workers
    assert len(list(batches)) == STEPS - 1
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_copies_one_batch_ahead_and_loses_none():
    made = []
    items = data.prefetch(made.append(n) or n for n in range(4))
    assert next(items) == 0
    assert made == [0, 1]
    assert list(items) == [1, 2, 3]
    assert list(data.prefetch([])) == []


def test_loader_pins_memory_for_a_gpu_only(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "DataLoader", lambda *args, **options: seen.append(options["pin_memory"]) or [])
    for device in ("cpu", "cuda"):
        train.training_batches(None, tiny("naive", "loader"), 1, torch.device(device))
    assert seen == [False, True]


FAULTS = """
import resource, torch, train
from nanoladder.run import load_config
for stage in "loader", "allocator":
    train.set_up(load_config([f"--stage={stage}", "--device=cpu"]))
    for n in range(30):
        torch.ones(16_000_000)
        if n == 19:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not machine.memory.GLIBC, reason="mallopt is glibc's")
def test_allocator_faults_in_no_page_twice():
    """Counts the page faults of ten allocations of 64 MB, in pages of up to 2 MB."""
    given, kept = map(int, python("-c", FAULTS, env=os.environ | {"PYTHONPATH": "."}).stdout.split())
    assert kept < 50 and given > 300


def test_allocator_asks_cuda_for_expandable_segments(monkeypatch):
    asked = []
    monkeypatch.setattr("nanoladder.private.set_allocator", asked.append)
    machine.keep_freed_memory(torch.device("cuda"))
    assert asked == ["expandable_segments:True"]


@pytest.mark.parametrize("stage, tf32", [("allocator", False), ("tf32", True)])
def test_tf32_is_allowed_in_float32_products(tiny, stage, tf32):
    train.set_up(tiny(stage=stage))
    assert torch.backends.cuda.matmul.allow_tf32 == tf32


@needs_gpu
def test_tf32_rounds_the_products_of_a_gpu(tiny):
    a = torch.randn(512, 512, device="cuda")
    exact = a.double() @ a.double()
    error = {}
    for stage in ("naive", "tf32"):
        train.set_up(tiny("naive", stage, device="cuda"))
        error[stage] = float((a @ a - exact).norm() / exact.norm())
    assert error["naive"] < 1e-5 < error["tf32"] < 1e-2


def linear_dtypes(gpt):
    """Collects the dtypes of the outputs of the model's linear layers."""
    seen = set()
    for layer in gpt.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amp_multiplies_in_the_dtype_and_keeps_weights_in_float32(tiny, dtype):
    config = tiny("naive", dtype=dtype)
    gpt, _, scaler = state = begin(config)
    seen = linear_dtypes(gpt)
    step(config, state)
    assert seen == {getattr(torch, dtype)}
    assert {p.dtype for p in gpt.parameters()} == {p.grad.dtype for p in gpt.parameters()} == {torch.float32}
    assert scaler.is_enabled() == (dtype == "float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_trains_the_same_model_in_any_dtype(tiny, dtype):
    agree(cached_trajectory(tiny("naive", dtype=dtype)), cached_trajectory(tiny("naive")), TOLERANCE["amp"])


def stream_dtypes(gpt):
    """Collects the dtypes of what enters and leaves the model's blocks, and of its gradients."""
    seen = []

    def record(_, inputs, output):
        for tensor in (inputs[0], output):
            seen.append(tensor.dtype)
            tensor.register_hook(lambda gradient: seen.append(gradient.dtype))

    for block in gpt.blocks:
        block.register_forward_hook(record)
    return seen


STREAMS = [{}, {"dropout": 0.1, "bias": True}, RECIPE, {"activation_checkpointing": "every:1"}, {"micro_batch_size": 4}]


@pytest.mark.parametrize("keys", STREAMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_half_residual_keeps_the_stream_and_its_gradient_in_the_dtype_of_products(tiny, dtype, keys):
    for half in (False, True):
        config = tiny("naive", dtype=dtype, half_residual=half, n_layer=2, **keys)
        state = begin(config)
        seen = stream_dtypes(state[0])
        step(config, state)
        assert len(seen) >= 8 and set(seen) == {getattr(torch, dtype) if half else torch.float32}


def test_half_residual_normalizes_in_float32(tiny):
    """Only the result is rounded: sums in bfloat16 would err by a percent."""
    normalize = model.GPT(tiny(n_embd=1024)).norm
    x = (3 + torch.randn(8, 1024)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = normalize(x)
    torch.testing.assert_close(ours.double(), normalize.double()(x.double()), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("keys", [{}, {**RECIPE, "zero_init": False}], ids=["naive", "recipe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_residual_trains_the_same_model(tiny, dtype, keys):
    whole = cached_trajectory(tiny("naive", **keys))
    half = cached_trajectory(tiny("naive", "half_residual", dtype=dtype, **keys))
    assert not torch.equal(half[0], cached_trajectory(tiny("naive", dtype=dtype, **keys))[0])
    agree(half, whole, TOLERANCE["amp"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_residual_has_nearly_the_gradients_of_a_whole_stream(tiny, dtype):
    gradients = {}
    for half in (False, True):
        config = tiny("naive", dtype=dtype, half_residual=half, n_layer=4)
        gpt, *_ = state = begin(config)
        step(config, state)
        gradients[half] = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    for name, gradient in gradients[False].items():
        assert (gradients[True][name] - gradient).norm() < 0.02 * gradient.norm(), name


@pytest.mark.parametrize("dtype, stream", [("float32", "float32, as products are;"), ("bfloat16", "bfloat16;")])
def test_half_residual_says_where_it_changes_nothing(tiny, dtype, stream):
    config = tiny("naive", "half_residual", dtype=dtype)
    assert f"residual stream: {stream}" in header.choices(config, torch.device("cpu"), "")["step"]


def test_a_checkpoint_with_half_residual_is_evaluated_as_it_was_trained(tiny, tmp_path):
    keys = {"dtype": "bfloat16", "attention": "auto", "loss_chunks": "auto", "max_steps": 1, "eval_interval": 1}
    config = tiny("naive", "half_residual", **keys, out_dir=tmp_path)
    train.train(config)
    *_, row = metrics.read_metrics(tmp_path / "metrics.jsonl")
    gpt, cpu = checkpoint.load_gpt(tmp_path / "last.safetensors"), torch.device("cpu")
    assert train.evaluate(gpt, data.open_dataset(config).val, config, cpu) == row["val_loss"]


@pytest.mark.parametrize("stage, stored", [("amp", True), ("flash", False)])
def test_flash_never_stores_the_attention_weights(tiny, stage, stored):
    B, nh, T = 8, 2, 128
    seen = operators_of_a_step(tiny(stage=stage, context_length=T)).sizes
    assert (B * nh * T * T in seen) == stored
    assert (max(seen) < B * nh * T * T) != stored


def test_flash_kernel_is_named_and_one_that_cannot_run_is_refused(tiny):
    cpu = torch.device("cpu")
    for config, kernel in [
        (tiny("naive"), "matmul"),
        (tiny(attention="sdpa"), "flash"),
        (tiny(dropout=0.1), "math"),  # the CPU's flash kernel has no dropout
        (tiny(attention="flash"), "flash"),
    ]:
        train.set_up(config)
        assert machine.attention_kernel(config, cpu).startswith(kernel)
    for keys in ({"attention": "cudnn"}, {"attention": "flash", "dropout": 0.1}):
        train.set_up(tiny(**keys))
        with pytest.raises(BadInput, match="attention=sdpa"):
            machine.attention_kernel(tiny(**keys), cpu)


BLOCKS = [({"dtype": "bfloat16"}, True), ({"dtype": "float32"}, False), ({"dtype": "float16"}, False)]
BLOCKS += [({"dtype": "float32", "context_length": T}, T == 256) for T in (256, 1025)] + [({"dropout": 0.1}, False)]


@pytest.mark.parametrize("keys, active", BLOCKS, ids=str)
def test_blocks_are_used_on_a_cpu_where_they_are_faster(tiny, keys, active):
    keys = {"dtype": "bfloat16", "batch_size": 2, "compile": False, **keys}
    for stage, expected in {"flash": False, "blocks": active}.items():
        config = tiny(stage=stage, **keys)
        assert ("attend" in operators_of_a_step(config).names) == expected
        assert machine.attention_kernel(config, torch.device("cpu")).startswith("blocks") == expected


ADAMW_KERNELS = [("forloop", "addcdiv_"), ("fused", "_fused_adamw_")]


@pytest.mark.parametrize("adamw_impl, kernel", ADAMW_KERNELS)
def test_fused_adamw_calls_its_kernel_once_per_group(tiny, adamw_impl, kernel):
    config = tiny(adamw_impl=adamw_impl)
    gpt, optimizer, _ = build(config)
    for parameter in gpt.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Operators() as operators:
        optimizer.step()
    times = len(list(gpt.parameters())) if adamw_impl == "forloop" else len(optimizer.param_groups)
    assert operators.names.count(kernel) == times


def test_pad_vocab_aligns_the_head(tiny):
    assert model.GPT(tiny("naive")).head.weight.shape == (60, 16)
    assert model.GPT(tiny("naive", "pad_vocab")).head.weight.shape == (64, 16)
    assert model.GPT(tiny("naive", "pad_vocab", vocab_size=64)).head.weight.shape == (64, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_rows_never_receive_probability_or_gradient(tiny, dtype):
    config = tiny("naive", "pad_vocab", dtype=dtype)
    gpt, *_ = state = begin(config)
    for _ in range(3):
        step(config, state)
        assert (gpt.head.weight.grad[60:] == 0).all()
    assert (gpt.head.weight[60:] == 0).all()
    assert (gpt.logits(torch.randint(60, (8, 16))).softmax(-1)[..., 60:] == 0).all()


def test_a_checkpoint_loads_under_another_padding(tiny, tmp_path):
    padded, plain = tiny("naive", "pad_vocab"), tiny("naive")
    source, *others = begun = begin(padded)
    step(padded, begun)
    progress = {"step": 1, "best_val_loss": 9.0, "best_step": 1, "interval_loss": 0.0, "interval_steps": 0}
    state = whole(*checkpoint.snapshot(padded, {"tokenizer": {}, "data": {}}, source, *others, progress))
    write_state(tmp_path / "a.safetensors", state)
    target = model.GPT(plain)
    checkpoint.load_weights(target, checkpoint.load(tmp_path / "a.safetensors"), "a.safetensors")
    assert torch.equal(target.head.weight, source.head.weight[:60])
    assert target.head.weight is target.token_embedding.weight
    with pytest.raises(BadInput, match="pad_vocab_to=64"):
        checkpoint.check_resumes(plain, state, "a.safetensors", torch.device("cpu"))


COMPILED = [({}, "GPT"), ({"shard": "full"}, "Block"), ({"optimizer_in_backward": True, "grad_clip": 0.0}, "Block")]


@pytest.mark.parametrize("keys, compiled", COMPILED, ids=str)
def test_the_model_or_its_blocks_are_compiled_and_keep_plain_names(tiny, keys, compiled):
    gpt, *_ = build(tiny(**keys))
    seen = {type(module).__name__ for module in gpt.modules() if module._compiled_call_impl is not None}
    assert seen == {compiled}
    assert list(gpt.state_dict()) == list(model.GPT(tiny()).state_dict())
    assert gpt.head.weight is gpt.token_embedding.weight


def test_a_compiler_failure_stops_the_run_with_its_reason(tiny, monkeypatch, tmp_path):
    def fail(*_):
        raise torch._dynamo.exc.TorchDynamoException("no room\nand so on")

    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(SystemExit, match="no room; --compile=False"):
        train.train(tiny(out_dir=tmp_path))


@pytest.mark.parametrize("stage, stored", [("naive", True), ("chunked_loss", False)])
def test_chunked_loss_never_stores_the_logits(tiny, stage, stored):
    B, T, V = 8, 16, 640
    seen = operators_of_a_step(tiny("naive", stage, vocab_size=V)).sizes
    assert (B * T * V in seen) == stored
    assert (max(seen) < B * T * V) != stored


@pytest.mark.parametrize("stage, times", [("cuda_graph", 0), ("float8", 12)])
def test_float8_multiplies_every_matrix_of_a_block_three_times(tiny, stage, times):
    """In the forward, and for the gradients of its input and of the matrix; the compiler does not hide it."""
    assert operators_of_a_step(tiny(stage=stage, compile=False)).names.count("_scaled_mm") == times


CHECKPOINTING = ["every:1", "every:2", "sqrt", "selective"]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_kind_of_checkpointing_trains_the_same_model_bit_for_bit(tiny, checkpointing):
    keys = {"dropout": 0.2, "n_layer": 5, "max_steps": 5}
    agree(
        cached_trajectory(tiny("naive", activation_checkpointing=checkpointing, **keys)),
        cached_trajectory(tiny("naive", **keys)),
        0,
    )


def kept_bytes(config):
    """Bytes that are still allocated after a forward, while its result is held for the backward."""
    gpt, *_ = begin(config)
    tokens = torch.randint(60, (8, 16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        hidden = gpt.hidden(tokens)
    assert hidden.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_checkpointing_keeps_less_for_the_backward(tiny):
    keys = {"n_layer": 9, "attention": "sdpa"}
    kept = {how: kept_bytes(tiny("naive", activation_checkpointing=how, **keys)) for how in ["none", *CHECKPOINTING]}
    assert kept["sqrt"] < kept["every:1"] < kept["selective"] < kept["none"]
    assert kept["every:1"] < kept["every:2"] < kept["none"]
    assert kept["every:1"] < kept["none"] / 5


@pytest.mark.parametrize(
    "attention, kernel", [("sdpa", "_scaled_dot_product_flash_attention_for_cpu"), ("blocks", "attend")]
)
def test_selective_checkpointing_recomputes_no_matrix_product(tiny, attention, kernel):
    times = {}
    for how in ("none", "selective", "every:1"):
        names = operators_of_a_step(tiny("naive", activation_checkpointing=how, attention=attention)).names
        times[how] = sum(name in ("mm", "addmm", "bmm", "_scaled_mm") for name in names)
        assert names.count(kernel) == (2 if how == "every:1" else 1)
    assert times["none"] == times["selective"] < times["every:1"]


@pytest.mark.slow
@pytest.mark.parametrize("shard, checkpointing", [("none", "sqrt"), ("none", "selective"), ("full", "every:1")])
def test_compiled_checkpointing_recomputes_the_same_dropout_in_the_backward(tiny, traced, checkpointing, shard):
    """The gradient must match the forward that ran: it is compared with a finite difference under one seed."""
    keys = {"compile": True, "shard": shard, "activation_checkpointing": checkpointing}
    gpt, *_ = begin(tiny("naive", dropout=0.3, **keys))
    tokens = torch.randint(60, (8, 16))

    def loss():
        torch.manual_seed(0)
        return gpt(tokens, tokens)

    loss().backward()
    weight = gpt.blocks[0].mlp.fc.weight
    gradient = weight.grad.clone()
    step = 1e-2 * gradient / gradient.norm()
    with torch.no_grad():
        weight += step
    above = loss()
    with torch.no_grad():
        weight -= 2 * step
    below = loss()
    torch.testing.assert_close((above - below).item() / 2e-2, gradient.norm().item(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("micro_batch_size, sizes", [(0, [8]), (8, [8]), (4, [4, 4]), (1, [1] * 8)])
def test_grad_accumulation_runs_micro_batches_and_updates_once(tiny, monkeypatch, micro_batch_size, sizes):
    seen, updates = [], []
    spy(monkeypatch, model.GPT, "hidden", lambda _, tokens: seen.append(len(tokens)))
    spy(monkeypatch, torch.optim.AdamW, "step", lambda *_: updates.append(1))
    trajectory(tiny("naive", micro_batch_size=micro_batch_size, max_steps=1))
    assert seen == sizes
    assert len(updates) == 1


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_grad_accumulation_weighs_tokens_not_micro_batches(tiny, micro_batch_size):
    """With padding, averaging the micro-batches' means gives another number and would fail here."""
    targets = torch.randint(60, (8, 16))
    targets[0, 1:] = targets[5, 3:] = model.IGNORE
    results = []
    for size in (0, micro_batch_size):
        config = tiny("naive", micro_batch_size=size)
        state = begin(config)
        loss, norm = step(config, state, targets)
        results.append([torch.tensor(loss), norm, *(parameter.grad for parameter in state[0].parameters())])
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


SETTINGS = {
    "set_to_none": st.booleans(),
    "lazy_metrics": st.booleans(),
    "num_workers": st.sampled_from([0, 1]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "half_residual": st.booleans(),
    "attention": st.sampled_from(["matmul", "sdpa", "blocks"]),
    "adamw_impl": st.sampled_from(["forloop", "fused"]),
    "pad_vocab_to": st.sampled_from([1, 8, 64]),
    "float8": st.booleans(),
    "loss_chunks": st.integers(0, 9),
    "activation_checkpointing": st.sampled_from(["none", "every:1", "every:2", "sqrt", "selective"]),
    "micro_batch_size": st.sampled_from([0, 1, 2, 4, 8]),
}


@pytest.mark.slow
@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(settings=st.fixed_dictionaries(SETTINGS))
def test_any_combination_trains_the_same_model(tiny, settings):
    """Over 8 updates; each stage alone does so over 20."""
    rounded = settings["dtype"] == "bfloat16" or settings["float8"]
    tolerance = TOLERANCE["amp"] if rounded else 5e-4
    agree(trajectory(tiny("naive", max_steps=8, **settings)), cached_trajectory(tiny("naive", max_steps=8)), tolerance)


FINISHED = {
    "with the memory stages": {"stage": "grad_accumulation"},
    "float16": {"dtype": "float16"},
    "half residual": {"dtype": "bfloat16", "half_residual": True, "n_layer": 2},
    "selective": {"activation_checkpointing": "selective", "micro_batch_size": 2},
    "float8": {"float8": True, "activation_checkpointing": "selective", "micro_batch_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("keys", FINISHED.values(), ids=FINISHED)
def test_the_finished_loop_resumes_bit_for_bit(tiny, tmp_path, keys, device):
    """With worker processes, dropout, and a stop after step 9, which ends no interval."""
    if device == "cuda":
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS has run before
        keys = {"device": "cuda", "deterministic": True, **GPU_SIZES, **keys}
    keys = {
        "compile": False,
        "num_workers": 2,
        "dropout": 0.2,
        "log_interval": 4,
        "eval_interval": 0,
        "lr_decay_steps": STEPS,
        **keys,
    }
    train.train(tiny(out_dir=tmp_path / "whole", **keys))
    train.train(tiny(out_dir=tmp_path / "parts", max_steps=9, **keys))
    train.train(tiny(out_dir=tmp_path / "parts", init_from="resume", **keys))
    whole, parts = (checkpoint.load(tmp_path / run / "last.safetensors") for run in ("whole", "parts"))
    for part in ("model", "optimizer", "scaler", "generators", "progress"):
        torch.testing.assert_close(whole[part], parts[part], rtol=0, atol=0)


def test_several_processes_without_ddp_are_refused(tiny, monkeypatch):
    for name in parallel.LAUNCHED:
        monkeypatch.setenv(name, "2")
    with pytest.raises(BadInput, match=r"torchrun.*ddp=True"):
        train.set_up(tiny(ddp=False))


def overwrite_outputs(monkeypatch):
    """Makes every forward fill the previous step's loss and gradients with NaN: a CUDA graph reuses their memory."""
    build_model, outputs = train.build_model, []

    def overwrite(gpt, _):
        while outputs:
            outputs.pop().fill_(math.nan)

    def build_spoiled(config, device):
        gpt = build_model(config, device)
        gpt.register_forward_pre_hook(overwrite)
        gpt.register_forward_hook(lambda _, inputs, loss: outputs.append(loss.detach()))
        for parameter in gpt.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: outputs.append(p.grad))
        return gpt

    monkeypatch.setattr(train, "build_model", build_spoiled)


@pytest.mark.parametrize("keys", [{"lazy_metrics": True}, {"optimizer": "muon"}, {"dtype": "float16"}], ids=str)
def test_no_step_reads_an_output_of_a_previous_step(tiny, tmp_path, monkeypatch, keys):
    """As CUDA graphs require, in training, logging, evaluating and saving."""
    keys = {"set_to_none": True, "log_interval": 3, "eval_interval": 4, "eval_windows": 9, "save_interval": 5, **keys}
    train.train(tiny("naive", out_dir=tmp_path / "kept", **keys))
    overwrite_outputs(monkeypatch)
    train.train(tiny("naive", out_dir=tmp_path / "overwritten", **keys))
    figures = [
        [{key: row.get(key) for key in ("train_loss", "val_loss", "grad_norm")} for row in rows]
        for rows in (metrics.read_metrics(tmp_path / run / "metrics.jsonl") for run in ("kept", "overwritten"))
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 10


@needs_gpu
@pytest.mark.parametrize(
    "keys",
    [{}, {"activation_checkpointing": "every:1"}, {"micro_batch_size": 2}, {"compile": False}, {"optimizer": "muon"}],
    ids=str,
)
def test_on_a_gpu_a_recorded_step_trains_logs_evaluates_and_resumes(tiny, tmp_path, keys):
    keys = {"device": "cuda", "log_interval": 3, "eval_interval": 4, **GPU_SIZES, **keys}
    figures = {}
    for recorded in (False, True):
        run = {"out_dir": tmp_path / str(recorded), "cuda_graph": recorded, "save_interval": 5, **keys}
        torch._dynamo.reset()
        train.train(tiny(max_steps=STEPS // 2, lr_decay_steps=STEPS, **run))
        train.train(tiny(init_from="resume", **run))
        rows = metrics.read_metrics(tmp_path / str(recorded) / "metrics.jsonl")
        figures[recorded] = torch.tensor([[row.get("train_loss", 0.0), row.get("val_loss", 0.0)] for row in rows])
    torch.testing.assert_close(*figures.values(), atol=TOLERANCE["amp"], rtol=0)


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_a_recorded_step_launches_one_graph_and_draws_new_dropout(tiny, compile):
    config = tiny(learning_rate=0, min_lr=0, device="cuda", compile=compile, dropout=0.2, **GPU_SIZES)
    state = begin(config)
    batch = Batch(*torch.randint(60, (2, 8, 64), device="cuda"))
    losses = [float(train.train_step(*state, batch, 0.0, config)[0]) for _ in range(6)]
    assert len(set(losses)) == 6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train.train_step(*state, batch, 0.0, config)
    names = [event.name for event in profiler.events()]
    assert names.count("cudaGraphLaunch") == 1 and not any(name == "aten::embedding" for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_the_finished_loop_compiles_into_one_graph_and_evaluates(tiny, tmp_path, dtype, request):
    """Generates code once; with the scaled gradients of float16, only traces."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if dtype == "float16":
        request.getfixturevalue("traced")
    keys = {"log_interval": 5, "eval_interval": STEPS, "eval_windows": 9, "save_interval": 0, "dtype": dtype}
    train.train(tiny(out_dir=tmp_path / "finished", **keys))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # training and evaluation
    train.train(tiny("naive", out_dir=tmp_path / "naive", **keys))
    rows = [metrics.read_metrics(tmp_path / run / "metrics.jsonl") for run in ("finished", "naive")]
    for finished, naive in zip(*rows, strict=True):
        for key in ("train_loss", "val_loss"):
            assert finished.get(key, 0) == pytest.approx(naive.get(key, 0), abs=TOLERANCE["amp"])


@needs_gpu
@pytest.mark.parametrize("stage", with_torchao(STAGES))
def test_on_a_gpu_every_stage_trains_the_same_model(tiny, stage):
    on_gpu = trajectory(tiny(stage=stage, device="cuda", **GPU_SIZES))
    agree(on_gpu, cached_trajectory(tiny("naive", **GPU_SIZES)), 2 * TOLERANCE["amp"])


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_on_a_gpu_every_attention_kernel_trains_the_same_model(tiny, attention, dtype):
    keys = {"attention": attention, "dtype": dtype, "device": "cuda", **GPU_SIZES}
    agree(trajectory(tiny("naive", **keys)), cached_trajectory(tiny("naive", **GPU_SIZES)), 2 * TOLERANCE["amp"])
