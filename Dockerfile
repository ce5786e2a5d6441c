# Dilatant for NVIDIA GPUs: docker build --tag registry.example.com/dilatant .
# CUDA, torch and Triton are those with which the GPU tests passed; drivers have to know CUDA 13.0 (580 and later).
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles C at run time, hence a compiler and Python's headers. Ubuntu drops old versions of packages, so that
# pinned ones could not be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 dilatant

ENV PATH=/opt/dilatant/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /opt/source
COPY pyproject.toml README.md LICENSE ./
COPY src src
# hadolint ignore=DL3013
RUN python3 -m venv /opt/dilatant \
    && pip install --no-cache-dir torch==2.11.0 triton==3.6.0 \
    && pip install --no-cache-dir ".[gpu,lora,video,generators]"

USER 10001
WORKDIR /home/dilatant
CMD ["dilatant", "doctor"]
