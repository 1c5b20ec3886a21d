# One verb per task. `make demo` and `make test` set everything up on a machine with only Python and a network.
PYTHON ?= python3
VENV := .venv
# more options for pip: another index, say
PIP_ARGS ?=
BIN := $(VENV)/bin
# one thread a process: the tests run in two processes already
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: setup demo test lint check bench kernels tritons browser gpu clean
.DEFAULT_GOAL := test

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (torch and friends: a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/tilewise demo

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal --durations 5 --ignore tests/browser

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: setup
	$(BIN)/tilewise check --backend torch

bench: setup
	$(BIN)/tilewise bench --device cpu

# the kernels compile, with no GPU, on the oldest Triton too, and on the oldest whose Gluon is known (the newest is in `make test`)
OLDEST_TRITON := 3.5.1
OLDEST_GLUON := 3.6.0
OLD_TRITONS := $(OLDEST_TRITON:%=$(VENV)/triton-%/.installed) $(OLDEST_GLUON:%=$(VENV)/triton-%/.installed)
kernels: $(OLD_TRITONS)
	TILEWISE_KERNELS=few TILEWISE_TRITON=$(VENV)/triton-$(OLDEST_TRITON) $(TEST_ENV) $(BIN)/python -m pytest tests/test_triton_compile.py -n 2
	TILEWISE_TRITON=$(VENV)/triton-$(OLDEST_GLUON) $(TEST_ENV) $(BIN)/python -m pytest tests/test_hopper_compile.py

tritons: $(OLD_TRITONS)

$(VENV)/triton-%/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

# the explainer page in a real browser
APT := env DEBIAN_FRONTEND=noninteractive apt-get
browser: setup
	command -v chromium >/dev/null || { $(APT) update -qq && $(APT) install -qq -y --no-install-recommends chromium fonts-noto-cjk; }
	TILEWISE_BROWSER=required $(TEST_ENV) $(BIN)/python -m pytest tests/browser -n 2 --dist worksteal

# on a machine with a GPU: every feature, dtype and head size on the device, and what it found as JSON
gpu: setup
	$(TEST_ENV) $(BIN)/python -m pytest tests/gpu -p no:cacheprovider -n 8 --json benchmarks/results/gpu-suite.json

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis
