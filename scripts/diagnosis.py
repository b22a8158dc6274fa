"""Why a request found on each replica what it found: the reasoning, without asking anybody.

`judge` looks at one replica: how far it holds the prompt, and what its consumer knows of the first block it lacks. A
`Case` is everything known of one request, from routers, consumers, engines and recordings; `report` turns it into
verdicts, one per replica, and findings, which name a cause and what to do about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from ..consumers.recording import Frame, Recording
from ..proto.api import BlocksResponse, Decided, ExplainedReplica, Lookup, PromptRequest, ReplicaInfo
from ..proto.errors import MalformedBatch, NotFound
from ..proto.events import BlockStored, block_tokens, decode_batch
from ..proto.hashing import (
    KEY_BYTES,
    BlockKey,
    Chain,
    Namespace,
    PromptExtras,
    block_hash,
    block_key,
    none_hash,
)
from .timeline import Point, Timeline, of_replica

Reason = Literal[
    "whole",
    "never_stored",
    "evicted",
    "detached",
    "no_usable_end",
    "cleared",
    "hidden_input",
    "stream_incomplete",
    "other_namespace",
    "other_salt",
    "other_adapter",
    "other_media",
    "stale",
    "uncounted",
    "unknown",
]

_LOSSES: Final = frozenset(
    {"gap", "joined_late", "history_lost", "unverified", "malformed_batch", "malformed_frame", "skipped_event"}
)
"""Causes of a degraded state that mean: something was published that this consumer does not know."""
_NO_END: Final = "another cache group of the model lacks what it needs at that point, or an engine block goes on"
MANY_BRANCHES: Final = 3
"""So many ways on from one block are a text that changes from request to request, not two conversations."""


# ---- verdicts -----------------------------------------------------------------------------------------------------


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far one replica holds a prompt, and why no further."""

    replica: str
    namespace: str
    matched_blocks: int
    prompt_blocks: int
    reusable_tokens: int
    state: str
    reason: Reason
    text: str
    """The reason, in a sentence."""
    cause: str = ""
    block: str | None = None
    """Key of the first block it lacks."""
    seq: int | None = None
    """The batch to blame, where there is one."""
    branches: int = 0
    """Ways on known there from the last block that matched."""


def judge(keys: Sequence[BlockKey], prompt_tokens: int, said: BlocksResponse) -> Verdict:
    """One replica's verdict. keys: the prompt's leading blocks, at least one more than match there, and `said.blocks`
    tells of each of them."""
    size = said.namespace.block_size
    total = prompt_tokens // size
    depth = 0
    while depth < min(len(keys), total) and said.blocks[depth].state == "attached":
        depth += 1
    above = said.blocks[depth - 1].branches if depth else 0
    held = depth
    while depth and said.blocks[depth - 1].through:
        depth -= 1
    if depth < held:
        reason: Reason = "no_usable_end"
        text, seq = f"blocks {depth} to {held - 1} are held, but no prompt can end there: {_NO_END}", None
    else:
        reason, text, seq = _why(depth, total, keys, said)
    return Verdict(
        replica=f"{said.replica}/{said.dp_rank}",
        namespace=said.namespace.id,
        matched_blocks=depth,
        prompt_blocks=total,
        reusable_tokens=min(depth, max(0, prompt_tokens - 1) // size) * size,
        state=said.state,
        cause=said.cause,
        reason=reason,
        text=text,
        seq=seq,
        block=keys[depth].hex() if depth < min(total, len(keys)) else None,
        branches=above,
    )


def _why(depth: int, total: int, keys: Sequence[BlockKey], said: BlocksResponse) -> tuple[Reason, str, int | None]:
    size = said.namespace.block_size
    if depth == total:
        return "whole", "every full block of the prompt is held", None
    if depth >= len(keys):
        return "unknown", f"block {depth} was not looked at", None
    block = said.blocks[depth]
    where = f"block {depth} (tokens {depth * size} to {depth * size + size - 1})"
    behind = sum(after.state == "detached" for after in said.blocks[depth + 1 :])
    detached = f"; {behind} blocks behind it are held and cannot be used without it" if behind else ""
    match block.state:
        case "left":
            text = f"{where} was in the index until batch {block.left_seq}, when the engine evicted it{detached}"
            if said.cause in _LOSSES:
                text += f"; but the consumer did not hear everything ({said.cause}), so there may be another copy"
            return "evicted", text, block.left_seq
        case "detached":
            # One index block of several engine pages, one of which is missing.
            text = f"{where} is held in part{detached}"
            return "detached", text, block.missing_left_seq
        case "hidden":
            return "hidden_input", f"{where} is held, but depends on something its engine does not publish", None
        case _ if behind:
            text = f"{where} was never heard of there, so it is missing{detached}"
            return "detached", text, None
        case _:
            return _never(depth, where, said)


def _never(depth: int, where: str, said: BlocksResponse) -> tuple[Reason, str, int | None]:
    """The consumer knows nothing of the block: did it not hear of it, or was there nothing to hear?"""
    if said.cause in _LOSSES:
        return (
            "stream_incomplete",
            f"{where} is unknown there, and the consumer did not hear everything ({said.cause}): it may be held",
            None,
        )
    if said.emptied_seq is not None and depth == 0:
        return (
            "cleared",
            f"{where} was not stored there since the cache was emptied with batch {said.emptied_seq}",
            said.emptied_seq,
        )
    text = f"{where} was never stored there"
    if said.emptied_seq is not None:
        text += f" since the cache was emptied with batch {said.emptied_seq}"
    if depth and (branches := said.blocks[depth - 1].branches) >= MANY_BRANCHES:
        text += (
            f", while {branches} other continuations of block {depth - 1} are known:"
            " something in these tokens changes from request to request"
        )
    elif not depth and said.hash_mode == "engine":
        text += ". Its engine's own hashes are taken as keys (hash_mode engine): they fit only if it runs sha256_cbor"
        text += f" with PYTHONHASHSEED={said.namespace.hash_seed}"
    return "never_stored", text, None


# ---- evidence -----------------------------------------------------------------------------------------------------


class Tokenisation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one engine turns the request's text into tokens."""

    replica: str
    tokens: int
    differs_at: int | None = None
    """The first token that is not as the router had it; None: all are."""


Label = Literal[
    "chat_template_drift",
    "hash_seed_mismatch",
    "changing_text",
    "lost_events",
    "load_diversion",
    "other_namespace",
    "other_salt",
    "other_adapter",
    "stale_replica",
    "cleared",
    "evicted",
    "detached",
    "hidden_input",
    "overpredicted",
    "underpredicted",
]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, named."""

    label: Label
    text: str
    """What is the matter, and what to do about it."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `metatrie explain` has to say."""

    model: str
    prompt_tokens: int
    findings: list[Finding]
    """The most telling first."""
    verdicts: list[Verdict]
    """Deepest first."""
    tokenisations: list[Tokenisation] = []
    """For a request in text."""
    decision: Decided | None = None
    """What the router decided, or would now."""


class Case(msgspec.Struct, kw_only=True):
    """What is known of one request, from wherever it could be had."""

    model: str
    prompt_tokens: int
    lookups: list[Lookup]
    replicas: list[ExplainedReplica]
    decision: Decided | None = None
    token_ids: Sequence[int] = ()
    unsalted_blocks: int = 0
    unadapted_blocks: int = 0
    said: dict[str, BlocksResponse] = {}
    """By `NAME/RANK`: what its consumer says of the prompt's blocks now."""
    pasts: dict[str, BlocksResponse] = {}
    """The same, of a consumer replayed from a recording."""
    seeds: dict[str, SeedCheck] = {}
    tokenisations: list[Tokenisation] = []
    changing: str = ""
    """Text of the block at which the prompt leaves what is known, where an engine gave it back."""
    changing_in: Literal["", "earlier", "last"] = ""
    """For a conversation: whether that text is of its last message."""

    def keys(self, namespace: str) -> list[BlockKey]:
        """The prompt's leading blocks as a namespace names them, as far as they are known."""
        for lookup in self.lookups:
            if lookup.id == namespace:
                raw = bytes.fromhex(lookup.keys)
                return [BlockKey(raw[i : i + KEY_BYTES]) for i in range(0, len(raw), KEY_BYTES)]
        return []


class SeedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine names its blocks as the declared seed would have it."""

    checked: int
    wrong: int
    fits: str | None
    """A seed that explains the names instead, if one of the usual ones does."""


USUAL_SEEDS: Final = ("0", "1", "2", "7", "42", "123", "1234", "12345", "1337", "random", "vllm-none-hash")
"""Tried where the declared seed does not fit; the last is what vLLM 0.29 and later take when none is set."""
SEED_SAMPLES: Final = 64


def check_seed(recording: Recording, replica: str | None = None) -> dict[str, SeedCheck]:
    """Compare published names of first blocks with what the declared seed predicts, for each recorded vLLM replica.

    Only blocks whose name depends on tokens alone are looked at. Says nothing of redacted recordings.
    """
    samples: dict[str, list[tuple[int, list[int]]]] = {}
    seeds: dict[str, str] = {}
    for entry in of_replica(recording, replica):
        source, record = entry.source, entry.record
        found = samples.setdefault(str(source.ref), [])
        if source.redacted or source.engine != "vllm" or not isinstance(record, Frame) or len(found) >= SEED_SAMPLES:
            continue
        seeds[str(source.ref)] = source.namespace.hash_seed
        with contextlib.suppress(MalformedBatch):
            for event in decode_batch(record.payload).events:
                if not isinstance(event, BlockStored) or event.parent is not None or not event.hashes:
                    continue
                plain = not (event.lora_name or event.lora_id or event.lookahead or event.cache_salt)
                if plain and event.extra_keys is None and (blocks := block_tokens(event)):
                    found.append((event.hashes[0], list(blocks[0])))
    return {
        ref: SeedCheck(
            checked=len(found),
            wrong=sum(not _named(seeds[ref], name, tokens) for name, tokens in found),
            fits=next((seed for seed in USUAL_SEEDS if all(_named(seed, *sample) for sample in found)), None),
        )
        for ref, found in samples.items()
        if found
    }


def _named(seed: str, name: int, tokens: list[int]) -> bool:
    return int.from_bytes(block_key(block_hash(none_hash(seed), tokens)), "big") == name


# ---- conclusions --------------------------------------------------------------------------------------------------


def report(case: Case) -> Report:
    """Put a case together. Pure: everything that had to be asked is in it."""
    verdicts = [_verdict(case, replica) for replica in case.replicas]
    verdicts.sort(key=lambda v: (-v.reusable_tokens, v.replica))
    return Report(
        model=case.model,
        prompt_tokens=case.prompt_tokens,
        findings=list(_findings(case, verdicts)),
        verdicts=verdicts,
        tokenisations=case.tokenisations,
        decision=case.decision,
    )


def _verdict(case: Case, replica: ExplainedReplica) -> Verdict:
    name = f"{replica.replica}/{replica.dp_rank}"
    keys = case.keys(replica.namespace)
    lookup = next((one for one in case.lookups if one.id == replica.namespace), None)
    total = lookup.prompt_blocks if lookup is not None else 0
    plain = Verdict(
        replica=name,
        namespace=replica.namespace,
        matched_blocks=replica.matched_blocks,
        prompt_blocks=total,
        reusable_tokens=replica.reusable_tokens,
        state=replica.state,
        cause=replica.cause,
        reason="unknown",
        text="its consumer was not asked: pass its --sidecar, or a --recording",
        block=keys[replica.matched_blocks].hex() if replica.matched_blocks < min(total, len(keys)) else None,
    )
    replace = msgspec.structs.replace
    if replica.state == "stale":
        return replace(
            plain, reason="stale", text=f"nothing of it counts: {_STALE.get(replica.cause, replica.cause)}"
        )
    if lookup is not None and replica.matched_blocks >= total:
        return replace(plain, reason="whole", text="every full block of the prompt is held")
    main = case.lookups[0] if case.lookups else None
    if main is not None and replica.namespace != main.id and not replica.matched_blocks:
        other = lookup.namespace if lookup is not None else None
        return replace(plain, reason="other_namespace", text=_namespaces_differ(main.namespace, other))
    told = [
        judge(keys, case.prompt_tokens, answers[name])
        for answers in (case.said, case.pasts)
        if name in answers and answers[name].namespace.id == replica.namespace and keys
    ]
    # A live consumer knows best what is; a recording remembers longer what was.
    vague = ("never_stored", "unknown")
    best = next((v for v in told if v.reason not in vague), told[0] if told else None)
    if best is None:
        declared = next((a[name].namespace for a in (case.said, case.pasts) if name in a), None)
        if declared is not None and main is not None and declared.id != replica.namespace:
            return replace(plain, reason="other_namespace", text=_namespaces_differ(main.namespace, declared))
        return plain
    if best.matched_blocks > replica.matched_blocks:
        text = (
            f"block {replica.matched_blocks} is held there, and did not count: it came since, or the router distrusts"
            " it, since the engine found less there than was predicted"
        )
        return replace(plain, reason="uncounted", text=text, branches=best.branches)
    # What was acted on are the router's own figures; what is known of the block may be newer.
    best = replace(
        best,
        matched_blocks=replica.matched_blocks,
        reusable_tokens=replica.reusable_tokens,
        state=replica.state,
        cause=replica.cause or best.cause,
    )
    if best.reason == "never_stored" and case.unsalted_blocks > best.matched_blocks:
        return replace(best, reason="other_salt", text="held without the cache salt this request has")
    if best.reason == "never_stored" and case.unadapted_blocks > best.matched_blocks:
        return replace(best, reason="other_adapter", text="held for the base model, not under this request's adapter")
    return best


_STALE: Final = {
    "lease_expired": "its consumer gave no sign of life for the length of its lease",
    "not_activated": "its consumer has not finished its first picture",
    "index_unavailable": "the index cannot be reached",
}


def _namespaces_differ(main: Namespace, other: Namespace | None) -> str:
    if other is None:
        return "its cache is of another namespace, in which this prompt was not looked up"
    fields = [
        f"{field} is {getattr(other, field)!r} and not {getattr(main, field)!r}"
        for field in Namespace.__struct_fields__
        if getattr(other, field) != getattr(main, field)
    ]
    return f"its cache is of another namespace: {', '.join(fields)}"


def _findings(case: Case, verdicts: Sequence[Verdict]) -> Iterator[Finding]:
    yield from _drift(case)
    yield from _seeds(case)
    deepest = verdicts[0] if verdicts else None
    by_reason: dict[Reason, list[Verdict]] = {}
    for verdict in verdicts:
        by_reason.setdefault(verdict.reason, []).append(verdict)
    new = [v for v in by_reason.get("never_stored", ()) if v.branches >= MANY_BRANCHES]
    if new and deepest is not None and new[0].matched_blocks == deepest.matched_blocks and _early(case, new[0]):
        depth, size = new[0].matched_blocks, case.lookups[0].namespace.block_size
        text = (
            f"the prompt leaves everything known at block {depth} (tokens {depth * size} to"
            f" {(depth + 1) * size - 1}), where {new[0].branches} others left it too, each its own way: something"
            " there changes with every request"
        )
        text += f'. It reads: "{case.changing}"' if case.changing else ""
        yield Finding(label="changing_text", text=text + ". Move it behind what stays the same, or drop it")
    lossy = [v for v in verdicts if v.cause in _LOSSES and v.reason not in ("whole", "stale")]
    for verdict in lossy[:MAX_ALIKE]:
        yield Finding(
            label="lost_events",
            text=f"{verdict.replica}: its consumer did not hear everything ({verdict.cause}), so blocks it holds may"
            " be missing from the index. A replay endpoint at the engine lets the consumer ask again",
        )
    yield from _diversion(case)
    for reason, label in _REASONS.items():
        for verdict in by_reason.get(reason, ())[:MAX_ALIKE]:
            yield Finding(label=label, text=f"{verdict.replica}: {verdict.text}")
    yield from _served(case)


def _early(case: Case, verdict: Verdict) -> bool:
    """Does much of the prompt come behind the place where it changes? A new question at the end is no fault."""
    if case.changing_in:
        return case.changing_in == "earlier"
    return verdict.prompt_blocks - verdict.matched_blocks >= max(MIN_BEHIND, verdict.prompt_blocks // 4)


MIN_BEHIND: Final = 4
MAX_ALIKE: Final = 3
"""Replicas named for one cause; the verdicts have all."""
_REASONS: Final[dict[Reason, Label]] = {
    "other_namespace": "other_namespace",
    "other_salt": "other_salt",
    "other_adapter": "other_adapter",
    "hidden_input": "hidden_input",
    "stale": "stale_replica",
    "cleared": "cleared",
    "detached": "detached",
    "evicted": "evicted",
}


def _drift(case: Case) -> Iterator[Finding]:
    differing = [one for one in case.tokenisations if one.differs_at is not None]
    if not differing:
        return
    size = case.lookups[0].namespace.block_size if case.lookups else 1
    names = ", ".join(f"{one.replica} (from token {one.differs_at} on)" for one in differing)
    first = min(one.differs_at or 0 for one in differing)
    yield Finding(
        label="chat_template_drift",
        text=f"the engines do not agree on this request's tokens: {names} of {len(case.tokenisations)} differ from"
        f" what was looked up, so from block {first // size} on they hold other blocks for the same text. Bring"
        " tokenizer and chat template of all of them to one revision",
    )


def _seeds(case: Case) -> Iterator[Finding]:
    for replica, check in case.seeds.items():
        if not check.wrong:
            continue
        said = case.said.get(replica) or case.pasts.get(replica)
        named = said is not None and said.hash_mode == "engine"
        if check.fits == "vllm-none-hash":
            instead = "they fit an engine started without PYTHONHASHSEED"
        elif check.fits is not None:
            instead = f"they fit PYTHONHASHSEED={check.fits}"
        else:
            instead = "it runs with another PYTHONHASHSEED, or not with sha256_cbor"
        effect = (
            "Its hashes are taken as keys (hash_mode engine), so no prompt ever matches there. Start it with the"
            " declared seed, or let keys be recomputed (hash_mode auto)"
            if named
            else "Keys are recomputed from tokens, so nothing is lost; only the comparison of names is"
        )
        yield Finding(
            label="hash_seed_mismatch",
            text=f"{replica}: {check.wrong} of {check.checked} first blocks are not named as the declared seed has"
            f" it; {instead}. {effect}",
        )


def _diversion(case: Case) -> Iterator[Finding]:
    decision = case.decision
    if decision is None or not decision.holdings:
        return
    deepest = decision.holdings[0]
    if deepest.replica == decision.replica or deepest.reusable_tokens <= decision.reusable_tokens:
        return
    rows = decision.explanation.candidates if decision.explanation else []
    terms = {f"{row.replica}/{row.dp_rank}": row for row in rows}
    chosen, passed = terms.get(decision.replica), terms.get(deepest.replica)
    text = (
        f"{deepest.replica} holds {deepest.reusable_tokens} tokens of the prompt, and {decision.replica}, which holds"
        f" {decision.reusable_tokens}, was chosen ({decision.policy})"
    )
    if passed is not None and chosen is not None:
        differing = [
            f"{name} {passed.terms[name]:g} against {chosen.terms.get(name, 0.0):g}"
            for name in passed.terms
            if passed.terms[name] != chosen.terms.get(name, 0.0)
        ]
        text += (
            ": " + ("ruled out by the policy's constraint; " if not passed.eligible else "") + ", ".join(differing)
        )
    yield Finding(label="load_diversion", text=text)


def _served(case: Case) -> Iterator[Finding]:
    decision = case.decision
    if decision is None or decision.served_tokens is None or decision.served_tokens == decision.reusable_tokens:
        return
    served, predicted = decision.served_tokens, decision.reusable_tokens
    if served < predicted:
        yield Finding(
            label="overpredicted",
            text=f"{decision.replica} found {served} tokens in its cache where {predicted} were expected: blocks went"
            " between the decision and the prefill, or its events are lost or late",
        )
    else:
        yield Finding(
            label="underpredicted",
            text=f"{decision.replica} found {served} tokens in its cache where {predicted} were expected: its events"
            " are late, or it names its blocks otherwise",
        )


# ---- cases --------------------------------------------------------------------------------------------------------


def case_of(decided: Decided, replicas: Sequence[ReplicaInfo] = ()) -> Case:
    """A case from a decision on record. replicas: as they are now, which tells where to ask; what they held then
    comes from the record."""
    held = {holding.replica: holding for holding in decided.holdings}
    rows = {}
    for holding in decided.holdings:
        name, _, rank = holding.replica.rpartition("/")
        namespaces = [one.id for one in decided.lookups if one.namespace.block_size == holding.block_size]
        rows[holding.replica] = ExplainedReplica(
            replica=name,
            dp_rank=int(rank),
            namespace=namespaces[0] if namespaces else "",
            matched_blocks=holding.matched_blocks,
            reusable_tokens=holding.reusable_tokens,
            state=holding.state,
            cause=holding.cause,
        )
    for replica in replicas:
        name = f"{replica.replica}/{replica.dp_rank}"
        if name in held:
            rows[name] = msgspec.structs.replace(rows[name], url=replica.url, consumer=replica.consumer)
    return Case(
        model=decided.model,
        prompt_tokens=decided.prompt_tokens,
        lookups=decided.lookups,
        replicas=list(rows.values()),
        decision=decided,
    )


def case_of_recording(
    recording: Recording, point: Point, replica: str | None, request: PromptRequest, tokens: Sequence[int]
) -> Case:
    """A case without a router: what a recording alone tells."""
    lookups: dict[str, Lookup] = {}
    rows: list[ExplainedReplica] = []
    pasts: dict[str, BlocksResponse] = {}
    for past in Timeline.at(recording, point, replica).replicas:
        space = past.source.namespace
        if space.model != request.model:
            continue
        chain = Chain(space.root, space.block_size, tokens, extras_of(request), lookahead=space.lookahead)
        keys = chain.keys(chain.blocks)
        lookups[space.id] = Lookup(
            namespace=space, id=space.id, prompt_blocks=chain.blocks, keys=b"".join(keys).hex()
        )
        said = pasts[str(past.source.ref)] = past.evidence(keys)
        verdict = judge(keys, len(tokens), said)
        rows.append(
            ExplainedReplica(
                replica=past.source.replica,
                dp_rank=past.source.dp_rank,
                namespace=space.id,
                matched_blocks=verdict.matched_blocks,
                reusable_tokens=verdict.reusable_tokens,
                state=said.state,
                cause=said.cause,
            )
        )
    if not rows:
        raise NotFound("no replica of this model was heard of by then", field="model")
    return Case(
        model=request.model,
        prompt_tokens=len(tokens),
        lookups=list(lookups.values()),
        replicas=rows,
        token_ids=tokens,
        pasts=pasts,
    )


def extras_of(request: PromptRequest) -> PromptExtras:
    """What the prompt's blocks depend on besides its tokens."""
    return PromptExtras(lora=request.lora, media=tuple(request.media or ()), cache_salt=request.cache_salt)
