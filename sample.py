"""Generates text from a trained model: python sample.py --out_dir=out/x --prompt=def"""

import contextlib
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

from nanoladder import checkpoint, machine
from nanoladder.entry import Parser, run_script
from nanoladder.errors import BadInput
from nanoladder.infer import USUAL, CachedGPT, Prompt, Sampling, Text, generate, heal, quantize, require_gain
from nanoladder.run.faults import explain_compiler_failure
from nanoladder.tokenizer.encoding import first_token


def main(argv):
    options = parse(argv)
    try:
        run(options, read_prompts(options))
    except (RuntimeError, MemoryError) as error:
        if machine.is_out_of_memory(error):
            tell("error: out of memory; expected fewer samples, shorter prompts or --dtype=bfloat16")
            sys.exit(3)
        explain_compiler_failure(error, options)
        raise


def run(options, prompts):
    """Loads the model and prints its continuations of the prompts. Raises BadInput."""
    device = machine.choose_device(options.device)
    if options.quantize:
        require_gain(device, len(prompts) * options.num_samples, options.compile)
    source = checkpoint.source_of(options)
    dtype = machine.choose_dtype(options.dtype, device)
    tell(f"loading {source}, in {str(dtype).removeprefix('torch.')} on {device} ...", progress=True)
    state = checkpoint.load_model(source)
    gpt, tokenizer = checkpoint.build_gpt(state, source), checkpoint.tokenizer_of(source, state)
    del state  # weights and optimizer as they were read
    gpt.to(device, dtype)
    if options.quantize:
        quantize(gpt)
    size = gpt.config.context_length
    if options.interactive:
        return converse(prepare(gpt, options.num_samples, size, options), tokenizer, options)
    starts = [read(prompt, tokenizer, size) for prompt in prompts]
    n_tokens = min(max(start.longest for start in starts) + options.max_new_tokens, size)
    model = prepare(gpt, len(prompts) * options.num_samples, n_tokens, options)
    n_new, seconds = write(model, tokenizer, prompts, starts, options)
    if n_new:
        tell(f"{n_new / seconds:,.1f} tokens/s")


def parse(argv):
    parser = Parser(prog="sample.py", description="Generates text from a trained model.", allow_abbrev=False)
    add = parser.add_argument
    checkpoint.add_source(parser)
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; -: stdin; several: one batch")
    add(
        "--prompt_file", action="append", default=[], metavar="FILE", help="a text file to continue; several: one batch"
    )
    add("--interactive", action="store_true", help="continue each line that is typed")
    add("--num_samples", type=int, default=1, help="samples of each prompt, in one batch (default: %(default)s)")
    add("--max_new_tokens", type=int, default=500, help="tokens per sample (default: %(default)s)")
    add("--stop", default="", metavar="TEXT", help="end a sample before this text")
    add("--temperature", type=float, default=USUAL.temperature, help="0: the likeliest token (default: %(default)s)")
    add("--top_k", type=int, default=USUAL.top_k, help="sample from the k likeliest tokens (default: %(default)s, all)")
    add("--top_p", type=float, default=USUAL.top_p, help="nucleus sampling, total probability (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=1337,
        help="random seed of each prompt's first sample; the next has seed + 1 (default: 1337)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    add("--dtype", default="auto", choices=dtypes, help="dtype of weights and cache; auto: half precision if native")
    add("--quantize", choices=["int8"], help="weights of one byte; only with --compile and one sample")
    words = {"nargs": "?", "const": "True", "choices": ["True", "False"]}
    add("--compile", default="False", **words, help="compile the step of one token: slower to start, faster to write")
    options = parser.parse_args(argv)
    options.compile = options.compile == "True"
    for condition, message in [
        (options.num_samples >= 1, "num_samples: expected at least 1"),
        (options.max_new_tokens >= 1, "max_new_tokens: expected at least 1"),
        (0 <= options.temperature < math.inf, "temperature: expected 0 or more, and finite"),
        (options.top_k >= 0, "top_k: expected 0 or more"),
        (0 <= options.seed < 2**63, "seed: expected 0 or more, below 2**63"),
        (0 < options.top_p <= 1, "top_p: expected above 0, up to 1"),
        (not options.interactive or not (options.prompt or options.prompt_file), "interactive: expected no prompts"),
    ]:
        if not condition:
            raise BadInput(message)
    return options


def read_prompts(options):
    """Returns the texts to continue: every --prompt, then every --prompt_file; else one empty text. Raises BadInput.

    The last newline of a file, or of stdin, is not part of the text.
    """
    try:
        stdin = sys.stdin.buffer.read().decode().removesuffix("\n") if "-" in options.prompt else ""
        texts = [stdin if prompt == "-" else prompt for prompt in options.prompt]
        texts += [Path(path).read_text(encoding="utf-8-sig").removesuffix("\n") for path in options.prompt_file]
        "".join(texts).encode()  # on the command line, other bytes are surrogates
    except (OSError, ValueError) as error:
        raise BadInput(f"prompt: {error}; expected text in UTF-8") from None
    return texts or [""]


def read(prompt, tokenizer, size):
    """Returns the Prompt of a text for a context of this size; of an empty text, one that starts a new document."""
    start = heal(tokenizer, prompt, size) if prompt else Prompt((first_token(tokenizer),))
    if len(start.tokens) > size:
        tell(f"a prompt of {len(start.tokens):,} tokens, of which the model sees the last {size:,}")
    return start


def prepare(gpt, n_rows, n_tokens, options):
    """Builds a CachedGPT for n_rows texts of n_tokens tokens, compiled if requested. Raises BadInput if too large."""
    device, element = gpt.norm.weight.device, gpt.norm.weight.element_size()
    cache, logits = 2 * gpt.config.n_layer * gpt.config.n_embd * n_tokens, gpt.config.padded_vocab_size  # of a row
    needed, free = n_rows * (cache + logits) * element, machine.free_memory(device)
    if needed > free:
        raise BadInput(
            f"{n_rows} samples of up to {n_tokens} tokens need {needed / 1e9:,.1f} GB for their cache, but "
            f"{free / 1e9:,.1f} GB are free; expected fewer samples, or a smaller --max_new_tokens"
        )
    if options.compile:
        tell("compiling the step of one token ...", progress=True)
    return CachedGPT(gpt, n_rows, n_tokens, options.compile)


def write(model, tokenizer, prompts, starts, options):
    """Prints the samples of each prompt in order, the first as it grows. starts: the Prompts.

    Returns the number of new tokens and their seconds, both without the first round, which runs the prompts.
    """
    texts, headings = [], []
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        for j in range(options.num_samples):
            generator = torch.Generator(model.device).manual_seed(options.seed + j)
            texts.append(Text(tokenizer, start, generator, options.max_new_tokens, options.stop))
            names = {f"prompt {i + 1}": len(prompts) > 1, f"sample {j + 1}": options.num_samples > 1}
            heading = ", ".join(name for name, several in names.items() if several)
            headings.append(f"--- {heading}\n{prompt}" if heading else prompt)
    print(headings[0], end="", flush=True)
    n_prefilled = started = None
    shown = 0
    for _ in generate(model, texts, Sampling(options.temperature, options.top_k, options.top_p)):
        if n_prefilled is None:
            n_prefilled, started = sum(len(text.tokens) for text in texts), time.perf_counter()
        shown = show(texts, headings, shown)
    return sum(len(text.tokens) for text in texts) - n_prefilled, time.perf_counter() - started


def show(texts, headings, shown):
    """Prints new characters of text `shown`, and of later ones once it has ended. Returns the first unfinished one."""
    while shown < len(texts):
        print(texts[shown].take(), end="", flush=True)
        if not texts[shown].ended:
            break
        shown += 1
        print("\n" + "".join(headings[shown : shown + 1]), end="", flush=True)
    return shown


def converse(model, tokenizer, options):
    """Continues each line that is typed, until the end of the input. Ctrl-C ends a sample, or a line half typed."""
    with contextlib.suppress(ImportError):  # Windows has none, and its console keeps a history
        import readline  # noqa: F401  input() then edits lines and keeps a history

    sys.stdin.reconfigure(errors="replace")
    tell("a line is a prompt; Ctrl-C ends a sample, Ctrl-D the program", progress=True)
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            prompt = input(mark)
            write(model, tokenizer, [prompt], [read(prompt, tokenizer, model.n_tokens)], options)
        except EOFError:
            return print(end="\n" if mark else "")
        except KeyboardInterrupt:
            print()
        except BadInput as error:
            tell(f"error: {error}")


def tell(line, progress=False):
    """Prints a line to stderr, apart from the samples; a line of progress only if stderr is a terminal."""
    if not progress or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main)
