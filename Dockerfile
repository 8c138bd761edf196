# The trainer: docker build --tag ludic . && docker run --rm --gpus all --volume "$PWD:/work" ludic train
FROM rust:1.95-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3-venv=3.* \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /env && /env/bin/pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY . .
RUN /env/bin/uv build --wheel --out-dir /dist

FROM python:3.12-slim-bookworm
COPY --from=wheel /dist /dist
COPY constraints.txt /dist/
RUN pip install --no-cache-dir uv==0.13.9 \
    && uv pip install --no-cache --system --constraint /dist/constraints.txt "$(ls /dist/*.whl)[datasets,math]" \
    && rm -r /dist \
    && useradd --create-home --uid 1000 ludic
USER 1000
WORKDIR /work
ENTRYPOINT ["ludic"]
CMD ["--help"]
