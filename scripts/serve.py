"""What `metatrie serve` adds to a router: consumers in the same process, registered over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from ..consumers.consumer import ReplicaConfig, ReplicaConsumer
from ..proto.api import RegisterReplica, ReplicaInfo, ReplicaLoad
from ..proto.engine import HashRule
from ..proto.errors import ConfigError, Conflict, InvalidField, NoReplica, StoreError
from ..proto.hashing import BlockKey, Namespace
from ..proto.index import ReplicaRef, ReplicaSpec, Store

MAX_CONSUMERS: Final = 1024
"""Replicas one process follows; a registration beyond that is refused."""
READY_S: Final = 5.0
"""How long a registration waits for its record to count before it is answered anyway."""

_log = logging.getLogger("metatrie.serve")
_Key = tuple[str, ReplicaRef]


class LocalConsumers:
    """Follows every registered replica from inside this process. Use as an async context manager."""

    def __init__(
        self, store: Store, *, rule_for: Callable[[str], HashRule], lease_s: float = 10.0, refresh_s: float = 60.0
    ) -> None:
        """rule_for: engine family → how it names blocks; raises ConfigError for one it does not know."""
        self._store, self._rule_for = store, rule_for
        self._lease_s, self._refresh_s = lease_s, refresh_s
        self._consumers: dict[_Key, tuple[ReplicaConsumer, asyncio.Task[None]]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LocalConsumers:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._consumers):
            await self._stop(key)
        if self._session is not None:
            await self._session.close()

    def consumers(self) -> list[ReplicaConsumer]:
        """Those running now."""
        return [consumer for consumer, _ in self._consumers.values()]

    async def left_at(self, spec: ReplicaSpec, keys: Sequence[BlockKey]) -> float | None:
        """When any of these blocks last left this replica's cache (see indexer/feedback.py)."""
        departures = (
            consumer.departures.of(key)
            for (_, ref), (consumer, _) in self._consumers.items()
            if ref == spec.ref
            for key in keys
        )
        return max((departure.ts for departure in departures if departure is not None), default=None)

    async def close(self) -> None:
        """Nothing: leaving the context does it."""

    async def register(self, request: RegisterReplica) -> ReplicaInfo:
        """Start following a replica; its record counts by the time this returns, or the store is slow.

        Raises Conflict if the name is taken with other settings, InvalidField for an unknown engine, NoReplica at
        the bound. Registering the same again changes nothing.
        """
        config = _config(request)
        key = (request.model, config.ref)
        if key in self._consumers:
            return self._same(key, config, request)
        if len(self._consumers) >= MAX_CONSUMERS:
            raise NoReplica(
                f"this process follows {MAX_CONSUMERS} replicas, its bound",
                remedy="run sidecars and `metatrie router` over one Redis instead",
            )
        try:
            rule = self._rule_for(request.engine)
        except ConfigError as error:
            raise InvalidField(
                str(error), field="engine", remedy="name an engine family this version knows"
            ) from None
        index = await self._store.open(_namespace(request))
        if key in self._consumers:  # somebody was faster while the store answered
            return self._same(key, config, request)
        consumer = ReplicaConsumer(config, index, rule=rule, lease_s=self._lease_s, refresh_s=self._refresh_s)
        task = asyncio.create_task(consumer.run(self._session), name=f"consumer {config.ref}")
        self._consumers[key] = consumer, task
        task.add_done_callback(lambda done: self._ended(key, done))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await consumer.writer.registered.wait()
        return _info(consumer)

    async def unregister(self, replica: str, *, model: str | None, dp_rank: int | None) -> bool:
        """Stop following every matching replica and remove its registration. False if there was none."""
        keys = [
            (name, ref)
            for name, ref in self._consumers
            if ref.replica == replica and model in (None, name) and dp_rank in (None, ref.dp_rank)
        ]
        for key in keys:
            await self._stop(key)
        return bool(keys)

    async def _stop(self, key: _Key) -> None:
        entry = self._consumers.pop(key, None)
        if entry is None:
            return
        consumer, task = entry
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await consumer.writer.release()

    def _same(self, key: _Key, config: ReplicaConfig, request: RegisterReplica) -> ReplicaInfo:
        consumer, _ = self._consumers[key]
        if consumer.config != config or consumer.namespace != _namespace(request):
            raise Conflict(
                f"{config.ref} is registered for this model already, with other settings",
                field="replica",
                remedy="DELETE it first, or choose another replica name or dp_rank",
            )
        return _info(consumer)

    def _ended(self, key: _Key, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        # A defect of ours, or an endpoint that cannot be bound. Its lease runs out, and it shows as stale.
        _log.error("the consumer of %s stopped", key[1], exc_info=task.exception())
        self._consumers.pop(key, None)


def _namespace(request: RegisterReplica) -> Namespace:
    return Namespace(
        model=request.model, block_size=request.block_size, hash_seed=request.hash_seed, revision=request.revision
    )


def _config(request: RegisterReplica) -> ReplicaConfig:
    return ReplicaConfig(
        replica=request.replica,
        dp_rank=request.dp_rank,
        engine=request.engine,
        events=request.events,
        replay=request.replay,
        topic=request.topic,
        url=request.url,
        role=request.role,
        hash_mode=request.hash_mode,
    )


def _info(consumer: ReplicaConsumer) -> ReplicaInfo:
    config, status, claim = consumer.config, consumer.status(), consumer.writer.claim
    return ReplicaInfo(
        replica=config.replica,
        dp_rank=config.dp_rank,
        model=consumer.namespace.model,
        namespace=consumer.namespace.id,
        block_size=consumer.namespace.block_size,
        engine=config.engine,
        role=config.role,
        url=config.url,
        events=config.events,
        state=status.state,
        cause=status.cause,
        incarnation=None if claim is None else claim.incarnation,
        blocks=status.blocks,
        detached=status.detached,
        lag_s=status.lag_s,
        load=ReplicaLoad(running=None, waiting=None, kv_usage=None, reserved_requests=0, reserved_tokens=0),
    )
