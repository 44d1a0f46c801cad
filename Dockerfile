# One image for every process: `turnkeeper worker` by default, `turnkeeper migrate` and the rest by argument.
FROM python:3.13.9-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/turnkeeper
COPY requirements.lock .
RUN /opt/turnkeeper/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY publisher publisher
COPY worker worker
COPY scripts scripts
RUN /opt/turnkeeper/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13.9-slim-bookworm
RUN useradd --create-home --uid 10001 turnkeeper
COPY --from=build /opt/turnkeeper /opt/turnkeeper
ENV PATH=/opt/turnkeeper/bin:$PATH PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root.
USER 10001
WORKDIR /home/turnkeeper
# A worker of this container has sent a heartbeat lately.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s --retries=3 CMD ["turnkeeper", "worker-alive"]
CMD ["turnkeeper", "worker"]
