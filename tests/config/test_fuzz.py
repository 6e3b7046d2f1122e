"""Fuzzing: every random command line or config file gives a Config, or one line and exit code 2 at once.

At once: in 5 s of processor time, which no other process on the machine adds to. The slowest takes 0.12 s.
"""

import dataclasses
import random
import time
from typing import get_args, get_origin

import pytest

from lab import climb
from nanoladder import checkpoint, config
from nanoladder.config import DEFAULTS, TYPES
from nanoladder.run import load_config

N_CASES = 1000
KEYS = sorted(DEFAULTS)
PRESETS_AND_STAGES = sorted(config.STAGES_DIR.parent.rglob("*.py"))
ODD_VALUES = [
    *(-1, 0, 1.5, -0.0, 10**30, -(10**30), 1e300, True, False, None, "", "x", "0", "auto", "a\nb", "\0", "\udcff", "é"),
    *("x" * 2000, "9" * 5000, "nan", "inf", "-inf", "1e999", "cuda:99", "every:0", "../..", "💥", b"x", 1j, ...),
]
OPERATORS = ["+", "-", "*", "//", "/", "%", "**", "<", "<=", "==", "!=", "and", "or", "if n_layer else"]
ODD_EXPRESSIONS = [
    "9**9**9",
    "9**-9**9",
    "2.0**9999",
    "(-8)**0.5",
    "1 << 10**9",
    "'a' * 10**9",
    "'%999999999d' % 1",
    "f'{1:999999999}'",
    "0x" + "f" * 9999,
    "1" * 9999,
    "1e309 - 1e309",
    "().__class__.__base__.__subclasses__()",
    "__import__('os').system('true')",
    "open('/dev/zero').read()",
    "exec('while True: pass')",
    "min.__self__",
    "min",
    "min()",
    "min(1)",
    "max(*'ab')",
    "max(1, key=2)",
    "(lambda: (yield))()",
    "[x for x in iter(int, 1)]",
    "sum(range(10**12))",
    "(seed := 3)",
    "(yield)",
    "await seed",
    "[1, 2][0]",
    "{1: 2}[1]",
    "*seed, 1",
    "seed in (1, 2)",
    "seed is None",
    "~seed",
    "...",
    "'\\N{BELL}'",
    "(" * 99 + "1" + ")" * 99,
    "(" * 9999 + "1",
    "-" * 500 + "1",
    "-" * 99_999 + "1",
    "not " * 500 + "1",
    "+".join(["1"] * 500),
    "+".join(["1"] * 99_999),
    "min(1, " * 80 + "1" + ")" * 80,
    "1 if 1 else " * 500 + "1",
    " < ".join(["1"] * 999),
    "'" + "x" * 10**6,
    "ｓｅｅｄ",
    "seed\x0c+ 1",
    "seed \\\n + 1",
    "\u202e1",
]
ODD_LINES = [
    "",
    "import os",
    "seed",
    "seed = ",
    "seed += 1",
    "seed: int = 1",
    "seed = n_layer = 1",
    "seed, n_layer = 1, 2",
    "seed.x = 1",
    "seed[0] = 1",
    "*seed, = 1",
    "__class__ = 1",
    "ｓeed = 1",
    "  seed = 1",
    "while True: pass",
    "def f(): pass",
    "class A: pass",
    "del seed",
    "match seed: ...",
    "# a comment",
    "'''not closed",
    "seed = 1; n_layer = 2",
    "\0",
    "\ufeffseed = 1",
    "\x1b[2J",
    "#" * 2 * 10**6,
]


def choices(kind):
    """All values that the Literals in a type allow."""
    if get_origin(kind) is None:
        return []
    return [value for part in get_args(kind) for value in ([part] if not isinstance(part, type) else choices(part))]


def good_value(rng, key):
    """A value that the key takes, in most combinations with others."""
    kind, default = TYPES[key], DEFAULTS[key]
    if choices(kind):
        return rng.choice(choices(kind))
    if kind is bool:
        return rng.random() < 0.5
    if key == "stage":
        return rng.choice(["", *config.stage_names()])
    return default * rng.choice([1, 2, 4]) if kind is int else default


def bad_value(rng, key):
    return rng.choice(rng.choice([ODD_VALUES, [good_value(rng, rng.choice(KEYS))]]))


def bad_name(rng, key):
    """A key with a typo, or something else altogether."""
    place = rng.randrange(len(key))
    return rng.choice(
        [
            *(key[:place] + key[place + 1 :], key[:place] + key[place] + key[place:], key[::-1], key.upper()),
            *(key + " ", key.replace("_", "-"), "_" + key, "", "-", "é", "x" * 9999, "\n", "__class__", "0"),
        ]
    )


def expression(rng, depth=2):
    """Random arithmetic on keys and numbers, valid or not."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([repr(rng.randrange(9)), repr(rng.random()), rng.choice(KEYS), repr(rng.choice(ODD_VALUES))])
    left, right = expression(rng, depth - 1), expression(rng, depth - 1)
    return rng.choice([f"({left} {rng.choice(OPERATORS)} {right})", f"max({left}, {right})", f"-{left}", f"not {left}"])


def words(rng, good):
    """Words of a command line that set one key; if not good, something in them may be wrong."""
    key = rng.choice(KEYS)
    value = good_value(rng, key)
    if good:
        return rng.choice([[f"--{key}={value}"], [f"--{key}", str(value)], [f"--{key}={value}", f"--{key}={value}"]])
    text = str(bad_value(rng, key))
    return rng.choice(
        [
            *([f"--{key}={text}"], [f"--{key}", text], [f"--{key}"], [f"--{bad_name(rng, key)}={value}"]),
            *([f"-{key}={value}"], [f"{key}={value}"], ["--"], ["-"], ["="], [text], ["--=", "--"]),
        ]
    )


def line(rng, good):
    """A line of a config file; if not good, something in it may be wrong."""
    key = rng.choice(KEYS)
    value = good_value(rng, key)
    if good:
        texts = [repr(value), f"({value!r})", f"{value!r} if seed >= 0 else {key}", f"{key}  # as it is", f"0 or {key}"]
        numbers = [f"max({value!r}, {value!r})", f"{value!r} * 2 // 2"] * (TYPES[key] is int)
        return f"{key} = {rng.choice(texts + numbers)}"
    kinds = [
        lambda: f"{key} = {bad_value(rng, key)!r}",
        lambda: f"{bad_name(rng, key)} = {value!r}",
        lambda: f"{key} = {rng.choice(ODD_EXPRESSIONS)}",
        lambda: f"{key} = {expression(rng)}",
        lambda: rng.choice(ODD_LINES),
    ]
    return rng.choice(kinds)()


def case(number, folder):
    """A command line, whose files are written into folder. Two in five contain good words and lines only."""
    rng = random.Random(number)
    files = [[line(rng, good=True) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(3))]
    argv = [words(rng, good=True) for _ in range(rng.randrange(4))]
    if number % 5 > 1:
        if files and rng.random() < 0.7:
            lines = rng.choice(files)
            lines.insert(rng.randrange(len(lines) + 1), line(rng, good=False))
        else:
            argv.append(words(rng, good=False))
    for name, lines in enumerate(files):
        path = folder / f"{name}.py"
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        argv.append([str(path)])
    if rng.random() < 0.2:
        argv.append([str(rng.choice(PRESETS_AND_STAGES))])
    rng.shuffle(argv)
    return [word for part in argv for word in part]


def test_1000_command_lines_and_files_are_a_config_or_one_line(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(checkpoint, "shape_of", lambda source: {})
    valid = 0
    for number in range(N_CASES):
        argv = case(number, tmp_path)
        found = []
        start = time.process_time()
        result = run_main(lambda given, found=found: found.append(load_config(given)), *argv)
        assert time.process_time() - start < 5, argv
        if result.code == 0:
            valid += 1
            assert result.err == result.out == ""
            assert_round_trip(found[0])
        else:
            assert result.code == 2 and result.out == "", argv
            assert is_one_line(result.err), argv
    assert 0.3 * N_CASES <= valid <= 0.7 * N_CASES


def is_one_line(err):
    return err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1 and len(err) < 1000


@pytest.mark.parametrize("word", ["--mode=ladder", "--vary=stages"])
def test_profile_refuses_what_makes_no_config(word, tmp_path, run_main):
    (tmp_path / "x.py").write_text("n_layr = 3")
    result = run_main(climb.main, str(tmp_path / "x.py"), word)
    assert result.code == 2 and result.out == "" and is_one_line(result.err) and "n_layer" in result.err


def assert_round_trip(found):
    """Asserts that every value has its type, and that given on a command line the values make the same config."""
    values = dataclasses.asdict(found)
    assert all(config.typed(key, value, "again") == value for key, value in values.items())
    assert load_config([f"--{key}={value}" for key, value in values.items()]) == found


@pytest.mark.parametrize("text", ODD_EXPRESSIONS, ids=lambda text: text[:20])
def test_odd_expressions_end_at_once(text, tmp_path, run_main):
    (tmp_path / "x.py").write_text(f"seed = {text}", encoding="utf-8")
    start = time.process_time()
    result = run_main(load_config, str(tmp_path / "x.py"))
    assert time.process_time() - start < 5
    assert result.code == 0 or (result.code == 2 and is_one_line(result.err))


@pytest.mark.parametrize(
    "text, value",
    [
        ("2 + 3 * 4 - 6 // 4", 13),
        ("7 % 4 ** 2", 7),
        ("-(-3)", 3),
        ("1 < 2 <= 2 and 5", 5),
        ("0 or 4", 4),
        ("1 and 0 or 3 if not bias else 7", 3),
        ("min(n_layer, 4, 5) + max(1, 2)", 6),
        ("2 if dataset + 'x' == 'python_stdlibx' else 3", 2),
        ("0 and nowhere", 0),
    ],
)
def test_an_expression_is_what_python_makes_of_it(text, value, tmp_path):
    (tmp_path / "x.py").write_text(f"seed = {text}", encoding="utf-8")
    assert load_config([str(tmp_path / "x.py")]).seed == value
