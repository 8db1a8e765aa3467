# A reducer: no torch, no compiler, no root, nothing written to its root file system.
#
#   docker build -f docker/reducer.Dockerfile -t reducer .
#   docker run --read-only -p 5555:5555 -v ./keys:/keys:ro reducer serve --keys /keys
#
# Probes, metrics and the page are answered within the container alone, unless REDUCTION_HTTP says
# otherwise: that port has no keys. What the labels say of the source comes with the arguments SOURCE
# (an address), REVISION (a commit) and CREATED (RFC 3339).
#
# The build secrets `pip` and `ca` are for builds behind a mirror: a pip configuration, and the
# certificates that it names. Without them pip does what it does everywhere.

ARG BASE=debian:trixie-20260824-slim@sha256:d7e12182ce18b85b93007c1dedf31f2d29e01ccf3182cc4017c709b6259bc132

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc libc6-dev libsodium-dev pkg-config python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/reducer
WORKDIR /src
COPY . .
# Of files whose hashes are known, and of these sources.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    locked="install -q --no-cache-dir --no-compile --require-hashes --only-binary :all:" \
    && /build/bin/pip $locked -r build.lock \
    && /build/bin/pip wheel -q --no-build-isolation --no-deps -w /wheels . \
    && /build/bin/pip --python /opt/reducer/bin/python $locked -r runtime.lock \
    && /build/bin/pip --python /opt/reducer/bin/python install -q --no-compile --no-deps /wheels/*
# Bytecode of what a reducer imports, and of nothing else: its root cannot be written to later. What
# NumPy carries for tests, type checkers and the building of extensions stays behind, too.
RUN /opt/reducer/bin/python -P -c "import reducer.cli" \
    && cd /opt/reducer/lib/python3*/site-packages/numpy \
    && rm -rf f2py _core/include _core/lib random/lib \
    && find . -depth -type d -name tests -exec rm -r {} + \
    && find . -name '*.pyi' -delete

FROM ${BASE}
ARG VERSION=0.1.0
ARG SOURCE=
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="reducer" \
      org.opencontainers.image.description="CPU-only reducer of the reduction server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
# The same goes for the standard library's bytecode; Debian compiles all of it.
RUN --mount=type=bind,from=build,source=/opt/reducer,target=/opt/reducer \
    apt-get update \
    && apt-get install -y --no-install-recommends libsodium23 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/* /usr/share/zoneinfo \
    && find /usr/lib/python3* -depth -name __pycache__ -exec rm -r {} + \
    && test "$(/opt/reducer/bin/python -c 'import reducer.cli; print(reducer.__version__)')" = "${VERSION}" \
    && groupadd --gid 10001 reducer \
    && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home \
        --shell /usr/sbin/nologin reducer
COPY --from=build /opt/reducer /opt/reducer
ENV PATH=/opt/reducer/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    REDUCTION_BIND=tcp://0.0.0.0:5555 \
    REDUCTION_HTTP=127.0.0.1:9090
USER 10001:10001
EXPOSE 5555 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 CMD ["reducer", "health"]
ENTRYPOINT ["reducer"]
CMD ["serve"]
