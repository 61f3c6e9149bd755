# Everything is installed into a virtual environment of its own, on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint style report bench bench-overlap bench-delay bench-backup bench-guessing \
	bench-useless bench-fairness soak protos manifests sbom clean

help:
	@echo "make demo       stream a story from the shipped model"
	@echo "make test       lint, types and tests (long checks: a tenth)"
	@echo "make test-full  the same with every check in full"
	@echo "make bench      speed of plain decoding against transformers' generate"
	@echo "make report     off, sync and ssd in one run: a table, and build/report.html with pictures"
	@echo "make bench-overlap    off, sync and ssd side by side, and theorem 7"
	@echo "make bench-delay      ssd and a blocking exchange over a slow link"
	@echo "make bench-backup     what a row does that missed, at batch 1 and 8"
	@echo "make bench-guessing   acceptance and hit rates of the shipped pair"
	@echo "make bench-useless    endpoints that guess wrong or answer late"
	@echo "make bench-fairness   an honest target beside a flooding one"
	@echo "make soak       ten minutes of mixed load while drafts are killed: what is left behind?"
	@echo "make protos     generate the Python code of protos/"
	@echo "make manifests  build deploy/ with kubectl, for the tests"
	@echo "make sbom       the software bill of materials: build/sbom.json"

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# Compiled when the package is installed.
KERNEL = services/engine/ssd_engine/few_rows.c

# pip would compile what it installs on one core. Some packages bring templates that are no Python:
# they are passed over, as pip does.
define install
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3*/site-packages || true
endef

$(VENV)/.serve: EXTRAS = serve
$(VENV)/.serve: pyproject.toml $(KERNEL) | $(VENV)/pyvenv.cfg
	$(install)
	@touch $@

$(VENV)/.dev: EXTRAS = serve,dev
$(VENV)/.dev: pyproject.toml $(KERNEL) | $(VENV)/pyvenv.cfg
	$(install)
	@touch $@ $(VENV)/.serve

demo: $(VENV)/.serve
	$(BIN)/ssd-client generate --local --chat --temperature 0.6 \
		"Tell me a story about a shy lamb who learns to sing."

lint: style
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# What was skipped for want of a tool: collected, and said last.
SKIPPED = $(abspath build)/skipped-tools.txt

# What watches how fast processes are goes one test at a time; then all else that starts some, one
# more than there are cores, as they wait for one another. What only computes takes what both leave
# of the machine, and gives way at once; its output comes last. Types are checked by one of its tests.
GIVING_WAY = $(shell chrt --idle 0 true 2>/dev/null && echo chrt --idle 0 || echo nice -n 19)
SIDE_BY_SIDE = --dist loadfile --no-loadscope-reorder --numprocesses
COMPUTED = build/computes.txt

# To load all files only to leave most of them out takes a while.
marked = $(shell grep -rl 'mark\.$1\b' tests --include='test_*.py')
WHOLLY_MARKED = $(shell grep -rlE '^pytestmark = \[?pytest\.mark\.(services|computes)\b' tests)

define run-tests
	@mkdir -p build && rm -f $(SKIPPED)
	@$(GIVING_WAY) $(BIN)/pytest -m computes $(call marked,computes) \
		$(SIDE_BY_SIDE) $$(nproc) >$(COMPUTED) 2>&1 & computes=$$!; \
	$(BIN)/pytest -m services $(call marked,services); services=$$?; \
	$(BIN)/pytest -m "not services and not computes" $(addprefix --ignore=,$(WHOLLY_MARKED)) \
		$(SIDE_BY_SIDE) $$(expr $$(nproc) + 1); rest=$$?; \
	wait $$computes; computes=$$?; cat $(COMPUTED); \
	[ "$$services $$rest $$computes" = "0 0 0" ]
	@cat $(SKIPPED) 2>/dev/null || true
endef

test test-full: export SSD_TEST_SKIPPED = $(SKIPPED)

test: style
	$(run-tests)

test-full: export SSD_TEST_FULL = 1
test-full: style
	$(run-tests)

# The shipped pair, grown until a verification takes longer than what the draft prepares meanwhile.
report: $(VENV)/.dev
	mkdir -p build
	$(BIN)/ssd-client bench --local --local-expand-to hidden=1536,ff=6144,layers=8 \
		--local-draft-expand-to hidden=1280,ff=5120 --depth 3 --ignore-eos --max-tokens 64 \
		--local-target-options "--threads 1 --no-adapt-depth --no-auto-off --backup jit" \
		--local-draft-options "--threads 1 --budget 6" --num-prompts 3 --repeat 3 \
		--out build/report.json --report build/report.html --trace build/trace.json

bench: $(VENV)/.dev
	$(BIN)/python tools/bench_plain.py

bench-overlap bench-delay bench-backup bench-guessing bench-useless bench-fairness: $(VENV)/.dev
	$(BIN)/python -m tools.$(subst -,_,$@)

soak: $(VENV)/.dev
	$(BIN)/python -m tools.soak --minutes 10

protos: $(VENV)/.dev
	$(BIN)/python tools/generate_protos.py
	cd protos && $(abspath $(BIN))/buf build --output ssd.binpb

manifests: $(VENV)/.dev
	$(BIN)/python -m tools.render_manifests

sbom: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python -m tools.sbom --out build/sbom.json

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
