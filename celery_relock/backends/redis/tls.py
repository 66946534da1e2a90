"""Whether a TLS connection can be made with its options.

A connection reads its certificates when it is made, so that renewed ones count. What is wrong with
them would look like an outage then, and a value of the wrong type would be a bare TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from typing import Any

from ...errors import LockConfigError


def check_tls(options: Mapping[str, Any]) -> None:
    """Try the options of redis-py's `SSLConnection`, each as a connection will use it.

    Args:
        options: those whose names do not start with `ssl_` are passed over.

    Raises:
        LockConfigError: one of them cannot be used. The message has no password.
    """
    for names, use in _USES.items():
        given = {name: options.get(name) for name in names}
        if all(value is None for value in given.values()):
            continue
        try:
            use(SSLContext(PROTOCOL_TLS_CLIENT), *given.values())
        except (TypeError, ValueError, OverflowError, OSError) as error:
            given |= {"ssl_password": "***"} if given.get("ssl_password") else {}
            said = ", ".join(f"{name}={value!r:.200}" for name, value in given.items() if value)
            raise LockConfigError(f"{said} cannot be used: {error}") from error


def _identify(context: SSLContext, certificate: Any, key: Any, password: Any) -> None:
    if certificate or key:
        context.load_cert_chain(certificate, key, password)


def _look_in(context: SSLContext, folder: Any) -> None:
    context.load_verify_locations(capath=folder)
    if not Path(folder).is_dir():  # OpenSSL looks there when it meets a server's certificate
        raise NotADirectoryError("there is no such folder")


def _flag(context: SSLContext, flags: Iterable[Any] | None) -> None:
    for flag in flags or ():
        context.verify_flags |= flag


_USES: dict[tuple[str, ...], Callable[..., object]] = {
    ("ssl_certfile", "ssl_keyfile", "ssl_password"): _identify,
    ("ssl_ca_certs",): lambda context, file: context.load_verify_locations(cafile=file),
    ("ssl_ca_path",): _look_in,
    ("ssl_ca_data",): lambda context, data: context.load_verify_locations(cadata=data),
    ("ssl_min_version",): lambda context, version: setattr(context, "minimum_version", version),
    ("ssl_ciphers",): lambda context, ciphers: context.set_ciphers(ciphers or "DEFAULT"),
    ("ssl_include_verify_flags",): _flag,
    ("ssl_exclude_verify_flags",): _flag,
}
