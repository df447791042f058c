# Everything starts from a bare clone: each target makes .venv, installs and builds what it needs, and
# does so again only when a file it depends on has changed.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.14.1 torchvision==0.29.1

# Switches of setup.py (docs/design.md#building). Given ones that differ from those of the last build compile
# anew; none leave it as it is.
SWITCHES := $(strip $(foreach name,OPZOO_CUDA OPZOO_RELEASE TORCH_CUDA_ARCH_LIST CUDA_HOME,$(if $($(name)),$(name)=$($(name)))))

SOURCES := $(shell find opzoo/csrc -type f) setup.py opzoo/_version.py
CXX_FILES := $(shell find opzoo/csrc docs -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test sanitize build docs pictures lint types format bench wheel matrix symbols clean

demo: build
	$(BIN)/python examples/detect_digits.py

test: build
	$(BIN)/python -m pytest -q

# A second build beside the first, for the CPU, under ASan and UBSan; any report ends it non-zero.
sanitize: $(VENV)/installed
	$(BIN)/python tools/sanitize.py

build: $(VENV)/built

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade-strategy only-if-needed $(TORCH) "setuptools>=77" wheel ninja
	$(BIN)/python tools/requirements.py test mmdet onnx examples bench lint docs > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q -r $(VENV)/requirements.txt
	touch $@

$(VENV)/switches: | $(VENV)/installed
	echo '$(SWITCHES)' > $@
ifneq ($(SWITCHES),)
ifneq ($(SWITCHES),$(shell cat $(VENV)/switches 2> /dev/null))
.PHONY: $(VENV)/switches
endif
endif

$(VENV)/built: $(VENV)/installed $(VENV)/switches $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	$(BIN)/python -c "import opzoo; print('built:', opzoo.build_info())"
	touch $@

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

types: $(VENV)/installed
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: build
	$(BIN)/python -m opzoo.bench

# The site, to build/docs/index.html; a warning is an error.
docs: build
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs-trees docs build/docs

# The pictures of the site, after a change to a script or to docs/benchmarks/*.csv.
pictures: build
	for script in docs/pictures/[!_]*.py; do $(BIN)/python $$script || exit 1; done

symbols: build
	$(BIN)/python tools/check_symbols.py

# One wheel for every torch and Python, with the architectures of a release.
wheel: $(VENV)/installed
	OPZOO_RELEASE=1 $(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w dist .

matrix: $(VENV)/installed
	$(BIN)/python tools/matrix.py

clean:
	rm -rf build dist *.egg-info opzoo/*.so $(VENV)/built
