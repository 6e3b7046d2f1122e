"""Generates text from a checkpoint: python sample.py --out_dir=out/x --prompt="def " """

import codecs

import torch

from nanoladder import checkpoint
from nanoladder.data.tokenizer import encode, end_of_text
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.machine import choose_device, double


def main(argv):
    options = parse(argv)
    device = choose_device(options.device)
    source = options.model or checkpoint.best_or_last(options.out_dir, options.checkpoint)
    model = checkpoint.load_gpt(source).to(device).eval()
    tokenizer = checkpoint.tokenizer_of(source, model.config.vocab_size)
    stop = end_of_text(tokenizer)
    prompt = encode(tokenizer, options.prompt)
    if not prompt:  # start a new document, as in the training data
        prompt = [0] if stop is None else [stop]
    for number in range(options.num_samples):
        generator = torch.Generator(device).manual_seed(options.seed + number)
        if options.num_samples > 1:
            print(f"--- sample {number + 1}")
        print(options.prompt, end="", flush=True)
        # A character may span several tokens: print complete characters only.
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in generate(model, prompt, tokenizer.n_vocab, options, generator):
            if token == stop:
                break
            print(utf8.decode(tokenizer.decode_single_token_bytes(token)), end="", flush=True)
        print(utf8.decode(b"", final=True))


def parse(argv):
    parser = Parser(prog="sample.py", description="Generates text from a checkpoint.")
    parser.add_argument("--out_dir", default="out/quickstart", help="run folder (default: %(default)s)")
    parser.add_argument("--checkpoint", default="best", help="best or last (default: %(default)s)")
    parser.add_argument("--model", help="a model from elsewhere instead: hf:gpt2, hf:FOLDER or a ckpt.pt of nanoGPT")
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--num_samples", type=int, default=1, help="number of samples (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="tokens per sample (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: most likely token (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=0, help="sample from the k most likely tokens (default: 0, all)")
    parser.add_argument("--top_p", type=float, default=0.95, help="nucleus sampling, total probability (default: 0.95)")
    parser.add_argument("--seed", type=int, default=1337, help="of the first sample, then + 1 each (default: 1337)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    options = parser.parse_args(argv)
    for condition, message in [
        (options.num_samples >= 1, "num_samples: expected at least 1"),
        (options.max_new_tokens >= 1, "max_new_tokens: expected at least 1"),
        (options.temperature >= 0, "temperature: expected 0 or more"),
        (options.top_k >= 0, "top_k: expected 0 or more"),
        (0 < options.top_p <= 1, "top_p: expected above 0, up to 1"),
    ]:
        if not condition:
            raise BadInput(message)
    return options


@torch.no_grad()
def generate(model, prompt, n_vocab, options, generator):
    """Yields max_new_tokens token ids below n_vocab that continue the prompt's ids, one at a time."""
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)  # (1, T)
    for _ in range(options.max_new_tokens):
        window = tokens[:, -model.config.context_length :]
        logits = model.head(model.hidden(window)[:, -1])  # (1, V), of the last position only
        token = draw(logits[0, :n_vocab], options, generator)
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
        yield int(token)


def draw(logits, options, generator):
    """Samples one token id () from logits (V,): temperature, then top-k, then top-p (Holtzman et al. 2020)."""
    if options.temperature == 0:
        return logits.argmax()
    probabilities = torch.softmax((double(logits) - logits.max()) / options.temperature, dim=-1)
    probabilities, order = probabilities.sort(descending=True)
    if options.top_k:
        probabilities[options.top_k :] = 0
    before = probabilities.cumsum(0) - probabilities  # total probability of more likely tokens
    probabilities[1:][before[1:] >= options.top_p * probabilities.sum()] = 0
    return order[torch.multinomial(probabilities, 1, generator=generator)]


if __name__ == "__main__":
    run_script(main)
