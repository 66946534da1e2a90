"""What both forms of the nodes have in common: containers, and processes in their stead."""

from __future__ import annotations

from typing import Any

from pytest_celery import CeleryTestWorker, CeleryWorkerCluster

APP = "tests.docker.app"
READY = " ready."
WORKER = (
    *("celery", "-A", APP, "worker", "--concurrency", "2", "--loglevel", "INFO"),
    *("--without-gossip", "--without-mingle", "--hostname"),
)


class SmokeWorker(CeleryTestWorker):
    """A worker whose network can be cut."""

    def hostname(self) -> str:
        return f"smoke@{self.container.id[:12]}"

    def cut(self) -> None:
        """Let nothing through to the worker or from it, without any of them being told."""
        self.container.cut()

    def mend(self) -> None:
        self.container.mend()


class Cluster(CeleryWorkerCluster):  # type: ignore[misc]
    """Two workers that stand for each other."""

    def named(self, hostname: str) -> SmokeWorker:
        (found,) = (worker for worker in self if worker.hostname() == hostname)
        return found

    def other(self, worker: SmokeWorker) -> SmokeWorker:
        (found,) = (each for each in self if each is not worker)
        return found

    def logs(self) -> str:
        return "\n".join(f"--- {worker.hostname()}\n{worker.logs()}" for worker in self)


def config(url: str, port: int) -> dict[str, Any]:
    """What pytest-celery asks of a broker or backend of this machine."""
    return {"url": url, "host_url": url, "hostname": "127.0.0.1", "port": port, "vhost": ""}


def urls(cluster_config: dict[str, Any]) -> dict[str, str]:
    """The environment that tells a worker where broker and backend are."""
    return {
        "CELERY_BROKER_URL": cluster_config["celery_broker_cluster_config"]["urls"][0],
        "CELERY_RESULT_BACKEND": cluster_config["celery_backend_cluster_config"]["urls"][0],
    }
