# Everything on a fresh machine: Python 3.11 or newer and a C compiler. The virtual environment is made here.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Python's and asyncio's debug modes double the work: they look in the night, and in the lanes.
DEV    := $(if $(AIODATADIST_NIGHTLY),-X dev)
RETRY  := $(if $(AIODATADIST_FLAKY),$(BIN)/python -m tests.retry --)
PYTEST := $(RETRY) $(BIN)/python $(DEV) -m pytest $(if $(AIODATADIST_NIGHTLY),--asyncio-debug)
# Tests wait most of their time: four for each core that this run may use keep it busy, where three left a fifth of it idle.
WORKERS := -p tests.workers --workers $(shell n=$$(nproc); echo $$((n < 4 ? 4 * n : 12)))
NATIVE := $(shell find native -name '*.[ch]' -o -name CMakeLists.txt -o -name '*.py')
# An editable install looks for a module where it was: one that moved is seen after another install.
MODULES := build/modules.txt
$(shell mkdir -p build; find aiodatadist -name '*.py' ! -name _declarations.py | sort >$(MODULES).new; \
    cmp -s $(MODULES).new $(MODULES) && rm $(MODULES).new || mv $(MODULES).new $(MODULES))

# Python keeps what it compiled, as it does for users: here it would be compiled anew for each of a thousand processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test mutants measure nightly check native pytest hostile fuzz frozen alone chaos hccs roce aicpu tcp hardware packaging bare site types torch lmcache sglang vllm smoke strict abi sniffio oldest bench wheel clean
help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml $(NATIVE) $(MODULES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,demo]' cmake ninja
	@touch $@

# The demo needs a tenth of what development needs; an environment for development does as well, if there is one.
DEMO := $(if $(wildcard $(STAMP)),$(BIN),build/demo/bin)
build/demo/bin/aiodatadist: pyproject.toml $(NATIVE) $(MODULES)
	@echo 'installing what the demo needs into build/demo'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@$(PYTHON) -m venv build/demo
	@build/demo/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	@build/demo/bin/python -m pip install --quiet --disable-pip-version-check '.[demo,cli]'
	@touch $@

$(BIN)/aiodatadist: $(STAMP) ;

demo: $(DEMO)/aiodatadist  ## a prefill and a decode process share a KV cache
	@$(DEMO)/aiodatadist demo

test: $(STAMP)  ## everything that needs no NPU and no network: pytest, native, check and packaging side by side
	@$(MAKE) --no-print-directory -j2 --output-sync=target pytest native check packaging

mutants: $(STAMP)  ## breaks each safety promise on purpose, and fails if the tests do not notice; MUTANTS names some
	@$(BIN)/python -m tests.mutants $(MUTANTS)

nightly: $(STAMP)  ## the same with the long tests, on both event loops, with many examples; and the lanes
	AIODATADIST_NIGHTLY=1 $(MAKE) test
	AIODATADIST_NIGHTLY=1 $(MAKE) alone
	$(MAKE) measure
	$(MAKE) mutants MUTANTS='--chaos'
	$(MAKE) mutants
	$(MAKE) frozen
	AIODATADIST_NIGHTLY=1 $(MAKE) hccs roce aicpu tcp
	$(MAKE) site types sniffio oldest torch
	$(MAKE) lmcache LMCACHE='lmcache lmcache-newest'
	$(MAKE) sglang SGLANG='sglang sglang-newest'
	AIODATADIST_NIGHTLY=1 $(MAKE) vllm VLLM='0.31 0.32 newest'
	$(MAKE) bare
	$(BIN)/python -m tests.lanes machines
	$(MAKE) fuzz SECONDS=60
	$(MAKE) chaos SECONDS=600

# What runs on strict softnpu alone belongs to those lanes.
ORDINARY := -m 'not alone and not measures' --ignore=tests/strict --ignore=tests/engines --ignore=tests/test_hardware_suite.py \
	--ignore=tests/demo/test_npu_demo.py --ignore=tests/bench/test_npu_bench.py
# Marked as recursive by `+`, its output is shown at once, not at its end; make -n would run what is marked.
pytest: $(STAMP)  ## the Python tests, in four processes for each core: they wait more than they work
	$(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)@env -u MAKEFLAGS $(PYTEST) $(WORKERS) $(ORDINARY)

hostile: $(STAMP)  ## attacks on what is promised of peers, strangers and routers: every file that tests/hostile/rows.py names
	@env -u MAKEFLAGS $(PYTEST) $(WORKERS) -m 'not alone and not measures' $$($(BIN)/python -m tests.hostile.rows)

# Processes that stand still half of the time take longer, and none of it is a failure.
frozen: $(STAMP)  ## the same while single processes are frozen at random, which it says the seed of; for the night
	@env -u MAKEFLAGS $(BIN)/python -m tests.freezer $(if $(SEED),--seed $(SEED)) -- $(PYTEST) $(WORKERS) --timeout 300 $(ORDINARY)

alone: $(STAMP)  ## chaos, calm runs and links on a busy machine, which are long and run when nothing else does; for the night
	@$(PYTEST) -m 'alone and not measures' --ignore=tests/engines

# A busy machine misses some of it, which is no reason to refuse a change: so this reports, and does not fail.
TIMES := build/times.jsonl
measure: $(STAMP)  ## what depends on the machine: times, ratios, lateness
	@rm -f $(TIMES)
	-@AIODATADIST_TIMES=$(TIMES) $(PYTEST) -q -m measures -rA --ignore=tests/engines
	-@AIODATADIST_TIMES=$(TIMES) $(PYTEST) -q -m 'not measures' $(shell grep -rl --include='test_*.py' 'lasting(' tests)
	@AIODATADIST_TIMES=$(TIMES) $(BIN)/python -m tests.stopwatch

# What moves bytes between two processes or two devices, where softnpu does as HCCL does between cards and between servers.
STRICT := tests/bench/test_npu_bench.py tests/conformance tests/demo/test_npu_demo.py tests/faults tests/hixl tests/model \
	tests/test_after_linking.py tests/test_checksums.py tests/test_deadlines.py tests/test_hardware_suite.py tests/test_layered.py tests/test_layered_checksums.py tests/test_notifications.py tests/test_probe.py \
	tests/test_priorities.py tests/test_pull.py tests/test_push.py tests/test_relink.py tests/test_request_response.py tests/test_symmetric_links.py
# Of those, what the three differ in most: transfers, what stops them, and what the device refuses.
DIFFERS := tests/conformance tests/faults/test_cancellation.py tests/faults/test_engine.py tests/faults/test_held_transfers.py \
	tests/test_deadlines.py tests/test_layered.py tests/test_priorities.py tests/test_pull.py tests/test_push.py tests/test_request_response.py
hccs roce aicpu: $(STAMP)  ## those tests on softnpu as strict as HCCL over HCCS, over RoCE, or on an A3 that unfolds on the device
	@env -u MAKEFLAGS SOFTNPU_STRICT=$@ $(PYTEST) $(WORKERS) -m 'not alone and not measures' $(STRICT) $(if $(filter roce,$@),tests/strict)

# The same over TCP, what says nothing there left out (tests/over_tcp.py).
tcp: $(STAMP)  ## transfers, links and faults over transport tcp; SHORT=1 for a part of them
	@env -u MAKEFLAGS AIODATADIST_TEST_TRANSPORT=tcp $(PYTEST) $(WORKERS) -m 'not alone and not measures' \
		$$($(BIN)/python -m tests.over_tcp $(if $(SHORT),--short))

hardware: $(STAMP)  ## the tests of two NPUs of this machine; docs/npu.md says how, ARGS are for pytest
	@env -u MAKEFLAGS AIODATADIST_HARDWARE=1 AIODATADIST_RUNTIME=ascend $(PYTEST) tests/hardware $(ARGS)

SECONDS = 120
chaos: $(STAMP)  ## processes, network and devices at their worst, for SECONDS in all profiles; SEED and PROFILE replay
	@$(BIN)/aiodatadist chaos --seconds $(SECONDS) --profile $(or $(PROFILE),all) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP)  ## every reader of input from others for SECONDS: atheris, which is installed in .cache/venvs, and C under ASan; NAMES picks some
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(NAMES)

packaging: $(STAMP)  ## sdist and wheel as they are released, where nothing else is installed
	@$(BIN)/python -m tests.packaging

bare: $(STAMP)  ## the wheel and the demo in a Debian without a compiler, as Dockerfile has it; needs root and mmdebstrap
	@$(BIN)/python -m tests.bare_root

site: $(STAMP)  ## the documentation site in build/site; what builds it is installed in .cache/venvs
	@$(BIN)/python -m tests.site

types: $(STAMP)  ## the types of the public interface, complete for pyright, which is installed in .cache/venvs with the engines
	@$(BIN)/python -m tests.completeness

torch: $(STAMP)  ## the tests with torch, which is installed in .cache/venvs/torch
	$(BIN)/python -m tests.lanes torch

LMCACHE := lmcache
lmcache: $(STAMP)  ## LMCache's classes over the context cache; it is installed in .cache/venvs
	@set -e; for lane in $(LMCACHE); do $(BIN)/python -m tests.lanes $$lane; done

SGLANG := sglang
sglang: $(STAMP)  ## SGLang's base classes over pushes; its files are installed in .cache/venvs
	@set -e; for lane in $(SGLANG); do $(BIN)/python -m tests.lanes $$lane; done

VLLM := 0.31 0.32
SMOKE := tests/engines/test_vllm.py tests/engines/test_vllm_claims.py tests/engines/test_vllm_pushes.py --timeout 150 -k 'tokens_are or claims'
vllm: $(STAMP)  ## vLLM engines that pull from and push to each other; each version of VLLM is installed in .cache/venvs, some GB
	@set -e; for version in $(VLLM); do $(BIN)/python -m tests.lanes vllm-$$version; done

smoke: $(STAMP)  ## of those with vLLM 0.32, that tokens are right and that no client reads what is not its own
	@$(BIN)/python -m tests.lanes vllm-0.32 -- $(SMOKE)

strict: $(STAMP)  ## a part of hccs, roce and aicpu: what they differ in most
	@set -e; for mode in hccs roce aicpu; do $(MAKE) --no-print-directory $$mode STRICT='$(DIFFERS)'; done

check: $(STAMP)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

native: $(STAMP)  ## the C tests: plain, under ASan and UBSan, under TSan
	PATH="$(abspath $(BIN)):$$PATH" sh native/tests/run.sh build/native "$(abspath aiodatadist/_native)"

abi: $(STAMP)  ## our declarations against the vendor's headers (fetched by pip into .cache/abi), and softnpu's exports
	$(BIN)/python -m tests.abi --fetch
	AIODATADIST_REQUIRE_ABI=1 $(BIN)/python -m pytest tests/abi

sniffio: $(STAMP)  ## a short run with the newest of everything, and sniffio (its venv is made in .cache/venvs)
	$(BIN)/python -m tests.lanes sniffio

oldest: $(STAMP)  ## a short run with the oldest of everything that pyproject.toml allows
	$(BIN)/python -m tests.lanes oldest

bench: $(STAMP)  ## the figures of the README
	$(BIN)/aiodatadist bench --op pull,push --memory pool,user --against process_vm,nixl
	$(BIN)/aiodatadist bench --op pull,push --block 32,2KiB,8KiB --batch 1 --layers 1 --seconds 1 --against process_vm,nixl
	$(BIN)/python -m benchmarks.copies
	$(BIN)/python -m benchmarks.facade
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.forms
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.layers
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.engines
	$(BIN)/python -m benchmarks.context_cache

wheel: $(STAMP)  ## a wheel in dist/, and its bill of materials
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m tests.sbom dist/*.whl

clean:  ## all that was made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache aiodatadist/_native/*.so aiodatadist/_native/_declarations.py
