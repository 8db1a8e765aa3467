# Two commands do everything on a fresh machine (python3 >= 3.10, a C compiler): make demo, make test.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
# By name, what is installed already is left alone: only an extra's packages are added to it.
PACKAGE := reduction-server
GENERATED := reducer/_loop.c reducer/_slots.c reducer/kernels/_kernels.c worker_client/_flight.c \
	worker_client/_cast.c worker_client/_submissions.c
# Commands, and Debian's packages for them where those have other names.
TEST_TOOLS := ip:iproute2 nft:nftables iperf3 mpirun:openmpi-bin srun:slurm-client \
	slurmctld slurmd
CONTAINER_TOOLS := buildah podman runc debootstrap $(filter ip:%,$(TEST_TOOLS))
# Processes of pytest. Tests mostly wait, and stay right beside others.
PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest --durations=10
PARALLEL := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
COMPILED := $(foreach folder,reducer reducer/kernels reducer/wire worker_client, \
	$(foreach kind,pyx pxd c h,$(wildcard $(folder)/*.$(kind))))

FUZZ_SECONDS ?= 60
SANITIZED_INPUTS ?= 2000

.PHONY: demo test test-integrations test-torch-suite test-containers test-clouds test-tools \
	container-tools lint bench fuzz sanitize audit sbom release clean

# Installs what is missing of $1, as root of a Debian; where that cannot be, tests are skipped.
define install
	@missing=; \
	for tool in $1; do command -v $${tool%:*} >/dev/null || missing="$$missing $${tool#*:}"; done; \
	if test -n "$$missing" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update && apt-get install -y --no-install-recommends $$missing; } >/dev/null \
			|| echo "could not be installed:$$missing"; \
	fi
endef

demo: .venv/ready
	$(BIN)/worker-client demo

test: .venv/ready
	$(PYTEST) $(PARALLEL) --ignore tests/integrations --ignore tests/containers

test-integrations: .venv/integrations-ready
	$(PYTEST) $(PARALLEL) -m "not slow" tests/integrations

test-torch-suite: .venv/integrations-ready
	$(BIN)/python -m pytest -m slow tests/integrations

# Images, a job of containers, and manifests. What cannot be had here is skipped, with the reason.
test-containers: .venv/manifests-ready container-tools
	$(PYTEST) -rs tests/containers

# The job files of Vertex AI and Azure ML. Their clients are large and pin what others need newer.
test-clouds: .venv-clouds/ready
	.venv-clouds/bin/python -m pytest -rs tests/containers/test_manifests.py

# What `make test` needs for links between hosts that lose packets, and for launchers.
test-tools:
	$(call install,$(TEST_TOOLS))

container-tools:
	$(call install,$(CONTAINER_TOOLS))

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint reducer worker_client
	$(BIN)/lint-imports

bench: .venv/bench-ready
	$(BIN)/python -m bench

# Every target for FUZZ_SECONDS seconds; findings, and inputs that reach something new, are left in
# build/fuzz.
fuzz: .venv/fuzz-ready
	$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS)

# The tests of what is compiled, and SANITIZED_INPUTS inputs for every fuzz target, on a debug build
# in build/sanitized.
sanitize: .venv/ready
	$(BIN)/python -m fuzz.sanitizers $(SANITIZED_INPUTS)

# Known vulnerabilities of what a reducer and a worker need at run time.
audit: build/runtime.txt .venv/security-ready
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r build/runtime.txt

sbom: build/runtime/ready .venv/security-ready
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o dist/sbom.cdx.json \
		build/runtime/bin/python

# A wheel and a source distribution, built by exactly what release.lock names.
release:
	rm -rf build/release dist
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install -q --require-hashes --only-binary :all: -r release.lock
	REDUCTION_BUILD_REQUIRED=1 SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
		build/release/bin/python -m build --no-isolation
	cd dist && sha256sum *.whl *.tar.gz | tee SHA256SUMS

clean:
	rm -rf .venv .venv-clouds build dist *.egg-info $(GENERATED)
	rm -f reducer/*.so reducer/kernels/*.so worker_client/*.so

.venv/ready: pyproject.toml setup.py constraints.txt $(filter-out $(GENERATED),$(COMPILED))
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[dev,demo]"
	touch $@

# Apart, so that no other test ever needs the frameworks, nor any test what the benchmarks need.
.venv/integrations-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[integrations]"
	touch $@

.venv/manifests-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[manifests]"
	touch $@

.venv-clouds/ready: pyproject.toml
	$(PYTHON) -m venv .venv-clouds
	.venv-clouds/bin/python -m pip install -q ".[clouds,dev]"
	touch $@

.venv/bench-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[bench]"
	touch $@

.venv/fuzz-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[fuzz]"
	touch $@

.venv/security-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[security]"
	touch $@

# What is installed with the package alone.
build/runtime/ready: pyproject.toml constraints.txt
	rm -rf build/runtime
	$(PYTHON) -m venv --without-pip build/runtime
	$(PYTHON) -m pip --python build/runtime/bin/python install -q -c constraints.txt .
	touch $@

build/runtime.txt: build/runtime/ready
	$(PYTHON) -m pip --python build/runtime/bin/python freeze --exclude reduction-server > $@
