"""nanoGPT's ckpt.pt: the same logits, and nothing in the file is executed. transformers is the reference."""

import pytest
import torch
import transformers
from conftest import Call, flags, refusal

import train
from model import GPT
from nanoladder import checkpoint

V = 17  # as in the folder `dense`
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16}
ODD = {"n_layer": 3, "n_head": 5, "n_embd": 35, "n_positions": 7}


def reference(bias=True, vocab_size=V, **shape):
    """A GPT-2 of transformers with large random weights; without bias, its biases are 0."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocab_size, **SHAPE | shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("bias") and not bias:
                parameter.zero_()
    return model


def saved_by_nanogpt(gpt2, bias=True):
    """The dict that nanoGPT would save of a GPT-2. Its matrices are (out, in), those of transformers (in, out)."""
    model = {}
    for name, tensor in gpt2.state_dict().items():
        if bias or not name.endswith("bias"):
            linear = tensor.dim() == 2 and ".h." in name
            model[name] = tensor.T.contiguous() if linear else tensor
    c = gpt2.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "block_size": c.n_positions}
    return {
        "model": model,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "model_args": {**shape, "bias": bias, "vocab_size": c.vocab_size, "dropout": 0.0},
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char", "compile": True},
    }


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of nanoGPT as a dict, and the path at which a test saves it."""
    return saved_by_nanogpt(reference()), tmp_path / "ckpt.pt"


def imported(path):
    state = checkpoint.load_model(str(path))
    model = GPT(checkpoint.config_of(state))
    checkpoint.load_weights(model, state, path)
    return model.eval()


@pytest.mark.parametrize("bias, shape", [(True, SHAPE), (False, ODD)])
def test_logits_are_those_of_the_same_weights(shape, bias, tmp_path):
    gpt2 = reference(bias, **shape)
    torch.save(saved_by_nanogpt(gpt2, bias), tmp_path / "ckpt.pt")
    model, tokens = imported(tmp_path / "ckpt.pt"), torch.randint(V, (3, 7))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), gpt2(tokens).logits, atol=1e-5, rtol=0)


def test_a_compiled_model_and_the_mask_of_an_older_one(saved):
    """torch.compile and DDP prefix every name; without fused attention each block also has its causal mask."""
    state, path = saved
    expected = state["model"]
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 16, 16).tril() for n in range(2)}
    state["model"] = {f"module._orig_mod.{name}": tensor for name, tensor in (expected | masks).items()}
    torch.save(state, path)
    found = checkpoint.load_model(str(path))["model"]
    assert torch.equal(found["blocks.1.mlp.fc.weight"], expected["transformer.h.1.mlp.c_fc.weight"])


def test_padding_of_gpt2_s_vocabulary_is_not_part_of_it(tmp_path):
    """nanoGPT counts 50304 tokens; a run on GPT-2's 50257 tokens takes these, whatever its own padding."""
    gpt2 = reference(n_layer=1, n_embd=4, vocab_size=50304)
    torch.save(saved_by_nanogpt(gpt2), tmp_path / "ckpt.pt")
    model = imported(tmp_path / "ckpt.pt")
    assert (model.config.vocab_size, len(model.head.weight)) == (50257, 50304)
    tokens = torch.randint(50257, (1, 16))
    with torch.no_grad():
        theirs = gpt2(tokens).logits[..., :50257]
        torch.testing.assert_close(model.logits(tokens)[..., :50257], theirs, atol=1e-5, rtol=0)


def test_before_february_2023_biases_were_not_an_argument(saved):
    state, path = saved
    del state["model_args"]["bias"]
    torch.save(state, path)
    found = checkpoint.load_model(str(path))
    assert found["config"]["bias"] and "blocks.1.mlp.fc.bias" in found["model"]


# -- bad input


def test_a_pickled_object_is_refused_and_not_constructed(saved, tmp_path, dense, refused):
    state, path = saved
    torch.save(state | {"config": Call(tmp_path / "made")}, path)
    line = refused(train.main, *flags(dataset=dense, out_dir=tmp_path / "run", bias=True, init_from=path))
    assert "could run code" in line and str(path) in line
    assert not (tmp_path / "made").exists() and not (tmp_path / "run").exists()


DAMAGE = [
    (lambda state: state.pop("model"), "it has no 'model'"),
    (lambda state: state["model"].pop("transformer.wpe.weight"), "it has no 'wpe.weight'"),
    (lambda state: state["model_args"].pop("block_size"), "it has no 'block_size'"),
    (lambda state: state["model_args"].update({"n_head": 5}), "n_head=5"),
    (lambda state: state["model_args"].update({"n_layer": 10**9}), "it has 2 blocks, where its config says n_layer=10"),
    (lambda state: state["model"].update({"transformer.wpe.weight": 3}), "its wpe.weight is int; expected a tensor"),
    (lambda state: state["model"].update({"transformer.wpe.weight": torch.zeros(16, 3)}), "is (16, 3), where its con"),
    (lambda state: state.clear(), "it has no 'model_args'"),
]


@pytest.mark.parametrize("change, reason", DAMAGE)
def test_damage_is_named(change, reason, saved):
    state, path = saved
    change(state)
    torch.save(state, path)
    line = refusal(checkpoint.load_model, str(path))
    assert reason in line and str(path) in line
