# Two commands do everything: `make run` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run up test check style types bench wheel setup clean

run: setup            ## the whole stack on this machine, a workload, the comparison; ends by itself
	$(BIN)/metatrie up --demo

up: setup             ## the same stack, kept running
	$(BIN)/metatrie up

test: setup           ## every test, against a real Redis
	$(BIN)/python -m pytest

check: style types    ## linters and type checker

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup          ## hot-path costs on this machine; see docs/performance.md
	$(BIN)/metatrie bench

wheel: setup          ## build the wheel, install it alone into a fresh environment, run it
	rm -rf build dist $(VENV)-wheel
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd / && $(CURDIR)/$(VENV)-wheel/bin/metatrie --help >/dev/null && echo "wheel: ok"
	rm -rf $(VENV)-wheel

setup: $(STAMP) .dev/metatrie

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev -e ".[embedded,hf]"
	touch $(STAMP)

# Type checkers do not see the editable install's mapping of the root folder to `metatrie`.
.dev/metatrie:
	mkdir -p .dev
	ln -sfn .. .dev/metatrie

clean:
	rm -rf $(VENV) .dev build dist *.egg-info
