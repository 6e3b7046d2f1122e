# make train: set up, prepare the default corpus, train the quickstart, print a sample.
# make test:  set up, run every test.
# make pages: build the ladder as a page, in out/pages, which any web server shows as it is.
# make gpu:   measure all that a machine with an NVIDIA GPU must show (docs/gpu.md).
# make test-fast: without the slow ones; make test-nightly: only those too long for make test;
# make test-oldest, test-newest: the fast ones, what compiles and what patches PyTorch (lab/predict/patches.py), with the
# oldest supported PyTorch and the newest.

PYTHON ?= python3
PY = .venv/bin/python
OUT = out/quickstart
SAMPLE = $(PY) sample.py --out_dir=$(OUT) --prompt="def __init__(self" --max_new_tokens=200

.PHONY: train test test-fast test-nightly test-oldest test-newest gpu pages
.DELETE_ON_ERROR:

train: $(OUT)/.finished
	$(SAMPLE)
	@echo
	@echo "A sample of $(OUT), trained on the Python standard library; its curves: $(OUT)/loss.png."
	@echo "To train anew: rm -r $(OUT) && make train"

# Three processes even on two cores, as many tests wait for their children; worksteal: a file's tests mostly in one.
PYTEST = -m pytest -n 3 --dist=worksteal

test: .venv/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) $(PYTEST)

test-fast: .venv/.test
	$(PY) $(PYTEST) -m "not slow and not nightly"

test-nightly: .venv/.test
	$(PY) $(PYTEST) -m nightly

# On Linux the package of another PyTorch brings gigabytes of CUDA.
test-oldest: TORCH = torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\).*/\1.0/p' pyproject.toml)
test-newest: TORCH = $(shell sed -n 's/.*"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)
test-oldest test-newest: OTHER = .venv-$(@:test-%=%)/bin/python
test-oldest test-newest:
	test -x $(OTHER) || $(PYTHON) -m venv $(OTHER:/bin/python=)
	$(OTHER) -m pip install --quiet --disable-pip-version-check --upgrade '$(TORCH)'
	grep -hv '^torch==' requirements.txt requirements-test.txt | \
		$(OTHER) -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	$(OTHER) $(PYTEST) -m "not slow and not nightly"
	$(OTHER) $(PYTEST) -m "slow and not nightly" tests/test_ladder.py tests/lab/predict

gpu:
	bash lab/gpu.sh

pages: .venv/.train
	$(PY) ladder.py html

# An interrupted training continues where it was saved.
$(OUT)/.finished: | .venv/.train data/python_stdlib/meta.json
	$(PY) train.py config/quickstart.py --out_dir=$(OUT) --init_from=auto
	@touch $@

data/python_stdlib/meta.json: | .venv/.train
	$(PY) data/python_stdlib/prepare.py

.venv/.train: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is too old; expected Python 3.11 or later: make PYTHON=python3.12"; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PY) -m ensurepip  # a .venv of uv's has no pip
	$(PY) -m pip install --quiet --disable-pip-version-check torch==$(shell sed -n 's/^torch==//p' requirements.txt)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.test: .venv/.train requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@
