"""From a store URL to a store: the only place that reads one."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from ..proto.errors import ConfigError
from ..proto.index import Store
from .embedded import EmbeddedRedis
from .memory import MemoryStore
from .redis_link import MAX_CONNECTIONS, RedisLink
from .redis_pages import PAGE_LIMIT
from .redis_store import RedisStore

SETTING = "store URL"
CONNECT_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 2.0

_FORMS = (
    "use memory:, embedded:, redis://host:6379/0, rediss://…, unix:///path/to.sock, redis+cluster://host:6379, "
    "or redis+sentinel://host:26379,host:26379/service"
)
_SENTINEL_PORT = 26379


async def open_store(
    url: str,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
    page_limit: int = PAGE_LIMIT,
) -> Store:
    """The store a URL names. Starts a server for `embedded:`, otherwise connects on first use; see `Store.ping`.

    memory: and embedded: live and die with this process. redis://, rediss:// (TLS) and unix:// name one server,
    redis+cluster:// and rediss+cluster:// any node of a cluster, redis+sentinel:// and rediss+sentinel:// the
    sentinels and the service they watch (their own credentials, if any, as ?sentinel_username=…&sentinel_password=…).
    Options of redis-py may follow as a query (?ssl_ca_certs=…).
    page_limit: blocks one Redis page takes before it overflows into further pages.
    Raises ConfigError; its text never repeats the URL, which may carry credentials.
    """
    if url == "memory:":
        return MemoryStore()
    # Scripts are sent by digest and replies decoded by us, so encoding, protocol and retries are not up to the URL.
    fixed: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": command_timeout_s,
        "protocol": 2,
        "decode_responses": False,
    }
    if url == "embedded:":
        server = EmbeddedRedis()
        await server.__aenter__()
        link = _single(server.url, fixed)
        return RedisStore(link, page_limit=page_limit, on_close=server.close)
    scheme, _, rest = url.partition("://")
    try:
        match scheme:
            case "redis" | "rediss" | "unix":
                return RedisStore(_single(url, fixed), page_limit=page_limit)
            case "redis+cluster" | "rediss+cluster":
                link = _cluster(f"{scheme.removesuffix('+cluster')}://{rest}", fixed)
                return RedisStore(link, page_limit=page_limit)
            case "redis+sentinel" | "rediss+sentinel":
                link = _sentinel(f"{scheme.removesuffix('+sentinel')}://{rest}", fixed)
                return RedisStore(link, page_limit=page_limit)
    except (ValueError, TypeError):
        raise ConfigError(SETTING, f"not a valid {scheme}:// URL", _FORMS) from None
    raise ConfigError(SETTING, "unknown scheme", _FORMS)


def _options(url: str, fixed: dict[str, Any]) -> dict[str, Any]:
    """Connection options of a redis:// URL, checked as far as that goes without connecting."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("no socket path")
    elif not parts.hostname or not (parts.path.strip("/") or "0").isdecimal() or parts.port == 0:
        raise ValueError("no host, or a database that is no number")
    options: dict[str, Any] = {**parse_url(url), **fixed}
    return options


def _no_retry(attempts: int = 0) -> Retry:
    return Retry(NoBackoff(), attempts)


def _single(url: str, fixed: dict[str, Any]) -> RedisLink:
    pool = ConnectionPool(max_connections=MAX_CONNECTIONS, retry=_no_retry(), **_options(url, fixed))
    # Unknown options surface here, not at the first command.
    pool.connection_class(**pool.connection_kwargs)
    return RedisLink(Redis.from_pool(pool))


def _cluster(url: str, fixed: dict[str, Any]) -> RedisLink:
    options = _options(url, fixed)
    options.pop("db", None)
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    # One more attempt, so that a slot that moved is asked for at its new place.
    return RedisLink(RedisCluster(max_connections=MAX_CONNECTIONS, retry=_no_retry(1), **options))


def _sentinel(url: str, fixed: dict[str, Any]) -> RedisLink:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    own = {
        name.removeprefix("sentinel_"): query.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in query
    }
    sentinels = []
    for host in hosts.split(","):
        address = urlsplit(f"//{host}")
        if not address.hostname:
            raise ValueError("no sentinel host")
        sentinels.append((address.hostname, address.port or _SENTINEL_PORT))
    if not service:
        raise ValueError("no service name")
    netloc = f"{credentials}@sentinel" if credentials else "sentinel"
    options = _options(urlunsplit((parts.scheme, netloc, f"/{db}", "", "")), fixed)
    options.pop("host")
    tls = options.pop("connection_class", None) is not None
    if query:
        raise ValueError("unknown option")
    options |= {"retry": _no_retry(), "ssl": tls}
    timeouts = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "protocol")}
    sentinel_options = {**timeouts, **own, "retry": _no_retry(), "ssl": tls}
    manager = Sentinel(  # type: ignore[no-untyped-call]  # redis-py leaves it unannotated
        sentinels, sentinel_kwargs=sentinel_options, **options
    )
    client = manager.master_for(unquote(service), max_connections=MAX_CONNECTIONS)
    return RedisLink(client, closers=[sentinel.aclose for sentinel in manager.sentinels])
