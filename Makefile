# Two commands do everything: `make run` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The native kernel is optional: built where there is a Rust toolchain, left out where there is none, or where it takes
# too long. METATRIE_PURE=1 runs without it.
NATIVE := native/Cargo.toml native/Cargo.lock native/pyproject.toml $(wildcard native/src/*.rs)
NATIVE_TIMEOUT_S ?= 75
NATIVE_WHEEL := $(VENV)/native-wheel
BUILD_NATIVE := command -v cargo >/dev/null 2>&1 && rm -rf $(NATIVE_WHEEL) \
	&& CARGO_TARGET_DIR=$(CURDIR)/$(VENV)/native-target timeout $(NATIVE_TIMEOUT_S) \
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(NATIVE_WHEEL) ./native

.PHONY: run up test test-pure check style types bench soak reliability chaos wheel setup clean

run: setup            ## the whole stack on this machine, a workload, the comparison; ends by itself
	$(BIN)/metatrie up --demo

up: setup             ## the same stack, kept running
	$(BIN)/metatrie up

test: setup           ## every test, against a real Redis
	$(BIN)/python -m pytest

test-pure: setup      ## what the native kernel has a part in, without it
	METATRIE_PURE=1 $(BIN)/python -m pytest tests/proto tests/engines tests/consumers tests/contract tests/router

check: style types    ## linters and type checker

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# PEER: python of an environment with `ai-dynamo-runtime`; left out, nothing is measured beside ours.
bench: setup          ## measure everything but the soak; writes docs/performance.md and its plots
	$(BIN)/metatrie bench --write docs/performance.md $(if $(PEER),--peer-python $(PEER))

soak: setup           ## a hundred million block events in compressed time; ten times too many of them for minutes
	$(BIN)/metatrie bench --part soak --write docs/performance.md
	$(BIN)/python tests/chaos/soak.py --write docs/reliability.md

reliability: setup    ## the fault tests, their times written to docs/reliability.md
	rm -f build/reliability.jsonl
	mkdir -p build
	METATRIE_RELIABILITY=$(CURDIR)/build/reliability.jsonl $(BIN)/python -m pytest tests/chaos
	$(BIN)/python tests/chaos/table.py build/reliability.jsonl docs/reliability.md

chaos: setup          ## five minutes of random faults; SEED=N repeats a run
	$(BIN)/metatrie chaos --seconds 300 $(if $(SEED),--seed $(SEED))

wheel: setup          ## build the wheel, install it alone into a fresh environment, run it
	rm -rf build dist $(VENV)-wheel
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd / && $(CURDIR)/$(VENV)-wheel/bin/metatrie --help >/dev/null && echo "wheel: ok"
	rm -rf $(VENV)-wheel

setup: $(STAMP) .dev/metatrie

$(STAMP): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@( $(BUILD_NATIVE) || true ) & \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev -e ".[embedded,hf]"; \
	status=$$?; wait; exit $$status
	@if ls $(NATIVE_WHEEL)/*.whl >/dev/null 2>&1; then \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall $(NATIVE_WHEEL)/*.whl; \
	else echo "native kernel: not built, pure Python is used"; fi
	touch $(STAMP)

# Type checkers do not see the editable install's mapping of the root folder to `metatrie`.
.dev/metatrie:
	mkdir -p .dev
	ln -sfn .. .dev/metatrie

clean:
	rm -rf $(VENV) .dev build dist *.egg-info
