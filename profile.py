"""Measures what each stage of the ladder is worth on this machine: python profile.py config/x.py [options]

Every figure comes from train.py's own train_step on real batches, in a process of its own (measure.py), one process
at a time. A row's first process trains on the batches that naive trained on, keeps the losses, counts the bytes of
all tensors and looks where the time goes; the others time it. They take turns, row after row, so that a drift of
the machine hits all alike. Started by torchrun, it measures how the config scales up to that many processes.
"""

import ast
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

# The standard library has a module of this name, which torch imports by way of cProfile: whoever imports `profile`
# from this folder gets that one. torch is imported where it is used, so that the two never wait for each other.
if __name__ == "profile":
    spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])

ROOT = Path(__file__).parent
OF_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
MEASURED = ["train.py", "model.py", "machine.py", "measure.py", "data/loader.py", "config/__init__.py"]  # and stages


def main(argv):
    options, config_argv = parse(argv)
    if options.compare:
        import summary

        print(summary.compare(*(summary.read(path) for path in options.compare)))
    elif int(os.environ.get("RANK", 0)) == 0:  # of torchrun's processes the first measures, in processes of its own
        climb(options, config_argv)


def parse(argv):
    """The options, and the rest of the command line, which is the config's."""
    from config import BadInput, Parser, load_config, stage_names

    usage = "python profile.py config/x.py [more.py ...] [--key=value ...] [options]"
    parser = Parser(usage=usage, description="Measures the ladder on this machine.", allow_abbrev=False)
    parser.add_argument(
        "--mode",
        choices=["ladder", "each", "without"],
        default="ladder",
        help="ladder: each stage on top of those before; each: every stage alone over naive; "
        "without: the config as it is, less one stage (default: %(default)s)",
    )
    parser.add_argument("--sweep", action="store_true", help="instead: the batch in micro-batches of every size")
    parser.add_argument("--compare", nargs=2, metavar="RESULTS", help="instead: set two results.json side by side")
    parser.add_argument("--stages", help="names, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="timed at least in one process (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed processes of each row (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="keep a Chrome trace of each row, in OUT_DIR/traces")
    parser.add_argument("--out_dir", help="default: results/<machine>/<config>")
    options, rest = parser.parse_known_args(argv)
    options.processes = int(os.environ.get("WORLD_SIZE", 1))
    options.mode = "scaling" if options.processes > 1 else "sweep" if options.sweep else options.mode
    options.stages = options.stages.split(",") if options.stages else stage_names()
    if unknown := [stage for stage in options.stages if stage not in stage_names()]:
        raise BadInput(f"--stages={','.join(unknown)}: no such stage; `python ladder.py` lists them")
    if min(options.steps, options.repeats) < 1:
        raise BadInput("--steps and --repeats: expected at least 1")
    config = load_config(rest)
    if config.stage and options.mode in ("ladder", "each"):
        raise BadInput(f"stage={config.stage}: --mode={options.mode} sets it; choose rows with --stages=a,b,c")
    if config.micro_batch_size and not options.sweep and not any(word.startswith("--batch_size") for word in rest):
        rest.append(f"--batch_size={config.micro_batch_size}")  # a step is one micro-batch: large presets run too
    return options, rest


def plan(options, config_argv):
    """{row: the words that make its config of the base's}; the first row is what the others are compared with."""
    from config import load_config, stage_files

    def file(stage):
        return str(stage_files(stage)[-1])

    above = [stage for stage in options.stages if stage != "naive"]
    match options.mode:
        case "ladder":
            return {stage: [f"--stage={stage}"] for stage in options.stages}
        case "each":
            rows = {stage: [file("naive"), file(stage)] for stage in above}
            return {"naive": [file("naive")], **rows, "all applied": [file("naive"), *map(file, above)]}
        case "without":
            return {"finished": [], **{f"without {stage}": turned_off(stage) for stage in above}}
        case "sweep":
            total = load_config(config_argv).batch_size
            sizes = [size for size in range(1, total + 1) if total % size == 0]
            return {f"{total // size} × {size}": [f"--micro_batch_size={size}"] for size in sizes}
        case "scaling":
            share = load_config(config_argv).batch_size
            counts = [n for n in range(1, options.processes + 1) if n == options.processes or n & (n - 1) == 0]
            return {str(n): [f"--batch_size={n * share}"] for n in counts}


def turned_off(stage):
    """The words that set a stage's fields back to what naive has."""
    import ladder

    naive = ladder.fields("naive")
    return [f"--{field}={ast.literal_eval(naive[field])}" for field in ladder.fields(stage)]


def not_applicable(rows, mode, config_argv):
    """{row: why it is not measured}, for a config that cannot be and one that is no other than the row's before."""
    from config import BadInput, load_config

    reasons, configs = {}, []
    for name, words in rows.items():
        try:
            config = load_config([*config_argv, *words])
        except BadInput as error:
            reasons[name] = str(error)
            continue
        config = dataclasses.replace(config, stage="", micro_batch_size=config.micro_batch_size % config.batch_size)
        if configs and config == configs[-1 if mode == "ladder" else 0]:
            reasons[name] = "not applicable: the same config as the row that it is compared with"
        configs.append(config)
    return reasons


def climb(options, config_argv):
    """Measures every row that results.json does not hold yet, and writes it after each process."""
    from tqdm import tqdm

    import summary
    from config import BadInput, load_config
    from data.loader import open_dataset

    config = load_config(config_argv)
    open_dataset(config.dataset, config.vocab_size, config.context_length)  # refuses what no row could be measured on
    names = "-".join(Path(word).stem for word in config_argv if word.endswith(".py"))
    conditions = {"machine": machine(config), "config": config_argv, "steps": options.steps, "code": code_hash()}
    folder = Path(options.out_dir or Path("results", machine_name(conditions["machine"]), names or "defaults"))
    results = read_results(folder / "results.json", conditions)
    rows = plan(options, config_argv)
    reasons = not_applicable(rows, options.mode, config_argv)
    part = results["modes"].setdefault(options.mode, {"limits": [], "rows": {}})
    for name, words in rows.items():
        part["rows"].setdefault(name, {"words": words, "note": reasons.get(name)})

    try:
        summary.write(folder, results)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error}); choose another --out_dir") from None
    with tqdm(tasks(options, rows), unit="process") as bar:
        for name, what, count in bar:
            bar.set_postfix_str(f"{name or 'the machine'}, {what}")
            row = part["rows"][name] if name else {}
            done = row.setdefault(what, []) if name else part["limits"]
            if len(done) >= count or row.get("note"):
                continue
            words = [*config_argv, *row.get("words", []), f"--steps={options.steps}"]
            if options.trace and what == "examine":
                words.append(f"--trace={Path(folder, 'traces', name.replace(' ', '_'))}")
            try:
                done.append(run_alone(what, words, options.processes, int(name) if options.processes > 1 else 1))
            except RuntimeError as error:
                row["note"] = str(error)
            summary.write(folder, results)
    summary.draw(results, options.mode, folder / f"{options.mode}.png")
    print(summary.table(results, options.mode))
    print(f"written: {folder}/results.json, table.md and {options.mode}.png")


def tasks(options, rows):
    """(row, what, how many times by then): correctness first, then rounds, in each the machine's own limits too."""
    scaling = options.mode == "scaling"
    found = [] if scaling else [(name, "examine", 1) for name in rows]
    for count in range(1, options.repeats + 1):
        found.append((None, "limits", count))
        for name in rows:
            found.append((name, "time", count))
            if scaling and name != "1":
                found.append((name, "silent", count))
    return found


def run_alone(what, words, processes=1, started=1):
    """Measures something in a new process, or in `started` of at most `processes` ones.

    Raises RuntimeError with what it said last if it fails.
    """
    command = [str(ROOT / "measure.py"), what, *words]
    environment = {key: value for key, value in os.environ.items() if key not in OF_TORCHRUN}
    if processes > 1:  # a process has as many threads alone as beside the others
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    if started > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={started}", *command]
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    if process.returncode == -9:
        raise RuntimeError("killed by the system, most likely out of memory")
    if process.returncode:
        said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise RuntimeError(next((line for line in said if line.startswith("error:")), said[-1]))
    measured = json.loads(process.stdout.splitlines()[-1])
    if "error" in measured:
        raise RuntimeError(measured["error"])
    return measured


def machine(config):
    """What the figures depend on: processor, device, versions."""
    import torch

    from machine import choose_device
    from report import peak_flops

    device = choose_device(config.device)
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "native_bfloat16": torch.cpu._is_avx512_bf16_supported(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "datasheet_flops": peak_flops(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine_name(machine):
    """A folder's name for the machine, such as intel-xeon-2-threads-bf16 or nvidia-h200."""
    cpu = f"{machine['cpu']} {machine['threads']} threads" + " bf16" * machine["native_bfloat16"]
    name = (machine["gpu"] or cpu).replace("(R)", "").replace("Processor", "")
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def code_hash():
    """Changes when the code that is measured changes."""
    files = [*(ROOT / name for name in MEASURED), *sorted(ROOT.glob("config/stages/*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def read_results(path, conditions):
    """What an interrupted climb left under the same conditions, else an empty result."""
    import summary
    from config import BadInput

    if not path.exists():
        return {"format_version": summary.FORMAT_VERSION, **conditions, "modes": {}}
    results = summary.read(path)
    if different := [key for key in conditions if results[key] != conditions[key]]:
        what = " and ".join(different)
        raise BadInput(f"{path} was measured under another {what}; choose another --out_dir, or remove it")
    return results


if __name__ == "__main__":
    from config import run

    run(main)
