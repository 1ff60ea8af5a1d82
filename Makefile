# make demo   set up and run the main job: train with tp=2 beside the dense model, and prove the two equal
# make test   set up and run the tests
# make lint   ruff and mypy
# make kernels     compile every Triton kernel for every architecture, no GPU needed
# make gpu-check   on a machine with a GPU: build, test and measure with the torch that is there

PYTHON ?= python3
VENV ?= .venv
OUT ?= demo_out
BIN := $(VENV)/bin
# The pin comes first and alone: an open range would fetch several gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# The extension is built against that torch, so without isolation; these are what the build needs beside it.
BUILD_TOOLS := 'setuptools>=77' ninja
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

.PHONY: demo test lint kernels gpu-check clean

demo: $(VENV)/.installed
	$(BIN)/paracore validate --tp 2 --hidden-size 128 --layers 2 --seq-len 64 --steps 20 --log-every 10
	$(BIN)/paracore train --tp 2 --compare-dense --out $(OUT)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(VENV)/.installed
	$(BIN)/paracore kernels

# Downloads nothing where there is a GPU. Elsewhere the same tests run under Triton's interpreter.
gpu-check:
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    $(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable . && \
	    $(PYTHON) -m paracore.bench.gpu_check; \
	else \
	    $(MAKE) --no-print-directory $(VENV)/.installed-test && $(BIN)/python -m paracore.bench.gpu_check; \
	fi

$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) $(BUILD_TOOLS)
	$(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) --no-build-isolation --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(OUT) build dist *.egg-info
