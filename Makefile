# make demo    attention on real input, checked against float64       make lint    ruff and mypy
# make test    the test suite                                         make clean   remove .venv and build products
# make test-slow   what `make test` leaves out: every specialisation's machine code, long emulated runs; hours
# make bench   a benchmark of a few seconds; needs a GPU
#
# Every target sets up .venv by itself, once, and again when pyproject.toml changes. Variables:
#   PYTHON           the Python (3.10 or newer) that .venv is made with          default: python3
#   TORCH            what `pip install` gets for torch before everything else    default: without an NVIDIA driver
#                    torch==$(CPU_TORCH_VERSION); with one nothing, so that pip picks the build with CUDA
#   TORCH_INDEX_URL  index that TORCH is taken from, for example one with CPU builds (PyPI's own are CUDA builds)
#   TEST_ARGS        more arguments for pytest, for example TEST_ARGS="-k window"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPU_TORCH_VERSION := 2.13.0
HAS_GPU := $(shell (nvidia-smi -L || ls /dev/nvidia0) >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),,torch==$(CPU_TORCH_VERSION))
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test test-slow bench lint format types setup clean

demo: setup
	$(BIN)/python -m fa4 demo

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow" $(TEST_ARGS)

test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow $(TEST_ARGS)

bench: setup
	$(BIN)/python -m perf.smoke

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy must see the modules under the names they are installed as, and kernels/ and pipelines/ are installed inside fa4.
types: setup
	rm -rf build/types && mkdir -p build/types/fa4
	cd build/types/fa4 && ln -s ../../../fa4/* ../../../kernels ../../../pipelines .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fa4

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
	    "fa4 needs Python 3.10 or newer; name one with PYTHON=... ($(PYTHON) is " + sys.version + ")")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(PIP_INSTALL) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)')
	$(PIP_INSTALL) --editable '.[test,dev,perf]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
