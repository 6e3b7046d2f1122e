"""Converts a run's model for other programs: python convert.py --out_dir=out/x --to=hf --output=FOLDER"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

from lab.programs import export
from nanoladder import checkpoint
from nanoladder.entry import Parser, run_script
from nanoladder.tokenizer.encoding import DESCRIPTION


def main(argv):
    options = parse(argv)
    source = checkpoint.best_or_last(options.out_dir, options.checkpoint)
    state = checkpoint.load_model(source)
    config = checkpoint.config_of(state)
    tokenizer = None
    if Path(options.out_dir, DESCRIPTION).exists():
        tokenizer = checkpoint.tokenizer_of(source, state)
    code = None if checkpoint.interop.is_gpt2(config) else export.modeling(config)
    paths = checkpoint.interop.write_huggingface(options.output, state, tokenizer, code)
    print(f"wrote {options.output} from {source}, step {state['progress']['step']}:")
    for path in paths:
        print(f"  {path.name:<25}{path.stat().st_size:>14,} bytes")
    if not config.bias and not code:
        print("The model has no biases, but GPT-2 always has them, so they are written as zeros.")
    if not tokenizer:
        print(f"{options.out_dir} has no tokenizer, so none is written.")
    trust = ", trust_remote_code=True" if code else ""
    if code:
        print("The folder holds code that transformers runs with its reader's rights.")
    print(f'transformers loads it: AutoModelForCausalLM.from_pretrained("{options.output}"{trust})')


def parse(argv):
    parser = Parser(prog="convert.py", description="Converts a run's model for other programs.", allow_abbrev=False)
    parser.add_argument("--out_dir", default="out/quickstart", help="run folder (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", choices=["best", "last"], default="best", help="checkpoint of the run (default: best)"
    )
    to = "hf: for Hugging Face's transformers: a GPT-2, or any other model with its code beside it"
    parser.add_argument("--to", choices=["hf"], default="hf", help=to)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_script(main)
