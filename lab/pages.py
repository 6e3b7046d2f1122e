"""Programs of the ladder's stages, the diffs between them, and what prints them: docs/ladder.md, the README's table."""

import ast
import difflib
import re
import textwrap
from functools import cache

from lab import link, summary, tables
from lab.fold import fold, merge
from lab.link import FOLDER
from lab.results import read_results
from nanoladder import files
from nanoladder.config import DEFAULTS, stage_names
from nanoladder.config.stages import (
    RECIPE_DIR,
    STAGES_DIR,
    fields,
    fields_up_to,
    ladder_of,
    needs_several,
    parse,
    reason,
    stage_below,
    tree,
)

RESULTS = FOLDER / "results"
# The README, the page's first view and its picture show these figures. To show others, change this line, then run
# python ladder.py docs; python ladder.py html; chromium --headless --hide-scrollbars --force-device-scale-factor=1.5 \
#     --window-size=1440,900 --screenshot=docs/ladder-page.png "file://$PWD/docs/ladder.html#amp"
MEASURED = RESULTS / "amd-epyc-2-threads-bf16" / "reference"
MODULES = {"model": "model.py", "train": "train.py"}
TITLE = """\
A GPT and the loop that trains it, in one program: python PROGRAM.py config/x.py --stage=NAME [--key=value ...]

The model comes first. From the first banner on, the code is in the order in which it runs."""
PAGE, README = FOLDER / "docs" / "ladder.md", FOLDER / "README.md"
HEADING = "## The ladder\n\n"  # of the README
PARAGRAPH = (
    "Speed and memory (the peak bytes of all tensors) compare a step with the stage that it stands on; ≈ 1 means no "
    "measurable change. [config/reference.py](config/reference.py), {parameters:.1f} million parameters, on "
    "[{machine}]({folder}/table.md). {gain}"
)
LABELS = "Stands on|What|Why|Cost|Tried|Source"  # of the paragraphs of a stage's docstring
BOTH = [*stage_names(STAGES_DIR), *stage_names(RECIPE_DIR)]  # the stages of both ladders
SCALING = {  # stages of several processes: the mode that measures them
    stage: "scaling" if stage == "ddp" else f"scaling-{stage.removesuffix('_parallel')}"
    for stage in filter(needs_several, stage_names())
}


def explanation(name):
    """Returns the rest of a stage's docstring as Markdown: what, why, cost, what was tried, and sources as links."""
    text = "\n" + ast.get_docstring(parse(name)).partition("\n")[2].strip()
    text = re.sub(rf"\s+^({LABELS}):", r"\n\n**\1:**", text, flags=re.MULTILINE).strip()
    return re.sub(r"^- (.*):\s+(https://\S+)$", r"- [\1](\2)", text, flags=re.MULTILINE)


def group(name):
    """Names the group of a stage: recipe, devices if it needs several, speed if its key is on by default, or memory."""
    if ladder_of(name) == RECIPE_DIR:
        return "recipe"
    if needs_several(name):
        return "devices"
    off = fields("naive")
    on = name == "naive" or any(repr(DEFAULTS[field]) != off[field] for field in fields(name))
    return "speed" if on else "memory"


def change(name):
    """Describes the assignment of a stage, "field: from → to"; empty for naive."""
    below = stage_below(name)
    return ", ".join(
        f"{field}: {fields_up_to(below)[field]} → {value}" for field, value in fields(name).items() if below
    )


def gain(rows):
    """Says what all stages together gain, on the loop as it is by default and with the memory stages.

    rows: those of --mode=ladder, as summary.summarize returns them.
    """
    first, *others = (row for row in rows if "seconds" in row)
    tops = {group(row["name"]): row for row in others}.values()
    said = [
        f"up to {row['name']}, {short(summary.speedup(first, row))} as fast "
        f"in {first['peak'] / row['peak']:.1f} times fewer bytes"
        for row in tops
    ]
    return f"Against naive, all stages together: {'; '.join(said)}."


def short(speedup):
    """Shortens summary.speedup's text to a ratio."""
    return "≈ 1" if speedup == summary.UNCHANGED else speedup.partition(" ")[0]


@cache
def script(name):
    """Returns model.py and train.py as one program, with every ladder field folded to its value at a stage.

    Raises BadInput for an unknown stage.
    """
    modules = {module: (FOLDER / path).read_text(encoding="utf-8") for module, path in MODULES.items()}
    return fold(merge(modules, TITLE), link.values(name))


def diff(a, b):
    """Yields the unified diff of two stages' programs; each hunk's header names the function of its first change."""
    old, new = script(a).splitlines(), script(b).splitlines()
    for hunk in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(n=2):
        _, i, j, k, m = next(change for change in hunk if change[0] != "equal")
        where = enclosing(new, k, m) if m > k else enclosing(old, i, j)
        (_, i, _, k, _), (_, _, j, _, m) = hunk[0], hunk[-1]
        yield f"@@ -{i + 1},{j - i} +{k + 1},{m - k} @@ {where}".rstrip()
        for kind, i, j, k, m in hunk:
            if kind == "equal":
                yield from (f" {line}" for line in old[i:j])
            else:
                yield from (f"-{line}" for line in old[i:j])
                yield from (f"+{line}" for line in new[k:m])


def definitions(a, b):
    """Returns [(path, source)] of the definitions in nanoladder/ that stage b's program calls and a's does not."""
    return link.definitions(script(b), script(a), link.values(b))


def enclosing(lines, start, end):
    """Returns the class or function, such as GPT.forward, of the first nonblank line in lines[start:end]."""
    line = next((n for n in range(start, end) if lines[n]), start) + 1
    return next((name for name, first, last in reversed(parts("\n".join(lines))) if first <= line <= last), "")


def parts(source):
    """Returns [name, first line, last line] of every class and function; a method is named Class.method."""
    spans = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                spans.append([prefix + child.name, child.lineno, child.end_lineno])
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return spans


def write():
    """Brings docs/ladder.md, and the README's table of the ladder, up to date."""
    files.write(PAGE, page())
    files.write(README, readme())


def page():
    """Returns docs/ladder.md: the introduction that stands there, then each stage with its change and its sources."""
    introduction = PAGE.read_text(encoding="utf-8").partition("- [")[0]
    contents = []
    for lines, name in [*tree(), *tree(RECIPE_DIR)]:
        depth = len(lines) // 2 + lines.endswith(("│ ", "  "))  # the first stage of a branch carries the others
        contents.append(f"{'  ' * depth}- [{name}](#{name}): {reason(name)}")
    return introduction + "\n".join([*contents, "", *map(section, BOTH)])


def measured(name):
    """Returns a stage's speed and memory beside the stage that it stands on; of the first, in ms and GB.

    Texts, of the figures in MEASURED; empty if the stage is not among them.
    """
    _, _, summarized = summaries("ladder")[0]
    rows = {stage: row for stage, row in summarized.items() if "peak" in row}
    if name not in rows:
        return "", ""
    row, below = rows[name], rows.get(summary.row_below(name, rows))
    if below is None:
        return f"{tables.milliseconds(row['seconds'])} ms", f"{row['peak'] / 1e9:.3f} GB"
    less = below["peak"] / row["peak"]
    return short(summary.speedup(below, row)), "≈ 1" if abs(less - 1) < 0.01 else f"{less:.2f}×"


@cache
def summaries(mode, own=()):
    """Returns [(path, results, {row name: summary})] of every results.json that contains a mode.

    Files of a reader's own come first, then that of the README, then the others in results/.
    """
    ours = sorted(RESULTS.glob("*/*/results.json"), key=lambda path: (path.parent != MEASURED, path))
    loaded = [(path, read_results(path)) for path in (*own, *ours)]
    return [
        (path, results, {row["name"]: row for row in summary.summarize(results, mode)})
        for path, results in loaded
        if mode in results["modes"]
    ]


def section(name):
    """Returns the page's section on a stage, with its diff to the stage below; the first shows train_step instead."""
    below = stage_below(name)
    if below is None:
        command, language, lines = f"show {name}", "python", function(script(name), "train_step")
    else:
        lines = (re.sub("^@@ .* @@", "@@", line).rstrip() for line in diff(below, name))
        command, language, lines = f"diff {name}", "diff", "\n".join(lines).rstrip()
    field = f"`{change(name)}`\n\n" if below else ""
    behind = definitions(below, name) if below else []
    blocks = "".join(f"`{path}`:\n\n```python\n{source}\n```\n\n" for path, source in behind)
    speed, memory = measured(name)
    gain = f"Measured: speed {speed}, memory {memory}.\n\n" if speed and below else ""
    return (
        f"## {name}\n\n{reason(name)}\n\n{field}{explanation(name)}\n\n"
        f"```{language}\n{lines}\n```\n\n{blocks}{gain}`python ladder.py {command}`\n"
    )


def function(source, name):
    """Returns the source of a function."""
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_source_segment(source, node)


def readme():
    """Returns the README with the two blocks below HEADING written anew; what the table says of a stage stays."""
    before, _, rest = README.read_text(encoding="utf-8").partition(HEADING)
    old, _, after = rest.split("\n\n", 2)
    said = dict(re.findall(r"^\| \[(\w+)\]\S* \| (.*?) \|", old, re.MULTILINE))
    _, results, rows = summaries("ladder")[0]
    rows = {name: row for name, row in rows.items() if "peak" in row}
    lines = ["| stage | what it does | field | speed | memory |", "| --- | --- | --- | --- | --- |"]
    for name in stage_names():
        field = ", ".join(f"`{field} = {value}`" for field, value in fields(name).items()) if stage_below(name) else ""
        cells = [f"[{name}](docs/ladder.md#{name})", said.get(name, reason(name)), field.replace("'", '"')]
        lines.append(f"| {' | '.join([*cells, *measured(name)])} |")
    paragraph = PARAGRAPH.format(
        parameters=next(iter(rows.values()))["parameters"] / 1e6,
        machine=tables.machine_in_words(results["machine"]),
        folder=MEASURED.relative_to(FOLDER),
        gain=gain(rows.values()),
    )
    wrapped = textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
    return before + HEADING + "\n".join(lines) + f"\n\n{wrapped}\n\n{after}"
