"""`metatrie explain`: why a request found on each replica what it found, and why it went where it went.

Two sources are put together. The router says what it did: what it hashed, how far each replica matched, what each
term of the policy came to. A replica's consumer says why: its sidecar is asked about the block where the chain breaks
(`POST /v1/blocks`), or a recording is played up to the moment and asked the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..consumers.recording import Recording, Source, open_recording
from ..engines.tokenizer import Tokenizer, load_tokenizer
from ..proto.api import (
    MAX_ASKED_BLOCKS,
    MAX_LISTED,
    BlocksRequest,
    BlocksResponse,
    Decided,
    DecisionList,
    ExplainResponse,
    Explanation,
    Problem,
    PromptRequest,
    ReplicaList,
    RouteRequest,
    Served,
)
from ..proto.errors import ConfigError, MetatrieError, NotFound
from ..proto.hashing import DEFAULT_HASH_SEED, Namespace
from .cli import common_options, report_console, run_process, structured
from .diagnosis import (
    MANY_BRANCHES,
    Case,
    Report,
    Tokenisation,
    Verdict,
    case_of,
    case_of_recording,
    check_seed,
    report,
)
from .timeline import END, Point, Timeline

# ---- prompts ------------------------------------------------------------------------------------------------------


class Prompts:
    """Requests from files, as token ids."""

    def __init__(self, tokenizer: str | None) -> None:
        """tokenizer: for requests in text; `byte`, or a directory with tokenizer.json. Raises ConfigError."""
        self._tokenizer: Tokenizer | None = None if tokenizer is None else load_tokenizer(tokenizer)

    def load(self, path: Path, recording: Recording | None = None) -> tuple[PromptRequest, list[int]]:
        """A request, and its token ids. One that names no model is taken to mean the recording's.

        Raises ConfigError if it is none, or in text and there is no tokenizer.
        """
        request = self.read(path, recording)
        if request.token_ids is not None:
            return request, request.token_ids
        if self._tokenizer is None:
            raise ConfigError("tokenizer", "is not set", "the request is in text; pass --tokenizer, or token_ids")
        if request.messages is not None:
            text = self._tokenizer.apply_chat_template(request.messages)
            return request, self._tokenizer.encode(text, add_special_tokens=False)
        return request, self._tokenizer.encode(request.prompt or "")

    @staticmethod
    def read(path: Path, recording: Recording | None = None) -> RouteRequest:
        """The request as it is. `-` is standard input."""
        try:
            raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            fields = msgspec.json.decode(raw, type=dict[str, Any])
            if "model" not in fields and recording is not None:
                models = {entry.source.namespace.model for entry in recording}
                fields["model"] = models.pop() if len(models) == 1 else None
            return msgspec.convert(fields, RouteRequest)
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read ({error.strerror})", "name a file with a request") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(str(path), f"is no request: {error}", "see /openapi.json of a router") from None


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what a capture in the frames format is of, as one argument: `capture`."""

    @functools.wraps(command)
    def collected(*args: Any, **options: Any) -> Any:
        model, name = options.pop("model"), options.pop("name")
        engine, block_size, hash_seed = (options.pop(o) for o in ("engine", "block_size", "hash_seed"))
        space = {"model": model, "block_size": block_size, "hash_seed": hash_seed}
        capture = None
        if model is not None:
            capture = Source(replica=name, engine=engine, namespace=structured("namespace", Namespace, space))
        return command(*args, capture=capture, **options)

    for option in (
        click.option("--hash-seed", default=DEFAULT_HASH_SEED, help="Capture: seed text of block hashes."),
        click.option("--block-size", type=int, default=16, help="Capture: tokens per index block."),
        click.option("--engine", default="vllm", help="Capture: engine family."),
        click.option("--name", default="capture", help="Capture: what to call its replica."),
        click.option("--model", help="Capture: the model it is of."),
    ):
        collected = option(collected)
    return collected


# ---- asking -------------------------------------------------------------------------------------------------------


class Asker:
    """Speaks to routers, consumers and engines. Use as an async context manager."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, url: str, kind: type[T]) -> T:
        return await self._call("GET", url, None, kind)

    async def post(self, url: str, body: object, kind: type[T]) -> T:
        return await self._call("POST", url, msgspec.json.encode(body), kind)

    async def text(self, url: str) -> str:
        """A page as it is. Raises Unanswered."""
        return (await self._fetch("GET", url, None)).decode("utf-8", "replace")

    async def _call(self, method: str, url: str, body: bytes | None, kind: type[T]) -> T:
        """Raises Unanswered if nobody answers, or something else than was asked for."""
        try:
            return msgspec.json.decode(await self._fetch(method, url, body), type=kind)
        except msgspec.MsgspecError:
            raise Unanswered(f"{url} answers something else than was asked") from None

    async def _fetch(self, method: str, url: str, body: bytes | None) -> bytes:
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = None if body is None else io.BytesIO(body)
        try:
            async with self._session.request(method, url, data=data, headers=headers) as response:
                raw = await response.read()
                if response.status == 404:
                    raise NotThere(f"{url}: {_detail(raw)}")
                if response.status != 200:
                    raise Unanswered(f"{url}: {response.status}, {_detail(raw)}")
                return raw
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(f"{url} does not answer ({type(error).__name__})") from None

    async def evidence(self, case: Case, sidecars: Sequence[str]) -> list[str]:
        """Ask the consumers of the deepest replicas; returns what went wrong, one line each.

        sidecars: asked about every replica that announced no consumer of its own.
        """
        problems = []
        replicas = case.replicas[:MAX_ASKED]
        todo = [(replica, replica.consumer) for replica in replicas if replica.consumer is not None]
        todo += [(replica, url) for url in sidecars for replica in replicas]
        for replica, url in todo:
            name = f"{replica.replica}/{replica.dp_rank}"
            keys = case.keys(replica.namespace) or case.keys(case.lookups[0].id if case.lookups else "")
            if name in case.said or not keys:
                continue
            asked = BlocksRequest(
                keys=[key.hex() for key in keys[:MAX_ASKED_BLOCKS]], replica=replica.replica, dp_rank=replica.dp_rank
            )
            try:
                case.said[name] = await self.post(f"{url.rstrip('/')}/v1/blocks", asked, BlocksResponse)
            except NotThere:
                continue  # it follows others
            except Unanswered as error:
                problems.append(str(error))
        return problems

    async def tokenisations(self, case: Case, request: PromptRequest) -> None:
        """Have every engine of the model tokenise the request, and compare."""
        if request.token_ids is not None:
            return
        body: dict[str, Any] = {"model": request.model}
        if request.prompt is not None:
            body["prompt"] = request.prompt
        else:
            body |= {"messages": request.messages, "add_generation_prompt": True}
        for replica in case.replicas[:MAX_ASKED]:
            if replica.url is None:
                continue
            with contextlib.suppress(Unanswered):
                tokens = (await self.post(f"{replica.url.rstrip('/')}/tokenize", body, _Tokens)).tokens
                case.tokenisations.append(
                    Tokenisation(
                        replica=f"{replica.replica}/{replica.dp_rank}",
                        tokens=len(tokens),
                        differs_at=_first_difference(tokens, case.token_ids),
                    )
                )

    async def changing_text(
        self, case: Case, verdicts: Sequence[Verdict], messages: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """What the block at which the prompt leaves the known says, from an engine that can turn tokens into text;
        and in which of the request's messages that is."""
        deepest = verdicts[0] if verdicts else None
        if deepest is None or deepest.branches < MANY_BRANCHES or not case.token_ids:
            return
        size = case.lookups[0].namespace.block_size
        start = deepest.matched_blocks * size
        for url in (replica.url.rstrip("/") for replica in case.replicas if replica.url is not None):
            with contextlib.suppress(Unanswered):
                before, block = [
                    (
                        await self.post(
                            f"{url}/detokenize", {"model": case.model, "tokens": list(case.token_ids[a:b])}, _Text
                        )
                    ).prompt
                    for a, b in ((max(0, start - size), start), (start, start + size))
                ]
                case.changing = f"…{before}[{block}]…"
                where = [i for i, m in enumerate(messages or ()) if block.strip() in str(m.get("content", ""))]
                if where:
                    case.changing_in = "last" if where[-1] == len(messages or ()) - 1 else "earlier"
                return


class Unanswered(MetatrieError):
    """A process that was asked did not answer, or refused."""


class NotThere(Unanswered):
    """It answered that it knows nothing of what was asked about."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


T = TypeVar("T")
MAX_ASKED: Final = 64
"""Replicas whose consumers are asked, deepest first, and engines asked to tokenise a request."""


def _detail(raw: bytes) -> str:
    with contextlib.suppress(msgspec.MsgspecError):
        problem = msgspec.json.decode(raw, type=Problem)
        return problem.detail + (f"; {problem.remedy}" if problem.remedy else "")
    return "with a body that is no problem document"


def _first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return at
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


def from_log(path: Path, ident: str) -> Decided:
    """A decision from a log the router wrote, with what became of it. `last`: the newest.

    Raises ConfigError if the file cannot be read or has no such decision.
    """
    found: Decided | None = None
    try:
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):  # a line the router was still writing
                    match msgspec.json.decode(line, type=Decided | Served):
                        case Decided() as decided if ident in ("last", decided.id):
                            found = decided
                        case Served(id=which, served_tokens=served) if found is not None and which == found.id:
                            found = msgspec.structs.replace(found, served_tokens=served)
    except OSError as error:
        raise ConfigError("log", f"{path}: {error.strerror}", "name the router's decision log") from None
    if found is None:
        raise ConfigError("decision", "is not in the log", "see the ids there, or use `last`")
    return found


# ---- showing ------------------------------------------------------------------------------------------------------


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """For people."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("replica", "state", "matched", "reusable", "why no further"):
        table.add_column(name, justify="right" if name in ("matched", "reusable") else "left")
    for one in verdicts:
        table.add_row(
            one.replica,
            f"{one.state}: {one.cause}" if one.cause else one.state,
            f"{one.matched_blocks} of {one.prompt_blocks}",
            f"{one.reusable_tokens} tokens",
            one.text,
        )
    console.print(table)


def show(console: Console, said: Report) -> None:
    """For people."""
    decision = said.decision
    lookups = decision.lookups if decision is not None else []
    console.print(f"model {said.model}, {said.prompt_tokens:,} prompt tokens", end="")
    console.print("".join(f", {one.prompt_blocks:,} blocks of {one.namespace.block_size}" for one in lookups[:1]))
    console.print()
    for finding in said.findings:
        console.print(Text.assemble((finding.label.replace("_", " "), "bold"), ": ", finding.text))
    if not said.findings:
        console.print("nothing out of the ordinary")
    console.print()
    show_verdicts(console, said.verdicts)
    for one in said.tokenisations:
        where = "the same" if one.differs_at is None else f"differs from token {one.differs_at} on"
        console.print(f"tokenised by {one.replica}: {one.tokens:,} tokens, {where}")
    if decision is None:
        return
    if decision.explanation is not None:
        console.print()
        _show_terms(console, decision.explanation)
    served = "not reported" if decision.served_tokens is None else f"{decision.served_tokens} tokens"
    console.print(
        f"{'would choose' if not decision.id else 'chose'} {decision.replica}: {decision.reusable_tokens} tokens"
        f" expected in its cache; served: {served}"
    )


MAX_COLUMNS: Final = 6
"""Candidates whose terms are shown side by side; --json has all."""


def _show_terms(console: Console, explanation: Explanation) -> None:
    parameters = ", ".join(f"{name}={value:g}" for name, value in explanation.parameters.items())
    console.print(f"{explanation.policy}: {explanation.formula}" + (f"  ({parameters})" if parameters else ""))
    shown = explanation.candidates[:MAX_COLUMNS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("term")
    for row in shown:
        table.add_column(f"{row.replica}/{row.dp_rank}" + ("" if row.eligible else "\n(ruled out)"), justify="right")
    for name in dict.fromkeys(name for row in shown for name in row.terms):
        if any(row.terms.get(name) for row in shown):
            table.add_row(name, *(f"{row.terms.get(name, 0.0):g}" for row in shown))
    console.print(table)
    console.print(explanation.why, markup=False)


# ---- command ------------------------------------------------------------------------------------------------------


@click.command("explain")
@common_options
@click.argument("request_file", required=False, type=click.Path(path_type=Path))
@click.option("--router", "router_url", metavar="URL", help="The router to ask.")
@click.option("--decision", "ident", metavar="ID", help="A decision it took, or `last`, instead of a request.")
@click.option("--log", type=click.Path(exists=True, path_type=Path), help="Take the decision from the router's log.")
@click.option("--sidecar", "sidecars", multiple=True, metavar="URL", help="A consumer to ask; any number.")
@click.option(
    "--recording",
    "files",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Files of a recording to ask; any number, in order.",
)
@click.option("--at", "point", help="The moment in the recording; by default the decision's, else its end.")
@click.option("--replica", metavar="NAME", help="Only this replica of the recording.")
@click.option("--tokenizer", help="Without a router, for requests in text: `byte`, or a tokenizer.json's directory.")
@capture_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on standard output.")
def command(
    log_level: str,
    request_file: Path | None,
    router_url: str | None,
    ident: str | None,
    log: Path | None,
    sidecars: tuple[str, ...],
    files: tuple[Path, ...],
    point: str | None,
    replica: str | None,
    tokenizer: str | None,
    capture: Source | None,
    as_json: bool,
) -> None:
    """Why a request finds on each replica what it finds, and where it goes.

    REQUEST_FILE: what one would POST to /v1/route, as JSON (- for standard input). It is only tried, not routed.
    """
    recording = open_recording(files, capture) if files else None
    prompts = Prompts(tokenizer)
    if (request_file is None) == (ident is None):
        raise click.UsageError("give either a request or --decision")
    if router_url is None and log is None and recording is None:
        raise click.UsageError("give --router, --log or --recording to ask")

    async def run(stop: asyncio.Event) -> None:
        console = report_console(as_json)
        async with Asker() as asker:
            at = END if point is None else Point.parse(point)
            messages: Sequence[Mapping[str, Any]] | None = None
            if ident is not None:
                case = await _decided(asker, router_url, log, ident)
                if point is None:
                    at = Point("time", int((case.decision.at if case.decision else 0) * 1e9))
            elif router_url is not None and request_file is not None:
                request = prompts.read(request_file, recording)
                messages = request.messages
                case = await _tried(asker, router_url, request)
            else:
                assert recording is not None
                assert request_file is not None
                asked, tokens = prompts.load(request_file, recording)
                case = case_of_recording(recording, at, replica, asked, tokens)
            # `serve` follows its replicas itself, and answers for them.
            consumers = [*sidecars, *([router_url] if router_url is not None else [])]
            for problem in await asker.evidence(case, consumers):
                console.print(f"[yellow]{problem}[/]")
            if recording is not None:
                case.seeds = check_seed(recording, replica)
                if not case.pasts:
                    for past in Timeline.at(recording, at, replica).replicas:
                        if keys := case.keys(past.source.namespace.id):
                            case.pasts[str(past.source.ref)] = past.evidence(keys)
            await asker.changing_text(case, report(case).verdicts, messages)
        said = report(case)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(said)).decode())
        else:
            show(console, said)

    run_process(log_level, run)


async def _tried(asker: Asker, router_url: str, request: RouteRequest) -> Case:
    answer = await asker.post(f"{router_url.rstrip('/')}/v1/explain", request, ExplainResponse)
    case = Case(
        model=request.model,
        prompt_tokens=answer.decision.prompt_tokens,
        lookups=answer.decision.lookups,
        replicas=answer.replicas,
        decision=answer.decision,
        token_ids=answer.token_ids,
        unsalted_blocks=answer.unsalted_blocks,
        unadapted_blocks=answer.unadapted_blocks,
    )
    await asker.tokenisations(case, request)
    return case


async def _decided(asker: Asker, router_url: str | None, log: Path | None, ident: str) -> Case:
    url = None if router_url is None else router_url.rstrip("/")
    if log is not None:
        decided = from_log(log, ident)
    elif ident == "last":
        listed = (await asker.get(f"{url}/v1/decisions?limit=1", DecisionList)).decisions
        if not listed:
            raise NotFound("the router has decided nothing yet")
        (decided,) = listed
    else:
        decided = await asker.get(f"{url}/v1/decisions/{ident}", Decided)
    now = []
    if url is not None:
        now = (await asker.get(f"{url}/v1/replicas?limit={MAX_LISTED}", ReplicaList)).replicas
    return case_of(decided, now)
