# Two commands do everything on a fresh machine (python3 >= 3.10, a C compiler): make demo, make test.

PYTHON ?= python3
BIN := .venv/bin
KERNEL_SOURCES := $(wildcard reducer/kernels/*.c reducer/kernels/*.h reducer/kernels/*.pxd) \
	reducer/kernels/_kernels.pyx
GENERATED := reducer/kernels/_kernels.c

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/worker-client demo

test: .venv/ready
	$(BIN)/python -m pytest --durations=10

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint reducer worker_client
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/python -m bench.kernels

clean:
	rm -rf .venv build dist *.egg-info reducer/kernels/*.so $(GENERATED)

.venv/ready: pyproject.toml setup.py constraints.txt $(filter-out $(GENERATED),$(KERNEL_SOURCES))
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,demo]"
	touch $@
