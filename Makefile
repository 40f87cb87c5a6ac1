.PHONY: setup train test lint bundle clean
.NOTPARALLEL:

setup:
	@scripts/setup.sh

train: setup
	@.venv/bin/nntile train experiments/gpt2_tiny.yaml

test: setup lint
	@.venv/bin/python -m pytest

# mypy sees the packages where an installation has them: tasks/ as nntile_py/tasks and so on.
lint: setup
	@.venv/bin/ruff check .
	@rm -rf build/mypy/nntile_py && mkdir -p build/mypy/nntile_py
	@ln -s $(addprefix ../../../,$(wildcard nntile_py/*) tasks tiles models) build/mypy/nntile_py/
	@[ -e nntile_py/_core.pyi ] || echo 'def __getattr__(name: str): ...  # type: ignore' >build/mypy/nntile_py/_core.pyi
	@cd build/mypy && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p nntile_py

# For machines without network: see the README.
bundle:
	@scripts/bundle.sh

# StarPU stays in its cache folder.
clean:
	rm -rf build dist *.egg-info nntile_py/_core*.so nntile_py/_build_info.json .venv/.setup-done .venv/.compiled
