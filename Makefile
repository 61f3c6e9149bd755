# Everything is installed into a virtual environment of its own, on first use.
PYTHON ?= python3
# Seconds that the machine runs, and ticks that its cores have worked: what a run says it took.
BEGUN := $(shell read up rest < /proc/uptime; read cpu user nice system rest < /proc/stat; echo $$up $$user $$nice $$system)
VENV ?= .venv
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-full test-under-load test-tools check durations report bench bench-overlap bench-delay bench-backup bench-guessing \
	bench-useless bench-fairness bench-acceptance bench-cpu-weights bench-gateway bench-grammars bench-eagle soak attack faults test-clients test-mutants protos manifests sbom clean

help:
	@echo "make demo       one story, told by off, sync and ssd: what speculation is worth"
	@echo "make serve      OpenAI's API and a page on this host: target, draft and gateway, until Ctrl-C"
	@echo "make test       the tests (interpreted kernels and explorations: a thirtieth)"
	@echo "make check      lint, types, and kernels compiled for a GPU"
	@echo "make test-tools programs that some tests run, by apt: Chromium and Prometheus"
	@echo "make test-full  the same with every check in full"
	@echo "make test-under-load  make test, while as many processes as there are cores burn them"
	@echo "make test-mutants     thirty faults in the code: do tests notice them?"
	@echo "make test-clients     others' clients as their registries have them, against a gateway"
	@echo "make bench      speed of plain decoding against transformers' generate"
	@echo "make report     off, sync and ssd in one run: a table, and build/report.html with pictures"
	@echo "make bench-overlap    off, sync and ssd side by side, and theorem 7"
	@echo "make bench-delay      ssd and a blocking exchange over a slow link"
	@echo "make bench-backup     what a row does that missed, at batch 1 and 8"
	@echo "make bench-guessing   acceptance and hit rates of the shipped pair"
	@echo "make bench-useless    endpoints that guess wrong or answer late"
	@echo "make bench-fairness   an honest target beside a flooding one"
	@echo "make bench-acceptance never slower than plain decoding, however good the draft is"
	@echo "make bench-cpu-weights  products on a CPU, beside the speed of its memory and F.linear"
	@echo "make bench-gateway    what HTTP adds to gRPC: first tokens, chunks a second, memory"
	@echo "make bench-grammars   what a schema costs: masks, and the time of a round"
	@echo "make bench-eagle      a head that reads its target's hidden states beside a draft model"
	@echo "make soak       ten minutes of mixed load while drafts are killed: what is left behind?"
	@echo "make attack     hostile callers, frozen engines, rotten weights: what do others notice?"
	@echo "make faults     each process is killed, stopped, terminated: what became of eight streams?"
	@echo "make protos     generate the Python code of protos/"
	@echo "make manifests  build deploy/ with kubectl, for the tests"
	@echo "make sbom       the software bill of materials: build/sbom.json"

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# Compiled when the package is installed.
KERNEL = $(wildcard services/engine/ssd_engine/kernels/cpu/*.[ch])

# The torch that is installed here, within what pyproject.toml allows: the newest one brings several
# GB of CUDA along. `make test TORCH='torch>=2.15,<2.16'` tries another in a new VENV.
TORCH ?= torch>=2.13,<2.14

# pip would compile what it installs on one core, and tests and models of others, too, that nobody
# here imports. Some packages bring templates that are no Python: they are passed over, as pip does.
define install
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]' '$(TORCH)'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib/python3*/site-packages || true
endef

$(VENV)/.serve: EXTRAS = serve
$(VENV)/.serve: pyproject.toml $(KERNEL) | $(VENV)/pyvenv.cfg
	$(install)
	@touch $@

$(VENV)/.gateway: EXTRAS = serve,gateway
$(VENV)/.gateway: pyproject.toml $(KERNEL) | $(VENV)/pyvenv.cfg
	$(install)
	@touch $@ $(VENV)/.serve

# What EAGLE-3 heads are held against lies beside the packages of the environment: it asks for others
# of images and sound, which heads do not need, and for an older transformers than it runs with.
ORACLE = speculators==0.9.0 hs-connectors==0.9.0

$(VENV)/.dev: EXTRAS = serve,gateway,dev
$(VENV)/.dev: pyproject.toml $(KERNEL) | $(VENV)/pyvenv.cfg
	$(install)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/oracle $(ORACLE)
	@touch $@ $(VENV)/.serve $(VENV)/.gateway

# The shipped pair, grown until speculation pays on two cores.
GROWN ?= hidden=1536,ff=6144,layers=8
GROWN_DRAFT ?= hidden=768,ff=3072

demo: $(VENV)/.serve
	$(BIN)/ssd-client race --local --local-device cpu --temperature 0.6 --seed 5 \
		--local-expand-to $(GROWN) --local-draft-expand-to $(GROWN_DRAFT) \
		"Tell me a story about a shy lamb who learns to sing."

# The shipped pair and a gateway; the shell becomes the command, so that Ctrl-C reaches one process.
serve: $(VENV)/.gateway
	@exec $(BIN)/ssd-client serve

check: $(VENV)/.dev
	$(BIN)/python -m tools.check

# Tests are collected once and dealt out to so many processes, one more than there are cores, as tests
# wait for processes that they start; checks in full keep the cores busy by themselves. Services start
# faster where Python may keep what it has compiled. The whole says at its end what it took.
PYTEST = PYTHONDONTWRITEBYTECODE= SSD_MAKE_BEGUN='$(BEGUN)' $(BIN)/pytest --durations 10 --workers

test: $(VENV)/.dev
	@$(PYTEST) $$(expr $$(nproc) + 1)

test-full: $(VENV)/.dev
	SSD_TEST_FULL=1 $(PYTEST) $$(nproc)

# What tests take, by which they are dealt out: tests/suite/durations.json.
durations: $(VENV)/.dev
	$(PYTEST) $$(nproc) --record-durations

# Some tests skip without these programs, and say so at the end.
test-tools:
	apt-get update
	apt-get install --yes --no-install-recommends chromium-headless-shell prometheus || \
	apt-get install --yes --no-install-recommends chromium prometheus

# As many processes as there are cores do nothing but burn them; they end with the shell that began them.
test-under-load: $(VENV)/.dev
	@for core in $$(seq $$(nproc)); do (while kill -0 $$$$ 2>/dev/null; do :; done) & done; \
	$(MAKE) test

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

bench-overlap bench-delay bench-backup bench-guessing bench-useless bench-fairness bench-acceptance bench-cpu-weights bench-gateway bench-grammars bench-eagle: $(VENV)/.dev
	$(BIN)/python -m tools.$(subst -,_,$@)

soak: $(VENV)/.dev
	$(BIN)/python -m tools.soak --minutes 10

attack: $(VENV)/.dev
	$(BIN)/python -m tools.attack

faults: $(VENV)/.dev
	$(BIN)/python -m tools.faults

# The clients' own environments are kept in build/clients.
test-clients: $(VENV)/.dev
	$(BIN)/python -m tools.clients

# Thirty faults, each against the tests that run its line: forty minutes at most.
test-mutants: $(VENV)/.dev
	$(BIN)/python -m tools.mutants

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
