"""A figure that was not measured leaves a cell of a table empty; a misspelt one is an error."""

import pytest
from conftest import MACHINE

from lab.measure import tables
from lab.research import recipe_report

UNTIMED = {"name": "flash", "note": None}


def test_a_row_without_figures_has_empty_cells():
    columns = [
        tables.columns([UNTIMED], "ladder"),
        tables.predicted_columns(UNTIMED, price=2.0),
        tables.TIME_COLUMNS,
        tables.memory_columns(),
        recipe_report.COLUMNS,
    ]
    assert {tables.cell(text, UNTIMED) for group in columns for text in group.values()} == {""}


def test_rows_that_were_not_timed_yet_are_not_called_training_runs():
    keys = {"batch_size": 4, "context_length": 16}
    results = {"keys": keys, "machine": MACHINE, "config": ["config/x.py"], "steps": 5}
    assert "0 processes" in tables.conditions(results, "ladder", [UNTIMED])
    assert "whole training runs" in tables.conditions(results, "train-optimizer", [UNTIMED])


@pytest.mark.parametrize("text", [lambda row: row["second"], lambda row: row["memory"]["peaks"], lambda row: row[None]])
def test_a_column_that_reads_a_figure_that_no_row_has_is_an_error(text):
    row = UNTIMED | {"seconds": 1.0, "memory": {"peak": 1}}
    with pytest.raises(KeyError):
        tables.markdown({"ms/step": text, "tokens/s": lambda row: row["tokens_per_s"]}, [row])
