# Everything is installed into a virtual environment of its own, on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint bench protos clean

help:
	@echo "make demo       stream a story from the shipped model"
	@echo "make test       lint, types and tests (long checks: a tenth)"
	@echo "make test-full  the same with every check in full"
	@echo "make bench      speed against transformers' generate"
	@echo "make protos     generate the Python code of protos/"

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet --editable '.[serve,dev]'
	@touch $@ $(VENV)/.serve

demo: $(VENV)/.serve
	$(BIN)/ssd-client generate --local --chat --temperature 0.6 \
		"Tell me a story about a shy lamb who learns to sing."

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-full: lint
	SSD_TEST_FULL=1 $(BIN)/pytest

bench: $(VENV)/.dev
	$(BIN)/python tools/bench_plain.py

protos: $(VENV)/.dev
	$(BIN)/python tools/generate_protos.py
	cd protos && $(abspath $(BIN))/buf build --output ssd.binpb

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
