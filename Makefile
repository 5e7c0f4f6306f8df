# Two commands do everything on a fresh machine with Python and make:
#   make demo   installs, then runs the main job
#   make test   installs, then runs all tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Test processes (pytest-xdist), at most 8: one per core by default, 0 for none. Tests of a file share a process.
JOBS   ?= auto
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types clean

demo: $(STAMP)
	$(BIN)/polynl reproduce --resume $(ARGS)

test: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The tests compare with grad-cam, which requires an opencv-python-headless that would overwrite mmcv-lite's.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a few minutes"
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps grad-cam ttach
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
