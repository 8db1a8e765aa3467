# A worker: torch, and this package with its commands. The same image serves every role of a job:
# `worker-client launch -- train.py` trains, or becomes a reducer where the launcher says so.
#
#   docker build -f docker/worker.Dockerfile -t worker .
#   docker build -f docker/worker.Dockerfile -t worker --build-arg BASE=IMAGE-WITH-CUDA-AND-TORCH .
#
# A base that has python3 and torch keeps its own; others get Debian's python3 and this TORCH, whose
# kind (CPU or CUDA) is that of the index that pip uses, so that no hash can be known. The other
# arguments, and the build secrets, are the reducer's.

ARG BASE=debian:trixie-20260824-slim@sha256:d7e12182ce18b85b93007c1dedf31f2d29e01ccf3182cc4017c709b6259bc132

FROM ${BASE} AS python
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends libsodium23 \
        $(command -v python3 >/dev/null || echo python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/*
# A virtual environment over the base's packages: Debian's pip installs nothing beside apt's.
RUN python3 -m venv --system-site-packages /opt/worker
ENV PATH=/opt/worker/bin:$PATH

# The wheel is built with the very Python that will load it.
FROM python AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libsodium-dev pkg-config \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && { test -e "$headers/Python.h" || apt-get install -y --no-install-recommends python3-dev; }
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    pip install -q --no-cache-dir --require-hashes --only-binary :all: -r build.lock \
    && pip wheel -q --no-build-isolation --no-deps -w /wheels .

FROM python
ARG TORCH=torch==2.15.0
ARG VERSION=0.1.0
ARG SOURCE=
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title="worker" \
      org.opencontainers.image.description="PyTorch worker with the reduction server's client" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -c "import torch" 2>/dev/null || pip install -q --no-cache-dir "${TORCH}"
# Copied, not mounted: buildah's issue 6609 keeps an old layer when only a mounted stage has changed.
COPY runtime.lock /wheels/
COPY --from=build /wheels /wheels
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    pip install -q --no-cache-dir --require-hashes --only-binary :all: -r /wheels/runtime.lock \
    && pip install -q --no-deps /wheels/*.whl \
    && test "$(python3 -c 'import reducer; print(reducer.__version__)')" = "${VERSION}"
RUN groupadd --gid 10001 worker && useradd --uid 10001 --gid 10001 --create-home worker
ENV PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/worker
CMD ["worker-client", "--help"]
