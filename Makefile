# make demo    two hosts on this machine, a deploy over ssh, a real completion
# make check   lint, types, offline tests: two minutes on two cores
# make test    check, then end to end in the lab
# make soak    fifty random faults in the lab, one after another: 40 minutes
# make gpu-test  two nodes on a machine with NVIDIA GPUs, as root (docs/gpu-run.md)
# Everything that is missing is set up first, under .venv and .lab.

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(BIN)/python -m tests.lab

OFFLINE := $(BIN)/pytest -q -m "not lab and not slow"

.PHONY: demo demo-down check style offline-1 offline-2 test test-all soak gpu-test bench schema lock clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(VENV)/installed: requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	touch $@

demo: $(VENV)/installed
	$(LAB) up
	CLUSTER=tests/lab/cluster.yaml $(BIN)/pyinfra -y inventory.py deploy.py
	@echo
	@echo "It serves. Ask it something yourself:"
	@echo "  curl -s http://127.0.0.1:28000/v1/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"tiny\", \"prompt\": \"Hello\", \"max_tokens\": 8}'"
	@echo "The same deploy again changes nothing: CLUSTER=tests/lab/cluster.yaml $(BIN)/pyinfra -y inventory.py deploy.py"
	@echo "Look inside a host: $(LAB) exec spark-1 bash. Remove it all: make demo-down"

demo-down: $(VENV)/installed
	$(LAB) down

check: $(VENV)/installed
	$(MAKE) --no-print-directory -j2 style offline-1 offline-2

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes for two cores; pytest-xdist and gevent do not go together.
offline-1:
	$(OFFLINE) tests/test_[a-o]*.py

offline-2:
	$(OFFLINE) --ignore-glob='tests/test_[a-o]*.py'

test: check
	$(LAB) up
	$(BIN)/pytest -m "lab and not slow"

test-all: check
	$(BIN)/pytest -q -m "slow and not lab"
	$(LAB) up
	$(BIN)/pytest -m lab

soak: $(VENV)/installed
	$(LAB) up
	$(BIN)/python -m tests.soak

gpu-test:
	$(GPU_PYTHON) -m tests.gpu check
	$(MAKE) --no-print-directory $(VENV)/installed
	test -d .lab/gpu/pieces || $(BIN)/python -m tests.gpu pack
	$(BIN)/python -m tests.gpu plan
	$(GPU_PYTHON) -m tests.gpu run
	GPU_REPORTS=.lab/gpu/out/reports $(BIN)/pytest -q tests/test_prove_recorded.py

bench: $(VENV)/installed
	$(LAB) up
	$(BIN)/python tests/benchmarks/rerun.py

schema: $(VENV)/installed
	$(BIN)/python -m cluster.schema > group_data/cluster.schema.json

lock:
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet uv
	.lock-venv/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url \
	    --no-header --python-version 3.10 --group dev pyproject.toml -o requirements.lock
	rm -r .lock-venv

clean:
	test ! -d $(VENV) || $(LAB) down --purge
	rm -rf $(VENV) .cluster
