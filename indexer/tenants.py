"""Who is calling, what they may do, and whose prefixes they can hit.

Strategy. A bearer token maps a caller to a tenant, a tenant to a trust group (by default its own), and a group to a
cache salt: HMAC-SHA-256 of the group's name under a secret. The salt enters the first block's hash, in the engine
and in the index alike, so prompts of two groups never share a block, and tenants of one group do. Nobody but the
router needs the secret; whoever knows a salt can address that group's prefixes, so salts are never shown.

Rotation. Secrets are numbered. A new one is added, then made the `version`; a tenant with a `salt_version` of its own
moves when that is changed. What was cached under the old salt is never hit again and ages out of the engines.

Tokens are kept and looked up as digests under a key of this process's own, so how long a look-up takes says nothing
about any token; a hit is confirmed in constant time. A caller whose token is unknown learns only that.

Changes. The file is looked at every POLL_S seconds and read again when it was written or replaced. What it says takes
effect as a whole or not at all: one that cannot be used leaves the last good one in force, which is logged, counted
and shown as a gauge until it is mended. A tenant's requests in flight and its place in the minute survive a change.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from ..proto.errors import ConfigError, Forbidden, NotFound, TooManyRequests, Unauthorized

MIN_SECRET_BYTES: Final = 16
MIN_TOKEN_CHARS: Final = 16
MAX_FILE_BYTES: Final = 16 << 20
POLL_S: Final = 1.0
"""Between two looks at the file."""

_log = logging.getLogger("metatrie.tenants")

SaltOf = Callable[[str], str | None]
"""Tenant name → its cache salt; None: its prefixes are not isolated."""


class Quota:
    """One tenant's limits, shared by all of its tokens: requests at a time, and a token bucket of requests."""

    def __init__(
        self,
        *,
        max_in_flight: int | None = None,
        requests_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """None: no limit. The bucket holds a minute's worth and starts full."""
        self._clock = clock
        self._at = clock()
        self._rate: float | None = None
        self._burst = self._level = 0.0
        self.in_flight = 0
        self.limit(max_in_flight=max_in_flight, requests_per_minute=requests_per_minute)

    def limit(self, *, max_in_flight: int | None, requests_per_minute: float | None) -> None:
        """Set other limits. What is in flight, and what is used up of the minute, stays."""
        self._max_in_flight = max_in_flight
        used = self._burst - self._level
        self._rate = None if requests_per_minute is None else requests_per_minute / 60
        self._burst = 0.0 if requests_per_minute is None else max(1.0, requests_per_minute)
        self._level = max(0.0, self._burst - used)

    def take(self) -> None:
        """Count one request. Raises TooManyRequests, saying when the next may come."""
        if self._rate is None:
            return
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            raise TooManyRequests(
                "the tenant's request rate is used up",
                remedy="slow down, or ask for a higher limit",
                retry_after_s=max(1, int((1 - self._level) / self._rate + 1)),
            )
        self._level -= 1

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the places in flight. Raises TooManyRequests if there is none."""
        if self._max_in_flight is not None and self.in_flight >= self._max_in_flight:
            raise TooManyRequests(
                "the tenant has as many requests running as it may", remedy="wait until one of them ends"
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asking, as far as the router cares."""

    trusted: bool = False
    """May name a cache salt, a tenant and media identifiers, all of which address other people's prefixes."""
    tenant: str | None = None
    """The tenant an authenticated caller belongs to."""
    models: frozenset[str] | None = None
    """Names it may ask for; None: all."""
    quota: Quota | None = None

    def may_use(self, model: str) -> None:
        """Raises NotFound, as for a model that does not exist: what others may use is not its business."""
        if self.models is not None and model not in self.models:
            raise NotFound("there is no such model", field="model", remedy="see GET /v1/models")

    def only_trusted(self, field: str) -> None:
        """Raises Forbidden unless the caller may send this field."""
        if not self.trusted:
            raise Forbidden(
                "only a trusted caller may send this field",
                field=field,
                remedy="leave it out, or authenticate as a caller configured as trusted",
            )


TRUSTED: Final = Caller(trusted=True)


class HasHeaders(Protocol):
    """Any request, as far as authentication reads it."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class BearerAuth:
    """Accepts callers that present a known token as `Authorization: Bearer …`."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        """callers: by token; tokens should have at least 128 random bits."""
        self._key = secrets.token_bytes(32)
        self._callers = {self._name(_digest(token)): (_digest(token), caller) for token, caller in callers.items()}

    @classmethod
    def of_digests(cls, callers: Mapping[bytes, Caller]) -> BearerAuth:
        """callers: by the SHA-256 digests of their tokens."""
        auth = cls({})
        auth._callers = {auth._name(digest): (digest, caller) for digest, caller in callers.items()}
        return auth

    def __call__(self, request: HasHeaders) -> Caller:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(token.strip())
        expected, caller = self._callers.get(self._name(digest), (b"", None))
        if not hmac.compare_digest(digest, expected) or caller is None or scheme.lower() != "bearer":
            raise Unauthorized(
                "no or unknown credentials", remedy="send Authorization: Bearer with a configured token"
            )
        return caller

    def _name(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


# The file

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class SaltConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[salt]`: what isolates trust groups from each other."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    """The secret in use, for tenants that name no other."""
    secrets: dict[str, str]
    """By version. Texts of at least MIN_SECRET_BYTES bytes, from a good source: `openssl rand -hex 32`."""


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tenants.NAME]`."""

    tokens: tuple[str, ...] = ()
    token_digests: tuple[_Digest, ...] = ()
    """SHA-256 of tokens, in hex, where the tokens themselves should not be in the file."""
    group: _Name | None = None
    """Trust group: tenants of one group hit each other's prefixes. By default the tenant's own."""
    salt_version: int | None = None
    trusted: bool = False
    """An operator, or a gateway that speaks for others: may name a tenant, a salt and media identifiers, and change
    registrations."""
    models: tuple[_Name, ...] | None = None
    max_in_flight: Annotated[int, msgspec.Meta(ge=1)] | None = None
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None


class TenantsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    salt: SaltConfig | None = None
    """Without one tenants share their prefixes; the file must then say `shared = true`."""
    shared: bool = False
    tenants: dict[_Name, TenantConfig]


class Tenants:
    """Everybody who may call, and the salts of their trust groups. Usable as an authenticator.

    Raises ConfigError, naming the entry, for a file that would not isolate what it says it does.
    """

    def __init__(self, config: TenantsConfig, before: Tenants | None = None) -> None:
        """before: whose quotas go on, under their old limits until `enforce`."""
        self._config = config
        _check(config)
        self._quotas: dict[str, Quota] = {}
        callers: dict[bytes, Caller] = {}
        for name, tenant in config.tenants.items():
            quota = None if before is None else before._quotas.get(name)
            if quota is None:
                quota = Quota(max_in_flight=tenant.max_in_flight, requests_per_minute=tenant.requests_per_minute)
            self._quotas[name] = quota
            caller = Caller(
                trusted=tenant.trusted,
                tenant=name,
                models=None if tenant.models is None else frozenset(tenant.models),
                quota=quota,
            )
            digests = [_digest(token) for token in tenant.tokens] + [bytes.fromhex(d) for d in tenant.token_digests]
            for digest in digests:
                if digest in callers:
                    raise ConfigError(f"tenants.{name}", "shares a token with another tenant", "give each its own")
                callers[digest] = caller
        self._auth = BearerAuth.of_digests(callers)

    def enforce(self) -> None:
        """Bring quotas that were taken over to this file's limits."""
        for name, tenant in self._config.tenants.items():
            self._quotas[name].limit(
                max_in_flight=tenant.max_in_flight, requests_per_minute=tenant.requests_per_minute
            )

    def __call__(self, request: HasHeaders) -> Caller:
        """Raises Unauthorized."""
        return self._auth(request)

    def salt_of(self, tenant: str) -> str | None:
        """The cache salt of the tenant's trust group. A tenant the file does not know is its own group."""
        salt = self._config.salt
        if salt is None:
            return None
        known = self._config.tenants.get(tenant)
        version, group = salt.version, tenant
        if known is not None:
            version, group = known.salt_version or version, known.group or tenant
        return hmac.new(salt.secrets[str(version)].encode(), group.encode(), "sha256").hexdigest()


class TenantsFile:
    """The tenants of a file, as it is now. Usable as `Tenants` are; `follow` keeps up with the file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError as `load_tenants`."""
        self._path = path
        self._stamp = _stamp(path)
        self._tenants = load_tenants(path)

    def __call__(self, request: HasHeaders) -> Caller:
        """Raises Unauthorized."""
        return self._tenants(request)

    def salt_of(self, tenant: str) -> str | None:
        """See Tenants."""
        return self._tenants.salt_of(tenant)

    async def follow(self, registry: CollectorRegistry, *, poll_s: float = POLL_S) -> None:
        """Read the file again whenever it changed, until cancelled."""
        reloads = Counter("metatrie_tenants_reloads", "Times a changed file was read", ("result",), registry=registry)
        refused = Gauge(
            "metatrie_tenants_file_refused", "1: the file cannot be used, an older one is in force", registry=registry
        )
        results = {ok: reloads.labels("loaded" if ok else "refused") for ok in (True, False)}
        while True:
            await asyncio.sleep(poll_s)
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                continue
            self._stamp = stamp  # taken before reading: what is written meanwhile is seen at the next look
            try:
                tenants = await asyncio.to_thread(load_tenants, self._path, self._tenants)
            except ConfigError as error:
                _log.error("the changed tenants file is refused, the last good one stays in force: %s", error)
                loaded = False
            else:
                tenants.enforce()
                self._tenants = tenants
                _log.info("the changed tenants file is in force")
                loaded = True
            results[loaded].inc()
            refused.set(not loaded)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when the file is written or replaced, or may be read by others; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def load_tenants(path: Path, before: Tenants | None = None) -> Tenants:
    """Read a tenants file. before: whose quotas go on. Raises ConfigError, also where others than its owner and group
    may read it."""
    try:
        found = path.stat()
        if found.st_mode & stat.S_IROTH:
            raise ConfigError("tenants", f"{path.name} holds secrets and everybody may read it", "chmod o-r it")
        if found.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                "tenants", f"{path.name} has more than {MAX_FILE_BYTES} bytes", "leave out what is unused"
            )
        table = tomllib.loads(path.read_text("utf-8"))
        return Tenants(msgspec.convert(table, TenantsConfig), before)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise ConfigError("tenants", f"{path.name} cannot be read as TOML", "see docs/front-door.md") from None
    except msgspec.ValidationError as error:
        # Only where, not what: msgspec may quote the value.
        where = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else path.name
        raise ConfigError("tenants", f"{where} is missing, unknown or wrong", "see docs/front-door.md") from None


def _check(config: TenantsConfig) -> None:
    salt = config.salt
    if salt is None and not config.shared:
        raise ConfigError("tenants", "no [salt]: every tenant would hit every other's prefixes", "set one, or shared")
    versions = set() if salt is None else {salt.version}
    for name, tenant in config.tenants.items():
        if any(len(token) < MIN_TOKEN_CHARS for token in tenant.tokens):
            raise ConfigError(f"tenants.{name}", "a token is too short to be safe", f"use {MIN_TOKEN_CHARS} or more")
        if tenant.salt_version is not None:
            versions.add(tenant.salt_version)
        if tenant.group is not None and tenant.group != name and tenant.group in config.tenants:
            other = config.tenants[tenant.group]
            if other.group not in (None, tenant.group):
                raise ConfigError(
                    f"tenants.{name}", "its group is the name of a tenant in another group", "rename it"
                )
    if salt is None:
        if any(tenant.salt_version is not None for tenant in config.tenants.values()):
            raise ConfigError("tenants", "a salt_version without [salt]", "add [salt]")
        return
    for version in versions:
        secret = salt.secrets.get(str(version))
        if secret is None or len(secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigError(
                "salt",
                f"secret {version} is missing or shorter than {MIN_SECRET_BYTES} bytes",
                "openssl rand -hex 32",
            )
