# make train [ARGS="algorithm=cispo seed=1"]   the default run, or one changed by key=value
# make test                                    quick linters, tests without processes, one run: minutes
# make test-all                                all linters, every test but those of engines and the cluster, one recipe
#   [PART=environments PYTHON312=PATH]           in place of it, those that want environments of other packages, in .environments/
#   [PART=312 PYTHON312=PATH]                    or the learner's on Python 3.12, with the newest megatron-core tried
# make test-engines                            the tests that want vLLM and SGLang, which it installs under .engines/
# make test-cluster                            jobs on a real Slurm of twenty-five nodes on this machine (root, Debian)
# make test-gpu [HALF=1|2] [GPU_PYTHON=python3]  the kit for one GPU, seven minutes a half; prints a table of figures
# make mutants [ARGS="--sample 40 --seed 1"] [CHANGED=1|PLANTED=1]   are 1,060 faults put into sixteen rooms seen by a test? hours
# make lint                                    linters alone (what pre-commit runs)
# make docs                                    the documents as a site, build/site; a broken link is an error (lint does it)
# make clean                                   remove the environment and caches; runs/ stays

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON312 ?= python3.12
BIN := .venv/bin
ENVIRONMENT := .venv/.installed
TORCH := torch==2.13.0
FILES_312 := tests/unit/learner tests/unit/options tests/tools/planner tests/matrix $(addprefix tests/distributed/test_, \
	resume_layouts.py kept.py overlap.py \
	float32_head.py parked.py conversion.py te_names.py pretended_gpu.py)
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder
PAGES := LICENSE Makefile pyproject.toml constraints.txt bench conf docs launcher rl_megatron slurm tools
ARGS ?=
FILES ?=
PART ?=
HALF ?=
GPU_PYTHON ?=

.PHONY: train test test-all test-engines test-cluster test-gpu mutants lint docs clean
.DELETE_ON_ERROR:
unexport PYTHONDONTWRITEBYTECODE # each process of pytest would rewrite the assertions of all test files at each start

train: $(ENVIRONMENT)
	$(BIN)/rl-megatron train $(ARGS)

test: $(ENVIRONMENT) .venv/te/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p tests.quick $(TOGETHER) -m "not slow" tests/e2e/test_resume.py tests/matrix tests/unit tests/tools tests/property

ifeq ($(PART),)
test-all: lint .venv/te/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q $(TOGETHER)
	$(BIN)/pytest -q tests/recipes -k '30b and not 80gb and not async'
else ifeq ($(PART),environments)
test-all: .venv/.reasoning-gym-installed $(patsubst %,.environments/%/.installed,verifiers verifiers-0.1 openenv skypilot \
		$(if $(shell $(PYTHON312) --version 2>/dev/null),nemo-gym))
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -rs tests/unit/environments tests/environments
else ifeq ($(PART),312)
test-all: .venv312/.installed .venv312/te/.installed
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= .venv312/bin/pytest -q -rs -n 2 --dist loadfile --no-loadscope-reorder \
		$(or $(FILES),$(FILES_312)) $(ARGS)
else
$(error PART=$(PART): environments or 312)
endif

test-cluster: $(ENVIRONMENT)
	tests/cluster/install.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -rs -n 4 --dist worksteal tests/cluster

# No server compiles a kernel: vLLM's for log-probs takes 34 s of CPU time. Jobs of test-cluster compile it.
test-engines: $(ENVIRONMENT) .engines/vllm/.installed .engines/sglang/.installed
	OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		$(addprefix tests/engines/test_, models.py restarts.py faults.py nodes.py) tests/engines

OF_verifiers := verifiers==0.4.0
OF_verifiers-0.1 := verifiers==0.1.14
OF_openenv := openenv-core==0.3.0
OF_skypilot := skypilot==0.14.1
OF_reasoning-gym := "reasoning-gym==0.1.25; python_version < '3.12'" # its pycosat has no wheel for 3.12
OF_nemo-gym := nemo-gym==0.4.0

.environments/%/.installed: Makefile
	.environments/$*/bin/python -m pip -V >/dev/null 2>&1 || \
		$(if $(filter nemo-gym,$*),$(PYTHON312),$(PYTHON)) -m venv .environments/$*
	.environments/$*/bin/pip install -q $(OF_$*)
	touch $@

.venv/.reasoning-gym-installed: $(ENVIRONMENT) # an example calls it in the run's own process
	$(BIN)/pip install -q -c constraints.txt $(OF_reasoning-gym)
	touch $@

# With GPU_PYTHON in an interpreter's own environment, of which nothing is changed (docs/install.md).
test-gpu: $(if $(GPU_PYTHON),,$(ENVIRONMENT))
	OMP_NUM_THREADS=4 $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -rs -m gpu --continue-on-collection-errors \
		$(if $(filter 1,$(HALF)),tests/gpu/first,$(if $(filter 2,$(HALF)),tests/gpu/second,tests/gpu)) $(ARGS)

mutants: .venv/.mutants-installed
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.mutants.$(if $(PLANTED),planted,run) $(if $(CHANGED),--changed $(CHANGED)) $(ARGS)

lint: $(ENVIRONMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.words
	$(MAKE) --no-print-directory docs

# Files are copied with their paths, so that a link is the same here and in the repository.
docs: $(ENVIRONMENT)
	rm -rf build/pages
	mkdir -p build/pages
	git ls-files -z -co --exclude-standard -- '*.md' $(PAGES) | xargs -0 cp --parents -t build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/site.yaml

clean:
	rm -rf .venv .venv312 .engines .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

# An environment that is there keeps its interpreter; one whose making was cut short has no pip, and is made again.
# torch by itself first and at its exact version: a looser range draws gigabytes of other builds.
$(ENVIRONMENT): pyproject.toml constraints.txt
	.venv/bin/python -m pip -V >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e .[dev]
	touch $@

.venv312/.installed: pyproject.toml constraints.txt
	$(PYTHON312) -c 'import sys; assert sys.version_info[:2] == (3, 12), sys.version'
	.venv312/bin/python -m pip -V >/dev/null 2>&1 || $(PYTHON312) -m venv .venv312
	.venv312/bin/pip install -q -c constraints.txt $(TORCH)
	.venv312/bin/pip install -q -c constraints.txt -e .[test]
	touch $@

.venv/.mutants-installed: $(ENVIRONMENT)
	$(BIN)/pip install -q -c constraints.txt -e .[mutants]
	touch $@

# TransformerEngine's Python sources alone, where only the test of its names looks for them.
.venv/te/.installed: $(ENVIRONMENT)

.venv312/te/.installed: .venv312/.installed

.venv/te/.installed .venv312/te/.installed: tests/te.txt
	$(patsubst %/te,%,$(@D))/bin/pip install -q --no-compile --no-deps --upgrade --target $(@D) -r tests/te.txt
	touch $@

# Engines want other versions than the learner and than each other. Stand-ins for what they lack on a CPU go into their
# environments, where every process of theirs loads them. Most of their modules are never imported: none is compiled here.
.engines/%/.installed: tests/engines/%.txt
	.engines/$*/bin/python -m pip -V >/dev/null 2>&1 || $(PYTHON) -m venv .engines/$*
	.engines/$*/bin/pip install -q --no-compile --no-deps -r $<
	if [ -d tests/engines/$*_cpu ]; then cp -r tests/engines/$*_cpu/. \
		"$$(.engines/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; fi
	touch $@

.engines/sglang/.installed: $(wildcard tests/engines/sglang_cpu/*)

.engines/vllm/.installed: $(wildcard tests/engines/vllm_cpu/*)
