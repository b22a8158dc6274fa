"""From a fleet, and what an index answered, to what a policy chooses from: the common case, no object per replica.

Strategy. Everything that requests do not change is laid out once per fleet, in columns. A request adds its depths,
which are those of holders only, what is on its way, and the load and speed of the moment: one column each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..proto.hashing import Chain
from ..proto.index import Depth, Incarnation, ReplicaView
from .load import Learned, Reservations
from .placement import Placements
from .policies import Candidates, Roster

_NO_DEPTH = Depth(0, (0, 0, 0))


class Lineup:
    """Those of one fleet that may be chosen without second thoughts: live, and not for decoding only."""

    def __init__(self, views: Sequence[ReplicaView], block_size: int, *, before: Lineup | None = None) -> None:
        """before: the same fleet as last seen. Leases are renewed all the time and replicas seldom change: what is
        laid out for the very sequence of refs stays laid out."""
        chosen = [view for view in views if view.state != "stale" and view.spec.role != "decode"]
        loads = [view.status.load for view in chosen]
        self._size = block_size
        self._incarnations = [view.incarnation for view in chosen if view.incarnation is not None]
        self._refs = [view.spec.ref for view in chosen]
        if before is not None and before._refs == self._refs:
            self._refs = before._refs
        self._roster = Roster(
            self._refs,
            block_sizes=[block_size] * len(chosen),
            states=[view.state for view in chosen],
            causes=[view.cause for view in chosen],
            urls=[view.spec.url for view in chosen],
            loads=loads if any(loads) else None,
        )

    def __len__(self) -> int:
        return len(self._incarnations)

    def candidates(
        self,
        depths: Mapping[Incarnation, Depth],
        chain: Chain | None,
        prompt_tokens: int,
        *,
        placements: Placements,
        reservations: Reservations,
        learned: Learned,
    ) -> Candidates:
        """All of them, for one request.

        depths: what the index answered; others in it are left out. chain: the prompt, which is hashed to its end if
        anything is on its way; None where it is not known. placements: call its `expire` first.
        """
        roster, size = self._roster, self._size
        get = depths.get
        found = [get(incarnation, _NO_DEPTH) for incarnation in self._incarnations]
        tiered = [depth for depth in depths.values() if depth.tiers[0] != depth.blocks]
        slower = [i for i, depth in enumerate(found) if depth.tiers[0] != depth.blocks] if tiered else ()
        held = [depth.blocks for depth in found]
        if placements and chain is not None:
            placements.deepen(self._incarnations, chain.keys(chain.blocks), held)
        # The last token is always computed: it is what the first one of the answer comes from.
        most = max(0, prompt_tokens - 1) // size
        limit = most * size
        totals = reservations.totals(roster.refs)
        return Candidates(
            roster,
            depths=found,
            reusable=[blocks * size if blocks < most else limit for blocks in held],
            requests=totals.requests,
            prefills=totals.prefills,
            tokens=totals.tokens,
            speeds=learned.speeds(roster.refs),
            slower=slower,
        )
