"""A master, its replicas, and the Sentinels that watch them, on free ports of 127.0.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.servers import Server
from tests.support.waiting import wait_for

# A loaded machine puts Sentinels into their tilt mode, in which they do nothing for 30 s.
PATIENTLY = 90.0


class Watcher(Server):
    """One Sentinel process. `kill` and `restart` keep its port."""

    def __init__(self, binary: str, config: str) -> None:
        super().__init__("sentinel")
        self._binary = binary
        self._config = self._folder / "sentinel.conf"
        for _ in range(5):
            self.port = free_port()
            self._config.write_text(f"port {self.port}\nbind 127.0.0.1\n{config}\n")
            if self.restart():
                return
        self.stop()
        raise RuntimeError(f"{binary} --sentinel did not start")

    def restart(self) -> bool:
        return self._launch([self._binary, str(self._config), "--sentinel"])

    def _answers(self) -> bool:
        once = Retry(NoBackoff(), 0)
        with contextlib.suppress(redis.ConnectionError), self.client(retry=once) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
        return False

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True, protocol=2, **options)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(19)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(18)


class Watched:
    """One service under Sentinels.

    Args:
        replicas, sentinels: how many of them.
        down_after: seconds of silence after which a master counts as down; with less, a loaded
            machine makes failovers of its own.
        password: of the servers; `sentinel_password`: of the Sentinels.

    Attributes:
        service: the master's name in the Sentinels.
        servers: every Redis, the first master first.
        sentinels: every Sentinel.
    """

    def __init__(
        self,
        binary: str,
        *config: str,
        replicas: int = 2,
        sentinels: int = 3,
        down_after: float = 1.5,
        password: str | None = None,
        sentinel_password: str | None = None,
        service: str = "shop",
    ) -> None:
        self.service, self.password, self.sentinel_password = service, password, sentinel_password
        self.servers: list[RedisServer] = []
        self.sentinels: list[Watcher] = []
        self._binary, self._alone = binary, list[Watcher]()
        self._frozen: list[RedisServer | Watcher] = []
        login = ("--masterauth", password) if password else ()
        self._config = (*config, *login, "--repl-diskless-sync-delay", "0")
        try:
            for _ in range(1 + replicas):
                self.servers.append(self._server(binary))
            for server in self.servers[1:]:
                server.client().replicaof("127.0.0.1", self.servers[0].port)
            watch = self._watch(self.servers[0].port, sentinels // 2 + 1, round(down_after * 1000))
            for _ in range(sentinels):
                self.sentinels.append(Watcher(binary, watch))
            self._have("publish-period", 200, "info-period", 500, "ping-period", 200)
            self.whole()
            # As it is by itself, but for what only makes a failover take longer.
            self._have("publish-period", 2000, "info-period", 10_000, "ask-period", 200)
        except BaseException:
            self.stop()
            raise

    def _server(self, binary: str) -> RedisServer:
        return RedisServer(*self._config, binary=binary, password=self.password)

    def _have(self, *periods: str | int) -> None:
        """How often the Sentinels do what. Those of Redis 6.2 cannot be told."""
        for each in self.sentinels:
            with contextlib.suppress(redis.ResponseError), self._ask(each) as client:
                client.execute_command("SENTINEL", "DEBUG", *periods)

    def _watch(self, port: int, quorum: int, down_after: int) -> str:
        of = self.service
        lines = [
            f"sentinel monitor {of} 127.0.0.1 {port} {quorum}",
            f"sentinel down-after-milliseconds {of} {down_after}",
            f"sentinel failover-timeout {of} 4000",
            f"sentinel parallel-syncs {of} 2",
        ]
        if self.password:
            lines.append(f'sentinel auth-pass {of} "{self.password}"')
        if self.sentinel_password:
            lines += [f"requirepass {self.sentinel_password}"]
            lines += [f"sentinel sentinel-pass {self.sentinel_password}"]
        return "\n".join(lines)

    @property
    def url(self) -> str:
        """As Celery writes it, without the name of the service."""
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return ";".join(f"sentinel://{login}127.0.0.1:{each.port}/0" for each in self.sentinels)

    @property
    def transport(self) -> dict[str, Any]:
        secret = {"password": self.sentinel_password} if self.sentinel_password else {}
        return {"master_name": self.service, **({"sentinel_kwargs": secret} if secret else {})}

    def _ask(self, sentinel: Watcher) -> redis.Redis:
        return sentinel.client(password=self.sentinel_password)

    def state(self, sentinel: Watcher) -> Mapping[str, Any]:
        with self._ask(sentinel) as client:
            found: Mapping[str, Any] = client.sentinel_master(self.service)
        return found

    def master(self) -> RedisServer:
        """The server that every Sentinel calls the master by now."""

        def agreed() -> int | None:
            ports = {self.state(each)["port"] for each in self.sentinels}
            return ports.pop() if len(ports) == 1 else None

        port = wait_for(agreed, PATIENTLY, what="Sentinels that agree on a master")
        return next(server for server in self.servers if server.port == port)

    def others(self) -> list[RedisServer]:
        master = self.master()
        return [server for server in self.servers if server is not master]

    def whole(self) -> RedisServer:
        """Wait until everything runs and is in step; what was killed or frozen comes back."""
        self.unfreeze()
        master = self.master()
        for server in self.servers:
            if server._process is None:
                server.restart(keep_data=False)
                server.client().replicaof("127.0.0.1", master.port)
        replicas = len(self.servers) - 1

        def in_step() -> bool:
            with contextlib.suppress(redis.RedisError):
                info = self.master().client().info("replication")
                lags = [info[f"slave{i}"] for i in range(replicas) if f"slave{i}" in info]
                states = [self.state(each) for each in self.sentinels]
                return (
                    info["role"] == "master"
                    and len([each for each in lags if each["state"] == "online"]) == replicas
                    and all(each["num-other-sentinels"] == len(states) - 1 for each in states)
                    and all(each["num-slaves"] == replicas for each in states)
                    and all(each["flags"] == "master" for each in states)
                    and not any(self._replicas_down(each) for each in self.sentinels)
                )
            return False

        wait_for(in_step, PATIENTLY, what="a master with its replicas and Sentinels")
        return self.master()

    def _replicas_down(self, sentinel: Watcher) -> bool:
        with self._ask(sentinel) as client:
            return any(
                each["is_sdown"] or each["master-link-status"] != "ok"
                for each in client.sentinel_slaves(self.service)
            )

    def freeze(self, one: RedisServer | Watcher) -> None:
        """SIGSTOP; `unfreeze`, `whole` and `stop` let it go."""
        one.pause()
        self._frozen.append(one)

    def cut_off(self, master: RedisServer) -> None:
        """Its replicas hear nothing of what it writes from now on, until `unfreeze`."""
        for replica in (server for server in self.servers if server is not master):
            self.freeze(replica)
        # Else the network would keep it for them.
        master.client().execute_command("CLIENT", "KILL", "TYPE", "replica")

    def unfreeze(self) -> None:
        while self._frozen:
            self._frozen.pop().resume()

    def watcher(self, port: int) -> Watcher:
        """One more Sentinel, alone, with another server as the master of the same name."""
        self._alone.append(Watcher(self._binary, self._watch(port, 1, 60_000)))
        return self._alone[-1]

    def fail_over(self) -> None:
        """SENTINEL FAILOVER: as an operator does it, without a server that is down."""

        def told() -> bool:
            # It may not have seen yet that a replica is well, or still clear up the last one.
            with contextlib.suppress(redis.ResponseError), self._ask(self.sentinels[0]) as client:
                return bool(client.execute_command("SENTINEL", "FAILOVER", self.service))
            return False

        wait_for(told, PATIENTLY, what="a failover on demand")

    def take_away(self, how: str) -> RedisServer:
        """The master goes, with all that it has written in its replicas. Returns it.

        It is "killed", "frozen", or "told" to hand over.
        """
        old = self.master()
        in_step(old)
        if how == "killed":
            old.kill()
        elif how == "frozen":
            self.freeze(old)
        else:
            self.fail_over()
            self.moved_from(old)  # what a client writes before goes to the old one, and is lost
        return old

    def moved_from(self, old: RedisServer) -> RedisServer:
        """Wait until every Sentinel names another master than this one."""
        wait_for(lambda: self.master() is not old, PATIENTLY, what="a failover")
        return self.master()

    def stop(self) -> None:
        self.unfreeze()
        for each in (*self._alone, *self.sentinels, *self.servers):
            each.stop()


def in_step(master: RedisServer) -> None:
    """Wait until every replica has all that was written."""
    offset = master.client().info("replication")["master_repl_offset"]

    def have() -> bool:
        info = master.client().info("replication")
        return all(info[f"slave{i}"]["offset"] >= offset for i in range(info["connected_slaves"]))

    wait_for(have, what="replicas in step")
