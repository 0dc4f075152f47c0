# One process without a wrapping shell script: SIGTERM drains running streams, then the container ends.
#
#   docker build -t monoloop .
#   docker run --rm -p 127.0.0.1:8000:8000 -v monoloop-models:/models monoloop
#
# pip takes its index from the usual PIP_* build arguments, for example to select torch's CPU build.

FROM python:3.12-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python -m venv /opt/monoloop
# Dependencies are a separate layer, so that a change of the code does not reinstall them.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; \
        project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = project['optional-dependencies']; \
        print(*project['dependencies'], *extras['kv-events'], *extras['otel'], sep='\n')" > requirements.txt \
    && /opt/monoloop/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY . .
RUN /opt/monoloop/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
# Triton compiles a small launcher in C the first time it meets a GPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home monoloop \
    && install -d -o monoloop -g monoloop /models /models/kernels
COPY --from=build /opt/monoloop /opt/monoloop
ENV PATH=/opt/monoloop/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/hub \
    MONOLOOP_CACHE_DIR=/models \
    NUMBA_CACHE_DIR=/models/kernels \
    TRITON_CACHE_DIR=/models/triton \
    MONOLOOP_HOST=0.0.0.0
USER monoloop
WORKDIR /home/monoloop
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m --retries=3 \
    CMD ["python", "-m", "server.healthcheck"]
ENTRYPOINT ["tini", "--", "monoloop"]
CMD ["serve"]
