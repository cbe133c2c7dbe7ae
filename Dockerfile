# rlgraph and SGLang for NVIDIA GPUs; how to build and start it: docs/gpu.md
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# A compiler and Python's headers for kernels that are compiled on first use; libraries of NUMA and InfiniBand
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       g++ ibverbs-providers libibverbs1 libnuma1 librdmacm1 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/rlgraph

ENV CUDA_HOME=/usr/local/cuda \
    PATH=/opt/rlgraph/bin:${PATH}

# The whole set, as it was resolved: pip chooses nothing
COPY requirements/sglang-py312.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --no-deps -r /tmp/requirements.txt

WORKDIR /tmp/rlgraph
COPY pyproject.toml README.md LICENSE ./
COPY graphs graphs
COPY nodes nodes
COPY rlgraph rlgraph
COPY runtime runtime
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && pip check

WORKDIR /workspace
CMD ["rlgraph", "doctor"]
