PYTHON ?= python

.PHONY: check test soak format

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:
	$(PYTHON) -m pytest -n 2

soak:
	$(PYTHON) -m pytest -m soak --timeout 0
