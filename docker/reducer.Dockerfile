# A reducer: no torch, no compiler, no root, nothing written to its root file system.
#
#   docker build -f docker/reducer.Dockerfile -t reducer .
#   docker run --read-only -p 5555:5555 -v ./keys:/keys:ro reducer serve --keys /keys
#
# The build secrets `pip` and `ca` are for builds behind a mirror: a pip configuration, and the
# certificates that it names. Without them pip does what it does everywhere.

ARG BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/reducer
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    PIP_CONSTRAINT=/src/constraints.txt \
        /build/bin/pip wheel -q --no-deps -w /wheels . \
    && /build/bin/pip --python /opt/reducer/bin/python install -q --no-cache-dir --no-compile \
        -c constraints.txt /wheels/*.whl
# Bytecode of what a reducer imports, and of nothing else: its root cannot be written to later. What
# NumPy carries for tests, type checkers and the building of extensions stays behind, too.
RUN /opt/reducer/bin/python -c "import reducer.cli" \
    && cd /opt/reducer/lib/python3*/site-packages/numpy \
    && rm -r distutils f2py _core/include _core/lib random/lib \
    && find . -depth -type d -name tests -exec rm -r {} + \
    && find . -name '*.pyi' -delete

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="reducer" \
      org.opencontainers.image.description="CPU-only reducer of the reduction server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The same goes for the standard library's bytecode; Debian compiles all of it.
RUN --mount=type=bind,from=build,source=/opt/reducer,target=/opt/reducer \
    apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/* /usr/share/zoneinfo \
    && find /usr/lib/python3* -depth -name __pycache__ -exec rm -r {} + \
    && /opt/reducer/bin/python -c "import reducer.cli" \
    && groupadd --gid 10001 reducer \
    && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home \
        --shell /usr/sbin/nologin reducer
COPY --from=build /opt/reducer /opt/reducer
ENV PATH=/opt/reducer/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    REDUCTION_BIND=tcp://0.0.0.0:5555 \
    REDUCTION_HTTP=0.0.0.0:9090
USER 10001:10001
EXPOSE 5555 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9090/healthz', timeout=2)"]
ENTRYPOINT ["reducer"]
CMD ["serve"]
