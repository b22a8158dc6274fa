"""The router without HTTP: who holds this prompt, who should serve it, and what is outstanding where.

Strategy. A request is hashed once and matched in every live namespace of its model (a rolling change has two), then
either listed (`match`) or handed to a policy together with load (`route`). The index is asked on every request; the
registry comes with its answer, so nothing here is older than the store. Beside that one background task reads every
fleet each `poll_interval_s`: it finds new namespaces, notices an outage before a request pays for it, and ends it.

When the store is away. The first failure marks the namespace down. From then on requests are answered at once
from the last fleet, every replica `stale`, `index` "unavailable", load the only criterion; only the background task
asks the store, more often than usual, and its first success ends the outage. A store that comes back empty has lost
the registrations too: until consumers register again, `route` falls back to the fleet last seen before, for at most
`REMEMBER_S`.

Invariants: no answer waits for a store known to be down; a replica that is not live is routed to only
if nothing live is left; answers never exceed their `limit`; no token id, prompt or salt is kept after the answer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..proto.api import (
    Feedback,
    FeedbackResponse,
    IndexHealth,
    MatchedReplica,
    MatchRequest,
    MatchResponse,
    PromptRequest,
    ReplicaInfo,
    ReplicaList,
    ReplicaLoad,
    RouteRequest,
    RouteResponse,
    Status,
    TierBlocks,
)
from ..proto.errors import ConfigError, Forbidden, InvalidField, NoReplica, NotFound, StoreError, StoreUnavailable
from ..proto.hashing import NO_EXTRAS, BlockHash, Chain, NamespaceId, PromptExtras
from ..proto.http import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_IN_FLIGHT
from ..proto.index import Depth, Fleet, Incarnation, Index, ReplicaRef, ReplicaView, State, Store
from .load import DEFAULT_CAPACITY, DEFAULT_TTL_S, LocalReservations, Pending, Reservations
from .policies import Candidate, Policy, RoutingRequest, make_policy
from .tokenize import DEFAULT_TIMEOUT_S, EngineTokenize, Tokenize

MAX_NAMESPACES = 1024
"""Namespaces one router serves; further ones are ignored and counted."""
READY_TIMEOUT_S = 2.0
"""A store that answers no faster is not ready."""
MAX_CAUSES = 32
"""Distinct causes the fleet metric tells apart; the rest are summed as `other`."""
INDEX_UNAVAILABLE = "index_unavailable"
"""Cause of a replica's staleness when it is the store that is away."""
REGISTRY_EMPTY = "registry_empty"
"""Cause of the staleness of replicas that vanished from the registry with all others."""
REMEMBER_S = 60.0
"""How long such replicas are still worth a try."""

_log = logging.getLogger("metatrie.router")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router process. Raises ConfigError, naming the setting, for values out of range."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: the operating system picks one."""
    policy: str = "hybrid"
    """Used unless a request names another."""
    policies: dict[str, dict[str, float]] = {}
    """Parameters by policy name; what is left out keeps its default."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    """Requests served at a time; more are answered 503."""
    poll_interval_s: float = 1.0
    """Between background reads of the registry."""
    outage_poll_interval_s: float = 0.25
    """The same while the store is away."""
    sweep_interval_s: float = 10.0
    """Between sweep steps; 0: this router does not sweep."""
    sweep_pages: int = 1024
    """Most pages cleaned in one step."""
    sweep_grace_s: float = 30.0
    """How long after its lease a replica stays in the registry."""
    reservation_ttl_s: float = DEFAULT_TTL_S
    max_reservations: int = DEFAULT_CAPACITY
    tokenize_timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        for setting, (low, high) in _RANGES.items():
            if not low <= getattr(self, setting) <= high:
                raise ConfigError(setting, "out of range", f"use a value from {low:g} to {high:g}")
        try:
            make_policy(self.policy, {}, random.Random())
            for name, parameters in self.policies.items():
                make_policy(name, parameters, random.Random(), field=f"policies.{name}")
        except InvalidField as error:
            raise ConfigError(error.field or "policies", error.detail, error.remedy or "") from None


_RANGES: Mapping[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_body_bytes": (1024, 1 << 30),
    "max_in_flight": (1, 1_000_000),
    "poll_interval_s": (0.01, 60),
    "outage_poll_interval_s": (0.01, 60),
    "sweep_interval_s": (0, 3600),
    "sweep_pages": (1, 1_000_000),
    "sweep_grace_s": (0, 86_400),
    "reservation_ttl_s": (1, 86_400),
    "max_reservations": (1, 10_000_000),
    "tokenize_timeout_s": (0.01, 300),
}


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asking, as far as the router cares."""

    trusted: bool = False
    """May name a cache salt, a tenant and media identifiers, all of which address other people's prefixes."""
    tenant: str | None = None
    """The tenant an authenticated caller belongs to."""


TRUSTED = Caller(trusted=True)


class _Space:
    """One namespace, and what was last seen of it."""

    __slots__ = (
        *("block_size", "down", "fleet", "id", "index", "remembered", "remembered_at", "root"),
        *("_views", "_views_of"),
    )

    def __init__(self, index: Index) -> None:
        namespace = index.namespace
        self.index = index
        self.id: NamespaceId = namespace.id
        self.root: BlockHash = namespace.root
        self.block_size = namespace.block_size
        self.fleet: Fleet | None = None
        self.down = False
        self.remembered: Fleet | None = None
        """The last fleet that had any replicas."""
        self.remembered_at = 0.0
        self._views: dict[Incarnation, ReplicaView] = {}
        self._views_of: Fleet | None = None

    def saw(self, fleet: Fleet, now: float) -> None:
        self.fleet = fleet
        if fleet.replicas:
            self.remembered, self.remembered_at = fleet, now

    def live(self, fleet: Fleet) -> Mapping[Incarnation, ReplicaView]:
        """`fleet.live()`, computed once per fleet."""
        if self._views_of is not fleet:
            self._views, self._views_of = fleet.live(), fleet
        return self._views


class _Found(msgspec.Struct, frozen=True, gc=False):
    """What one namespace answered."""

    space: _Space
    fleet: Fleet
    depths: Mapping[Incarnation, Depth]
    live: Mapping[Incarnation, ReplicaView]
    """Empty when the index could not be asked: then nobody's state is known."""
    blind: str | None = None
    """Why the index could not be asked about these replicas; None: it was."""

    def state(self, view: ReplicaView) -> State:
        return view.state if self.blind is None else "stale"

    def cause(self, view: ReplicaView) -> str:
        return view.cause if self.blind is None else self.blind


class _Answer(msgspec.Struct, frozen=True, gc=False):
    """One prompt, looked up in every namespace of its model."""

    found: list[_Found]
    """The namespace with most live replicas first."""
    prompt_tokens: int
    index: IndexHealth
    names: frozenset[str] | None
    """Replicas to consider; None: all."""

    def admits(self, ref: ReplicaRef) -> bool:
        return self.names is None or ref.replica in self.names

    def reusable(self, found: _Found, blocks: int) -> int:
        size = found.space.block_size
        return min(blocks, (self.prompt_tokens - 1) // size) * size

    @property
    def block_size(self) -> int:
        return self.found[0].space.block_size

    def entry(self, found: _Found, view: ReplicaView, depth: Depth) -> MatchedReplica:
        ref, size = view.spec.ref, found.space.block_size
        return MatchedReplica(
            replica=ref.replica,
            dp_rank=ref.dp_rank,
            matched_blocks=depth.blocks,
            reusable_tokens=self.reusable(found, depth.blocks),
            tiers=TierBlocks(*depth.tiers),
            state=found.state(view),
            cause=found.cause(view) or None,
            block_size=None if size == self.block_size else size,
        )

    def total(self) -> int:
        """How many `views` there are."""
        if len(self.found) == 1 and self.names is None:
            return len(self.found[0].fleet.replicas)
        return sum(1 for _ in self.views())

    def views(self) -> Iterator[tuple[_Found, ReplicaView]]:
        """Every replica to consider, once, by ref; of two records of one replica the one that is live."""
        if len(self.found) == 1:
            only = self.found[0]
            for view in only.fleet.replicas:  # ordered by ref already
                if self.admits(view.spec.ref):
                    yield only, view
            return
        merged: dict[ReplicaRef, tuple[_Found, ReplicaView]] = {}
        for found in self.found:
            for view in found.fleet.replicas:
                ref = view.spec.ref
                if self.admits(ref) and (ref not in merged or (view.live and not merged[ref][1].live)):
                    merged[ref] = found, view
        for ref in sorted(merged):
            yield merged[ref]


class Router:
    """Answers for every model in a store. Start it before use, stop it after:

    async with Router(store) as router:
        answer = await router.match(MatchRequest(model="m", token_ids=[…]))

    Closes neither the store nor a `tokenize` passed in.
    """

    def __init__(
        self,
        store: Store,
        config: RouterConfig | None = None,
        *,
        registry: CollectorRegistry | None = None,
        reservations: Reservations | None = None,
        tokenize: Tokenize | None = None,
        tenant_secret: bytes | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """registry: where metrics go; each router needs its own. tenant_secret: turns tenant names into cache salts;
        without one tenants share their prefixes."""
        self.config = config or RouterConfig()
        self.registry = registry or CollectorRegistry()
        self._store = store
        self._rng = rng or random.Random()
        self._clock = clock
        self._reservations = reservations or LocalReservations(
            ttl_s=self.config.reservation_ttl_s, capacity=self.config.max_reservations
        )
        self._owns_tokenize = tokenize is None
        self._tokenize = tokenize or EngineTokenize(timeout_s=self.config.tokenize_timeout_s)
        self._tenant_secret = tenant_secret
        self._spaces: dict[NamespaceId, _Space] = {}
        self._by_model: dict[str, list[_Space]] = {}
        self._policies: dict[tuple[str, str], Policy] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._metrics = _RouterMetrics(self.registry)
        self.registry.register(_FleetCollector(self._spaces, self._reservations))

    # Lifecycle

    async def start(self) -> Self:
        """Begin background work. A store that is away does not keep the router from starting."""
        self._stopping = False
        await self._poll_once()
        self._tasks = [asyncio.create_task(self._poll(), name="router-poll")]
        if self.config.sweep_interval_s:
            self._tasks.append(asyncio.create_task(self._sweep(), name="router-sweep"))
        for task in self._tasks:
            task.add_done_callback(_report_defect)
        return self

    async def stop(self) -> None:
        """Idempotent."""
        # The flag, too: before Python 3.12 asyncio.wait_for, which store clients use, may swallow a cancellation.
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._owns_tokenize:
            await self._tokenize.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # Answers

    async def match(self, request: MatchRequest, caller: Caller = TRUSTED) -> MatchResponse:
        """How much of the prompt each replica holds, deepest first.

        Raises NotFound for an unknown model, Forbidden for what an untrusted caller may not say, StoreUnavailable if
        the store is away and was never seen, and what tokenising raises.
        """
        answer = await self._look_up(request, caller)
        rows: list[tuple[int, ReplicaRef, _Found, ReplicaView, Depth]] = []
        for found in answer.found:
            for incarnation, depth in found.depths.items():
                view = found.live.get(incarnation)
                if view is not None and answer.admits(view.spec.ref):
                    rows.append((-depth.blocks * found.space.block_size, view.spec.ref, found, view, depth))
        rows.sort(key=_deepest_first)
        listed: dict[ReplicaRef, MatchedReplica] = {}
        for _, ref, found, view, depth in rows:
            if len(listed) == request.limit:
                break
            if ref not in listed:
                listed[ref] = answer.entry(found, view, depth)
        total = answer.total()
        room = min(total, request.limit)
        if len(listed) < room:
            for found, view in answer.views():
                if view.spec.ref not in listed:
                    listed[view.spec.ref] = answer.entry(found, view, _NO_DEPTH)
                    if len(listed) == room:
                        break
        prompt_blocks = answer.prompt_tokens // answer.block_size
        self._metrics.prompt_blocks.inc(prompt_blocks)
        if rows:
            self._metrics.matched_blocks.inc(rows[0][4].blocks)
        return MatchResponse(
            model=request.model,
            block_size=answer.block_size,
            prompt_tokens=answer.prompt_tokens,
            prompt_blocks=prompt_blocks,
            index=answer.index,
            total=total,
            replicas=list(listed.values()),
        )

    async def route(self, request: RouteRequest, caller: Caller = TRUSTED) -> RouteResponse:
        """Which replica should serve the prompt, with its load reserved.

        Raises as `match`, InvalidField for an unknown policy, and NoReplica if there is nobody to choose from.
        """
        answer = await self._look_up(request, caller)
        policy = self._policy(request)
        candidates = self._candidates(answer)
        decision = policy.choose(
            candidates,
            RoutingRequest(
                prompt_tokens=answer.prompt_tokens,
                max_output_tokens=request.max_output_tokens,
                priority=request.priority,
            ),
            explain=request.explain,
        )
        chosen = decision.candidate
        reservation = await self._reservations.add(
            chosen.ref,
            predicted_tokens=chosen.reusable_tokens,
            uncached_tokens=answer.prompt_tokens - chosen.reusable_tokens,
        )
        self._metrics.decision(policy.name, decision.reason)
        self._metrics.prompt_blocks.inc(answer.prompt_tokens // chosen.block_size)
        self._metrics.matched_blocks.inc(chosen.matched_blocks)
        return RouteResponse(
            model=request.model,
            replica=chosen.ref.replica,
            dp_rank=chosen.ref.dp_rank,
            url=chosen.url,
            block_size=chosen.block_size,
            prompt_tokens=answer.prompt_tokens,
            matched_blocks=chosen.matched_blocks,
            reusable_tokens=chosen.reusable_tokens,
            state=chosen.state,
            cause=chosen.cause or None,
            index=answer.index,
            policy=policy.name,
            reason=decision.reason,
            reservation=reservation.id,
            explanation=decision.explanation,
        )

    async def feedback(self, feedback: Feedback) -> FeedbackResponse:
        """Record what the engine found cached, and free the reservation's prefill part, or all of it if finished.

        Only the first feedback of a reservation counts for the metrics. Raises NotFound for an unknown reservation.
        """
        before = await self._reservations.end_prefill(feedback.reservation)
        if before is None:
            raise _no_reservation("reservation")
        if before.prefilling:
            self._metrics.predicted(before.predicted_tokens, feedback.cached_tokens)
        if feedback.finished:
            await self._reservations.free(feedback.reservation)
        return FeedbackResponse(
            reservation=before.id,
            predicted_tokens=before.predicted_tokens,
            served_tokens=feedback.cached_tokens,
            freed=feedback.finished,
        )

    async def free(self, reservation: str) -> None:
        """The request is over. Raises NotFound for an unknown reservation."""
        if not await self._reservations.free(reservation):
            raise _no_reservation("id")

    async def replicas(self, *, model: str | None = None, limit: int) -> ReplicaList:
        """Every registered replica, read afresh; from memory, and all stale, where the store is away.

        Raises NotFound for an unknown model.
        """
        if model is not None:
            spaces = await self._spaces_of(model)
        else:
            if not any(space.down for space in self._spaces.values()):
                await self._discover_if_possible()
            spaces = list(self._spaces.values())
        await self._read_fleets(spaces)
        pending = self._reservations.pending()
        infos = [
            _info(space, view, pending.get(view.spec.ref))
            for space in spaces
            for view in (space.fleet.replicas if space.fleet else ())
        ]
        infos.sort(key=lambda info: (info.model, info.replica, info.dp_rank))
        return ReplicaList(
            index="unavailable" if any(space.down for space in spaces) else "ok",
            replicas=infos[:limit],
            total=len(infos),
        )

    async def ready(self) -> Status:
        """Raises StoreError, or what killed a background task, if this router cannot do its work."""
        for task in self._tasks:
            if task.done():
                task.result()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._store.ping()
                await self.refresh()
        except TimeoutError:
            raise StoreUnavailable("the store took too long to answer") from None
        if any(space.down for space in self._spaces.values()):
            raise StoreUnavailable("a fleet could not be read")
        return Status(
            status="ready",
            models=len(self._by_model),
            replicas=sum(len(space.live(space.fleet)) for space in self._spaces.values() if space.fleet),
        )

    async def refresh(self) -> None:
        """See new namespaces and registrations now, not at the next poll. Raises StoreError."""
        await self._discover()
        await asyncio.gather(*(self._read_fleet(space) for space in self._spaces.values()))

    def forget(self, replica: str) -> None:
        """An operator unregistered it: it must not be remembered if the registry is empty now."""
        for space in self._spaces.values():
            if space.remembered and any(view.spec.ref.replica == replica for view in space.remembered.replicas):
                space.remembered = None

    # Looking up

    async def _look_up(self, request: PromptRequest, caller: Caller) -> _Answer:
        extras = self._extras(request, caller)
        spaces = self._by_model.get(request.model) or await self._spaces_of(request.model)
        if request.token_ids is not None:
            tokens = request.token_ids
        else:
            await self._read_fleets(spaces)  # whom to ask must not be older than whom the index will answer for
            tokens = await self._tokenize(request, self._urls(spaces))
        if len(spaces) == 1:
            space = spaces[0]
            found = [await self._ask(space, Chain(space.root, space.block_size, tokens, extras))]
        else:
            found = await self._ask_all(spaces, tokens, extras)
        known = [f for f in found if f is not None]
        if not known:
            raise StoreUnavailable("no fleet of this model was ever read")
        return _Answer(
            known,
            len(tokens),
            "ok" if len(known) == len(found) and all(f.blind is None for f in known) else "unavailable",
            None if request.replicas is None else frozenset(request.replicas),
        )

    async def _ask_all(
        self, spaces: Sequence[_Space], tokens: list[int], extras: PromptExtras
    ) -> list[_Found | None]:
        """Ask each namespace that had live replicas when last seen (all, if none had), live ones first."""
        chains: dict[tuple[BlockHash, int], Chain] = {}
        busy = [s for s in spaces if s.fleet and s.live(s.fleet)] or spaces
        asked = []
        for space in busy:
            key = space.root, space.block_size
            chain = chains.setdefault(key, Chain(*key, tokens, extras))  # namespaces often differ in name only
            asked.append(self._ask(space, chain))
        found = list(await asyncio.gather(*asked))
        found += [_Found(s, s.fleet, {}, {}) for s in spaces if s.fleet and s not in busy]
        return sorted(found, key=lambda f: -len(f.live) if f else 0)

    async def _ask(self, space: _Space, chain: Chain) -> _Found | None:
        """None if the namespace cannot be asked and its fleet was never read."""
        if not space.down:
            try:
                match = await space.index.match(chain)
            except StoreError as error:
                self._mark_down(space, error)
            else:
                space.saw(match.fleet, self._clock())
                return _Found(space, match.fleet, match.depths, space.live(match.fleet))
        self._metrics.blind_answers.inc()
        return None if space.fleet is None else _Found(space, space.fleet, {}, {}, INDEX_UNAVAILABLE)

    async def _spaces_of(self, model: str) -> list[_Space]:
        spaces = self._by_model.get(model)
        if not spaces:
            await self._discover()  # it may have been announced a moment ago
            spaces = self._by_model.get(model)
        if not spaces:
            raise NotFound(
                "no replica of this model was ever registered", field="model", remedy="see GET /v1/replicas"
            )
        return spaces

    def _extras(self, request: PromptRequest, caller: Caller) -> PromptExtras:
        lora, media, salt = request.lora, request.media, self._salt(request, caller)
        if lora is None and salt is None and not media:
            return NO_EXTRAS
        if media and not caller.trusted:
            raise _not_trusted("media")
        return PromptExtras(
            lora=lora, media=tuple(sorted(media or (), key=lambda item: item.offset)), cache_salt=salt
        )

    def _salt(self, request: PromptRequest, caller: Caller) -> str | None:
        if request.cache_salt is not None:
            if not caller.trusted:
                raise _not_trusted("cache_salt")
            return request.cache_salt
        if self._tenant_secret is None:
            return None
        tenant = caller.tenant
        if request.tenant is not None and request.tenant != tenant:
            if not caller.trusted:
                raise _not_trusted("tenant")
            tenant = request.tenant
        return None if tenant is None else hmac.new(self._tenant_secret, tenant.encode(), "sha256").hexdigest()

    @staticmethod
    def _urls(spaces: Iterable[_Space]) -> list[str]:
        views = (view for space in spaces if space.fleet for view in space.live(space.fleet).values())
        return sorted({view.spec.url for view in views if view.spec.url})

    # Choosing

    def _policy(self, request: RouteRequest) -> Policy:
        """One instance per known model and policy, since some remember."""
        name = request.policy or self.config.policy
        key = request.model, name
        policy = self._policies.get(key)
        if policy is None:
            policy = make_policy(name, self.config.policies.get(name, {}), self._rng)
            self._policies[key] = policy
        return policy

    def _candidates(self, answer: _Answer) -> list[Candidate]:
        """Whom a policy may choose from: the live; without any, those that were live when last seen; else all; and
        where the registry was emptied a short while ago, whom it had before. Raises NoReplica."""
        candidates = self._best_known(answer)
        if not candidates:
            oldest = self._clock() - REMEMBER_S
            spaces = [f.space for f in answer.found if f.space.remembered_at >= oldest]
            lost = [_Found(s, s.remembered, {}, {}, REGISTRY_EMPTY) for s in spaces if s.remembered]
            candidates = self._best_known(_Answer(lost, answer.prompt_tokens, answer.index, answer.names))
        if not candidates:
            raise NoReplica(
                "no replica of this model can be chosen",
                field=None if answer.names is None else "replicas",
                remedy="see GET /v1/replicas for what is registered",
            )
        return candidates

    def _best_known(self, answer: _Answer) -> list[Candidate]:
        pending = self._reservations.pending()
        live: list[Candidate] = []
        lately: list[Candidate] = []
        rest: list[Candidate] = []
        for found, view in answer.views():
            spec = view.spec
            if spec.role == "decode":
                continue  # gets its prompts from a prefill replica, not from here
            state = found.state(view)
            depth = _NO_DEPTH
            if state != "stale" and view.incarnation is not None:
                depth = found.depths.get(view.incarnation, _NO_DEPTH)
            reserved = pending.get(spec.ref, _NOTHING)
            candidate = Candidate(
                ref=spec.ref,
                url=spec.url,
                matched_blocks=depth.blocks,
                reusable_tokens=answer.reusable(found, depth.blocks),
                tiers=depth.tiers,
                block_size=found.space.block_size,
                state=state,
                cause=found.cause(view),
                reserved_requests=reserved.requests,
                reserved_tokens=reserved.tokens,
                load=view.status.load,
            )
            (live if state != "stale" else lately if view.state != "stale" else rest).append(candidate)
        return live or lately or rest

    # Background

    async def _poll(self) -> None:
        while not self._stopping:
            down = any(space.down for space in self._spaces.values())
            await asyncio.sleep(self.config.outage_poll_interval_s if down else self.config.poll_interval_s)
            await self._poll_once()

    async def _poll_once(self) -> None:
        await self._discover_if_possible()
        for space in list(self._spaces.values()):
            await self._read_fleet(space)

    async def _discover(self) -> None:
        """Find new namespaces. Raises StoreError."""
        for namespace in await self._store.namespaces():
            if namespace.id in self._spaces:
                continue
            if len(self._spaces) >= MAX_NAMESPACES:
                self._metrics.ignored_namespaces.inc()
                return
            space = _Space(await self._store.open(namespace))
            await self._read_fleet(space)
            if space.id not in self._spaces:  # somebody else's refresh may have been faster
                self._spaces[space.id] = space
                self._by_model.setdefault(namespace.model, []).append(space)

    async def _discover_if_possible(self) -> None:
        try:
            await self._discover()
        except StoreError as error:
            self._metrics.store_error(error)

    async def _read_fleets(self, spaces: Iterable[_Space]) -> None:
        """Those that are not known to be down."""
        await asyncio.gather(*(self._read_fleet(space) for space in spaces if not space.down))

    async def _read_fleet(self, space: _Space) -> None:
        try:
            fleet = await space.index.fleet()
        except StoreError as error:
            self._mark_down(space, error)
        else:
            space.saw(fleet, self._clock())
            if space.down:
                _log.warning("the index of namespace %s can be reached again", space.id)
            space.down = False

    def _mark_down(self, space: _Space, error: StoreError) -> None:
        self._metrics.store_error(error)
        if not space.down:
            _log.warning("the index of namespace %s cannot be used: %s", space.id, error)
        space.down = True

    async def _sweep(self) -> None:
        while not self._stopping:
            # Routers started together should not all come for the lock together.
            await asyncio.sleep(self.config.sweep_interval_s * self._rng.uniform(0.75, 1.25))
            for space in list(self._spaces.values()):
                if space.down:
                    continue
                try:
                    report = await space.index.sweep(pages=self.config.sweep_pages, grace_s=self.config.sweep_grace_s)
                except StoreError as error:
                    self._metrics.store_error(error)
                else:
                    self._metrics.swept_pages.inc(report.pages)


_NO_DEPTH = Depth(0, (0, 0, 0))
_NOTHING = Pending()


def _deepest_first(row: tuple[int, ReplicaRef, _Found, ReplicaView, Depth]) -> tuple[int, ReplicaRef]:
    return row[0], row[1]


def _not_trusted(field: str) -> Forbidden:
    return Forbidden(
        "only a trusted caller may send this field",
        field=field,
        remedy="leave it out, or authenticate as a caller configured as trusted",
    )


def _no_reservation(field: str) -> NotFound:
    return NotFound(
        "there is no such reservation (any more)", field=field, remedy="it was freed, or it expired; route again"
    )


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task %s ended for a defect of ours", task.get_name(), exc_info=error)


def _info(space: _Space, view: ReplicaView, pending: Pending | None) -> ReplicaInfo:
    spec, status, namespace = view.spec, view.status, space.index.namespace
    load, reserved = status.load, pending or _NOTHING
    return ReplicaInfo(
        replica=spec.ref.replica,
        dp_rank=spec.ref.dp_rank,
        model=namespace.model,
        namespace=space.id,
        block_size=namespace.block_size,
        engine=spec.engine,
        role=spec.role,
        url=spec.url,
        events=spec.events,
        state="stale" if space.down else view.state,
        cause=INDEX_UNAVAILABLE if space.down else view.cause,
        incarnation=view.incarnation,
        blocks=status.blocks,
        detached=status.detached,
        lag_s=status.lag_s,
        load=ReplicaLoad(
            running=None if load is None else load.running,
            waiting=None if load is None else load.waiting,
            kv_usage=None if load is None else load.kv_usage,
            reserved_requests=reserved.requests,
            reserved_tokens=reserved.tokens,
        ),
    )


class _RouterMetrics:
    """What the router counts. Labels come from fixed sets: policies, reasons, error classes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"metatrie_router_{name}", text, labels, registry=registry)

        self.prompt_blocks = counter("prompt_blocks", "Full blocks in the prompts looked up")
        self.matched_blocks = counter(
            "matched_blocks", "Of those, held by the chosen replica (route) or the deepest one (match)"
        )
        self.blind_answers = counter("blind_answers", "Lookups answered without the index, since it was away")
        self.swept_pages = counter("swept_pages", "Pages of dead incarnations reclaimed")
        self.ignored_namespaces = counter("ignored_namespaces", "Times namespaces were ignored at the bound")
        self._decisions = counter("decisions", "Routing decisions", "policy", "reason")
        self._predicted = counter("predicted_tokens", "Cached prompt tokens predicted, of requests with feedback")
        self._served = counter("served_tokens", "Cached prompt tokens engines reported for the same requests")
        self._over = counter("overpredicted_tokens", "Tokens predicted and not served")
        self._under = counter("underpredicted_tokens", "Tokens served and not predicted")
        self._feedbacks = counter("feedbacks", "Requests with feedback")
        self._store_errors = counter("store_errors", "Store operations that failed", "error")

    def decision(self, policy: str, reason: str) -> None:
        self._decisions.labels(policy, reason).inc()

    def predicted(self, predicted: int, served: int) -> None:
        self._feedbacks.inc()
        self._predicted.inc(predicted)
        self._served.inc(served)
        self._over.inc(max(0, predicted - served))
        self._under.inc(max(0, served - predicted))

    def store_error(self, error: StoreError) -> None:
        self._store_errors.labels(type(error).__name__).inc()


class _FleetCollector(Collector):
    """Gauges computed when somebody scrapes, from what the router last saw."""

    def __init__(self, spaces: Mapping[NamespaceId, _Space], reservations: Reservations) -> None:
        self._spaces = spaces
        self._reservations = reservations

    def collect(self) -> Iterable[Metric]:
        fleet: Tally[tuple[str, str]] = Tally()
        causes: set[str] = set()
        for space in self._spaces.values():
            for view in space.fleet.replicas if space.fleet else ():
                state, cause = ("stale", INDEX_UNAVAILABLE) if space.down else (view.state, view.cause)
                if cause not in causes:
                    if len(causes) >= MAX_CAUSES:
                        cause = "other"
                    causes.add(cause)
                fleet[state, cause] += 1
        replicas = GaugeMetricFamily(
            "metatrie_router_replicas", "Registered replicas by state and its cause", labels=["state", "cause"]
        )
        for labels, count in fleet.items():
            replicas.add_metric(labels, count)
        yield replicas
        yield GaugeMetricFamily(
            "metatrie_router_namespaces_down",
            "Namespaces whose index cannot be used",
            value=sum(space.down for space in self._spaces.values()),
        )
        counts = self._reservations.counts()
        yield GaugeMetricFamily("metatrie_router_reservations", "Reservations held", value=counts.held)
        yield CounterMetricFamily(
            "metatrie_router_reservations_expired", "Reservations nobody freed", value=counts.expired
        )
        yield CounterMetricFamily(
            "metatrie_router_reservations_dropped", "Reservations dropped at the bound", value=counts.dropped
        )
