# A worker, or a client, with celery-relock in it. Build it from the repository's root:
#     docker build -f docker/worker.Dockerfile -t celery-relock/worker .
# For engines without BuildKit too. PYTHON_PACKAGES are installed beside it.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
RUN python -m venv --without-pip /venv
# In an order in which a change of the package costs its own installation alone.
ARG PYTHON_PACKAGES="celery[redis] hiredis rich"
RUN pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check ${PYTHON_PACKAGES}
COPY pyproject.toml README.md LICENSE ./
COPY lua ./lua
COPY celery_relock ./celery_relock
RUN pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check .

FROM ${BASE_IMAGE}
# Names, because Celery takes a group that it cannot find for root's.
RUN echo "worker:x:10001:" >>/etc/group \
    && echo "worker:x:10001:10001::/app:/bin/false" >>/etc/passwd
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 APP=demo.tasks
COPY --from=build /venv /venv
WORKDIR /app
COPY demo ./demo
USER worker
# The worker of this container answers.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=2 \
    CMD celery inspect ping --timeout 5 --destination "celery@$HOSTNAME"
# Celery is the first process and gets the SIGTERM of `docker stop`: it ends its tasks and stops.
CMD ["celery", "worker", "--concurrency", "4", "--without-gossip", "--without-mingle"]
