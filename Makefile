# make setup | demo | test | check | referee; everything lives in .venv and .venv-cuda, and nothing needs a GPU.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CUDA := .venv-cuda/bin
CUDA_READY := .venv-cuda/.ready

.PHONY: setup cuda demo test check referee lint types imports clean

setup: $(READY)

cuda: $(CUDA_READY)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

# The CUDA build of torch (three equals signs: no build of another name) without NVIDIA's packages, which emulated cards
# stand in for; all else is .venv's.
$(CUDA_READY): $(READY)
	$(BIN)/python -m venv .venv-cuda
	$(CUDA)/pip install --quiet --disable-pip-version-check --no-deps "torch===$$(sed -n 's/^torch==//p' constraints.txt)"
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(CUDA)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth"
	touch $(CUDA_READY)

demo: $(READY)
	$(BIN)/python launch/demo.py

test: $(READY) $(CUDA_READY)
	$(BIN)/python -m pytest

check: lint types imports test

# Every model and every way to train it, rehearsed and on an emulated card: about an hour, which goes on where it was.
referee: $(READY) $(CUDA_READY)
	$(BIN)/python benchmarks/referee.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv-cuda demo build *.egg-info
