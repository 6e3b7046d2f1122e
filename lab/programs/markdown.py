"""The ladders as Markdown: docs/ladder.md, the tables of docs/results.md and that of the README."""

import ast
import re
import textwrap

from lab.measure import tables
from lab.measure.machine import machine_in_words
from lab.programs import figures
from lab.programs.bundle import FOLDER
from lab.programs.sentences import by_loss, gain, worth
from lab.programs.sentences import measured as gained
from lab.programs.stages import BOTH, SAME, describe
from nanoladder.config import stage_names
from nanoladder.config.stages import RECIPE_DIR, fields, needs_several, reason, stage_below, tree

PAGE, RESULTS, README = FOLDER / "docs" / "ladder.md", FOLDER / "docs" / "results.md", FOLDER / "README.md"
CLIMB = {  # the README's rows: the stage that ends each, on an H200
    "naive": "naive",
    "TF32": "tf32",
    "bfloat16 and fused attention": "flash",
    "fused AdamW, padded vocabulary": "pad_vocab",
    "`torch.compile`": "compile",
    "chunked loss, CUDA graph": "cuda_graph",
}
KINDS = ("speed", "memory")  # of a stage's figures
FIRST, SHOWN = "naive", ("Attention", "train_step")  # the first stage, and what its section shows of its program


def page() -> str:
    """Returns docs/ladder.md: the introduction that stands there, then each stage with its change and its sources."""
    introduction = PAGE.read_text(encoding="utf-8").partition("- [")[0]
    contents = []
    for lines, name in [*tree(), *tree(RECIPE_DIR)]:
        depth = len(lines) // 2 + lines.endswith(("│ ", "  "))  # the first stage of a branch carries the others
        contents.append(f"{'  ' * depth}- [{name}](#{name}): {reason(name)}")
    return introduction + "\n".join([*contents, "", *(section(describe(name)) for name in BOTH)])


def section(stage):
    """Returns the page's section on a stage: words and figures first, then code; what it newly calls is folded."""
    text = [stage.reason, *([f"`{stage.change}`"] if stage.below else []), *explanation(stage), *measured(stage)]
    if stage.below:
        text += [SAME] if stage.same_program else []
        text += [f"```diff\n{stage.diff}\n```", *(folded(*definition) for definition in stage.definitions)]
        text.append(f"`python ladder.py diff {stage.name}`")
    elif stage.group == "recipe":
        text.append(f"Its program is that of [{FIRST}](#{FIRST}).")
    else:
        nodes = {getattr(node, "name", ""): node for node in ast.parse(stage.program).body}
        text += [f"```python\n{ast.get_source_segment(stage.program, nodes[part])}\n```" for part in SHOWN]
        text.append(f"`python ladder.py show {stage.name}`")
    return "\n\n".join([f"## {stage.name}", *text]) + "\n"


def folded(path, source):
    """Returns a definition, under a line that unfolds it."""
    n_lines = len(source.splitlines())
    summary = f"newly called, in {path}: {n_lines} line{'s' if n_lines > 1 else ''}"
    return f"<details><summary>{summary}</summary>\n\n```python\n{source}\n```\n\n</details>"


def explanation(stage):
    """Returns the paragraphs of a stage's docstring, and the list of its sources."""
    sources = [f"- [{title}]({address})" for title, address in stage.sources]
    labeled = [f"**{label}:** {text}" for label, text in stage.parts.items()]
    return [*filter(None, [stage.introduction]), *labeled, "\n".join(["**Source:**", *sources])]


def measured(stage):
    """Returns the paragraph on what a stage gains: on the machines of docs/results.md, or those of its own mode."""
    if stage.group == "recipe":
        saved = figures.by_loss().get(stage.name)
        texts = {"By loss": by_loss(stage.name, saved)} if saved else {}
        texts |= {figures.describe_machine(machine): worth(stage.name, each) for machine, each in stage.figures.items()}
        texts = texts if stage.below else {}
    elif stage.group == "devices":
        scaling = [each for each in stage.figures if each.mode != "ladder"]
        texts = {machine_in_words(each.results["machine"]): f"{gained(each, stage.name)}." for each in scaling}
    else:
        ladders = {each.key: each for each in stage.figures}
        texts = {machine: gained(ladders[key], stage.name) for machine, key in figures.SHOWN.items()}
        texts = {machine: f"{text}." for machine, text in texts.items() if text}
    lines = [f"- {machine}: {text}" for machine, text in texts.items()]
    return ["\n".join(["**Measured:**", *lines])] if lines else []


def relative(stage):
    """Returns {machine: (speed, memory)} of a stage on the machines of docs/results.md; {} of a rung."""
    if stage.group == "recipe":
        return {}
    rows = {each.key: each.rows for each in stage.figures if each.mode == "ladder"}
    return {machine: figures.relative(stage.name, rows[key]) for machine, key in figures.SHOWN.items()}


def readme() -> str:
    """Returns the README with the table between its <!-- ladder --> marks rewritten."""
    rows = figures.shown("an H200").rows
    naive = rows["naive"]
    lines = ["| on one NVIDIA H200 | tokens/s | speedup | memory |", "| --- | --: | --: | --: |"]
    for words, stage in CLIMB.items():
        row = rows[stage]
        tokens, speedup = f"{row['tokens_per_s']:,.0f}", f"{naive['seconds'] / row['seconds']:.1f}×"
        lines.append(f"| [{words}](docs/ladder.md#{stage}) | {tokens} | {speedup} | {row['peak'] / 1e9:.1f} GB |")
    text = README.read_text(encoding="utf-8")
    marked = r"(<!-- ladder -->\n).*?(<!-- ladder -->)"
    return re.sub(marked, lambda marks: f"{marks[1]}{chr(10).join(lines)}\n{marks[2]}", text, flags=re.DOTALL)


def results() -> str:
    """Returns docs/results.md with its tables and the sentences on all stages' gain rewritten."""
    text = RESULTS.read_text(encoding="utf-8")
    for head, lines in (("stage", stage_table(text)), ("rung", rung_table(text))):
        text = re.sub(rf"^\| {head} \|(.*\n\|)+.*", lambda _, lines=lines: "\n".join(lines), text, flags=re.MULTILINE)
    gains = {machine: gain(figures.shown(machine).rows.values()) for machine in figures.SHOWN}
    sentences = [f"On {machine}, {sentence.replace('Against', 'against')}" for machine, sentence in gains.items()]
    gained = "\n\n".join(textwrap.fill(sentence, 120, break_on_hyphens=False) for sentence in sentences)
    return re.sub(r"^On two cores, (.+\n)+\nOn an H200, (.+\n)+", lambda _: f"{gained}\n", text, flags=re.MULTILINE)


def stage_table(text):
    """Returns the lines of the table of stages that need one process in docs/results.md, the text."""
    heads = ["stage", "what it does", "field", *(f"{kind} on {machine}" for machine in figures.SHOWN for kind in KINDS)]
    names = [name for name in stage_names() if not needs_several(name)]
    return table_lines(text, heads, {name: sum(relative(describe(name)).values(), ()) for name in names})


def rung_table(text):
    """Returns the lines of the table of rungs in docs/results.md, the text."""
    saved = figures.by_loss()
    known = {(scale, loss) for scales in saved.values() for scale, gains in scales.items() for loss in gains}
    columns = sorted(known, key=lambda column: ([*figures.BY_LOSS].index(column[0]), -column[1]))
    heads = ["rung", "what it does", "field", *(f"{scale}, at {loss:.2f}" for scale, loss in columns)]
    cells = {}
    for name in stage_names(RECIPE_DIR)[1:]:
        gains = [saved.get(name, {}).get(scale, {}).get(loss) for scale, loss in columns]
        cells[name] = [tables.factor(gain) if gain else "" for gain in gains]
    return table_lines(text, heads, cells)


def table_lines(text, heads, cells):
    """Returns a table's lines, with the text's own words on each stage. cells: {stage: last cells of its row}."""
    words = dict(re.findall(r"^\| \[(\w+)\]\S* \| (.*?) \|", text, re.MULTILINE))
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, last in cells.items():
        values = ", ".join(f"`{field} = {value}`" for field, value in fields(name).items() if stage_below(name))
        values = values.replace("'", '"')
        link, does = f"[{name}](ladder.md#{name})", words.get(name, reason(name).rstrip("."))
        lines.append(f"| {' | '.join([link, does, values, *last])} |")
    return lines
