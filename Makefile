# make setup | demo | test-fast | test | check | docs; everything lives in .venv and three beside it; nothing needs a GPU.
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.made
READY := .venv/.ready
CUDA_READY := .venv-cuda/.ready
OLDEST_READY := .venv-oldest/.ready
NEWEST_READY := .venv-newest/.ready
PROVED := bigdit/libraries.py

.PHONY: setup cuda oldest newest demo test-fast test check docs lint types imports clean

setup: $(READY)

cuda: $(READY) $(CUDA_READY)

oldest: $(READY) $(OLDEST_READY)

newest: $(READY) $(NEWEST_READY)

$(VENV):
	$(PYTHON) -m venv .venv
	touch $@

$(READY): $(VENV) setup.cfg pyproject.toml constraints.txt
	@echo "installing torch, DeepSpeed, diffusers and what bigdit needs into .venv: about 3 GB on disk, some minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

# The CUDA build of torch (three equals signs: no build of another name) with the Triton that it requires, and without
# NVIDIA's packages, which emulated GPUs stand in for. All else is .venv's, which may be filled meanwhile. In the other
# two it is the first and the last that plans are proved with, whatever this machine's pip is held to.
$(CUDA_READY): TORCH = $$(sed -n 's/^torch==//p' constraints.txt)
$(OLDEST_READY): TORCH = $$(sed -n 's/.*"torch": ("\(.*\)", ".*/\1/p' $(PROVED))
$(NEWEST_READY): TORCH = $$(sed -n 's/.*"torch": (".*", "\(.*\)").*/\1/p' $(PROVED))
$(OLDEST_READY) $(NEWEST_READY): $(PROVED)
$(CUDA_READY) $(OLDEST_READY) $(NEWEST_READY): $(VENV) setup.cfg constraints.txt
	@echo "installing torch $(TORCH) into $(@D): about 2 GB on disk, the rest is that of .venv; this takes a minute or more"
	$(BIN)/python -m venv $(@D)
	PIP_CONSTRAINT=/dev/null $(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps "torch===$(TORCH)"
	$(@D)/bin/python -c 'import importlib.metadata as m; print(*(r.partition(";")[0] for r in m.requires("torch") \
	  if r.startswith("triton")))' | PIP_CONSTRAINT=/dev/null xargs $(@D)/bin/pip install --quiet \
	  --disable-pip-version-check --no-deps
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth"
	touch $@

demo: $(READY) $(CUDA_READY)
	$(BIN)/python launch/demo.py

test: $(READY) $(CUDA_READY) $(OLDEST_READY) $(NEWEST_READY)
	$(BIN)/python -m pytest

# Plain Python: no engine, no emulated GPU.
test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow" tests/catalog tests/config tests/memory tests/objectives tests/optim tests/sources \
	  tests/speed tests/store

check:
	$(MAKE) -j2 lint types imports docs
	$(MAKE) test

# The pages as a site in build/site; a link that leads nowhere is an error, which --quiet would take out of what --strict
# counts. The variable is what material asks for to leave out its announcement of a successor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv-cuda .venv-oldest .venv-newest demo build *.egg-info
