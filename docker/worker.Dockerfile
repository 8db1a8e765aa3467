# A worker: torch, and this package with its commands. The same image serves every role of a job:
# `worker-client launch -- train.py` trains, or becomes a reducer where the launcher says so.
#
#   docker build -f docker/worker.Dockerfile -t worker .
#   docker build -f docker/worker.Dockerfile -t worker --build-arg BASE=IMAGE-WITH-CUDA-AND-TORCH .
#
# A base that has python3 and torch keeps its own; others get Debian's python3 and this TORCH, whose
# kind (CPU or CUDA) is that of the index that pip uses. The build secrets are the reducer's.

ARG BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS python
USER root
RUN command -v python3 >/dev/null || { \
        apt-get update \
        && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    }
# A virtual environment over the base's packages: Debian's pip installs nothing beside apt's.
RUN python3 -m venv --system-site-packages /opt/worker
ENV PATH=/opt/worker/bin:$PATH

# The wheel is built with the very Python that will load it.
FROM python AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && { test -e "$headers/Python.h" || apt-get install -y --no-install-recommends python3-dev; }
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    PIP_CONSTRAINT=/src/constraints.txt \
        pip wheel -q --no-deps -w /wheels .

FROM python
ARG TORCH=torch==2.15.0
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="worker" \
      org.opencontainers.image.description="PyTorch worker with the reduction server's client" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -c "import torch" 2>/dev/null || pip install -q --no-cache-dir "${TORCH}"
# Copied, not mounted: buildah's issue 6609 keeps an old layer when only a mounted stage has changed.
COPY --from=build /wheels /wheels
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    pip install -q --no-cache-dir /wheels/*.whl
RUN groupadd --gid 10001 worker && useradd --uid 10001 --gid 10001 --create-home worker
ENV PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/worker
CMD ["worker-client", "--help"]
