# Two commands: `make run` serves the demo model, `make test` passes the checks. Each makes the environment first.
#
#   PORT=8000          where `make run` listens, on 127.0.0.1
#   TORCH=cpu|cuda     the build; by default whether an NVIDIA driver answers
#   TORCH_INDEX=URL    a further package index to look for torch in, such as PyTorch's own index of CPU builds:
#                      on Linux the default index serves torch with the CUDA stack (some 3 GB)
#   PYTHON=python3     the interpreter to make the environment with, 3.11 or newer

PYTHON ?= python3
PORT ?= 8000
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_INDEX ?=
PYTEST_ARGS ?=

MODEL := smollm2-135m-instruct
VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/run-$(TORCH).ok
TEST_READY := $(VENV)/test-$(TORCH).ok
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0

ifeq ($(filter $(TORCH),cpu cuda),)
$(error TORCH must be cpu or cuda, not '$(TORCH)')
endif
ifeq ($(TORCH),cuda)
RUN_EXTRA := [cuda]
TEST_EXTRA := [cuda,test]
RUN_SIZE := 4 GB
TEST_SIZE := 4 GB
else
# So small a model loses right answers to bfloat16's rounding, and on a CPU it gains little by it.
RUN_DTYPE := --dtype float32
TEST_EXTRA := [test]
# The kernel tests run in Triton's interpreter; the CPU build of torch does not bring it.
TRITON := 'triton>=3.6,<3.8'
OTHERWISE := (3 GB where the index serves torch with CUDA only; see TORCH_INDEX in the Makefile)
RUN_SIZE := 0.3 GB $(OTHERWISE)
TEST_SIZE := 0.5 GB $(OTHERWISE)
endif

.PHONY: run test lint types fetch-model clean
.DEFAULT_GOAL := run
MAKEFLAGS += --no-print-directory

run: $(RUN_READY)
	@exec $(BIN)/slipstream serve --model $(MODEL) --port $(PORT) $(RUN_DTYPE)

test: lint types fetch-model
	@$(BIN)/python -m pytest $(PYTEST_ARGS) || { echo "make test: pytest failed, see above" >&2; exit 1; }

lint: $(TEST_READY)
	@$(BIN)/ruff check . || { echo "make test: ruff found faults, see above" >&2; exit 1; }
	@$(BIN)/ruff format --check . || { echo "make test: not formatted; run $(BIN)/ruff format ." >&2; exit 1; }

# The checkout may have any name, so mypy sees it through a link that has the package's.
types: $(TEST_READY)
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/slipstream
	@cd $(VENV)/types && ../bin/mypy --config-file ../../pyproject.toml -p slipstream \
		|| { echo "make test: mypy found faults, see above" >&2; exit 1; }

fetch-model: $(TEST_READY)
	@$(BIN)/python -m slipstream.engine.loader.demo_model \
		|| { echo "make: fetching the demo model failed, see above" >&2; exit 1; }

$(RUN_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Slipstream ($(TORCH) build): about $(RUN_SIZE) to download, then 93 MB for the demo model."
	@$(PIP_INSTALL) -e '.$(RUN_EXTRA)' || { echo "make: the installation failed, see above" >&2; exit 1; }
	@touch $@

$(TEST_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Slipstream ($(TORCH) build) and its test tools: about $(TEST_SIZE) to download, then 93 MB for the demo model."
	@$(PIP_INSTALL) -e '.$(TEST_EXTRA)' $(TRITON) || { echo "make: the installation failed, see above" >&2; exit 1; }
	@touch $@ $(RUN_READY)

# One environment holds one build of torch: a change of TORCH makes it anew.
ifneq ($(filter-out %-$(TORCH).ok,$(wildcard $(VENV)/*.ok)),)
.PHONY: $(BIN)/python
endif
$(BIN)/python:
	@rm -rf $(VENV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "make: needs Python 3.11 or newer as $(PYTHON); name another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "make: $(PYTHON) cannot make an environment; install python3-venv" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
