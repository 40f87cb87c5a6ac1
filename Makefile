.PHONY: setup setup-test setup-lint setup-docs train test torture lint links docs wheel bundle clean
.NOTPARALLEL:

# What training needs; the next targets add the packages of extras of pyproject.toml.
setup:
	@scripts/setup.sh

setup-test:
	@scripts/setup.sh test lint docs

setup-lint:
	@scripts/setup.sh lint

setup-docs:
	@scripts/setup.sh docs

train: setup
	@.venv/bin/nntile train experiments/gpt2_tiny.yaml

test: setup-test lint
	@.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Kills, of ranks too, interrupts and full disks at hundreds of moments, 10 000 fuzzed configs, 2 000 damaged files,
# 100 000 evaluations, an hour of training: three to four hours.
torture: setup-test
	@NNTILE_TORTURE=1 .venv/bin/python -m pytest -s tests/test_checkpoint.py tests/test_interrupts.py tests/test_resume.py \
		tests/test_mpi_kills.py tests/faults tests/test_soak.py tests/test_triton.py tests/test_grouped_triton.py tests/test_ranks.py

lint: setup-lint links
	@.venv/bin/ruff check .
	@[ -e nntile_py/_core.pyi ] || echo 'def __getattr__(name: str): ...  # type: ignore' >build/package/nntile_py/_core.pyi
	@cd build/package && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p nntile_py

# What reads sources sees the packages where an installation has them: tasks/ as nntile_py/tasks and so on.
links:
	@rm -rf build/package/nntile_py && mkdir -p build/package/nntile_py
	@ln -s $(addprefix ../../../,$(wildcard nntile_py/*) tasks tiles models) build/package/nntile_py/

# The site of docs/, in build/site.
docs: setup-docs links
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "docs: open $(CURDIR)/build/site/index.html"

# dist/nntile_py-*.whl for this Python and this torch; it needs no compiler where it is installed.
wheel: setup
	@scripts/wheel.sh

# For machines without network: see the README.
bundle:
	@scripts/bundle.sh

# StarPU stays in its cache folder.
clean:
	rm -rf build dist *.egg-info nntile_py/_core*.so nntile_py/_build_info.json .venv/.setup-done .venv/.compiled .venv/.requirements
