"""`metatrie audit`: per block, what the index says, what its consumer believes, and what the engine has.

Three pictures, compared pairwise, each read the way somebody else would read it:

- *engine*: its own table, where it shows one (`GET /debug/cache`: the simulated engine; real engines have none);
- *inventory*: `GET /v1/copies` and `GET /v1/inventory` of the sidecar that follows it;
- *index*: what is stored under the incarnation that counts, and what a lookup finds for the prompts of the inventory.

A running system changes between two reads. A difference counts only if the same block differs in every one of
`ROUNDS` readings with pauses in between, and engine and inventory are only compared between the same two batches.

`--repair` asks the sidecar to bring its inventory in line with the engine's table and to publish everything anew,
then audits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from ..indexer.connect import open_store
from ..proto.hashing import BlockKey, Chain
from ..proto.index import THROUGH, Incarnation, Index, ReplicaRef, ReplicaView, Store, TierMask
from .cli import common_options, redis_option, run_process, until

ROUNDS: Final = 3
PAUSE_S: Final = 0.3
ENGINE_TRIES: Final = 100
ENGINE_PAUSE_S: Final = 0.05
REPAIR_S: Final = 30.0
"""How long a repair may take until it shows."""
PAGE: Final = 10_000
MAX_LOOKUPS: Final = 20_000
"""Prompts looked up per replica; of more, every so-many-th."""
TIMEOUT_S: Final = 10.0


class ReplicaAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. None where a picture could not be had; counts are of blocks."""

    model: str
    replica: str
    dp_rank: int
    state: str
    cause: str
    incarnation: int | None
    index: int
    """Stored under the incarnation that counts."""
    inventory: int | None = None
    """What the index must hold."""
    engine: int | None = None
    """What the engine holds, attached to a prefix or not."""
    missing: int | None = None
    """In the inventory, not in the index."""
    stale: int | None = None
    """In the index, not in the inventory."""
    misplaced: int | None = None
    """In both, but in other tiers, or where no lookup finds it."""
    engine_missing: int | None = None
    """In the engine, not in the inventory."""
    engine_stale: int | None = None
    """In the inventory, not in the engine, or in another number of copies."""
    examples: list[str] = []
    """Some of what differs, as `kind key`."""
    note: str = ""
    """Why a picture is not there."""

    @property
    def wrong(self) -> int:
        """Differences of any kind."""
        return sum(n or 0 for n in (self.missing, self.stale, self.misplaced, self.engine_missing, self.engine_stale))

    @property
    def complete(self) -> bool:
        """Index and inventory could be compared."""
        return self.missing is not None

    @property
    def precision(self) -> float | None:
        """Share of the index that is right."""
        return None if self.stale is None else 1.0 - self.stale / self.index if self.index else 1.0

    @property
    def recall(self) -> float | None:
        """Share of what should be in the index that is."""
        if self.missing is None or self.misplaced is None or self.inventory is None:
            return None
        return 1.0 - (self.missing + self.misplaced) / self.inventory if self.inventory else 1.0


class _Block(msgspec.Struct, frozen=True):
    key: str
    tiers: int
    parent: str | None


class _InventoryPage(msgspec.Struct, frozen=True):
    incarnation: int | None
    blocks: list[_Block]
    next: str | None


class _CopiesPage(msgspec.Struct, frozen=True):
    next_seq: int
    copies: dict[int, int]
    next: str | None


Kind = Literal["missing", "stale", "misplaced"]
_Difference = tuple[Kind, BlockKey]


async def audit(
    store: Store,
    session: aiohttp.ClientSession,
    *,
    model: str | None = None,
    replica: str | None = None,
    sidecars: Mapping[str, str] | None = None,
    examples: int = 5,
) -> list[ReplicaAudit]:
    """Audit every registered replica, or those of one model or name. Raises StoreError.

    sidecars: replica → base URL of its sidecar, where the registry's own would not do.
    """
    found: list[ReplicaAudit] = []
    for namespace in await store.namespaces():
        if model is not None and namespace.model != model:
            continue
        index = await store.open(namespace)
        for view in (await index.fleet()).replicas:
            ref = view.spec.ref
            if replica is not None and ref.replica != replica:
                continue
            url = (sidecars or {}).get(ref.replica) or view.spec.consumer
            found.append(await audit_replica(index, view, session, sidecar=url, examples=examples))
    return found


async def audit_replica(
    index: Index, view: ReplicaView, session: aiohttp.ClientSession, *, sidecar: str | None, examples: int = 5
) -> ReplicaAudit:
    """Audit one replica. Raises StoreError; a sidecar or engine that does not answer is noted in the result."""
    ref, incarnation = view.spec.ref, view.incarnation
    base = ReplicaAudit(
        model=index.namespace.model,
        replica=ref.replica,
        dp_rank=ref.dp_rank,
        state=view.state,
        cause=view.cause,
        incarnation=incarnation,
        index=0,
    )
    if incarnation is None or not view.live:
        return msgspec.structs.replace(base, note=f"nothing of it counts: {view.cause}")
    if sidecar is None:
        held = await index.held(incarnation)
        return msgspec.structs.replace(base, index=len(held), note="its sidecar's address is not known")
    api = _Sidecar(session, sidecar, ref)
    try:
        persisting: set[_Difference] | None = None
        for turn in range(ROUNDS):
            if turn:
                await asyncio.sleep(PAUSE_S)
            held, wanted, differences = await _compare(index, incarnation, api)
            persisting = differences if persisting is None else persisting & differences
            if not persisting:
                break
        assert persisting is not None
        counts = {
            kind: sum(1 for what, _ in persisting if what == kind) for kind in ("missing", "stale", "misplaced")
        }
        shown = [f"{kind} {key.hex()}" for kind, key in sorted(persisting)[:examples]]
        result = msgspec.structs.replace(base, index=len(held), inventory=len(wanted), examples=shown, **counts)
        if view.spec.url is None:
            return result
        return await _compare_engine(result, api, view.spec.url, examples)
    except _Moved:
        return msgspec.structs.replace(base, note="its incarnation changed meanwhile; audit again")
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        return msgspec.structs.replace(base, note=f"its sidecar does not answer ({type(error).__name__})")


class _Moved(Exception):
    """The replica began another life while it was audited."""


class _Sidecar:
    """One replica's side of a sidecar's HTTP API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, ref: ReplicaRef) -> None:
        self.session, self._url = session, url.rstrip("/")
        self._who = {"replica": ref.replica, "dp_rank": str(ref.dp_rank)}
        self.ref = ref

    async def inventory(self, incarnation: Incarnation) -> dict[BlockKey, _Block]:
        """Raises _Moved if it belongs to another incarnation by now."""
        blocks: dict[BlockKey, _Block] = {}
        after: str | None = ""
        while after is not None:
            raw = await self.get("/v1/inventory", after=after, limit=str(PAGE))
            page = msgspec.json.decode(raw, type=_InventoryPage)
            if page.incarnation != incarnation:
                raise _Moved
            blocks |= {BlockKey(bytes.fromhex(block.key)): block for block in page.blocks}
            after = page.next
        return blocks

    async def copies(self) -> tuple[int, dict[int, int]] | None:
        """(next sequence number, copies by engine hash); None if a batch came in between two pages."""
        copies: dict[int, int] = {}
        seq: int | None = None
        after: str | None = ""
        while after is not None:
            raw = await self.get("/v1/copies", limit=str(PAGE), **({"after": after} if after else {}))
            page = msgspec.json.decode(raw, type=_CopiesPage, strict=False)
            if seq is not None and page.next_seq != seq:
                return None
            seq, after = page.next_seq, page.next
            copies |= page.copies
        assert seq is not None
        return seq, copies

    async def repair(self) -> None:
        async with self.session.post(
            f"{self._url}/v1/repair", params=self._who, timeout=aiohttp.ClientTimeout(total=REPAIR_S)
        ) as response:
            response.raise_for_status()

    async def get(self, path: str, **query: str) -> bytes:
        return await _get(self.session, self._url + path, {**self._who, **query})


async def _get(session: aiohttp.ClientSession, url: str, query: Mapping[str, str]) -> bytes:
    async with session.get(url, params=query, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
        response.raise_for_status()
        return await response.read()


async def _compare(
    index: Index, incarnation: Incarnation, sidecar: _Sidecar
) -> tuple[dict[BlockKey, TierMask], dict[BlockKey, _Block], set[_Difference]]:
    """One reading of index and inventory, and how they differ."""
    wanted = await sidecar.inventory(incarnation)
    held = await index.held(incarnation)
    differences: set[_Difference] = {("missing", key) for key in wanted.keys() - held.keys()}
    differences |= {("stale", key) for key in held.keys() - wanted.keys()}
    differences |= {("misplaced", key) for key in wanted.keys() & held.keys() if wanted[key].tiers != held[key]}
    for keys in _prompts(wanted):
        depth = (await index.match(Chain.of_keys(keys))).depths.get(incarnation)
        reached = 0 if depth is None else depth.blocks
        differences |= {("misplaced", key) for key in keys[reached:] if key in held}
    return held, wanted, differences


def _prompts(blocks: Mapping[BlockKey, _Block]) -> Iterable[list[BlockKey]]:
    """Chains of block keys, from the start of a prompt to a block nothing follows, that cover all blocks."""
    parents = {key: None if b.parent is None else BlockKey(bytes.fromhex(b.parent)) for key, b in blocks.items()}
    leaves = sorted(parents.keys() - set(parents.values()))
    for leaf in leaves[:: max(1, -(-len(leaves) // MAX_LOOKUPS))]:
        keys: list[BlockKey] = []
        at: BlockKey | None = leaf
        while at is not None and blocks[at].tiers & THROUGH:
            at = parents.get(at)  # no prompt ends there
        while at is not None and len(keys) <= len(parents):
            keys.append(at)
            at = parents.get(at)
        yield keys[::-1]


async def _compare_engine(result: ReplicaAudit, sidecar: _Sidecar, url: str, examples: int) -> ReplicaAudit:
    """Add the engine's own table, if it shows one."""
    query = {"dp_rank": str(result.dp_rank)}
    for _ in range(ENGINE_TRIES):
        believed = await sidecar.copies()
        try:
            async with sidecar.session.get(
                url.rstrip("/") + "/debug/cache", params=query, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as response:
                response.raise_for_status()
                seq = int(response.headers["X-Next-Seq"])
                truth = msgspec.json.decode(await response.read(), type=dict[int, int], strict=False)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError, msgspec.DecodeError):
            return msgspec.structs.replace(result, note="the engine shows no table of its own")
        if believed is not None and believed[0] == seq:
            copies = believed[1]
            missing = sorted(truth.keys() - copies.keys())
            stale = sorted(h for h, n in copies.items() if truth.get(h) != n)
            shown = [f"engine_missing {h:016x}" for h in missing] + [f"engine_stale {h:016x}" for h in stale]
            return msgspec.structs.replace(
                result,
                engine=len(truth),
                engine_missing=len(missing),
                engine_stale=len(stale),
                examples=[*result.examples, *shown][:examples],
            )
        await asyncio.sleep(ENGINE_PAUSE_S)
    return msgspec.structs.replace(result, note="the engine never stood still long enough to be compared")


async def repair(
    store: Store,
    session: aiohttp.ClientSession,
    audits: Sequence[ReplicaAudit],
    *,
    sidecars: Mapping[str, str] | None = None,
) -> list[ReplicaAudit]:
    """Repair every replica that is wrong, and audit it again until that shows or REPAIR_S is over.

    Raises StoreError, and what a sidecar that does not answer raises (aiohttp.ClientError, TimeoutError).
    """
    done: list[ReplicaAudit] = []
    for found in audits:
        if found.wrong:
            for namespace in await store.namespaces():
                if namespace.model == found.model:
                    again = await _repair_one(await store.open(namespace), found, session, sidecars or {})
                    found = again if again is not None else found
        done.append(found)
    return done


async def _repair_one(
    index: Index, found: ReplicaAudit, session: aiohttp.ClientSession, sidecars: Mapping[str, str]
) -> ReplicaAudit | None:
    ref = ReplicaRef(found.replica, found.dp_rank)
    asked = False
    result: ReplicaAudit | None = None
    deadline = asyncio.get_running_loop().time() + REPAIR_S
    while asyncio.get_running_loop().time() < deadline:
        view = next((v for v in (await index.fleet()).replicas if v.spec.ref == ref), None)
        url = sidecars.get(ref.replica) or (view.spec.consumer if view is not None else None)
        if view is None or url is None:
            return None
        if not asked:
            await _Sidecar(session, url, ref).repair()
            asked = True
        if view.incarnation != found.incarnation:  # the new one was switched to
            result = await audit_replica(index, view, session, sidecar=url)
            # What is left then are blocks of the engine whose tokens nobody heard of.
            if result.complete and not (result.missing or result.stale or result.misplaced or result.engine_stale):
                return result
        await asyncio.sleep(PAUSE_S)
    return result


# Command


@click.command("audit")
@common_options
@redis_option(required=True)
@click.option("--model", help="Only replicas of this model.")
@click.option("--replica", help="Only this replica.")
@click.option(
    "--sidecar",
    "sidecars",
    multiple=True,
    metavar="REPLICA=URL",
    help="Where to reach a replica's sidecar, if the registry does not say or says something of use elsewhere only.",
)
@click.option("--repair", "mend", is_flag=True, help="Have what is wrong brought in line, and audit again.")
@click.option("--examples", type=click.IntRange(0, 1000), default=5, help="Differing blocks to name per replica.")
@click.option("--json", "as_json", is_flag=True, help="Print the audits as JSON on standard output.")
def command(
    log_level: str,
    redis_url: str,
    model: str | None,
    replica: str | None,
    sidecars: tuple[str, ...],
    mend: bool,
    examples: int,
    as_json: bool,
) -> None:
    """Compare index, inventories and engines, block by block.

    Exits with 0 if nothing differs, 1 if something does, 2 if a replica could not be compared.
    """
    known = dict(_pair(text) for text in sidecars)
    outcome: list[ReplicaAudit] = []

    async def run(stop: asyncio.Event) -> None:
        async def work() -> None:
            store = await open_store(redis_url)
            try:
                async with aiohttp.ClientSession() as session:
                    found = await audit(
                        store, session, model=model, replica=replica, sidecars=known, examples=examples
                    )
                    if mend:
                        try:
                            found = await repair(store, session, found, sidecars=known)
                        except (aiohttp.ClientError, TimeoutError) as error:
                            raise click.ClickException(f"a sidecar did not repair: {type(error).__name__}") from None
                    outcome.extend(found)
            finally:
                await store.close()

        await until(stop, work())

    run_process(log_level, run)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode([_row(one) for one in outcome])).decode())
    else:
        _show(outcome, Console())
    if any(one.wrong for one in outcome):
        raise SystemExit(1)
    if not outcome or not all(one.complete for one in outcome):
        raise SystemExit(2)


def _pair(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name or not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{text} is not REPLICA=URL", param_hint="--sidecar")
    return name, url


def _row(one: ReplicaAudit) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return {**fields, "precision": one.precision, "recall": one.recall}


def _show(audits: Sequence[ReplicaAudit], console: Console) -> None:
    if not audits:
        console.print("no replica is registered")
        return
    table = Table(box=None, padding=(0, 1))
    for name in ("replica", "state", "index", "missing", "stale", "misplaced", "engine", "missing", "stale"):
        table.add_column(name, justify="left" if name in ("replica", "state") else "right", overflow="fold")
    for one in audits:
        state = f"{one.state} ({one.cause})" if one.cause else one.state
        cells = (one.index, one.missing, one.stale, one.misplaced, one.engine, one.engine_missing, one.engine_stale)
        table.add_row(f"{one.replica}/{one.dp_rank}", state, *("–" if cell is None else str(cell) for cell in cells))
    console.print(table)
    for one in audits:
        for line in [one.note, *one.examples]:
            if line:
                console.print(f"{one.replica}/{one.dp_rank}: {line}")
