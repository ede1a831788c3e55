# nearstep: `make run` trains on the simulated device, `make test` checks everything quickly.
# Both set up .venv themselves. Needs Python 3.11+, g++, make and perl.

PYTHON ?= python3
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
RUN_ARGS ?=
CHECK_ARGS ?=
BOARD  ?= ulx3s_85f
BOARD_ARGS ?=
BLOCK  ?= link_layer
COUNT  ?= 100
SEED   ?= 1
VENV   := .venv
# As it was given, through the environment: neither make nor a shell reads the & ? $ * in it.
override RUN_ARGS := $(value RUN_ARGS)
export RUN_ARGS
# Without it every process of the tests compiles torch and the tests anew.
unexport PYTHONDONTWRITEBYTECODE
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SITE   := $(VENV)/.site
BOARDS := from nearstep_spec.boards.board import BOARDS; print(*BOARDS)
# A process a core, so none of them simulates in threads unless its test is about them, nor do
# those of torch wait for each other: they spin, and took four times the processor time.
# One more than the cores: a test that waits, for others or for a library that another builds, leaves
# its core to the next one.
PYTEST := NEARSTEP_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(shell expr $(JOBS) + 1) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all wheel sim bench bench-check bitstream bitstream-all formal mutate linux lint format docs site clean

help:  ## show this text
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with everything from PyPI

$(READY): pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/prerequisites
	@exec "$(PYTHON)" .ci/setup.py
	@touch $@

run: $(READY)  ## train a small GPT with every optimizer step on the RTL (RUN_ARGS="--steps 50")
	@$(BIN)/python .ci/run_with_args.py examples/train_gpt.py

test: $(READY)  ## fast tests, complete in breadth
	@NEARSTEP_OPTIMISE=-O1 $(PYTEST) --durations=15 --durations-min=10 -m "not deep"

test-all: $(SITE)  ## every test, deep ones and formal proofs included; a stopped run goes on
	@NEARSTEP_OPTIMISE=-O1 $(PYTEST) -p tests.resumed --passed build/passed.tsv

sim: $(READY)  ## all cocotb benches
	@$(PYTEST) -m cocotb

wheel: $(READY)  ## a wheel under dist/ with compiled rules, for machines without a compiler (WHEEL_FOR=aarch64)
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=true WHEEL_FOR=$(WHEEL_FOR) $(BIN)/python -m pip wheel --no-deps -w dist .

formal: $(READY)  ## formal proofs of FIFOs, movers, windows, registers
	@$(PYTEST) -m formal

mutate: $(READY)  ## mutants of a block of RTL, and which its tests notice (BLOCK=link_layer COUNT=100 SEED=1)
	@NEARSTEP_THREADS=1 NEARSTEP_OPTIMISE=-O1 $(BIN)/python -m tests.mutation $(BLOCK) --count $(COUNT) --seed $(SEED)

linux: $(READY)  ## Debian's kernel, below QEMU, trains on the card (RUN_ARGS="--device sim:smartssd?lanes=4")
	@$(BIN)/python .ci/run_with_args.py -m nearstep_sim.linux.guest

bench: $(READY)  ## all benchmarks: JSON and plots under build/bench, docs/benchmarks.md
	@set -e; for b in bench/bench_*.py; do echo "== $$b"; $(BIN)/python $$b; done; $(BIN)/python bench/page.py

bench-check: $(READY)  ## compare the ratios of benchmarks with bench/ratios.json (CHECK_ARGS="--quick")
	@$(BIN)/python bench/check.py $(CHECK_ARGS)

bitstream: $(READY)  ## bitstream of a board under build/boards (BOARD=ulx3s_85f BOARD_ARGS="--memory blockram")
	@$(BIN)/nearstep bitstream $(BOARD) $(BOARD_ARGS)

bitstream-all: $(READY)  ## bitstreams of all boards, with their DRAM and with block RAM alone
	@failed=0; for board in $$($(BIN)/python -c "$(BOARDS)"); do for memory in dram blockram; do \
	echo "== $$board, $$memory"; \
	$(BIN)/nearstep bitstream $$board --memory $$memory $(BOARD_ARGS) || failed=1; done; done; exit $$failed

lint: $(READY)  ## ruff, mypy, layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layering.py

format: $(READY)  ## let ruff format the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY)  ## regenerate the pages under docs/ that come from the sources
	@$(BIN)/nearstep registers axdimm --format md -o docs/registers-axdimm.md
	@$(BIN)/nearstep registers axdimm-arbiter --format md -o docs/registers-axdimm-arbiter.md
	@$(BIN)/nearstep registers smartssd --format md -o docs/registers-smartssd.md
	@$(BIN)/nearstep registers coarse --format md -o docs/registers-coarse.md
	@$(BIN)/nearstep registers coarse-sync --format md -o docs/registers-coarse-sync.md
	@$(BIN)/python -m tests.shipped.page docs/verification.md

site: $(SITE)  ## docs, commands, Python and registers as pages for a browser: build/site/index.html
	@$(BIN)/python -m sphinx -W --keep-going -n -q -E -j $(JOBS) -c site -d build/site.doctrees . build/site

$(SITE): $(READY)
	@$(BIN)/python -m pip install --no-compile --disable-pip-version-check -q -e ".[site]"
	@touch $@

clean:  ## remove build products (.venv and the build cache stay: .venv/bin/nearstep cache clear)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
