"""Generates text from a trained model: python sample.py --out_dir=out/x --prompt="def " """

import contextlib
import sys
import time
from pathlib import Path

import torch

from nanoladder import checkpoint, files, machine
from nanoladder.data.tokenizer import encode, end_of_text
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.infer import CachedGPT, Sampling, Text, describe_speed, generate, quantize, require_gain

LONGEST_PROMPT = 2**24  # bytes


def main(argv):
    options = parse(argv)
    prompts = read_prompts(options)
    device = machine.choose_device(options.device)
    if options.quantize:
        require_gain(device, len(prompts) * options.num_samples, options.compile)
    source = options.model or checkpoint.best_or_last(options.out_dir, options.checkpoint)
    gpt = checkpoint.load_gpt(source)
    tokenizer = checkpoint.tokenizer_of(source, gpt.config.vocab_size)
    gpt.to(device, machine.choose_dtype(options.dtype, device))
    if options.quantize:
        quantize(gpt)
    if options.interactive:
        return converse(prepare(gpt, options.num_samples, gpt.config.context_length, options), tokenizer, options)
    starts = [to_tokens(prompt, tokenizer) for prompt in prompts]
    for number, start in enumerate(starts, 1):
        if len(start) > gpt.config.context_length:
            tell(f"prompt {number} has {len(start):,} tokens; the model sees the last {gpt.config.context_length:,}")
    n_tokens = min(max(map(len, starts)) + options.max_new_tokens, gpt.config.context_length)
    model = prepare(gpt, len(prompts) * options.num_samples, n_tokens, options)
    write(model, tokenizer, list(zip(prompts, starts, strict=True)), options)


def parse(argv):
    parser = Parser(prog="sample.py", description="Generates text from a trained model.", allow_abbrev=False)
    add = parser.add_argument
    add("--out_dir", default="out/quickstart", help="run folder (default: %(default)s)")
    add("--checkpoint", default="best", help="best or last (default: %(default)s)")
    add("--model", help="a model from elsewhere instead: hf:gpt2, hf:FOLDER or a ckpt.pt of nanoGPT")
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; -: stdin; several: one batch")
    add(
        "--prompt_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file to continue, without its last newline",
    )
    add("--interactive", action="store_true", help="continue line after line as they are typed")
    add("--num_samples", type=int, default=1, help="samples of each prompt, in one batch (default: %(default)s)")
    add("--max_new_tokens", type=int, default=500, help="tokens per sample (default: %(default)s)")
    add("--stop", default="", metavar="TEXT", help="end a sample before this text")
    add("--temperature", type=float, default=0.8, help="0: most likely token (default: %(default)s)")
    add("--top_k", type=int, default=0, help="sample from the k most likely tokens (default: 0, all)")
    add("--top_p", type=float, default=0.95, help="nucleus sampling, total probability (default: 0.95)")
    add("--seed", type=int, default=1337, help="of a prompt's first sample, then + 1 each (default: 1337)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    add("--dtype", default="auto", choices=dtypes, help="of weights and cache; auto: half precision if native")
    add("--quantize", choices=["int8"], help="weights of one byte: faster with --compile, for one sample at a time")
    add("--compile", action="store_true", help="compile the step of one token: slower to start, faster to write")
    options = parser.parse_args(argv)
    for condition, message in [
        (options.num_samples >= 1, "num_samples: expected at least 1"),
        (options.max_new_tokens >= 1, "max_new_tokens: expected at least 1"),
        (options.temperature >= 0, "temperature: expected 0 or more"),
        (options.top_k >= 0, "top_k: expected 0 or more"),
        (0 < options.top_p <= 1, "top_p: expected above 0, up to 1"),
        (options.prompt.count("-") <= 1, "prompt=-: expected once, since stdin is read once"),
        (not options.interactive or not (options.prompt or options.prompt_file), "interactive: expected no prompts"),
    ]:
        if not condition:
            raise BadInput(message)
    return options


def read_prompts(options):
    """Texts to continue, in order: those of --prompt, of --prompt_file, or an empty one. Raises BadInput."""
    found = []
    for prompt in options.prompt:
        text = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
        found.append(decode(text, f"prompt={prompt}"))
    for path in options.prompt_file:
        try:
            content = files.read(Path(path), LONGEST_PROMPT)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"prompt_file={path} cannot be read ({reason}); expected a text file") from None
        found.append(decode(content, f"prompt_file={path}").removesuffix("\n"))
    return found or [""]


def decode(content, name):
    """UTF-8 bytes as text. Raises BadInput if they are not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: byte {error.start} is no UTF-8; expected text in UTF-8") from None


def to_tokens(prompt, tokenizer):
    """Token ids of a prompt. An empty one starts a new document, as in the training data."""
    end = end_of_text(tokenizer)
    return encode(tokenizer, prompt) or [0 if end is None else end]


def prepare(gpt, n_rows, n_tokens, options):
    """A CachedGPT for n_rows texts of n_tokens tokens; compiled, if asked for. Raises BadInput if it does not fit."""
    device, element = gpt.norm.weight.device, gpt.norm.weight.element_size()
    needed, free = 2 * gpt.config.n_layer * gpt.config.n_embd * n_rows * n_tokens * element, machine.free_memory(device)
    if needed > free:
        raise BadInput(
            f"{n_rows} samples of up to {n_tokens} tokens need a cache of {needed / 1e9:.1f} GB, of which "
            f"{free / 1e9:.1f} are free; expected fewer samples, or a smaller --max_new_tokens"
        )
    if options.compile:
        machine.find_compiler(device)
        tell("compiling the step of one token ...")
    return CachedGPT(gpt, n_rows, n_tokens, options.compile)


def write(model, tokenizer, prompts, options):
    """Prints the samples of each prompt, (text, token ids), in order, the first as it grows; then the speed."""
    texts, headings = [], []
    for prompt, start in prompts:
        for number in range(options.num_samples):
            generator = torch.Generator(model.device).manual_seed(options.seed + number)
            texts.append(Text(tokenizer, start, generator, options.max_new_tokens, options.stop))
            headings.append(prompt)
    if len(texts) > 1:
        headings = [f"--- sample {number}\n{prompt}" for number, prompt in enumerate(headings, 1)]
    print(headings[0], end="", flush=True)
    n_rounds, shown = -1, 0  # the first round runs the prompts
    for _ in generate(model, texts, Sampling(options.temperature, options.top_k, options.top_p)):
        n_rounds += 1
        if n_rounds == 0:
            begun, start = sum(len(text.tokens) for text in texts), time.perf_counter()
        shown = show(texts, headings, shown)
    if n_rounds:
        n_tokens = sum(len(text.tokens) for text in texts) - begun
        tell(describe_speed(model, n_tokens, n_rounds, time.perf_counter() - start))


def show(texts, headings, shown):
    """Prints new characters of that text, and of those after it once it has ended. Returns the first that goes on."""
    while shown < len(texts):
        print(texts[shown].take(), end="", flush=True)
        if not texts[shown].ended:
            break
        shown += 1
        print("\n" + "".join(headings[shown : shown + 1]), end="", flush=True)
    return shown


def converse(model, tokenizer, options):
    """Continues each line that is typed, until the end of the input. Ctrl-C ends a sample."""
    with contextlib.suppress(ImportError):  # Windows has none, and its console keeps a history
        import readline  # noqa: F401  input() then edits lines and keeps a history

    while True:
        try:
            prompt = input("> ")
            write(model, tokenizer, [(prompt, to_tokens(prompt, tokenizer))], options)
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print()
        except BadInput as error:
            tell(f"error: {error}")


def tell(line):
    """Prints a line beside the samples, to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main)
