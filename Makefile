# Everything runs in .venv, which these commands make and keep up to date (the smoke suite in
# .venv-smoke, the company suite in .venv-company, the documentation in .venv-docs, the examples in
# .venv-examples).
# `PYTHON=python3.12 make test` chooses the interpreter of a new .venv, `make test ARGS="-k fences"`
# the tests, `make test JOBS=0` runs them one after the other, `RELOCK_LONG=1 make test` the long form.

BIN := .venv/bin
# Most tests wait for a worker or a lease, so more run at a time than there are cores.
JOBS ?= 8

# The tests start a thousand processes: none of them is to compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test smoke company check docs demo dist clean
.PHONY: example-django example-fastapi example-django-compose example-fastapi-compose

help:
	@echo "make test    install what is missing, then run the whole suite"
	@echo "make smoke   only the smoke suite: whole workers killed, restarted, cut off"
	@echo "make company only the company suite: beside Sentry, New Relic, OpenTelemetry, …"
	@echo "make check   format, lint, types, Lua lint, the documentation site"
	@echo "make docs    build the documentation site into build/docs"
	@echo "make demo    watch the locks at work, on a real Redis and a real worker"
	@echo "make example-django, make example-fastapi"
	@echo "             run an example on a Redis that is there (examples/README.md)"
	@echo "make example-django-compose, make example-fastapi-compose"
	@echo "             run it in containers"
	@echo "make dist    build sdist and wheel, and install them in clean environments"
	@echo "make clean   remove .venv and everything that was built"

test:
	@scripts/install-system
	@scripts/venv test
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)
	$(if $(ARGS),,@scripts/smoke -q)
	$(if $(ARGS),,@scripts/company -q)

# SMOKE_NODES=docker make smoke: on containers
smoke:
	@scripts/install-system
	@scripts/smoke $(ARGS)

# RELOCK_LONG=1 make company: in thread pools as well
company:
	@scripts/install-system
	@scripts/company $(ARGS)

check:
	@scripts/install-system
	@scripts/venv check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@scripts/lint-lua
	@scripts/docs

docs:
	@scripts/docs

demo:
	@scripts/demo $(ARGS)

example-django example-fastapi:
	@scripts/example $(@:example-%=%)

example-django-compose example-fastapi-compose:
	@docker compose -f examples/$(@:example-%-compose=%)/compose.yaml up --build

dist:
	@scripts/dist

clean:
	rm -rf .venv .venv-company .venv-docs .venv-examples .venv-smoke build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
