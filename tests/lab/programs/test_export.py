"""A recipe model is exported with its code: transformers computes, caches, trains and saves what model.py does."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LINE, RECIPE, tiny
from safetensors.torch import load_file

import convert
import sample
import train
from lab.programs.export import modeling
from model import GPT
from nanoladder import checkpoint
from nanoladder.checkpoint.interop import CUSTOM_KEYS, write_huggingface
from nanoladder.checkpoint.shape import RECIPE as KEYS
from nanoladder.config import DEFAULTS
from nanoladder.tokenizer.encoding import encode, load_tokenizer

ALL = {key: RECIPE[key] for key in KEYS}  # the recipe's keys that change the model
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    """Makes transformers keep its copies of the code in a temporary folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    monkeypatch.setattr(sys, "path", [*sys.path])


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def pair(folder, **keys):
    """A GPT with weights large enough for any mistake to show, and its export as loaded by transformers."""
    config = tiny(vocab_size=40, pad_vocab_to=64, **keys)
    gpt, generator = GPT(config).eval(), torch.Generator().manual_seed(0)
    for parameter in gpt.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    state = {"config": vars(config), "model": dict(gpt.named_parameters())}
    write_huggingface(folder, state, code=modeling(checkpoint.config_of(state)))
    return gpt, load(folder)


def tokens(T=16):
    return torch.randint(40, (2, T), generator=torch.Generator().manual_seed(1))


def close(one, other):
    assert one.std() > 0.1
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("key", [*KEYS, "bias", "all"])
def test_logits_are_the_models_with_and_without_a_cache_and_with_padding(key, tmp_path):
    gpt, theirs = pair(tmp_path, **(ALL if key == "all" else {key: True} if key == "bias" else {key: ALL[key]}))
    ids = tokens()
    logits = gpt.logits(ids)[..., :40]
    close(theirs(ids).logits, logits)
    half = theirs(ids[:, :8])
    steps = [theirs(ids[:, t : t + 2], past_key_values=half.past_key_values).logits for t in range(8, 16, 2)]
    close(torch.cat([half.logits, *steps], dim=1), logits)
    padded, mask = torch.cat([tokens(3), ids[:, :13]], dim=1), torch.ones(2, 16, dtype=torch.long)
    mask[:, :3] = 0
    close(theirs(padded, attention_mask=mask).logits[:, 3:], logits[:, :13])
    close(theirs(padded.flip(1), attention_mask=mask.flip(1)).logits[:, :13], gpt.logits(ids[:, :13].flip(1))[..., :40])


@torch.no_grad()
def test_generation_is_the_same_with_a_cache_in_beams_and_beside_longer_prompts(tmp_path):
    _, theirs = pair(tmp_path, **ALL)
    prompts, mask = tokens(8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :4] = 0
    for options in ({}, {"num_beams": 3}):
        texts = [theirs.generate(prompts, attention_mask=mask, use_cache=c, **GREEDY, **options) for c in (True, False)]
        assert torch.equal(*texts)
        for row, start in enumerate((4, 0)):
            alone = theirs.generate(prompts[row : row + 1, start:], **GREEDY, **options)
            assert torch.equal(texts[0][row, start:], alone[0])


def test_it_trains_as_a_model_of_transformers(tmp_path):
    gpt, theirs = pair(tmp_path, **ALL)
    ids = tokens()
    labels = ids.clone()
    labels[0, 4:] = -100
    expected = gpt(ids[:, :-1], labels[:, 1:])
    out = theirs.train()(ids, labels=labels)
    assert out.past_key_values is None
    torch.testing.assert_close(out.loss, expected / (3 + 15))
    torch.testing.assert_close(theirs(ids, labels=labels, num_items_in_batch=36).loss, expected / 36)
    assert [type(each) for each in theirs(ids, labels=labels, return_dict=False)] == [torch.Tensor] * 2
    expected.backward()
    (out.loss * 18).backward()
    for name, parameter in theirs.model.named_parameters():  # without the padded rows
        torch.testing.assert_close(parameter.grad, gpt.get_parameter(name).grad[: len(parameter)], rtol=1e-4, atol=1e-5)


def test_a_new_model_of_transformers_has_our_initial_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    _, theirs = pair(tmp_path, **ALL, zero_init=True, seed=7)
    fresh = AutoModelForCausalLM.from_config(theirs.config, trust_remote_code=True).model
    ours = GPT(tiny(vocab_size=40, **ALL, zero_init=True, seed=7))
    assert all(torch.equal(weight, fresh.get_parameter(name)) for name, weight in ours.named_parameters())


def test_bfloat16_keeps_angles_in_float32(tmp_path):
    gpt, _ = pair(tmp_path, **ALL)
    theirs = load(tmp_path, dtype=torch.bfloat16).model
    ours, theirs_rotary = (part.blocks[1].attention.rotary for part in (gpt, theirs))
    assert torch.equal(theirs_rotary.cos, ours.cos) and torch.equal(theirs_rotary.sin, ours.sin)
    assert theirs.smear.dtype == torch.bfloat16


def test_unsupported_calls_are_refused(tmp_path):
    _, theirs = pair(tmp_path, **ALL)
    for refused, words, options in (
        (tokens(17), "17 tokens; expected at most context_length=16", {}),
        (tokens(), r"has the shape \(2, 3\); expected \(2, 16\)", {"attention_mask": torch.ones(2, 3)}),
    ):
        with pytest.raises(ValueError, match=words):
            theirs(refused, **options)
    with pytest.raises(ValueError, match="a StaticCache as past_key_values; expected a DynamicCache"):
        theirs.generate(tokens(4), cache_implementation="static", **GREEDY)
    with pytest.raises(NotImplementedError, match="set_input_embeddings"):
        theirs.resize_token_embeddings(50)


def test_the_code_is_specialized_to_the_model():
    """It has no branch on our config keys, and no name of this project."""
    for keys in ({}, ALL):
        tree = ast.parse(modeling(tiny(vocab_size=40, **keys)))
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        read = {node.attr for node in attributes if ast.unparse(node.value).endswith("config")}
        assert read & DEFAULTS.keys() <= set(CUSTOM_KEYS)
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} == {"functools", "math", "torch", "transformers", "zlib"}


ALONE = """
import importlib.util, json, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not any(importlib.util.find_spec(name) for name in ("nanoladder", "lab", "model"))
ids, texts, tensors = torch.tensor(json.loads(sys.argv[1])), [], {}
for folder in ("hf", "again"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained("again")
    tokenizer.save_pretrained("again")
    tensors[folder] = model(ids).logits.detach()
    prompts = tokenizer(["the ca", "on the"], return_tensors="pt")
    for use_cache in (True, False):
        out = model.generate(**prompts, max_new_tokens=10, do_sample=False, use_cache=use_cache)
        texts.append([tokenizer.decode(row) for row in out])
save_file(tensors, "logits.safetensors")
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_a_folder_works_where_this_project_is_not_installed(dense, tmp_path, run_main):
    keys = {"max_steps": 40, "context_length": 40, "save_interval": 40, "pad_vocab_to": 64}
    config = tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), **{**RECIPE, **keys})
    train.train(config)
    said = run_main(convert.main, f"--out_dir={config.out_dir}", "--checkpoint=last", f"--output={tmp_path / 'hf'}")
    assert said.code == 0 and "modeling_nanoladder.py" in said.out and "trust_remote_code=True" in said.out
    encoding = load_tokenizer(config.out_dir)
    ids = [encode(encoding, LINE)[:40]]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, json.dumps(ids)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = checkpoint.load_gpt(Path(config.out_dir, "last.safetensors")).eval().logits(torch.tensor(ids))
    expected = expected[..., : checkpoint.load_gpt(Path(config.out_dir, "last.safetensors")).config.vocab_size]
    for logits in load_file(tmp_path / "logits.safetensors").values():
        close(logits, expected.detach())
    source = [f"--out_dir={config.out_dir}", "--checkpoint=last", "--device=cpu", "--dtype=float32"]
    words = ["--prompt=the ca", "--prompt=on the", "--temperature=0", "--max_new_tokens=10"]
    own = run_main(sample.main, *source, *words).out
    texts = json.loads(result.stdout.splitlines()[-1])
    assert all(own == "".join(f"--- prompt {i}\n{text}\n" for i, text in enumerate(each, 1)) for each in texts)
