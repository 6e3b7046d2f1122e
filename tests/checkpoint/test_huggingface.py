"""GPT-2s of transformers are read and written: equal logits, equal greedy text; others are refused in one line."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, tiny, write_folder
from safetensors.torch import load_file, save_file

import sample
import train
from model import GPT
from nanoladder import checkpoint, infer
from nanoladder.checkpoint import huggingface
from nanoladder.data.tokenizer import build_tokenizer
from nanoladder.errors import BadInput

SHAPES = [  # n_layer, n_head, n_embd, vocab_size, positions
    (1, 1, 8, 57, 7),
    (2, 3, 12, 257, 33),
    (3, 5, 20, 50257, 7),
]


def random_gpt2(n_layer=2, n_head=2, n_embd=16, vocab_size=57, n_positions=7, **keys):
    """A GPT-2 of transformers, with weights and biases large enough for any mistake to show."""
    from transformers import GPT2Config, GPT2LMHeadModel

    keys = {"bos_token_id": None, "eos_token_id": None, **keys}
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=n_positions, **keys)).eval()
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


def likeliest(model, prompt, n):
    """The ids that greedy generation appends, with a cache that takes our model over."""
    vocabulary = {"n_vocab": model.config.vocab_size, "special_tokens_set": ()}
    tokenizer = SimpleNamespace(**vocabulary, decode_single_token_bytes=lambda token: b"")
    text = infer.Text(tokenizer, prompt, torch.Generator(), n)
    for _ in infer.generate(infer.CachedGPT(model, 1, len(prompt) + n), [text], infer.Sampling(temperature=0)):
        pass
    return text.tokens[len(prompt) :]


def generated(model, prompt, n):
    """The same with transformers."""
    tokens = torch.tensor([prompt])
    ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, do_sample=False)
    return ids[0, len(prompt) :].tolist()


# -- both ways


@pytest.mark.parametrize("n_layer, n_head, n_embd, vocab_size, positions", SHAPES)
def test_reading_and_writing_keep_logits_and_greedy_text(n_layer, n_head, n_embd, vocab_size, positions, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = random_gpt2(n_layer, n_head, n_embd, vocab_size, positions)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert_equal_logits(ours, theirs)
    prompt = tokens_for(theirs)[0, :2].tolist()
    text = generated(theirs, prompt, positions - 2)
    assert likeliest(load(tmp_path / "theirs"), prompt, positions - 2) == text and len(set(text)) > 1
    huggingface.write(tmp_path / "ours", checkpoint.load_model(f"hf:{tmp_path}/theirs"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs) and back.dtype == torch.float32
    assert_equal_logits(ours, back)
    assert generated(back, prompt, positions - 2) == text


@pytest.mark.parametrize("pad_vocab_to, bias", [(64, False), (64, True), (1, False)])
def test_a_model_of_ours_is_written(pad_vocab_to, bias, tmp_path):
    from transformers import AutoModelForCausalLM

    config = tiny(vocab_size=57, pad_vocab_to=pad_vocab_to, bias=bias, n_head=4, context_length=9)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    if pad_vocab_to > 1:
        model.head.weight.data[57:] = 0  # the padded rows
    state = {"config": vars(config), "model": dict(model.named_parameters())}
    huggingface.write(tmp_path, state)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_equal_logits(model, theirs)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight and len(theirs.lm_head.weight) == 57
    assert theirs.config.resid_pdrop == config.dropout
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" not in names and set(names) == set(theirs.state_dict()) - {"lm_head.weight"}
    again = huggingface.read(str(tmp_path))
    assert again["config"]["bias"] == bias
    assert {name: len(weight) for name, weight in again["model"].items()} == {
        name: 57 if name == "token_embedding.weight" else len(weight) for name, weight in state["model"].items()
    }
    for name, weight in again["model"].items():
        assert torch.equal(weight, state["model"][name][: len(weight)]), name


# -- variants of the format


def test_shards(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert_equal_logits(load(tmp_path), saved[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes(dtype, copy, saved):
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, copy / "model.safetensors")
    read = huggingface.read(str(copy))["model"]
    assert {weight.dtype for weight in read.values()} == {torch.float32}
    expected = saved[1].transformer.wte.weight.to(dtype).float()
    assert torch.equal(read["token_embedding.weight"], expected)


def test_names_without_the_prefix_causal_masks_and_a_tied_head(copy, saved):
    """As in the files of gpt2 in the hub, and of older versions."""
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(copy / "model.safetensors").items()}
    for n in range(2):
        tensors[f"h.{n}.attn.bias"] = torch.ones(7, 7).tril()[None, None]
        tensors[f"h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    assert_equal_logits(load(copy), saved[1])


# -- refusals


def edit(folder, **changes):
    """Changes entries of config.json; removes those of None if it would be the first such entry."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "llama"}, ['model_type="llama"', 'expected "gpt2"']),
        ({"activation_function": "gelu"}, ['activation_function="gelu"', '"gelu_new" or "gelu_pytorch_tanh"']),
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=true", "expected false"]),
        ({"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon=1e-06", "expected 1e-05"]),
        ({"n_inner": 48}, ["n_inner=48", "expected null or 64"]),
        ({"n_layer": 3}, ["it has no h.2.ln_1.weight"]),
        ({"n_layer": 1}, ["does not have", "h.1."]),
        ({"n_head": 3}, ["n_head=3"]),
        ({"n_embd": 18}, ["wte.weight is torch.float32 (57, 16)", "(57, 18)"]),
        ({"n_layer": "2"}, ["n_layer='2'", "a whole number"]),
    ],
    ids=str,
)
def test_another_architecture_is_refused_in_one_line(changes, named, copy, tmp_path, refused):
    edit(copy, **changes)
    out_dir = tmp_path / "new"
    line = refused(train.main, *flags(init_from=f"hf:{copy}", out_dir=out_dir, dataset=tiny_data(tmp_path)))
    assert str(copy) in line and all(word in line for word in named), line
    assert not out_dir.exists()


def tiny_data(folder):
    return write_folder(folder / "data", [i % 57 for i in range(200)], [1] * 50, 57)


BLOCK = "transformer.h.1."


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.pop("transformer.ln_f.bias"), "it has no ln_f.bias"),
        (lambda t: t.update({f"{BLOCK}mlp.c_fc.weight": torch.zeros(64, 16)}), "h.1.mlp.c_fc.weight is torch.float32"),
        (lambda t: t.update({"score.weight": torch.zeros(2, 16)}), "does not have, such as score.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(57, 16)}), "lm_head.weight differs"),
        (lambda t: t.update({"wte.weight": torch.zeros(57, 16)}), "wte.weight comes twice"),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(change, named, copy):
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(BadInput) as refusal:
        huggingface.read(str(copy))
    assert named in str(refusal.value) and str(copy) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "file, content, named",
    [
        ("config.json", None, "config.json cannot be read (No such file or directory)"),
        ("config.json", "[]", "config.json cannot be read"),
        ("model.safetensors", None, "model.safetensors cannot be read"),
        ("model.safetensors", "x" * 1000, "model.safetensors cannot be read"),
    ],
)
def test_missing_and_damaged_files(file, content, named, copy):
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_text(content)
    with pytest.raises(BadInput) as refusal:
        huggingface.read(str(copy))
    line = str(refusal.value)
    assert named in line and "expected a folder of config.json, model.safetensors and tokenizer.json" in line
    assert str(copy) in line


def test_a_pickle_is_not_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(BadInput, match="a pickle is not read; transformers writes model"):
        huggingface.read(str(copy))


def test_damaged_shards(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="5KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(BadInput, match=shards[1].name):
        huggingface.read(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": 3}}))
    with pytest.raises(BadInput, match=r"index\.json cannot be read"):
        huggingface.read(str(tmp_path))


# -- the hub


def test_without_a_network_one_line_says_which_files_to_put_where(tmp_path, monkeypatch, refused):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    line = refused(sample.main, "--model=hf:gpt2")
    for word in ("hf:gpt2: ", "ConnectionError", "config.json", "model.safetensors", "tokenizer.json", "hf:FOLDER"):
        assert word in line
    assert "https://huggingface.co/openai-community/gpt2/tree/main" in line
    assert "https://huggingface.co/someone/x/tree/main" in refused(sample.main, "--model=hf:someone/x")
    line = refused(sample.main, "--model=hf:/no/such/folder")
    assert "hf:/no/such/folder: no such folder" in line and "https" not in line
    assert "hf:: no such folder" in refused(sample.main, "--model=hf:")  # not the folder in which it runs
    assert "hf:gpt2-xl" in refused(sample.main, "--model=gpt2-xl")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused(sample.main, "--model=hf:gpt2")


# -- starting from one


def test_another_shape_is_refused_with_every_key_to_set(saved, tmp_path, refused, run_main):
    given = {"init_from": f"hf:{saved[0]}", "out_dir": tmp_path / "new", "dataset": tiny_data(tmp_path), "n_head": 4}
    line = refused(train.main, *flags(**given))
    expected = line.partition("expected ")[2].split()
    assert expected == ["--n_head=2", "--n_embd=16", "--context_length=7"]
    assert not (tmp_path / "new").exists()
    assert run_main(train.main, *flags(**given), *expected, "--max_steps=1").code == 0  # as pasted


# -- writing


def state_of(seed=0):
    config = tiny(vocab_size=57, seed=seed)
    return {"config": vars(config), "model": dict(GPT(config).named_parameters())}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"holds notes\.txt; delete it, or choose another folder"):
        huggingface.write(tmp_path, state_of())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("function, times", [("fsync", 1), ("replace", 5), ("replace", 6), ("fsync", 11)])
def test_a_killed_process_leaves_no_half_of_a_model(function, times, tmp_path):
    """The whole folder, or none; the same command then writes it."""
    out, byte = tmp_path / "out", build_tokenizer("byte")
    if (child := os.fork()) == 0:
        try:
            original, calls = getattr(os, function), []

            def call(*arguments):
                calls.append(1)
                if len(calls) == times:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments)

            setattr(os, function, call)
            huggingface.write(out, state_of(), byte)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert out.exists() == (times == 11)  # the last thing that is done
    if not out.exists():
        huggingface.write(out, state_of(), byte)
    assert len(list(out.iterdir())) == 5 and huggingface.read(str(out))
    assert Path(out, "config.json").stat().st_mode & 0o044 == 0o044
