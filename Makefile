# make demo   set up, then run the six-run example and compare it
# make test   set up, then run every test; as root on Debian this installs Slurm for the tests on a virtual cluster
# Both make .venv once and use it again. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup slurm demo test test-fast lint format clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "europa_exp needs Python 3.11 or newer; say which with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python launch.py -m comm=fp8,bf16 nccl.max_ctas=8,16,32

slurm:
	@tests/slurm/cluster.sh install || echo "The tests on a virtual Slurm are skipped."

test: $(INSTALLED) slurm
	$(BIN)/python -m pytest

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
