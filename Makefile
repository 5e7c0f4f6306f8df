# Two commands do everything on a fresh machine with Python and make:
#   make demo   installs, then runs the main job
#   make test   installs, then runs all tests
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
# Test processes (pytest-xdist), at most 8: one per core by default, 0 for none. Tests of a file share a process.
JOBS    ?= auto
PINNED  := --quiet --constraint constraints.txt
PIP     := $(BIN)/python -m pip install --disable-pip-version-check $(PINNED)
UV      := $(BIN)/python -m uv pip install --python $(BIN)/python --compile-bytecode $(PINNED)
# uv takes half the time for torch's gigabytes. pip takes over where uv is missing or cannot use pip's settings.
install = $(UV) $(1) || $(PIP) $(1)

.PHONY: demo test lint types docs clean

demo: $(STAMP)
	$(BIN)/polynl reproduce --resume $(ARGS)

test: $(STAMP) $(CLIENTS)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# A static site of the pages and docstrings; a broken link or reference is an error.
docs: $(STAMP)
	$(BIN)/python docs/site/build.py

# The tests compare with grad-cam, which requires an opencv-python-headless that would overwrite mmcv-lite's.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a few minutes"
	-$(PIP) uv
	$(call install,--editable ".[test]")
	$(call install,--no-deps grad-cam ttach)
	touch $(STAMP)

# Packages of others, which the tests run the blocks in. Without them, those tests are skipped and say so.
$(CLIENTS): $(STAMP)
	{ $(call install,--editable ".[clients]"); } && touch $(CLIENTS) || \
		echo "cannot install the extra 'clients': skipping the tests that use its packages"

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
