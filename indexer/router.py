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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry

from ..proto.api import (
    MAX_LISTED,
    Decided,
    DecisionList,
    ExplainedReplica,
    ExplainResponse,
    Feedback,
    FeedbackResponse,
    MatchRequest,
    MatchResponse,
    PolicyInfo,
    PolicyList,
    PromptRequest,
    ReplicaInfo,
    ReplicaList,
    ReplicaLoad,
    RouteRequest,
    RouteResponse,
    Status,
)
from ..proto.errors import ConfigError, Forbidden, InvalidField, NoReplica, NotFound, StoreError, StoreUnavailable
from ..proto.hashing import KEY_BYTES, NO_EXTRAS, BlockHash, Chain, NamespaceId, PromptExtras
from ..proto.http import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_IN_FLIGHT
from ..proto.index import (
    Incarnation,
    Match,
    ReplicaRef,
    ReplicaView,
    Store,
)
from ..proto.soon import Soon
from .answers import INDEX_UNAVAILABLE, NO_DEPTH, Answer, Found, Space, doubted
from .decisions import DEFAULT_CAPACITY as DEFAULT_DECISIONS
from .decisions import Decisions, holdings
from .feedback import ConsumerWitness, Feedbacks, Prediction, Witness
from .load import (
    DEFAULT_CAPACITY,
    DEFAULT_TTL_S,
    Learned,
    LocalReservations,
    Pending,
    Reservations,
    SharesReservations,
    Wanted,
    report_defect,
)
from .models import ModelConfig, Models, Target
from .placement import Placements
from .policies import DEFAULT_POLICY, NO_CHAIN, Candidate, Candidates, Decision, Policy, RoutingRequest, make_policy
from .queueing import QueueConfig, RouterQueue, Turn
from .router_metrics import FleetCollector, QueueCollector, RouterMetrics
from .tenants import TRUSTED, Caller, SaltOf
from .text import TextTokenize
from .tokenize import DEFAULT_TIMEOUT_S, EngineTokenize, Tokenize, Tokens

MAX_NAMESPACES = 1024
"""Namespaces one router serves; further ones are ignored and counted."""
READY_TIMEOUT_S = 2.0
"""A store that answers no faster is not ready."""
REGISTRY_EMPTY = "registry_empty"
"""Cause of the staleness of replicas that vanished from the registry with all others."""
PARTIAL = "the prompt is known in part only"
"""Note of an answer whose prompt goes on beyond what was looked up."""
REMEMBER_S = 60.0
"""How long such replicas are still worth a try."""

_log = logging.getLogger("metatrie.router")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router process. Raises ConfigError, naming the setting, for values out of range."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: the operating system picks one."""
    policy: str = DEFAULT_POLICY
    """Used unless a request names another."""
    policies: dict[str, dict[str, int | float]] = {}
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
    models: dict[str, ModelConfig] = {}
    """What is declared about models: tokenizers, aliases, adapters."""
    queue: QueueConfig = QueueConfig()
    """Which requests through the front door wait in the router."""
    decisions: int = DEFAULT_DECISIONS
    """Decisions remembered, for `GET /v1/decisions`; 0: none."""
    decision_log: str | None = None
    """File every decision is appended to, as JSON lines; keys and lengths, no tokens or text."""
    max_decision_log_bytes: int = 256 << 20
    """When it is larger, it is renamed to NAME.1 and begun anew."""

    def __post_init__(self) -> None:
        for setting, (low, high) in _RANGES.items():
            if not low <= getattr(self, setting) <= high:
                raise ConfigError(setting, "out of range", f"use a value from {low:g} to {high:g}")
        try:
            make_policy(self.policy, {}, random.Random())
            for name, parameters in self.policies.items():
                make_policy(name, parameters, random.Random(), field=f"policies.{name}")
            for model in self.models:
                name, parameters = self.policy_of(model)
                make_policy(name, parameters, random.Random(), field=f"models.{model}.policy")
        except InvalidField as error:
            raise ConfigError(error.field or "policies", error.detail, error.remedy or "") from None

    def policy_of(self, model: str, name: str | None = None) -> tuple[str, dict[str, int | float]]:
        """A model's policy with its parameters, or another's that a request names."""
        own = self.models[model].policy if model in self.models else {}
        configured = str(own.get("name", self.policy))
        chosen = name or configured
        parameters = dict(self.policies.get(chosen, {}))
        if chosen == configured:
            parameters |= {key: value for key, value in own.items() if key != "name"}  # type: ignore[misc]  # checked at start
        return chosen, parameters


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
    "decisions": (0, 1_000_000),
    "max_decision_log_bytes": (1 << 16, 1 << 40),
}


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
        salt_of: SaltOf | None = None,
        witness: Witness | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """registry: where metrics go; each router needs its own. salt_of: turns tenant names into cache salts; or
        tenant_secret does, by HMAC; with neither, tenants share their prefixes.
        witness: whom to ask about replicas' caches; closed with this. Raises ConfigError for models that
        cannot be served as declared."""
        self.config = config or RouterConfig()
        self.registry = registry or CollectorRegistry()
        self._store = store
        self._rng = rng or random.Random()
        self._clock = clock
        self._reservations = reservations or _reservations_of(store, self.config)
        self._placements = Placements()
        self._learned = Learned(capacity=self.config.max_reservations)
        self._owns_tokenize = tokenize is None
        self.models = Models(self.config.models)
        self._tokenize = tokenize or TextTokenize(
            self.config.models, EngineTokenize(timeout_s=self.config.tokenize_timeout_s)
        )
        self._salt_of = salt_of if tenant_secret is None else partial(_salt, tenant_secret)
        self._witness = witness or ConsumerWitness()
        self._feedbacks = Feedbacks(self._witness, clock=clock)
        self.queue = RouterQueue(self.config.queue, alone=self._reservations.alone, clock=clock)
        self._spaces: dict[NamespaceId, Space] = {}
        self._by_model: dict[str, list[Space]] = {}
        self._policies: dict[tuple[str, str | None], Policy] = {}
        self._tasks: list[asyncio.Task[None]] = []
        log = self.config.decision_log
        self.decisions = Decisions(
            capacity=self.config.decisions,
            log=None if log is None else Path(log),
            max_log_bytes=self.config.max_decision_log_bytes,
        )
        self._metrics = RouterMetrics(self.registry)
        self.registry.register(FleetCollector(self._spaces, self._reservations, self._feedbacks))
        self.registry.register(QueueCollector(self.queue))

    # Lifecycle

    async def start(self) -> Self:
        """Begin background work. A store that is away does not keep the router from starting."""
        await self._reservations.start()
        await self._poll_once()
        self._tasks = [asyncio.create_task(self._poll(), name="router-poll")]
        if self.config.sweep_interval_s:
            self._tasks.append(asyncio.create_task(self._sweep(), name="router-sweep"))
        for task in self._tasks:
            task.add_done_callback(report_defect)
        return self

    async def stop(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.queue.close()
        await self._reservations.close()
        self.decisions.close()
        await self._witness.close()
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
        return self._matches(request, await self._look_up(request, caller))

    def match_quickly(
        self, request: MatchRequest, caller: Caller = TRUSTED
    ) -> MatchResponse | Soon[MatchResponse] | None:
        """As `match`, without a task: where the index can do without one, and nothing else has to be waited for. None
        where `match` must be asked."""
        target = self._target(request, caller)
        spaces = self._by_model.get(target.model)
        if request.token_ids is None or spaces is None or len(spaces) != 1:
            return None
        space = spaces[0]
        if space.quick is None or space.down:
            return None
        extras = self._extras(request, caller, target)
        chain = Chain(space.root, space.block_size, request.token_ids, extras, lookahead=space.lookahead)
        match = space.quick(chain)
        if isinstance(match, Soon):
            return match.map(partial(self._in_time, request, space, chain))
        return None if match is None else self._matched(request, self._found(space, chain, match))

    def _in_time(
        self, request: MatchRequest, space: Space, chain: Chain, match: Callable[[], Match | Awaitable[Match]]
    ) -> MatchResponse | Awaitable[MatchResponse]:
        made = match()
        if isinstance(made, Match):
            return self._matched(request, self._found(space, chain, made))
        return self._too_late(request, space, chain, made)

    async def _too_late(
        self, request: MatchRequest, space: Space, chain: Chain, match: Awaitable[Match]
    ) -> MatchResponse:
        return self._matched(request, await self._asked(space, chain, match))

    def _matched(self, request: MatchRequest, found: Found | None) -> MatchResponse:
        """What `match` answers about token ids that were looked up in the only namespace there is."""
        assert request.token_ids is not None
        return self._matches(request, self._answer(request, [found], len(request.token_ids), None))

    def _matches(self, request: MatchRequest, answer: Answer) -> MatchResponse:
        first = answer.found[0]
        total, replicas = answer.listed(request.limit)
        prompt_blocks = answer.prompt_tokens // first.space.block_size
        self._metrics.prompt_blocks += prompt_blocks
        self._metrics.matched_blocks += replicas[0].matched_blocks if replicas else 0
        return MatchResponse(
            model=request.model,
            block_size=first.space.block_size,
            prompt_tokens=answer.prompt_tokens,
            prompt_blocks=prompt_blocks,
            index=answer.index,
            total=total,
            replicas=replicas,
            note=answer.note,
        )

    async def tokenize(self, request: PromptRequest, caller: Caller = TRUSTED) -> Tokens:
        """The token ids of a prompt or of messages, as the model's engines have them. Raises as `match`."""
        target = self._target(request, caller)
        return await self._tokens(request, await self._spaces_of(target.model), target, caller)

    async def route(
        self,
        request: RouteRequest,
        caller: Caller = TRUSTED,
        *,
        admit: Callable[[Candidate], bool] | None = None,
        stand_ins: int = 0,
        turn: Turn | None = None,
    ) -> RouteResponse:
        """Which replica should serve the prompt, with its load reserved.

        admit: whom to choose from, of those worth choosing. stand_ins: how many of `token_ids`, the last ones, are no
        tokens but stand for what could not be tokenised. turn: waits here while its best replica is busy, since
        whoever asks will tell of first tokens and ends; None: answers at once.
        Raises as `match`, InvalidField for an unknown policy, and NoReplica if there is nobody to choose from.
        """
        if turn is None:
            return await self._try_to_route(request, caller, admit, stand_ins, None)
        try:
            while True:
                try:
                    return await self._try_to_route(request, caller, admit, stand_ins, turn)
                except _MustWait as wait:
                    await turn.wait(wait.decision, wait.prompt_tokens, wait.ready)
        finally:
            turn.settle()

    async def _try_to_route(
        self,
        request: RouteRequest,
        caller: Caller,
        admit: Callable[[Candidate], bool] | None,
        stand_ins: int,
        turn: Turn | None,
    ) -> RouteResponse:
        """Raises _MustWait where the turn has not come."""
        if self._reservations.shared:
            looking = self._look_up(request, caller, partial=stand_ins > 0)
            answer, _ = await asyncio.gather(looking, self._reservations.refresh())
        else:
            answer = await self._look_up(request, caller, partial=stand_ins > 0)
        policy = self._policy(request)
        asked = self._routing(request, answer)
        decided: list[tuple[Decision, _Holder | None]] = []
        waits = turn if policy.queues else None

        def ready() -> bool:
            try:
                decision = policy.choose(self._admitted(answer, admit), self._routing(request, answer), dry=True)
            except NoReplica:
                return False
            return waits is None or not waits.must_wait(decision)

        def choose(reservation: str) -> Wanted:
            self._placements.cancel(reservation)
            decision = policy.choose(self._admitted(answer, admit), asked, dry=True)
            if waits is not None and not decided and waits.must_wait(decision):
                raise _MustWait(decision, answer.prompt_tokens, ready)
            policy.chosen(decision.candidate, asked)
            holder = self._sent(answer, decision.candidate, reservation, confirmed=not stand_ins)
            decided.append((decision, holder))
            cached = decision.candidate.reusable_tokens
            return Wanted(decision.candidate.ref, cached, answer.prompt_tokens - cached)

        reservation = await self._reservations.place(choose)
        decision, holder = decided[-1]
        chosen = decision.candidate
        reserved = self._reservations.total(chosen.ref)
        self._learned.routed(
            reservation.id,
            chosen.ref,
            tokens=reserved.tokens,
            decoding=reserved.requests - reserved.prefills,
            now=self._clock(),
        )
        self._feedbacks.expect(reservation.id, _prediction(answer, holder, decision.candidates, chosen))
        remembered = self.decisions.add(
            model=request.model,
            prompt_tokens=answer.prompt_tokens,
            looked=answer.looked(),
            policy=policy.name,
            decision=decision,
            index=answer.index,
            reservation=reservation.id,
        )
        self._metrics.decision(policy.name, decision.reason)
        self._metrics.prompt_blocks += answer.prompt_tokens // chosen.block_size
        self._metrics.matched_blocks += chosen.matched_blocks
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
            note=answer.note,
            index=answer.index,
            policy=policy.name,
            reason=decision.reason,
            reservation=reservation.id,
            explanation=decision.explain() if request.explain else None,
            decision=remembered,
        )

    async def explain(self, request: RouteRequest, caller: Caller = TRUSTED) -> ExplainResponse:
        """What `route` would decide now, and what that rests on. Reserves nothing, and no policy remembers it.

        Raises as `route`, and Forbidden for callers that are not trusted: the answer tells of keys.
        """
        _only_trusted(caller)
        target = self._target(request, caller)
        spaces = await self._spaces_of(target.model)
        tokens = (await self._tokens(request, spaces, target, caller)).ids
        asked = msgspec.structs.replace(request, token_ids=tokens, prompt=None, messages=None)
        answer = await self._look_up(asked, caller)
        policy, candidates = self._policy(request), self._candidates(answer)
        decision = policy.choose(candidates, self._routing(asked, answer), dry=True)
        chosen = decision.candidate
        rows = []
        for found, view in answer.views():
            depth = NO_DEPTH
            if view.incarnation is not None and found.state(view) != "stale":
                depth = found.depths.get(view.incarnation, NO_DEPTH)
            rows.append(
                ExplainedReplica(
                    replica=view.spec.ref.replica,
                    dp_rank=view.spec.ref.dp_rank,
                    namespace=found.space.id,
                    matched_blocks=depth.blocks,
                    reusable_tokens=answer.reusable(found, depth.blocks),
                    state=found.state(view),
                    cause=found.cause(view),
                    url=view.spec.url,
                    consumer=view.spec.consumer,
                )
            )
        rows.sort(key=lambda row: (-row.reusable_tokens, row.replica, row.dp_rank))
        extras = self._extras(asked, caller, target)
        return ExplainResponse(
            decision=Decided(
                id="",
                at=time.time(),
                model=request.model,
                prompt_tokens=answer.prompt_tokens,
                lookups=[looked.lookup() for looked in answer.looked()],
                index=answer.index,
                candidates=len(candidates),
                holdings=holdings(candidates, chosen),
                policy=policy.name,
                reason=decision.reason,
                replica=str(chosen.ref),
                matched_blocks=chosen.matched_blocks,
                reusable_tokens=chosen.reusable_tokens,
                explanation=decision.explain(),
            ),
            replicas=rows[:MAX_LISTED],
            token_ids=list(tokens),  # they may have come packed
            unsalted_blocks=await self._deepest(spaces, tokens, extras, cache_salt=None),
            unadapted_blocks=await self._deepest(spaces, tokens, extras, lora=None),
        )

    async def _deepest(
        self, spaces: Iterable[Space], tokens: Sequence[int], extras: PromptExtras, **other: None
    ) -> int:
        """Leading blocks the deepest replica would hold if the prompt lacked an extra; 0 if it does."""
        changed = msgspec.structs.replace(extras, **other)
        if changed == extras:
            return 0
        found = [
            await self._ask(space, Chain(space.root, space.block_size, tokens, changed, lookahead=space.lookahead))
            for space in spaces
        ]
        return max((depth.blocks for f in found if f for depth in f.depths.values()), default=0)

    def decided(self, caller: Caller, *, limit: int, model: str | None, replica: str | None) -> DecisionList:
        """What was decided lately. Raises Forbidden for callers that are not trusted."""
        _only_trusted(caller)
        return DecisionList(
            decisions=self.decisions.newest(limit, model=model, replica=replica), kept=len(self.decisions)
        )

    def decision(self, caller: Caller, ident: str) -> Decided:
        """One decision. Raises Forbidden for callers that are not trusted, NotFound if it is not kept (any more)."""
        _only_trusted(caller)
        found = self.decisions.get(ident)
        if found is None:
            raise NotFound(
                "no such decision is kept", field="id", remedy="see GET /v1/decisions, or the decision log"
            )
        return found

    async def feedback(self, feedback: Feedback, caller: Caller = TRUSTED) -> FeedbackResponse:
        """Record what the engine found cached, and free the reservation's prefill part, or all of it if finished.

        Only the first feedback of a reservation counts for the metrics, and only a trusted caller's changes what is
        believed of the replica. Raises NotFound for an unknown reservation.
        """
        before = await self._reservations.end_prefill(feedback.reservation)
        if before is None:
            raise _no_reservation("reservation")
        self.queue.ease(before)
        now = self._clock()
        self._placements.computed(feedback.reservation, now)
        if feedback.finished:
            self._learned.finished(feedback.reservation, now, feedback.output_tokens)
        else:
            self._learned.first_token(feedback.reservation, now)
        outcome = None
        prediction = self._feedbacks.take(feedback.reservation)
        if prediction is not None:
            self._metrics.predicted(prediction.predicted_tokens, feedback.cached_tokens)
            self.decisions.served(before.id, feedback.cached_tokens)
            outcome = await self._judge(prediction, feedback, caller)
        if feedback.finished:
            await self._reservations.free(feedback.reservation)
        return FeedbackResponse(
            reservation=before.id,
            predicted_tokens=before.predicted_tokens,
            served_tokens=feedback.cached_tokens,
            freed=feedback.finished,
            outcome=outcome,
        )

    async def _judge(self, prediction: Prediction, feedback: Feedback, caller: Caller) -> str | None:
        cached = feedback.cached_tokens
        try:
            judgement = await self._feedbacks.judge(
                prediction, cached_tokens=cached, prompt_tokens=feedback.prompt_tokens
            )
        except StoreError as error:
            self._metrics.store_error(error)
            return None
        if caller.trusted:
            self._feedbacks.learn(prediction, judgement, cached_tokens=cached)
        self._metrics.judged(judgement.outcome, judgement.missed_tokens, prediction.diverted_tokens)
        return judgement.outcome

    async def first_token(self, reservation: str) -> None:
        """The request's prefill is over. Without effect for an unknown reservation."""
        now = self._clock()
        self._placements.computed(reservation, now)
        self._learned.first_token(reservation, now)
        before = await self._reservations.end_prefill(reservation)
        if before is not None:
            self.queue.ease(before)

    async def free(self, reservation: str) -> None:
        """The request is over. Raises NotFound for an unknown reservation."""
        self._feedbacks.drop(reservation)
        self._placements.cancel(reservation)
        self._learned.finished(reservation, self._clock(), None)
        before = await self._reservations.free(reservation)
        if before is None:
            raise _no_reservation("id")
        self.queue.ease(before)

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
        await asyncio.gather(self._read_fleets(spaces), self._reservations.refresh())
        views = [(space, view) for space in spaces for view in (space.fleet.replicas if space.fleet else ())]
        infos = [
            _info(space, view, self._reservations.total(view.spec.ref), doubted(view, self._feedbacks.doubts))
            for space, view in views
        ]
        infos.sort(key=lambda info: (info.model, info.replica, info.dp_rank))
        return ReplicaList(
            index="unavailable" if any(space.down for space in spaces) else "ok",
            replicas=infos[:limit],
            total=len(infos),
        )

    def expect_alive(self) -> None:
        """Raises what killed a background task: without one this router goes stale, and only a restart mends that."""
        for task in self._tasks:
            if task.done():
                task.result()
        self._reservations.expect_alive()
        self.queue.expect_alive()

    async def ready(self) -> Status:
        """Raises StoreError, or what killed a background task, if this router cannot do its work."""
        self.expect_alive()
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

    # What a front door asks

    def salt_of(self, caller: Caller) -> str | None:
        """The cache salt of the caller's own prefixes."""
        return None if self._salt_of is None or caller.tenant is None else self._salt_of(caller.tenant)

    async def expect_model(self, model: str, caller: Caller = TRUSTED) -> None:
        """Raises NotFound unless a replica of what the name means was ever registered."""
        caller.may_use(model)
        await self._spaces_of(self.models.resolve(model).model)

    def model_names(self) -> list[str]:
        """Base models that have a live replica."""
        return [model for model, spaces in self._by_model.items() if self._urls(spaces)]

    def engine_urls(self) -> list[str]:
        """Base URLs of live engines, of every model."""
        return self._urls(space for spaces in self._by_model.values() for space in spaces)

    # Looking up

    def _target(self, request: PromptRequest, caller: Caller) -> Target:
        caller.may_use(request.model)
        return self.models.resolve(request.model)

    async def _look_up(self, request: PromptRequest, caller: Caller, *, partial: bool = False) -> Answer:
        target = self._target(request, caller)
        extras = self._extras(request, caller, target)
        spaces = self._by_model.get(target.model) or await self._spaces_of(target.model)
        tokenized = await self._tokens(request, spaces, target, caller)
        tokens = tokenized.ids
        if len(spaces) == 1:
            space = spaces[0]
            found = [
                await self._ask(space, Chain(space.root, space.block_size, tokens, extras, lookahead=space.lookahead))
            ]
        else:
            found = await self._ask_all(spaces, tokens, extras)
        return self._answer(request, found, len(tokens), PARTIAL if partial else tokenized.note)

    @staticmethod
    def _answer(
        request: PromptRequest, found: Sequence[Found | None], prompt_tokens: int, note: str | None
    ) -> Answer:
        names = None if request.replicas is None else frozenset(request.replicas)
        known = [f for f in found if f is not None]
        if not known:
            raise StoreUnavailable("no fleet of this model was ever read")
        seeing = len(known) == len(found) and not [f for f in known if f.blind is not None]
        return Answer(known, prompt_tokens, "ok" if seeing else "unavailable", names, note)

    async def _tokens(
        self, request: PromptRequest, spaces: Sequence[Space], target: Target, caller: Caller
    ) -> Tokens:
        if request.token_ids is not None:
            return Tokens(request.token_ids)
        scope = self._salt(request, caller) or ""
        await self._read_fleets(spaces)  # whom to ask must not be older than whom the index will answer for
        return await self._tokenize(request, self._urls(spaces), target=target, scope=scope)

    async def _ask_all(self, spaces: Sequence[Space], tokens: list[int], extras: PromptExtras) -> list[Found | None]:
        """Ask each namespace that had live replicas when last seen (all, if none had), live ones first."""
        chains: dict[tuple[BlockHash, int, int], Chain] = {}
        busy = [s for s in spaces if s.fleet and s.live(s.fleet)] or spaces
        asked = []
        for space in busy:
            key = space.root, space.block_size, space.lookahead
            if key not in chains:  # namespaces often differ in name only
                chains[key] = Chain(*key[:2], tokens, extras, lookahead=space.lookahead)
            chain = chains[key]
            asked.append(self._ask(space, chain))
        found = list(await asyncio.gather(*asked))
        found += [Found(s, s.fleet, {}, {}) for s in spaces if s.fleet and s not in busy]
        return sorted(found, key=lambda f: -len(f.live) if f else 0)

    async def _ask(self, space: Space, chain: Chain) -> Found | None:
        """None if the namespace cannot be asked and its fleet was never read."""
        return (
            self._blindly(space, chain) if space.down else await self._asked(space, chain, space.index.match(chain))
        )

    async def _asked(self, space: Space, chain: Chain, match: Awaitable[Match]) -> Found | None:
        try:
            return self._found(space, chain, await match)
        except StoreError as error:
            self._mark_down(space, error)
            return self._blindly(space, chain)

    def _blindly(self, space: Space, chain: Chain) -> Found | None:
        self._metrics.blind_answers.inc()
        return None if space.fleet is None else Found(space, space.fleet, {}, {}, INDEX_UNAVAILABLE, chain)

    def _found(self, space: Space, chain: Chain, match: Match) -> Found:
        feedbacks = self._feedbacks
        space.saw(match.fleet, self._clock())
        depths = feedbacks.cut(chain, match.depths)
        return Found(space, match.fleet, depths, space.live(match.fleet), chain=chain, doubts=feedbacks.doubts)

    async def _spaces_of(self, model: str) -> list[Space]:
        spaces = self._by_model.get(model)
        if not spaces:
            await self._discover()  # it may have been announced a moment ago
            spaces = self._by_model.get(model)
        if not spaces:
            raise NotFound(
                "no replica of this model was ever registered", field="model", remedy="see GET /v1/replicas"
            )
        return spaces

    def _extras(self, request: PromptRequest, caller: Caller, target: Target) -> PromptExtras:
        lora, media, salt = request.lora or target.lora, request.media, self._salt(request, caller)
        if lora is None and salt is None and not media:
            return NO_EXTRAS
        if media:
            caller.only_trusted("media")
        return PromptExtras(
            lora=lora, media=tuple(sorted(media or (), key=lambda item: item.offset)), cache_salt=salt
        )

    def _salt(self, request: PromptRequest, caller: Caller) -> str | None:
        if request.cache_salt is not None:
            caller.only_trusted("cache_salt")
            return request.cache_salt
        if self._salt_of is None:
            return None
        tenant = caller.tenant
        if request.tenant is not None and request.tenant != tenant:
            caller.only_trusted("tenant")
            tenant = request.tenant
        return None if tenant is None else self._salt_of(tenant)

    @staticmethod
    def _urls(spaces: Iterable[Space]) -> list[str]:
        views = (view for space in spaces if space.fleet for view in space.live(space.fleet).values())
        return sorted({view.spec.url for view in views if view.spec.url})

    # Choosing

    def _routing(self, request: RouteRequest, answer: Answer) -> RoutingRequest:
        return RoutingRequest(
            prompt_tokens=answer.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            priority=request.priority,
            now=self._clock(),
            chain=answer.found[0].chain or NO_CHAIN,
            session=request.session,
            expected_output_tokens=self._learned.output_tokens,
        )

    def _admitted(self, answer: Answer, admit: Callable[[Candidate], bool] | None) -> Candidates:
        """Whom to choose from. Raises NoReplica."""
        candidates = self._candidates(answer)
        if admit is not None:
            admitted = [candidate for candidate in candidates if admit(candidate)]
            if not admitted:
                raise NoReplica("no replica of this model can take the request now", remedy="retry later")
            if len(admitted) < len(candidates):
                candidates = Candidates.of(admitted)
        return candidates

    def _sent(self, answer: Answer, chosen: Candidate, reservation: str, *, confirmed: bool) -> _Holder | None:
        """Count what the request will put into the chosen cache. confirmed: the index will have all of its blocks."""
        holder = _holder(answer, chosen.ref)
        if holder is not None:
            found, incarnation, view = holder
            if found.chain is not None:
                keys = found.chain.keys(found.chain.blocks)
                lag_s = view.status.lag_s if found.state(view) == "exact" else None
                now = self._clock()
                self._placements.sent(
                    *(reservation, incarnation, keys, chosen.matched_blocks, now), lag_s=lag_s, confirmed=confirmed
                )
        return holder

    def _policy(self, request: RouteRequest) -> Policy:
        return self._policy_of(self.models.resolve(request.model).model, request.policy)

    def _policy_of(self, model: str, name: str | None) -> Policy:
        """One instance per known model and policy, since some remember. name: None for the model's own."""
        policy = self._policies.get((model, name))
        if policy is None:
            kind, parameters = self.config.policy_of(model, name)
            policy = self._policies.get((model, kind)) or make_policy(kind, parameters, self._rng)
            self._policies[model, name] = self._policies[model, kind] = policy
        return policy

    def policies(self) -> PolicyList:
        """What places the requests of each model, declared or seen, that do not name a policy themselves."""
        infos = []
        for model in sorted({*self._by_model, *self.config.models}):
            policy = self._policy_of(model, None)
            infos.append(
                PolicyInfo(
                    model=model,
                    policy=policy.name,
                    formula=policy.formula,
                    parameters=msgspec.structs.asdict(policy.parameters),
                )
            )
        return PolicyList(policies=infos)

    def _candidates(self, answer: Answer) -> Candidates:
        """Whom a policy may choose from: the live; without any, those that were live when last seen; else all; and
        where the registry was emptied a short while ago, whom it had before. Raises NoReplica."""
        self._placements.expire(self._clock())
        only = answer.found[0]
        if len(answer.found) == 1 and answer.names is None and only.blind is None and not only.doubts:
            lineup = only.space.lineup(only.fleet)
            if lineup:
                return lineup.candidates(
                    only.depths,
                    only.chain,
                    answer.prompt_tokens,
                    placements=self._placements,
                    reservations=self._reservations,
                    learned=self._learned,
                )
        candidates = self._best_known(answer)
        if not candidates:
            oldest = self._clock() - REMEMBER_S
            spaces = [f.space for f in answer.found if f.space.remembered_at >= oldest]
            lost = [Found(s, s.remembered, {}, {}, REGISTRY_EMPTY) for s in spaces if s.remembered]
            candidates = self._best_known(Answer(lost, answer.prompt_tokens, answer.index, answer.names))
        if not candidates:
            raise NoReplica(
                "no replica of this model can be chosen",
                field=None if answer.names is None else "replicas",
                remedy="see GET /v1/replicas for what is registered",
            )
        return Candidates.of(candidates)

    def _best_known(self, answer: Answer) -> list[Candidate]:
        live: list[Candidate] = []
        lately: list[Candidate] = []
        rest: list[Candidate] = []
        for found, standings in answer.standings():
            depths, chain, size = found.depths, found.chain, found.space.block_size
            for view, state, cause in standings:
                spec, incarnation = view.spec, view.incarnation
                if spec.role == "decode":
                    continue  # gets its prompts from a prefill replica, not from here
                reserved = self._reservations.total(spec.ref)
                depth, held = NO_DEPTH, [0]
                if state != "stale" and incarnation is not None:  # what is stale holds nothing, nor will
                    depth = depths.get(incarnation, NO_DEPTH)
                    held = [depth.blocks]
                    if chain is not None and self._placements:
                        self._placements.deepen([incarnation], chain.keys(chain.blocks), held)
                candidate = Candidate(
                    ref=spec.ref,
                    url=spec.url,
                    matched_blocks=depth.blocks,
                    reusable_tokens=answer.reusable(found, held[0]),
                    tiers=depth.tiers,
                    block_size=size,
                    state=state,
                    cause=cause,
                    reserved_requests=reserved.requests,
                    reserved_prefills=reserved.prefills,
                    reserved_tokens=reserved.tokens,
                    load=view.status.load,
                    speed=self._learned.speed(spec.ref),
                )
                (live if state != "stale" else lately if view.state != "stale" else rest).append(candidate)
        return live or lately or rest

    # Background

    async def _poll(self) -> None:
        while True:
            down = any(space.down for space in self._spaces.values())
            await asyncio.sleep(self.config.outage_poll_interval_s if down else self.config.poll_interval_s)
            await self._poll_once()
            self.decisions.flush()

    async def _poll_once(self) -> None:
        await self._discover_if_possible()
        for space in list(self._spaces.values()):
            await self._read_fleet(space)
        fleets = (space.fleet for space in self._spaces.values() if space.fleet)
        self._learned.keep({view.spec.ref for fleet in fleets for view in fleet.replicas})

    async def _discover(self) -> None:
        """Find new namespaces. Raises StoreError."""
        for namespace in await self._store.namespaces():
            if namespace.id in self._spaces:
                continue
            if len(self._spaces) >= MAX_NAMESPACES:
                self._metrics.ignored_namespaces.inc()
                return
            space = Space(await self._store.open(namespace))
            await self._read_fleet(space)
            if space.id not in self._spaces:  # somebody else's refresh may have been faster
                self._spaces[space.id] = space
                self._by_model.setdefault(namespace.model, []).append(space)

    async def _discover_if_possible(self) -> None:
        try:
            await self._discover()
        except StoreError as error:
            self._metrics.store_error(error)

    async def _read_fleets(self, spaces: Iterable[Space]) -> None:
        """Those that are not known to be down."""
        await asyncio.gather(*(self._read_fleet(space) for space in spaces if not space.down))

    async def _read_fleet(self, space: Space) -> None:
        try:
            fleet = await space.index.fleet()
        except StoreError as error:
            self._mark_down(space, error)
        else:
            space.saw(fleet, self._clock())
            if space.down:
                _log.warning("the index of namespace %s can be reached again", space.id)
            space.down = False

    def _mark_down(self, space: Space, error: StoreError) -> None:
        self._metrics.store_error(error)
        if not space.down:
            _log.warning("the index of namespace %s cannot be used: %s", space.id, error)
        space.down = True

    async def _sweep(self) -> None:
        while True:
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
                    space.backlog = report.remaining


def _reservations_of(store: Store, config: RouterConfig) -> Reservations:
    """Shared with all routers on the store, where it can."""
    if isinstance(store, SharesReservations):
        return store.reservations(ttl_s=config.reservation_ttl_s, capacity=config.max_reservations)
    return LocalReservations(ttl_s=config.reservation_ttl_s, capacity=config.max_reservations)


class _MustWait(Exception):
    """The best replica has enough to do."""

    def __init__(self, decision: Decision, prompt_tokens: int, ready: Callable[[], bool]) -> None:
        """ready: whether it could go by now."""
        super().__init__()
        self.decision = decision
        self.prompt_tokens = prompt_tokens
        self.ready = ready


_Holder = tuple[Found, Incarnation, ReplicaView]
"""A replica that may hold something, where it was found."""


def _holder(answer: Answer, ref: ReplicaRef) -> _Holder | None:
    for found, view in answer.views():
        if view.spec.ref == ref:
            return None if view.incarnation is None else (found, view.incarnation, view)
    return None


def _prediction(answer: Answer, holder: _Holder | None, candidates: Candidates, chosen: Candidate) -> Prediction:
    """What feedback will be compared with."""
    size = chosen.block_size
    index, incarnation, spec, keys = answer.found[0].space.index, None, None, b""
    if holder is not None and holder[1] in holder[0].depths and holder[0].chain is not None:
        found, incarnation, view = holder
        assert found.chain is not None
        blocks = min(chosen.reusable_tokens // size, found.depths[incarnation].blocks)
        index, spec = found.space.index, view.spec
        keys = b"".join(found.chain.keys(blocks)[:blocks])
    return Prediction(
        index=index,
        incarnation=incarnation,
        spec=spec,
        decided_at=time.time(),
        keys=keys,
        block_size=size,
        prompt_tokens=answer.prompt_tokens,
        whole=answer.note is None,
        # How many tokens stand-ins are is a guess; what is compared are those the index showed.
        predicted_tokens=chosen.reusable_tokens if answer.note is None else len(keys) // KEY_BYTES * size,
        indexed_tokens=len(keys) // KEY_BYTES * size,
        diverted_tokens=max(candidates.reusable) - chosen.reusable_tokens,
    )


def _only_trusted(caller: Caller) -> None:
    """Decisions tell of other people's prompts: how long they are, and which prefixes they share."""
    if not caller.trusted:
        raise Forbidden(
            "only a trusted caller may read decisions", remedy="ask from the router's own machine, or authenticate"
        )


def _no_reservation(field: str) -> NotFound:
    return NotFound(
        "there is no such reservation (any more)", field=field, remedy="it was freed, or it expired; route again"
    )


def _salt(secret: bytes, tenant: str) -> str:
    return hmac.new(secret, tenant.encode(), "sha256").hexdigest()


def _info(space: Space, view: ReplicaView, reserved: Pending, doubt: str | None) -> ReplicaInfo:
    spec, status, namespace = view.spec, view.status, space.index.namespace
    load = status.load
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
        state="stale" if space.down else "degraded" if doubt else view.state,
        cause=INDEX_UNAVAILABLE if space.down else doubt or view.cause,
        incarnation=view.incarnation,
        blocks=status.blocks,
        detached=status.detached,
        consumer=spec.consumer,
        lag_s=status.lag_s,
        load=ReplicaLoad(
            running=None if load is None else load.running,
            waiting=None if load is None else load.waiting,
            kv_usage=None if load is None else load.kv_usage,
            reserved_requests=reserved.requests,
            reserved_tokens=reserved.tokens,
        ),
    )
