"""What a prompt's look-up found: namespaces and their fleets as last seen, and how an answer lists them.

Most answers are *plain*: one namespace, asked and answering, every replica in the state its fleet has it in. What
such an answer lists is the same for all prompts but for depths, so it is worked out once per fleet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from ..proto.api import IndexHealth, MatchedReplica, TierBlocks
from ..proto.hashing import BlockHash, Chain, NamespaceId
from ..proto.index import Depth, Fleet, Incarnation, Index, MatchesQuickly, ReplicaRef, ReplicaView, State
from .decisions import Looked
from .lineup import Lineup

INDEX_UNAVAILABLE = "index_unavailable"
"""Cause of a replica's staleness when it is the store that is away."""

NO_DEPTH = Depth(0, (0, 0, 0))
_NO_TIERS = TierBlocks(0, 0, 0)


Standing = tuple[ReplicaView, State, str]
"""A replica, its state, and why that is not exact."""


class Space:
    """One namespace, and what was last seen of it."""

    __slots__ = (
        *("backlog", "block_size", "down", "fleet", "id", "index", "lookahead", "quick", "remembered"),
        *("remembered_at", "root", "_lineup", "_lineup_of", "_roster", "_roster_of"),
        *("_standings", "_standings_of", "_views", "_views_of"),
    )

    def __init__(self, index: Index) -> None:
        namespace = index.namespace
        self.index = index
        self.quick = index.match_quickly if isinstance(index, MatchesQuickly) else None
        self.id: NamespaceId = namespace.id
        self.root: BlockHash = namespace.root
        self.block_size = namespace.block_size
        self.lookahead = namespace.lookahead
        self.fleet: Fleet | None = None
        self.down = False
        self.backlog = 0
        """Dead incarnations the last sweep step left for the next."""
        self.remembered: Fleet | None = None
        """The last fleet that had any replicas."""
        self.remembered_at = 0.0
        self._views: dict[Incarnation, ReplicaView] = {}
        self._views_of: Fleet | None = None
        self._standings: list[Standing] = []
        self._standings_of: Fleet | None = None
        self._roster: Roster = Roster(())
        self._roster_of: Fleet | None = None
        self._lineup: Lineup | None = None
        self._lineup_of: Fleet | None = None

    def saw(self, fleet: Fleet, now: float) -> None:
        self.fleet = fleet
        if fleet.replicas:
            self.remembered, self.remembered_at = fleet, now

    def live(self, fleet: Fleet) -> Mapping[Incarnation, ReplicaView]:
        """`fleet.live()`, computed once per fleet."""
        if self._views_of is not fleet:
            self._views, self._views_of = fleet.live(), fleet
        return self._views

    def standings(self, fleet: Fleet) -> Sequence[Standing]:
        """Every replica as the fleet itself has it, computed once per fleet."""
        if self._standings_of is not fleet:
            self._standings = [(view, view.state, view.cause) for view in fleet.replicas]
            self._standings_of = fleet
        return self._standings

    def roster(self, fleet: Fleet) -> Roster:
        """What an answer lists of these replicas, computed once per fleet."""
        if self._roster_of is not fleet:
            self._roster, self._roster_of = Roster(self.standings(fleet)), fleet
        return self._roster

    def lineup(self, fleet: Fleet) -> Lineup:
        """The fleet's candidates, computed once per fleet."""
        if self._lineup is None or self._lineup_of is not fleet:
            self._lineup = Lineup(fleet.replicas, self.block_size, before=self._lineup)
            self._lineup_of = fleet
        return self._lineup


class Roster:
    """The replicas of one fleet as answers list them, but for what they hold."""

    __slots__ = ("empty", "holders")

    def __init__(self, standings: Sequence[Standing]) -> None:
        self.holders: dict[Incarnation, tuple[int, str, int, State, str | None, str | None]] = {}
        """Of those that may hold anything: place by ref, name, rank, state, cause, role."""
        self.empty: list[MatchedReplica] = []
        """Every replica, by ref, as one that holds nothing."""
        for place, (view, state, cause) in enumerate(standings):
            ref, role = view.spec.ref, None if view.spec.role == "both" else view.spec.role
            self.empty.append(
                MatchedReplica(
                    replica=ref.replica,
                    dp_rank=ref.dp_rank,
                    matched_blocks=0,
                    reusable_tokens=0,
                    tiers=_NO_TIERS,
                    state=state,
                    cause=cause or None,
                    role=role,
                )
            )
            if view.incarnation is not None and view.live:
                self.holders[view.incarnation] = place, ref.replica, ref.dp_rank, state, cause or None, role


class Found(msgspec.Struct, frozen=True, gc=False):
    """What one namespace answered."""

    space: Space
    fleet: Fleet
    depths: Mapping[Incarnation, Depth]
    live: Mapping[Incarnation, ReplicaView]
    """Empty when the index could not be asked: then nobody's state is known."""
    blind: str | None = None
    """Why the index could not be asked about these replicas; None: it was."""
    chain: Chain | None = None
    """The prompt as this namespace names it; None where it was not asked about it."""
    doubts: Mapping[Incarnation, str] = {}
    """Incarnations whose predictions keep failing, and why."""

    def state(self, view: ReplicaView) -> State:
        if self.blind is not None:
            return "stale"
        return "degraded" if self.doubts and doubted(view, self.doubts) else view.state

    def cause(self, view: ReplicaView) -> str:
        if self.blind is not None:
            return self.blind
        return (doubted(view, self.doubts) if self.doubts else None) or view.cause


class Answer(msgspec.Struct, frozen=True, gc=False):
    """One prompt, looked up in every namespace of its model."""

    found: list[Found]
    """The namespace with most live replicas first."""
    prompt_tokens: int
    index: IndexHealth
    names: frozenset[str] | None
    """Replicas to consider; None: all."""
    note: str | None = None
    """Why only the beginning of the prompt was looked up."""

    def admits(self, ref: ReplicaRef) -> bool:
        return self.names is None or ref.replica in self.names

    def reusable(self, found: Found, blocks: int) -> int:
        size = found.space.block_size
        return min(blocks, max(0, self.prompt_tokens - 1) // size) * size

    @property
    def block_size(self) -> int:
        return self.found[0].space.block_size

    def entry(self, found: Found, view: ReplicaView, depth: Depth) -> MatchedReplica:
        # Once per replica of every answer: nothing in here is asked twice.
        spec, size, blocks = view.spec, found.space.block_size, depth.blocks
        if found.blind is None:
            status = view.status
            counts = view.live and view.incarnation is not None
            state, cause = (status.state, status.cause) if counts else ("stale", view.cause)
            if found.doubts and (doubt := doubted(view, found.doubts)):
                state, cause = "degraded", doubt
        else:
            state, cause = "stale", found.blind
        return MatchedReplica(
            replica=spec.ref.replica,
            dp_rank=spec.ref.dp_rank,
            matched_blocks=blocks,
            reusable_tokens=self.reusable(found, blocks) if blocks else 0,
            tiers=TierBlocks(*depth.tiers),
            state=state,
            cause=cause or None,
            block_size=None if found is self.found[0] or size == self.block_size else size,
            role=None if spec.role == "both" else spec.role,
        )

    def looked(self) -> list[Looked]:
        """Where the prompt was looked up, and how far."""
        return [
            Looked(f.space.index.namespace, f.chain, max((d.blocks for d in f.depths.values()), default=0))
            for f in self.found
            if f.chain is not None
        ]

    @property
    def plain(self) -> bool:
        """One namespace answered for all of its replicas, and the fleet itself has their state."""
        if len(self.found) != 1 or self.names is not None:
            return False
        (only,) = self.found
        return only.blind is None and not only.doubts

    def listed(self, limit: int) -> tuple[int, list[MatchedReplica]]:
        """How many replicas there are to consider, and of those at most `limit`: deepest first, then by ref."""
        if self.plain:
            return len(self.found[0].fleet.replicas), _listed_plainly(self, limit)
        total = sum(1 for _ in self.views())
        return total, _listed(self, limit, total)

    def standings(self) -> Iterator[tuple[Found, Sequence[Standing]]]:
        """As `views`, with state and cause, by namespace."""
        if self.plain:
            only = self.found[0]
            yield only, only.space.standings(only.fleet)
            return
        for found, view in self.views():
            yield found, [(view, found.state(view), found.cause(view))]

    def views(self) -> Iterator[tuple[Found, ReplicaView]]:
        """Every replica to consider, once, by ref; of two records of one replica the one that is live."""
        if len(self.found) == 1:
            only = self.found[0]
            for view in only.fleet.replicas:  # ordered by ref already
                if self.admits(view.spec.ref):
                    yield only, view
            return
        merged: dict[ReplicaRef, tuple[Found, ReplicaView]] = {}
        for found in self.found:
            for view in found.fleet.replicas:
                ref = view.spec.ref
                if self.admits(ref) and (ref not in merged or (view.live and not merged[ref][1].live)):
                    merged[ref] = found, view
        for ref in sorted(merged):
            yield merged[ref]


def doubted(view: ReplicaView, doubts: Mapping[Incarnation, str]) -> str | None:
    """Why an otherwise exact replica is not to be believed."""
    return doubts.get(view.incarnation) if view.incarnation is not None and view.state == "exact" else None


def _listed_plainly(answer: Answer, limit: int) -> list[MatchedReplica]:
    """`_listed`, for a plain answer: what most are, so it builds nothing twice and nothing that is not listed."""
    (found,) = answer.found
    roster = found.space.roster(found.fleet)
    holders, size = roster.holders, found.space.block_size
    most = max(0, answer.prompt_tokens - 1) // size
    rows = [(-depth.blocks, holders[incarnation], depth) for incarnation, depth in found.depths.items()]
    rows.sort()
    listed: list[MatchedReplica] = []
    last, tiers, reusable = None, _NO_TIERS, 0
    for _, (_, replica, dp_rank, state, cause, role), depth in rows[:limit]:
        if depth is not last:
            last, tiers, reusable = depth, TierBlocks(*depth.tiers), min(depth.blocks, most) * size
        listed.append(
            MatchedReplica(
                replica=replica,
                dp_rank=dp_rank,
                matched_blocks=depth.blocks,
                reusable_tokens=reusable,
                tiers=tiers,
                state=state,
                cause=cause,
                role=role,
            )
        )
    room = min(len(roster.empty), limit) - len(listed)
    if room > 0:
        taken = {place for _, (place, *_), _ in rows}
        listed += islice((row for place, row in enumerate(roster.empty) if place not in taken), room)
    return listed


def _listed(answer: Answer, limit: int, total: int) -> list[MatchedReplica]:
    """Deepest first, then by ref; at most `limit`. total: replicas to consider."""
    rows: list[tuple[int, ReplicaRef, Found, ReplicaView, Depth]] = []
    for found in answer.found:
        for incarnation, depth in found.depths.items():
            view = found.live.get(incarnation)
            if view is not None and answer.admits(view.spec.ref):
                rows.append((-depth.blocks * found.space.block_size, view.spec.ref, found, view, depth))
    rows.sort(key=_deepest_first)
    listed: dict[ReplicaRef, MatchedReplica] = {}
    for _, ref, found, view, depth in rows:
        if len(listed) == limit:
            break
        if ref not in listed:
            listed[ref] = answer.entry(found, view, depth)
    room = min(total, limit)
    if len(listed) < room:
        for found, view in answer.views():
            if view.spec.ref not in listed:
                listed[view.spec.ref] = answer.entry(found, view, NO_DEPTH)
                if len(listed) == room:
                    break
    return list(listed.values())


def _deepest_first(row: tuple[int, ReplicaRef, Found, ReplicaView, Depth]) -> tuple[int, ReplicaRef]:
    return row[0], row[1]
