"""Every optimizer follows its paper's update, keeps state of the documented size, and resumes exactly."""

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    assert_same_state,
    build,
    flags,
    needs_gpu,
    replace,
    rows,
    same,
    saved,
    state_bytes,
    tiny,
    with_torchao,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from nanoladder.checkpoint.state import plain_state
from nanoladder.data import Batch
from nanoladder.machine import precision
from nanoladder.optim import galore, lion, muon

OTHERS = ["sgd", "adafactor", "muon", "lion", "adamw8bit", "galore"]
CPU = torch.device("cpu")
WIDE = {"n_embd": 64, "vocab_size": 256, "context_length": 16}  # matrices of at least 4096 elements, as 8 bits need


def make(**keys):
    """A model, its optimizer, its scaler, and the config of all."""
    config = tiny(**WIDE, **keys)
    return *build(config), config


def batch_of(step, config):
    """A batch that depends only on the step."""
    shape = 2, config.batch_size, config.context_length
    return Batch(*torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(step)).unbind())


def steps(model, optimizer, scaler, config, n=5):
    """Trains for n steps; returns their losses and norms."""
    found = [train.train_step(model, optimizer, scaler, batch_of(n, config), 1e-3, config) for n in range(n)]
    return torch.tensor([[float(loss), float(norm)] for loss, norm in found])


def matrices(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def with_gradients(parameters, step):
    """Sets the gradients of a step, the same in every call; returns them in float64."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return [parameter.grad.double() for parameter in parameters]


# -- the updates


def test_lion_takes_the_steps_of_the_paper():
    parameters = matrices((5, 3), (4,))
    expected = [parameter.detach().double() for parameter in parameters]
    means = [torch.zeros_like(value) for value in expected]
    optimizer = lion.Lion([{"params": parameters, "weight_decay": 0.3}], 0.01)
    for step in range(4):
        gradients = with_gradients(parameters, step)
        optimizer.step()
        for i, gradient in enumerate(gradients):
            update = torch.sign(0.9 * means[i] + 0.1 * gradient)
            expected[i] = expected[i] - 0.01 * (update + 0.3 * expected[i])
            means[i] = 0.99 * means[i] + 0.01 * gradient
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (8, 8)])
def test_galore_takes_the_steps_of_the_paper(shape, monkeypatch):
    """With a new subspace at steps 1, 4 and 7, in which the moving averages continue."""
    monkeypatch.setattr(galore, "GAP", 3)
    (parameter,) = matrices(shape)
    wide = shape[0] <= shape[1]
    expected, mean, square = parameter.detach().double(), 0.0, 0.0
    optimizer = galore.GaLore([{"params": [parameter], "weight_decay": 0.3}], 0.01, (0.9, 0.95))
    for step in range(1, 8):
        (gradient,) = with_gradients([parameter], step)
        if step % 3 == 1:  # the top 2 of 8 singular vectors; their signs are arbitrary, but the same in both programs
            left, _, _ = torch.linalg.svd(parameter.grad if wide else parameter.grad.T, full_matrices=False)
            basis = left[:, :2].double()
        optimizer.step()
        low = basis.T @ gradient if wide else gradient @ basis
        mean, square = 0.9 * mean + 0.1 * low, 0.95 * square + 0.05 * low**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        change = basis @ update if wide else update @ basis.T
        assert torch.linalg.matrix_rank(change) == 2
        expected = expected - 0.01 * 0.3 * expected - 0.01 * galore.SCALE * change
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_takes_the_steps_of_torch_optim_muon(dtype, monkeypatch):
    """Wide, tall and square matrices, several of one shape. PyTorch's Muon converts only to bfloat16."""
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-3}[dtype]
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        monkeypatch.setattr(torch, "bfloat16", torch.float32)  # as PyTorch 2.15 names it
    monkeypatch.setattr(muon, "WARMUP", 1)
    monkeypatch.setattr(muon, "AT_ONCE", 2 * 8 * 20)  # the three of one shape take two products
    shapes = [(8, 20), (20, 8), (8, 20), (8, 8), (8, 20)]
    ours, theirs = matrices(*shapes), matrices(*shapes)
    optimizer = muon.Muon([{"params": ours, "weight_decay": 0.3}], tiny(), dtype)
    torchs = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for parameters, each in ((ours, optimizer), (theirs, torchs)):
            with_gradients(parameters, step)
            each.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_muon_updates_the_matrices_of_queries_keys_and_values_separately():
    (whole,), thirds = matrices((24, 8)), matrices((24, 8))[0].detach().chunk(3)
    thirds = [torch.nn.Parameter(third.clone()) for third in thirds]
    apart = muon.Muon([{"params": thirds, "weight_decay": 0.3}], tiny(polar_express=True), torch.float32)
    config = tiny(polar_express=True, split_qkv=True)
    together = muon.Muon([{"params": [whole], "weight_decay": 0.3}], config, torch.float32)
    together.split = {whole}
    for step in range(3):
        with_gradients([whole], step)
        for third, gradient in zip(thirds, whole.grad.chunk(3), strict=True):
            third.grad = gradient.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole, torch.cat(thirds))


@pytest.mark.parametrize(
    "coefficients, low, high", [(muon.NEWTON_SCHULZ, 0.6, 1.3), (muon.POLAR_EXPRESS, 0.4, 1.6)], ids=["five", "four"]
)
@pytest.mark.parametrize("shape", [(3, 16, 40), (3, 40, 16)])
def test_orthogonalized_matrices_keep_their_singular_vectors_and_have_values_near_1(shape, coefficients, low, high):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    values = left.mT @ muon.orthogonalize(coefficients, given) @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(values, torch.diag_embed(diagonal), rtol=0, atol=1e-4)
    assert diagonal.min() > low and diagonal.max() < high


@pytest.mark.parametrize("name", ["muon", "galore"])
def test_adamw_beside_another_optimizer_uses_the_config_s_learning_rate(name):
    model, optimizer, scaler, config = make(optimizer=name)
    lr = train.learning_rate(config.warmup_steps, config)
    train.train_step(model, optimizer, scaler, batch_of(0, config), lr, config)
    assert {group["lr"] for group in optimizer.param_groups} == {config.learning_rate}


@pytest.mark.parametrize("name", ["adamw", "muon", "galore", "adamw8bit"])
def test_beta1_applies_to_adamw_and_to_optimizers_derived_from_it(name):
    _, optimizer, _, config = make(optimizer=name, beta1=0.8)
    assert {group["betas"] for group in optimizer.param_groups if "betas" in group} == {(0.8, config.beta2)}


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(monkeypatch):
    model, optimizer, scaler, config = make(optimizer="muon", adamw_impl="fused", dtype="bfloat16")
    twin, *_ = make()
    inside = {f"blocks.{name}" for name, parameter in model.blocks.named_parameters() if parameter.dim() == 2}
    parts = [[p for name, p in twin.named_parameters() if (name in inside) == hidden] for hidden in (True, False)]
    decayed = config.weight_decay
    decay = [decayed if p is twin.head.weight else 0.0 for p in parts[1]]
    pair = [
        torch.optim.Muon(parts[0], lr=1e-3, weight_decay=decayed, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [p], "weight_decay": d} for p, d in zip(parts[1], decay, strict=True)],
            betas=(config.beta1, config.beta2),
            fused=True,
        ),
    ]
    monkeypatch.setattr(muon, "WARMUP", 2)
    for step, momentum in enumerate([0.95 - 0.5 * (0.95 - 0.85), 0.95, 0.95]):
        train.train_step(model, optimizer, scaler, batch_of(step, config), 1e-3, config)
        for parameter, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = parameter.grad.clone()
        pair[0].param_groups[0]["momentum"] = momentum
        for each in pair:
            each.step()
    assert len(inside) == 8
    assert same(model.state_dict(), twin.state_dict())


def test_8_bit_state_trains_almost_like_32_bit_state():
    losses = []
    for name in ("adamw", "adamw8bit"):
        model, optimizer, scaler, config = make(optimizer=name)
        losses.append(steps(model, optimizer, scaler, config, 20)[:, 0])
        kinds = [hasattr(state["exp_avg"], "codes") for state in optimizer.state.values() if "exp_avg" in state]
        assert any(kinds) == (name == "adamw8bit")
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, atol=1e-2, rtol=0)


class ProductDtypes(TorchDispatchMode):
    """Collects the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in ("bmm", "baddbmm"):
            self.seen.add(args[0].dtype)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, native", [("auto", False), ("auto", True), ("float32", True), ("bfloat16", True)])
def test_muon_multiplies_in_the_dtype_of_the_model(dtype, native, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: native)
    model, optimizer, *_ = make(optimizer="muon", dtype=dtype)
    gradients = with_gradients(list(model.parameters()), 0)
    with ProductDtypes() as products:
        optimizer.step()
    assert products.seen == {torch.bfloat16 if native and dtype != "float32" else torch.float32}
    kept = [parameter.grad.double() for parameter in model.parameters()]
    assert same(dict(enumerate(kept)), dict(enumerate(gradients)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_learns_at_the_learning_rate_that_suits_adamw(name):
    config = tiny(**WIDE, optimizer=name, max_steps=60, warmup_steps=6, learning_rate=3e-3, min_lr=3e-4)
    model, optimizer, scaler = build(config)
    batch = batch_of(0, config)
    losses = [
        float(train.train_step(model, optimizer, scaler, batch, train.learning_rate(step, config), config)[0])
        for step in range(1, 61)
    ]
    assert losses[-1] < losses[0] - 1 and all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "sgd"])  # its decay goes through the momentum
def test_weight_decay_shrinks_the_weights_as_in_adamw(name):
    """With zero gradients, only the decay changes the weights."""
    model, optimizer, _, config = make(optimizer=name, learning_rate=1e-2, weight_decay=0.5)
    before = model.blocks[0].mlp.fc.weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * group.get("lr_factor", 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.blocks[0].mlp.fc.weight.detach(), before * (1 - 1e-2 * 0.5), rtol=1e-5, atol=1e-7)


# -- the state


MUCH = {"n_embd": 128, "vocab_size": 256, "context_length": 32}  # norms and positions are negligible
BYTES = {"adamw": 8, "sgd": 4, "lion": 4, "adafactor": 0.049, "adamw8bit": 2.088}
BYTES |= {"muon": 4.348, "galore": 2.827}  # including AdamW's state for embeddings and norms


@pytest.mark.parametrize("name, expected", BYTES.items())
def test_the_state_takes_its_documented_bytes_per_parameter(name, expected):
    config = tiny(**MUCH, optimizer=name)
    model, optimizer, scaler = build(config)
    steps(model, optimizer, scaler, config, 1)
    assert state_bytes(optimizer) / model.n_params == pytest.approx(expected, rel=0.01)


# The smallest width has matrices whose product depends on their memory layout
@pytest.mark.parametrize(
    "keys",
    [
        *({"optimizer": name, "n_embd": 64} for name in OTHERS),
        {"optimizer": "galore", "n_embd": 8},
        {"optimizer_in_backward": True, "grad_clip": 0.0},
    ],
    ids=str,
)
def test_every_optimizer_resumes_bit_for_bit(keys, dense, tmp_path, monkeypatch):
    monkeypatch.setattr(galore, "GAP", 4)  # new subspaces at steps 1, 5 and 9
    keys = {"dataset": str(dense), "pad_vocab_to": 64, "dropout": 0.2, **keys}
    one = tiny(**keys, out_dir=str(tmp_path / "one"), max_steps=10, save_interval=7)
    two = replace(one, out_dir=str(tmp_path / "two"), init_from="resume")
    train.train(one)
    later = shutil.ignore_patterns("last.*", "step_00000010.*")
    shutil.copytree(one.out_dir, two.out_dir, ignore=later)  # as if killed after step 7
    assert [path.name for path in Path(two.out_dir).glob("*.safetensors")] == ["step_00000007.safetensors"]
    train.train(two)
    assert rows(one, "train_loss", "grad_norm") == rows(two, "train_loss", "grad_norm")
    assert_same_state(one, two)
    tensors = [leaf for leaf in tree_leaves(saved(one)) if isinstance(leaf, torch.Tensor)]
    assert {type(tensor) for tensor in tensors} == {torch.Tensor}  # the file needs no tensor subclass


# -- together with the rest of the loop


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
def test_a_float16_step_that_overflows_is_skipped_and_the_next_ones_are_not(name):
    model, optimizer, scaler, config = make(optimizer=name, dtype="float16")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    handle = model.head.weight.register_hook(lambda gradient: gradient + math.inf)
    steps(model, optimizer, scaler, config, 1)
    handle.remove()
    assert same(model.state_dict(), before) and not any(optimizer.state.values())
    assert scaler.get_scale() == 2.0**15
    half = steps(model, optimizer, scaler, config)
    torch.testing.assert_close(half, steps(*make(optimizer=name)), rtol=2e-2, atol=0)


# -- 8 bits, an extra


def test_without_torchao_one_line_says_how_to_install_it(dense, tmp_path, monkeypatch, refused):
    for name in ["torchao", *(name for name in sys.modules if name.startswith("torchao."))]:
        monkeypatch.setitem(sys.modules, name, None)
    line = refused(train.main, *flags(dataset=dense, out_dir=tmp_path / "new", optimizer="adamw8bit"))
    assert "pip install torchao" in line and not (tmp_path / "new").exists()


# -- the update in the backward


# With these keys, the backward reads weights again
LATE = {"activation_checkpointing": "every:1", "loss_chunks": 4, "attention": "sdpa"}


@pytest.mark.parametrize("keys", [LATE, *({"optimizer": name, "dropout": 0.1} for name in ["adamw", *OTHERS])], ids=str)
def test_updates_in_the_backward_equal_updates_after_it_bit_for_bit(keys, monkeypatch):
    monkeypatch.setattr(galore, "GAP", 2)
    runs, weights = [], []
    for inside in (False, True):
        model, optimizer, scaler, config = make(optimizer_in_backward=inside, grad_clip=0.0, adamw_impl="fused", **keys)
        runs.append(steps(model, optimizer, scaler, config))
        weights.append(model.state_dict())
        weights[-1] = {"weights": weights[-1], "state": plain_state(model, optimizer)}
    assert torch.equal(runs[0][:, 0], runs[1][:, 0]) and same(*weights)
    torch.testing.assert_close(runs[0][:, 1], runs[1][:, 1])  # the norms, added in another order


IMPLEMENTATIONS = [{"optimizer": "lion"}, {"optimizer": "muon"}, {"adamw_impl": "forloop"}, {"adamw_impl": "fused"}]


@pytest.mark.parametrize("keys", IMPLEMENTATIONS, ids=lambda keys: "-".join(keys.values()))
def test_updates_in_the_backward_stop_at_the_first_non_finite_gradient(keys):
    """Gradients arrive from the last layer to the first: an overflow in the middle spares the first layers."""
    model, optimizer, scaler, config = make(optimizer_in_backward=True, grad_clip=0.0, **keys)
    steps(model, optimizer, scaler, config, 2)

    def changed_by_a_step(n):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train.train_step(model, optimizer, scaler, batch_of(n, config), 1e-3, config)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}

    handle = model.blocks[1].mlp.fc.weight.register_hook(lambda gradient: gradient * math.inf)
    changed = changed_by_a_step(2)
    assert "blocks.1.mlp.proj.weight" in changed and not any(name.startswith("blocks.0") for name in changed)
    assert not changed & {"blocks.1.mlp.fc.weight", "token_embedding.weight"}
    handle.remove()
    assert len(changed_by_a_step(3)) == len(list(model.parameters()))  # the previous step left nothing behind


def test_at_most_one_gradient_exists_at_a_time():
    model, optimizer, scaler, config = make(optimizer_in_backward=True, grad_clip=0.0)
    alive = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: alive.append(any(p.grad is not None for p in model.parameters())))
    steps(model, optimizer, scaler, config, 2)
    assert len(alive) == 2 * len(list(model.parameters())) and not any(alive)


@needs_gpu
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", with_torchao(OTHERS))
def test_on_a_gpu_every_optimizer_trains_as_on_a_cpu(name, inside):
    keys = {"optimizer": name, "optimizer_in_backward": inside, "grad_clip": 0.0}
    expected = steps(*make(**keys))
    config = tiny(**WIDE, **keys)
    model, optimizer, scaler = build(config, "cuda")
    batches = (batch_of(n, config).to("cuda") for n in range(5))
    found = [train.train_step(model, optimizer, scaler, batch, 1e-3, config)[0] for batch in batches]
    torch.testing.assert_close(torch.tensor([float(loss) for loss in found]), expected[:, 0], rtol=1e-2, atol=0)
