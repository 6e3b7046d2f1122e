"""Programs of the ladder's stages, the diffs between them, and what prints them: docs/ladder.md, the README's table."""

import ast
import difflib
import re
import textwrap
from functools import cache

from lab.measure import summary, tables
from lab.measure.results import read, read_results
from lab.programs import bundle
from lab.programs.bundle import FOLDER
from lab.programs.fold import fold, merge
from lab.research import records
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
MEASURED = {  # {the README's words for a machine: its figures}; the page begins with the first
    "two cores": RESULTS / "amd-epyc-2-threads-bf16" / "reference",
    "an H200": RESULTS / "nvidia-h200" / "reference-50257",
}
RECIPES = [  # the README's figures of the second ladder
    RESULTS / "amd-epyc-2-threads-bf16" / "recipe_small_finished",  # without: of the five that hold
    RESULTS / "amd-epyc-2-threads" / "recipe_small_second",  # of the seven after them
    RESULTS / "amd-epyc-2-threads" / "recipe_small_gpt2",  # alone: of the rungs after the five that need no Muon
    RESULTS / "amd-epyc-2-threads-bf16" / "recipe_small",  # the screening
]
TITLE = """\
A GPT and the loop that trains it, in one program: python PROGRAM.py config/x.py --stage=NAME [--key=value ...]

The model comes first; then the parts of the loop, in the order in which it calls them, and the loop."""
SAME = "The program is the same; what it calls changes:"  # of a stage whose diff is empty
PAGE, README = FOLDER / "docs" / "ladder.md", FOLDER / "README.md"
KINDS = ("speed", "memory")  # of a stage's figures
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
    before = fields_up_to(below) if (below := stage_below(name)) else {}
    changed = {field: value for field, value in fields(name).items() if before and before[field] != value}
    return ", ".join(f"{field}: {before[field]} → {value}" for field, value in changed.items())


def compared(row, other):
    """Returns how many times as fast as another a row of summary.summarize is, and in how much less memory."""
    smaller = other["peak"] / row["peak"]
    return tables.gain(row, other["name"]), "≈ 1" if abs(smaller - 1) < 0.01 else f"{smaller:.2f}×"


def gain(rows):
    """Says what all stages together gain, by rows of --mode=ladder: those on by default, then those for memory too."""
    first, *others = (row for row in rows if "seconds" in row)
    others = [row for row in others if "gains" in row]  # not of too few rounds
    tops = {group(row["name"]): row for row in others}.values()
    said = [f"up to {row['name']}, {' as fast in '.join(compared(row, first))} less memory" for row in tops]
    return f"Against naive, all stages together: {'; '.join(said)}."


@cache
def script(name):
    """Returns model.py and train.py as one program, with every ladder field folded to its value at a stage.

    Raises BadInput for an unknown stage.
    """
    modules = {module: bundle.read(f"{module}.py") for module in ("model", "train")}
    return fold(merge(modules, TITLE), bundle.values(name))


def matcher(old, new):
    """Returns the difflib.SequenceMatcher of two lists of lines."""
    return difflib.SequenceMatcher(None, old, new, autojunk=False)


def diff(a, b, program=script):
    """Yields the unified diff of two stages' programs; each hunk's header names the function of its first change.

    program: function of a stage; bundle.standalone also shows changes of what the programs call.
    """
    old, new = program(a).splitlines(), program(b).splitlines()
    for hunk in matcher(old, new).get_grouped_opcodes(n=2):
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


def short_diff(name, program=script):
    """Returns the lines that a stage changes in the program of the one below, headed by functions, not by numbers."""
    lines = diff(stage_below(name), name, program)
    return "\n".join(re.sub("^@@ .* @@", "@@", line).rstrip() for line in lines).rstrip()


@cache
def definitions(a, b):
    """Returns [(path, source)] of our definitions that stage b's program calls and a's does not."""
    return bundle.definitions(script(b), script(a), bundle.values(b))


def enclosing(lines, start, end):
    """Returns the class or function, such as GPT.forward, of the first nonblank line in lines[start:end]."""
    line = next((n for n in range(start, end) if lines[n]), start) + 1
    around = [name for name, first, last in parts(ast.parse("\n".join(lines))) if first <= line <= last]
    return around[-1] if around else ""


def parts(tree, prefix=""):
    """Yields [name, first line, last line] of every class and function; a method is named Class.method."""
    for child in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inside = f"{prefix}{child.name}."
            yield [prefix + child.name, child.lineno, child.end_lineno]
        yield from parts(child, inside)


def page():
    """Returns docs/ladder.md: the introduction that stands there, then each stage with its change and its sources."""
    introduction = PAGE.read_text(encoding="utf-8").partition("- [")[0]
    contents = []
    for lines, name in [*tree(), *tree(RECIPE_DIR)]:
        depth = len(lines) // 2 + lines.endswith(("│ ", "  "))  # the first stage of a branch carries the others
        contents.append(f"{'  ' * depth}- [{name}](#{name}): {reason(name)}")
    return introduction + "\n".join([*contents, "", *map(section, BOTH)])


def measured(name, machine):
    """Returns a stage's speed and memory relative to the stage that it stands on; of the first, in ms and GB.

    Texts, of the figures of a machine in MEASURED; empty if the stage is not among them.
    """
    rows = {stage: row for stage, row in reference(machine)[1].items() if "peak" in row}
    if name not in rows:
        return "", ""
    row, below = rows[name], rows.get(summary.row_below(name, rows))
    if below is None:
        return f"{tables.milliseconds(row['seconds'])} ms", f"{row['peak'] / 1e9:.3f} GB"
    return compared(row, below)


@cache
def summaries(mode, own=()):
    """Returns {machine/name: (results, {row name: summary})} of every runs.jsonl that contains a mode.

    A reader's own files come first, then that of the README, then the others in results/.
    """
    first = next(iter(MEASURED.values()))
    ours = sorted(RESULTS.glob("*/*/runs.jsonl"), key=lambda path: (path.parent != first, path))
    found = {}
    for path in (*own, *ours):
        results = read_results(path)
        if mode in results["modes"]:
            rows = {row["name"]: row for row in summary.summarize(results, mode)}
            found.setdefault("/".join(path.resolve().parts[-3:-1]), (results, rows))
    return found


def reference(machine="two cores"):
    """Returns the (results, rows) of the README's figures of a machine in MEASURED."""
    return summaries("ladder")["/".join(MEASURED[machine].parts[-2:])]


def section(name):
    """Returns the page's section on a stage, with its diff to the stage below; the first shows train_step instead."""
    below, program = stage_below(name), script(name)
    if below is None:
        step = next(node for node in ast.parse(program).body if getattr(node, "name", "") == "train_step")
        code = f"```python\n{ast.get_source_segment(program, step)}\n```"
        text = [explanation(name), code, f"`python ladder.py show {name}`"]
    else:
        lines = short_diff(name)
        text = [f"`{change(name)}`", explanation(name), *([] if lines else [SAME])]
        text.append(f"```diff\n{lines or short_diff(name, bundle.standalone)}\n```")
        text += [f"`{path}`:\n\n```python\n{source}\n```" for path, source in definitions(below, name)]
        for machine in MEASURED:
            speed, memory = measured(name, machine)
            figures = [f"{kind} {value}" for kind, value in (("speed", speed), ("memory", memory)) if value]
            text += [f"Measured on {machine}: {', '.join(figures)}."] if figures else []
        text.append(f"`python ladder.py diff {name}`")
    return "\n\n".join([f"## {name}", reason(name), *text]) + "\n"


def readme():
    """Returns the README with its diff, its tables and the sentences on all stages' gain rewritten."""
    text = records.with_table(README.read_text(encoding="utf-8"), "records/")
    step = re.search(r"@@ train_step\n.*?(?=\n@@ )", short_diff("amp"), re.DOTALL)[0]
    text = re.sub(r"(?<=```diff\n).*?(?=\n```)", lambda _: step, text, flags=re.DOTALL)
    for head, lines in (("stage", stage_table(text)), ("rung", rung_table(text))):
        text = re.sub(rf"^\| {head} \|(.*\n\|)+.*", lambda _, lines=lines: "\n".join(lines), text, flags=re.MULTILINE)
    gains = {machine: gain(reference(machine)[1].values()).replace("Against", "against") for machine in MEASURED}
    said = [textwrap.fill(f"On {machine}, {each}", 120, break_on_hyphens=False) for machine, each in gains.items()]
    gained = "\n\n".join(said)
    return re.sub(r"^On two cores, (.+\n)+\nOn an H200, (.+\n)+", lambda _: f"{gained}\n", text, flags=re.MULTILINE)


def stage_table(text):
    """Returns the lines of the first ladder's table in the README, which is the text: the stages of one process."""
    heads = ["stage", "what it does", "field", *(f"{kind} on {machine}" for machine in MEASURED for kind in KINDS)]
    names = [name for name in stage_names() if not needs_several(name)]
    figures = {name: [figure for machine in MEASURED for figure in measured(name, machine)] for name in names}
    return table_lines(text, heads, figures)


def rung_table(text):
    """Returns the lines of the second ladder's table in the README, which is the text: the rungs of the trunk."""
    recipes = (read(folder / "recipe.json", ["rows"])["rows"] for folder in RECIPES)
    *together, alone, screened = ({row["name"]: row for row in rows} for rows in recipes)
    heads = ["rung", "what it does", "field", "tokens ×", "alone ×", "without ×", "verdict"]
    figures = {}
    _, *trunk = [name for branch, name in tree(RECIPE_DIR) if not branch]
    for name in trunk:
        row, kept = screened.get(name, {}), next((rows[name] for rows in together if name in rows), {})
        verdict = kept.get("verdict") or row.get("verdict") or "not measured yet"
        factors = [row.get("step"), row.get("alone") or alone.get(name, {}).get("alone"), kept.get("without")]
        figures[name] = [*(tables.factor(each) if each else "" for each in factors), verdict]
    return table_lines(text, heads, figures)


def table_lines(text, heads, figures):
    """Returns a table's lines, with the README's own words on each stage. figures: {stage: last cells of its row}."""
    said = dict(re.findall(r"^\| \[(\w+)\]\S* \| (.*?) \|", text, re.MULTILINE))
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, cells in figures.items():
        field = ", ".join(f"`{field} = {value}`" for field, value in fields(name).items()) if stage_below(name) else ""
        words = [f"[{name}](docs/ladder.md#{name})", said.get(name, reason(name).rstrip(".")), field.replace("'", '"')]
        lines.append(f"| {' | '.join([*words, *cells])} |")
    return lines
