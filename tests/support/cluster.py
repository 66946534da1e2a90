"""A private Redis Cluster: three masters, each with a replica, on free ports of 127.0.0.1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.cluster import Cluster
from celery_relock.backends.redis.keys import CLUSTER_BUCKETS as BUCKETS
from celery_relock.backends.redis.keys import Keys
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.engine import Engine
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.tls import Authority
from tests.support.waiting import wait_for

SLOTS = 16384
# How long a node is silent before it counts as failed, in ms.
NODE_TIMEOUT = 1000


def is_sharded(client: Any) -> bool:
    """Whether a server has channels that stay in their slot (Redis 7)."""
    return int(client.info("server")["redis_version"].partition(".")[0]) >= 7


class ClusterServers:
    """A running cluster.

    Args:
        authority: vouches for the nodes, which then speak TLS with each other, and with who likes.

    Attributes:
        nodes: the servers; at the start the first half are masters, each with the replica that
            stands at the same place in the second half.
    """

    def __init__(
        self,
        binary: str,
        masters: int = 3,
        replicas: bool = True,
        authority: Authority | None = None,
    ) -> None:
        config = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT)),
            *("--repl-diskless-sync-delay", "0", "--repl-diskless-sync", "yes"),
            *("--cluster-replica-validity-factor", "0", "--repl-ping-replica-period", "1"),
        )
        count = masters * 2 if replicas else masters
        self.nodes: list[RedisServer] = []
        self._admins: dict[RedisServer, redis.Redis] = {}
        self._tls: list[int] = []
        try:
            for _ in range(count):
                if authority is None:
                    self.nodes.append(RedisServer(*config, binary=binary, bus=True))
                else:
                    self._start_with_tls(config, binary, authority)
            self._join(masters)
        except BaseException:
            self.stop()
            raise

    def _start_with_tls(self, config: Sequence[str], binary: str, authority: Authority) -> None:
        for is_last in (False, False, True):
            port = free_port(bus=True)
            secure = (*authority.server_config(port=port), "--tls-cluster", "yes")
            try:
                node = RedisServer(*config, *secure, binary=binary, bus=True)
            except RuntimeError:  # another process took this port, or that of its bus, first
                if is_last:
                    raise
                continue
            self.nodes.append(node)
            self._tls.append(port)
            return

    @property
    def url(self) -> str:
        """For `relock_url`: some of its nodes."""
        ports = self._tls or [node.port for node in self.nodes]
        scheme = "rediss+cluster" if self._tls else "redis+cluster"
        return f"{scheme}://" + ",".join(f"127.0.0.1:{port}" for port in ports[:3])

    def backend(
        self, namespace: str, buckets: int = BUCKETS, patience: float = 30.0
    ) -> RedisBackend:
        """A backend with connections of its own, as if it were a process of its own."""
        made = transport_for_url(f"{self.url}?patience={patience}")
        assert isinstance(made, Cluster)
        if buckets != BUCKETS:
            made = Cluster(sorted(made.addresses), *made.made, failover=patience, buckets=buckets)
        return RedisBackend(made, namespace)

    def name_at(self, node: RedisServer, namespace: str, other_than: Sequence[str] = ()) -> str:
        """A lock name that has its bucket at a node now, and no bucket in common with others."""
        keys = Keys(namespace, BUCKETS)
        taken = {keys.bucket(name) for name in other_than}
        for number in range(10_000):
            name = f"name-{number}"
            if keys.bucket(name) not in taken and self.master_of(keys.lock(name)) is node:
                return name
        raise AssertionError("this node has no bucket")

    def slot_of(self, name: str, namespace: str) -> int:
        return int(key_slot(Keys(namespace, BUCKETS).lock(name).encode()))

    def client(self, **options: Any) -> RedisCluster:
        """A client of redis-py; the caller closes it."""
        nodes = [ClusterNode("127.0.0.1", node.port) for node in self.nodes if node.running]
        return RedisCluster(startup_nodes=nodes, **options)

    def stop(self) -> None:
        """End all nodes for good."""
        for node in self.nodes:
            node.stop()

    def admin(self, node: RedisServer) -> redis.Redis:
        """A client of one node."""
        if node not in self._admins:
            self._admins[node] = node.client()
        return self._admins[node]

    def client_list(self) -> list[dict[str, str]]:
        """Who is connected to any node."""
        return [client for node in self.nodes for client in self.admin(node).client_list()]

    def ask(self, node: RedisServer, *words: Any) -> Any:
        """A CLUSTER command, as it is answered; text is decoded."""
        found = self.admin(node).execute_command("CLUSTER", *words)
        return found.decode() if isinstance(found, bytes) else found

    def master_of(self, key: str) -> RedisServer:
        """The server that has the slot of a key now, as the cluster agrees."""
        slot = key_slot(key.encode())
        for node in self.nodes:
            if not node.running:
                continue
            with contextlib.suppress(redis.RedisError):
                for first, last, serving, *_ in self.ask(node, "SLOTS"):
                    if first <= slot <= last:
                        return self._by_port(serving[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def master_of_lock(self, name: str, namespace: str) -> RedisServer:
        return self.master_of(Keys(namespace, BUCKETS).lock(name))

    def copied(self, master: RedisServer) -> None:
        """Returns when its replicas have all that was written by now."""
        with self.admin(master).pipeline(transaction=False) as pipe:
            # WAIT is about what came before on its connection; any command brings that up to now.
            pipe.ping()
            pipe.execute_command("WAIT", 1, 5000)
            assert pipe.execute()[1] >= 1

    def hears(self, node: RedisServer, engine: Engine, name: str) -> bool:
        """Whether an engine listens at a node for the bucket of a lock."""
        keys: Keys = engine.backend.keys  # type: ignore[attr-defined]
        channel = keys.inbox(engine.inbox.name, keys.bucket(name))
        kind = "SHARDCHANNELS" if is_sharded(self.admin(node)) else "CHANNELS"
        return bool(self.admin(node).execute_command("PUBSUB", kind, channel))

    def masters(self) -> list[RedisServer]:
        """All servers that are masters now."""
        return [each for each in self.nodes if each.running and self._role(each) == "master"]

    def replicas_of(self, master: RedisServer) -> list[RedisServer]:
        """The servers that copy a master now."""
        found = [line.decode().split() for line in self.ask(master, "REPLICAS", self.id_of(master))]
        return [self._by_port(int(line[1].split("@")[0].split(":")[1])) for line in found]

    def id_of(self, node: RedisServer) -> str:
        return str(self.ask(node, "MYID"))

    def fail_over(self, master: RedisServer) -> RedisServer:
        """SIGKILL a master; returns when a replica serves its slots, which it is."""
        replicas = self.replicas_of(master)
        master.kill()
        return wait_for(
            lambda: next((one for one in replicas if self._role(one) == "master"), None),
            timeout=30,
            what="a replica to take over",
        )

    def bring_back(self, node: RedisServer) -> None:
        """Start a node that was killed; returns when it copies the master that followed it."""
        node.restart(keep_data=True)
        wait_for(
            lambda: (
                self.admin(node).info("replication").get("master_link_status") == "up"
                and self.is_well()
            ),
            timeout=30,
            what="a node to come back",
        )

    def mend(self) -> None:
        """Bring back all nodes that were killed."""
        for node in self.nodes:
            if not node.running:
                self.bring_back(node)
        wait_for(self.is_complete, timeout=30)

    def hand_over(self, master: RedisServer) -> RedisServer:
        """A replica takes over in peace, as for maintenance; returns it."""
        replica = self.replicas_of(master)[0]
        self.ask(replica, "FAILOVER")
        wait_for(lambda: self._role(replica) == "master" and self.is_well(), timeout=30)
        return replica

    def is_well(self) -> bool:
        """Whether all running nodes see all slots served, by the same masters."""
        views = set()
        for node in self.nodes:
            if not node.running:
                continue
            try:
                info = self.ask(node, "INFO")
                slots = self.ask(node, "SLOTS")
            except redis.RedisError:
                return False
            if "cluster_state:ok" not in info:
                return False
            views.add(tuple(sorted((first, last, on[1]) for first, last, on, *_ in slots)))
        return len(views) == 1

    def begin_move(self, slot: int, to: RedisServer) -> RedisServer:
        """Begin to move a slot; returns the node that has had it."""
        source = self._owner(slot)
        self.ask(to, "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "SETSLOT", slot, "MIGRATING", self.id_of(to))
        return source

    def move_keys(self, slot: int, source: RedisServer, to: RedisServer, most: int = 100) -> int:
        """Move so many keys of the slot; returns how many there were."""
        keys = self.ask(source, "GETKEYSINSLOT", slot, most)
        if keys:
            self.move(keys, source, to)
        return len(keys)

    def move(self, keys: Sequence[str], source: RedisServer, to: RedisServer) -> None:
        """Move these keys, which are all there."""
        place = ("127.0.0.1", to.port, "", 0, 5000)
        self.admin(source).execute_command("MIGRATE", *place, "KEYS", *keys)

    @contextlib.contextmanager
    def node_timeout(self, ms: int) -> Iterator[None]:
        """At the nodes that run: how long a node is silent before it counts as failed."""
        running = [self.admin(node) for node in self.nodes if node.running]
        for each in running:
            each.config_set("cluster-node-timeout", ms)
        try:
            yield
        finally:
            for each in running:
                each.config_set("cluster-node-timeout", NODE_TIMEOUT)

    def set_coverage(self, full: bool) -> None:
        """Whether all slots have to be served, or else none is."""
        for node in self.masters():
            self.admin(node).config_set("cluster-require-full-coverage", "yes" if full else "no")

    def end_move(self, slot: int, source: RedisServer, to: RedisServer) -> None:
        """Move what is left, and tell all masters."""
        while self.move_keys(slot, source, to):
            pass
        own = self.id_of(to)

        def is_told() -> bool:
            for node in (to, source, *self.masters()):
                self.ask(node, "SETSLOT", slot, "NODE", own)
            time.sleep(0.05)  # what was on its way between the nodes arrives
            return self.is_well()

        # Until they agree: moves within milliseconds can cross older news of the same slot, and
        # Redis 7.0 is then left with no node that takes it for its own.
        wait_for(is_told, timeout=30)

    def _owner(self, slot: int) -> RedisServer:
        for first, last, serving, *_ in self.ask(self.nodes[0], "SLOTS"):
            if first <= slot <= last:
                return self._by_port(serving[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def _role(self, node: RedisServer) -> str:
        try:
            return str(self.admin(node).info("replication")["role"]) if node.running else ""
        except redis.RedisError:
            return ""

    def _by_port(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)

    def _join(self, masters: int) -> None:
        first = self.nodes[0]
        each = SLOTS // masters
        for number, node in enumerate(self.nodes):
            self.ask(node, "SET-CONFIG-EPOCH", number + 1)
            if number < masters:
                last = SLOTS - 1 if number == masters - 1 else (number + 1) * each - 1
                slots = range(number * each, last + 1)
                self.ask(node, "ADDSLOTS", *slots)
        for last_try in (False, False, True):
            for number, node in enumerate(self.nodes):
                self.ask(first, "MEET", "127.0.0.1", self._tls[number] if self._tls else node.port)
            # A handshake that takes longer than the node timeout is given up, for good.
            with contextlib.suppress(*() if last_try else (AssertionError,)):
                wait_for(lambda: all(self._knows(node) for node in self.nodes), timeout=15)
                break
        for number, node in enumerate(self.nodes[masters:]):
            self.ask(node, "REPLICATE", self.id_of(self.nodes[number]))
        wait_for(self.is_complete, timeout=30, what="the cluster to be complete")

    def _knows(self, node: RedisServer) -> bool:
        return f"cluster_known_nodes:{len(self.nodes)}\r" in self.ask(node, "INFO")

    def is_complete(self) -> bool:
        """Whether all is well and each master has its replica, which has all that it had."""
        infos = [self.admin(node).info("replication") for node in self.nodes]
        copies = [info for info in infos if info["role"] == "slave"]
        links = [info["master_link_status"] for info in copies]
        seen = all(
            len(slots[2:]) == (2 if copies else 1)
            for node in self.nodes
            for slots in self.ask(node, "SLOTS")
        )
        return self.is_well() and seen and all(link == "up" for link in links)
