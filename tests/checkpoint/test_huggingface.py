"""GPT-2 models of transformers are read and written with equal logits; others are refused in one line."""

import json
import os

import pytest
import torch
from conftest import flags, refusal, tiny, write_folder
from safetensors.torch import load_file, save_file

import sample
import train
from model import GPT
from nanoladder import checkpoint
from nanoladder.checkpoint.interop import read_huggingface, write_huggingface
from nanoladder.tokenizer.encoding import build_tokenizer


def random_gpt2(n_layer=2, n_head=2, n_embd=16, vocab_size=57, n_positions=7):
    """A GPT-2 of transformers, with weights and biases large enough for any mistake to show."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=n_positions, bos_token_id=None, eos_token_id=None)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as save_pretrained writes it, and its model."""
    folder = tmp_path_factory.mktemp("saved")
    model = random_gpt2()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of that folder, to be changed."""
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder):
    """Our GPT, read from a folder."""
    return checkpoint.load_gpt(f"hf:{folder}").eval()


def tokens_for(model):
    shape = (2, model.config.n_positions)
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_equal_logits(ours, theirs):
    tokens = tokens_for(theirs)
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours.logits(tokens)[..., : expected.shape[-1]], expected, rtol=0, atol=1e-5)


# -- both ways


@pytest.mark.parametrize("n_layer, n_head, n_embd, vocab_size, positions", [(1, 1, 8, 57, 7), (2, 3, 12, 257, 33)])
def test_reading_and_writing_keep_logits(n_layer, n_head, n_embd, vocab_size, positions, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = random_gpt2(n_layer, n_head, n_embd, vocab_size, positions)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert_equal_logits(ours, theirs)
    write_huggingface(tmp_path / "ours", checkpoint.load_model(f"hf:{tmp_path}/theirs"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs) and back.dtype == torch.float32
    assert_equal_logits(ours, back)


@pytest.mark.parametrize("pad_vocab_to, bias", [(64, False), (1, True)])
def test_a_model_of_ours_is_written(pad_vocab_to, bias, tmp_path):
    from transformers import AutoModelForCausalLM

    config = tiny(vocab_size=57, pad_vocab_to=pad_vocab_to, bias=bias, n_head=4, context_length=9)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.head.weight.data[57:] = 0  # the padded rows
    state = {"config": vars(config), "model": dict(model.named_parameters())}
    write_huggingface(tmp_path, state)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_equal_logits(model, theirs)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight and len(theirs.lm_head.weight) == 57
    assert set(load_file(tmp_path / "model.safetensors")) == set(theirs.state_dict()) - {"lm_head.weight"}
    again = read_huggingface(str(tmp_path))
    assert again["config"]["bias"] == bias and again["model"].keys() == state["model"].keys()
    for name, weight in again["model"].items():
        assert torch.equal(weight, state["model"][name][: len(weight)]), name


# -- variants of the format


def test_shards_and_other_float_dtypes(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert_equal_logits(load(tmp_path), saved[1])
    for path in tmp_path.glob("*.safetensors"):
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}, path)
    read = read_huggingface(str(tmp_path))["model"]
    assert torch.equal(read["token_embedding.weight"], saved[1].transformer.wte.weight.to(torch.bfloat16).float())
    path.unlink()
    assert "it has no " in refusal(read_huggingface, str(tmp_path))


def test_reading_copies_no_weight(saved):
    """All weights lie in the mapped file, of which a process then reads only its shards."""
    weights = read_huggingface(str(saved[0]))["model"].values()
    addresses = [weight.data_ptr() for weight in weights]
    assert max(addresses) - min(addresses) < (saved[0] / "model.safetensors").stat().st_size


def test_names_without_the_prefix_causal_masks_and_a_tied_head(copy, saved):
    """As in the files of gpt2 on the hub, and of older versions."""
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(copy / "model.safetensors").items()}
    for n in range(2):
        tensors[f"h.{n}.attn.bias"] = torch.ones(7, 7).tril()[None, None]
        tensors[f"h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    assert_equal_logits(load(copy), saved[1])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrappers_and_a_tied_weight_that_is_stored_as_the_head(prefix, copy, saved):
    """As save_model of safetensors leaves a compiled or distributed model."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(copy / "model.safetensors").items()}
    tensors[f"{prefix}lm_head.weight"] = tensors.pop(f"{prefix}transformer.wte.weight")
    tie = {f"{prefix}transformer.wte.weight": f"{prefix}lm_head.weight"}
    save_file(tensors, copy / "model.safetensors", {"format": "pt", **tie})
    assert_equal_logits(load(copy), saved[1])


# -- refusals


REFUSED = [  # changes of config.json, of the tensors (None: without it), and parts of the line
    ({"model_type": "llama"}, {}, ['model_type="llama"', 'expected "gpt2"']),
    ({"activation_function": "gelu"}, {}, ['activation_function="gelu"', '"gelu_new" or "gelu_pytorch_tanh"']),
    ({"n_layer": 3}, {}, ["it has 2 blocks", "n_layer=3"]),
    ({"n_layer": 10**9}, {}, ["it has 2 blocks", "n_layer=1000000000"]),
    ({"n_embd": 18}, {}, ["wte.weight is (57, 16)"]),
    ({}, {"transformer.ln_f.bias": None}, ["it has no 'ln_f.bias'"]),
    ({}, {"transformer.h.1.mlp.c_fc.weight": torch.zeros(64, 16)}, ["h.1.mlp.c_fc.weight is (64, 16)", "(16, 64)"]),
    ({}, {"transformer.ln_f.bias": torch.zeros(16).int()}, ["its ln_f.bias is torch.int32; expected a tensor of"]),
    ({}, {"module.ln_f.bias": torch.zeros(16)}, ["under two names"]),
    ({"n_inner": 48}, {}, ["n_inner=48; expected null or 64"]),
    ({"n_positions": "7"}, {}, ['n_positions="7"; expected a whole number']),
    ({"scale_attn_weights": False}, {}, ["scale_attn_weights=false; expected true"]),
    ({"tie_word_embeddings": False}, {}, ["tie_word_embeddings=false; expected true"]),
    ({}, {"score.weight": torch.zeros(2, 16)}, ["does not have, such as score.weight"]),
    ({}, {"lm_head.weight": torch.zeros(57, 16)}, ["lm_head.weight differs"]),
    (None, {}, ["config.json"]),
    ({}, None, ["it has no model.safetensors"]),
]


@pytest.mark.parametrize("config, tensors, named", REFUSED)
def test_another_model_is_refused_in_one_line(config, tensors, named, copy, tmp_path, refused):
    for name, changes in (("config.json", config), ("model.safetensors", tensors)):
        if changes is None:
            (copy / name).unlink()
    if config:
        (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | config))
    if tensors:
        changed = load_file(copy / "model.safetensors") | tensors
        save_file({name: t for name, t in changed.items() if t is not None}, copy / "model.safetensors")
    out_dir = tmp_path / "new"
    line = refused(train.main, *flags(init_from=f"hf:{copy}", out_dir=out_dir, dataset=tiny_data(tmp_path)))
    assert str(copy) in line and all(word in line for word in named), line
    assert not out_dir.exists()


def tiny_data(folder):
    return write_folder(folder / "data", [i % 57 for i in range(200)], [1] * 50, 57)


def test_another_shape_is_refused_with_every_key_to_set(saved, tmp_path, refused, run_main):
    given = {"init_from": f"hf:{saved[0]}", "out_dir": tmp_path / "new", "dataset": tiny_data(tmp_path), "n_head": 4}
    line = refused(train.main, *flags(**given))
    expected = line.partition("expected ")[2].split()
    assert expected == ["--n_head=2", "--n_embd=16", "--context_length=7"]
    assert not (tmp_path / "new").exists()
    assert run_main(train.main, *flags(**given), *expected, "--max_steps=1").code == 0  # pasted from the error


def test_without_a_network_one_line_says_which_files_to_put_where(monkeypatch, refused):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    line = refused(sample.main, "--model=hf:gpt2")
    for word in ("hf:gpt2: ", "ConnectionError", "config.json", "model.safetensors", "tokenizer.json", "hf:FOLDER"):
        assert word in line
    assert "https://huggingface.co" in line
    assert "hf:/no/such/folder: no such folder" in refused(sample.main, "--model=hf:/no/such/folder")
    assert "hf:gpt2" in refused(sample.main, "--model=gpt2-xl")


# -- writing


def state_of(config):
    return {"config": vars(config), "model": dict(GPT(config).named_parameters())}


def test_a_non_empty_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds notes.txt; delete it" in refusal(write_huggingface, tmp_path, state_of(tiny(vocab_size=57)))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("n_written", range(4))
def test_a_partial_export_does_not_look_like_a_model(n_written, tmp_path, monkeypatch):
    paths, replace = [], os.replace

    def replace_until(source, target):
        paths.append(target)
        if len(paths) > n_written:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_until)
    state = state_of(tiny(vocab_size=256))
    assert "No space left" in refusal(write_huggingface, tmp_path / "out", state, build_tokenizer("byte"))
    assert "config.json" in refusal(read_huggingface, str(tmp_path / "out"))
