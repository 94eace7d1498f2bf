# Needs make and python3 >= 3.11. `make run` and `make test` build .venv themselves and install into it with pip.

PYTHON ?= python3
PORT ?= 8501

VENV := .venv
PY := $(VENV)/bin/python
# Written last, so that what was interrupted is made anew. Installing `test` or `check` installs what `run` needs as well.
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_CHECK := $(VENV)/.installed-check

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-gpu check clean FORCE

help:
	@echo 'make run        install what is missing and open the dashboard on http://127.0.0.1:$(PORT) (PORT=8600 for another)'
	@echo 'make test       install what is missing and run the tests (a few minutes)'
	@echo 'make test-slow  the tests that take minutes each'
	@echo 'make test-gpu   the tests that need a CUDA device'
	@echo 'make check      ruff and pyright'
	@echo 'make clean      remove .venv and all caches'
	@echo 'PYTHON=python3.12 before or after any of them names another interpreter (3.11 or newer)'

run: $(INSTALLED)
	@$(PY) -m app.cli app --port $(PORT)

test: $(INSTALLED_TEST)
	@$(PY) -m pytest -m 'not slow and not gpu and not browser' -n 2 --dist loadfile --no-loadscope-reorder
	@$(PY) -m pytest tests/browser -m 'browser and not slow'

test-slow: $(INSTALLED_TEST)
	@$(PY) -m pytest -m slow

test-gpu: $(INSTALLED_TEST)
	@$(PY) -m pytest -m gpu

check: $(INSTALLED_CHECK)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter that went away leaves a .venv that looks complete and cannot start.
ifneq ($(shell $(PY) -c pass 2>/dev/null && echo works),works)
$(INSTALLED) $(INSTALLED_TEST) $(INSTALLED_CHECK): FORCE
endif

$(INSTALLED): pyproject.toml
	$(call install,.)
	@touch $@

$(INSTALLED_TEST): pyproject.toml
	$(call install,.[test])
	@touch $(INSTALLED) $@

$(INSTALLED_CHECK): pyproject.toml
	$(call install,.[check])
	@touch $(INSTALLED) $@

define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1); ServeLab needs Python 3.11 or newer:" \
	"make $(or $(MAKECMDGOALS),run) PYTHON=python3.12" >&2; exit 1; }
@ls $(VENV)/.installed* >/dev/null 2>&1 && $(PY) -c pass 2>/dev/null || { \
	echo 'Installing ServeLab into $(VENV); the first time this takes some minutes.'; \
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
$(PY) -m pip install --disable-pip-version-check -e '$(1)'
endef
