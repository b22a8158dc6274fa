"""Coverage-guided fuzzing of what reads untrusted bytes: the event decoder, the stream machine, the inventory.

    pip install atheris
    python -m metatrie.scripts.fuzz decoder -max_total_time=600 tests/data/fuzz/decoder
    python -m metatrie.scripts.fuzz stream  -max_total_time=600 tests/data/fuzz/stream

What follows the target's name goes to libFuzzer; the first directory is the corpus, which grows with coverage.
An input that breaks a promise (any exception, a bound exceeded), takes longer than `-timeout` or more memory than
`-rss_limit_mb` is written out and ends the run.

Strategy. Both targets take MessagePack, and most byte-wise mutations of it are noise to a decoder; so every other
mutation is structural: decode, replace, repeat, drop or swap one value anywhere inside, encode. A stream input is a
list of operations `[kind, seq, payload]`, which the target plays against the machine and an inventory behind it, so
that one input is a whole life: connects, gaps, replays, restarts and timeouts in any order.

The targets themselves need no fuzzer: the test suite runs them over the corpus kept in tests/data/fuzz.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from ..consumers import inventory, stream
from ..consumers.inventory import Inventory
from ..consumers.stream import TRANSITIONS, Apply, Dropped, Phase, RequestReplay, Restarted, Stream
from ..engines import rules
from ..engines.rules import rule_for
from ..proto import events, hashing
from ..proto.errors import MalformedBatch
from ..proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode_batch
from ..proto.hashing import Namespace

MAX_HELD: Final = 8
MAX_HELD_BYTES: Final = 4096
MAX_BLOCKS: Final = 64
MAX_OPERATIONS: Final = 256
INSTRUMENTED: Final = (events, hashing, stream, inventory, rules)

_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
_NAMESPACE = Namespace(model="m", block_size=4)
_U64 = 1 << 64


def check_decoder(data: bytes) -> None:
    """Decode one payload, by the native kernel too where there is one, and apply it twice. Raises AssertionError, or
    whatever was not meant to be raised."""
    batch, packed = _decoded(data, pack_tokens=False), _decoded(data, pack_tokens=True)
    # By their bytes: a NaN anywhere equals nothing.
    assert _encode(batch) == _encode(packed), "the two ways to decode differ"
    if isinstance(batch, str):
        return
    _check_batch(batch)
    for engine in ("vllm", "sglang"):
        held = Inventory(_NAMESPACE, rule=rule_for(engine), max_blocks=MAX_BLOCKS)
        _check_inventory(held, batch)
        _check_inventory(held, batch)


def _decoded(data: bytes, *, pack_tokens: bool) -> Batch | str:
    """The batch, or what is wrong with it."""
    try:
        return decode_batch(data, pack_tokens=pack_tokens)
    except MalformedBatch as error:
        return error.cause


def check_stream(data: bytes) -> None:
    """Play a list of operations against the stream machine, with an inventory behind it."""
    try:
        operations = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    if not isinstance(operations, list) or not operations:
        return
    machine = Stream(replay=operations[0] is not False, max_held=MAX_HELD, max_held_bytes=MAX_HELD_BYTES)
    held = Inventory(_NAMESPACE, rule=rule_for("vllm"), max_blocks=MAX_BLOCKS)
    now, request, expected = 0.0, 0, 0
    for operation in operations[:MAX_OPERATIONS]:
        if not isinstance(operation, list) or not operation:
            continue
        seq = operation[1] if len(operation) > 1 and type(operation[1]) is int else 0
        payload = operation[2] if len(operation) > 2 and isinstance(operation[2], bytes) else b""
        frames = [seq % _U64] if len(operation) > 1 else []
        wire = [b"", *(frame.to_bytes(8, "big") for frame in frames), payload]
        match operation[0]:
            case 0:
                actions = machine.live(wire, now)
            case 1:
                actions = machine.replayed([b"", *wire], request, now)
            case 2:
                actions = machine.connected(now)
            case 3:
                actions = machine.disconnected(now)
            case 4:
                now += abs(seq) % 16
                actions = machine.tick(now)
            case _:
                actions = machine.live([b"x"] * (abs(seq) % 5), now)
        for action in actions:
            match action:
                case Apply(seq=at, batch=batch):
                    assert at >= expected, "a batch was applied twice, or out of order"
                    expected = at + 1
                    _check_inventory(held, batch)
                case RequestReplay(start=start, request=number):
                    assert start <= machine.expected
                    assert number > request, "request numbers must tell replies apart"
                    request = number
                case Restarted():
                    expected = 0
                    held.restart()
                    assert held.settle().reset
                case Dropped():
                    held.clear()
                    held.settle()
        assert machine.expected >= expected
        assert machine.held <= MAX_HELD
        assert machine.phase in {phase for pair in TRANSITIONS for phase in (pair[0], TRANSITIONS[pair])}
        assert (machine.phase is Phase.DEGRADED) <= bool(machine.cause)


def _check_batch(batch: Batch) -> None:
    assert 0.0 <= batch.ts < float("inf")
    assert all(skipped.cause.isidentifier() for skipped in batch.skipped)
    for event in batch.events:
        match event:
            case BlockStored():
                assert all(0 <= h < _U64 for h in event.hashes)
                assert event.parent is None or 0 <= event.parent < _U64
                assert all(type(token) is int and 0 <= token < _U64 for token in event.tokens)
                assert event.medium == event.medium.lower()
                assert 0 <= event.group < events.MAX_GROUPS
                assert not (event.remote and event.medium == "gpu")
                assert event.extra_keys is None or len(event.extra_keys) >= len(event.hashes)
            case BlockRemoved():
                assert all(0 <= h < _U64 for h in event.hashes)
                assert 0 <= event.group < events.MAX_GROUPS
            case AllBlocksCleared():
                pass


def _check_inventory(held: Inventory, batch: Batch) -> None:
    delta = held.apply(batch)
    assert len({write.key for write in delta.writes}) == len(delta.writes)
    assert 0 <= held.attached <= held.held <= held.nodes <= 2 * MAX_BLOCKS
    assert held.copies <= MAX_BLOCKS
    shown = held.expected()
    assert all(shown.values())
    written = {write.key: write for write in held.attached_writes()}
    assert written.keys() == shown.keys()
    for write in written.values():
        assert write.parent is None or write.parent in shown, "prefix closure"


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {"decoder": check_decoder, "stream": check_stream}


# Mutation


_INTERESTING: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 4, 16, 63, 64, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, float("nan"), float("inf"), "", "GPU", "cpu", "lora", "REMOTE", b"", b"\xff" * 8, b"\x01" * 32),
    *([], {}, [[]], [None], [1, 2, 3, 4], "BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "mamba"),
    *(["tenant"], [["image", 0]], ["image", -3], "full_attention", "sliding_window"),
)


def mutate(data: bytes, max_size: int, rng: random.Random) -> bytes | None:
    """One structural change to a MessagePack document; None when it is none, or the result would be too long."""
    try:
        root = [msgspec.msgpack.decode(data)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    places = list(_places(root))
    holder, key = rng.choice(places)
    other_holder, other_key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            holder[key] = rng.choice(_INTERESTING)
        case 1:
            holder[key] = other_holder[other_key]
        case 2 if type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, rng.randint(-100, 100)))
        case 3 if isinstance(holder[key], bytes):
            inner = mutate(holder[key], max_size, rng)
            holder[key] = holder[key] if inner is None else inner
        case 4 if isinstance(holder, list) and holder is not root:
            holder.insert(key, holder[key])
        case 5 if holder is not root:
            del holder[key]
        case _:
            holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
    try:
        changed = msgspec.msgpack.encode(root[0])
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError, msgspec.MsgspecError):
        return None  # a number beyond 64 bits, a container as a key, or a value inside itself
    return changed if len(changed) <= max_size else None


def _places(root: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Every (container, index or key), breadth first, at most 4096."""
    todo: list[Any] = [root]
    count = 0
    for holder in todo:
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            yield holder, key
            count += 1
            if count == 4096:
                return
            if isinstance(holder[key], (list, dict)):
                todo.append(holder[key])


def _instrument(atheris: Any) -> None:
    for module in INSTRUMENTED:
        for value in vars(module).values():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            for function in vars(value).values() if isinstance(value, type) else (value,):
                if isinstance(function, types.FunctionType):
                    atheris.instrument_func(function)


def main() -> None:
    """Run one target under libFuzzer; see the module's text."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m metatrie.scripts.fuzz {{{','.join(TARGETS)}}} [libFuzzer options] [corpus]")
    try:
        import atheris  # type: ignore[import-untyped,unused-ignore]  # optional, and without types
    except ImportError:
        sys.exit("this needs the package atheris: pip install atheris")
    target = TARGETS[sys.argv.pop(1)]

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = mutate(data, max_size, rng) if rng.random() < 0.5 else None
        return changed if changed is not None else bytes(atheris.Mutate(data, max_size))

    _instrument(atheris)
    atheris.Setup(sys.argv, target, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
