# Two commands do everything on a fresh machine with Python and make:
#   make demo   sets up, then runs the main job
#   make test   sets up, then passes all tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types clean

demo: $(STAMP)
	$(BIN)/polynl reproduce --resume $(ARGS)

test: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# grad-cam, which ours is compared with, asks for an opencv-python-headless that would write over mmcv-lite's.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): the first time this takes some minutes"
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps grad-cam ttach
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
