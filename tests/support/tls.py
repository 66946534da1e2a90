"""Redis servers with TLS, and the certificates that they need, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def speaks_tls(binary: str) -> bool:
    """Whether this Redis was built with TLS."""
    # In any case it stops: without TLS at the port, with TLS at the missing certificate.
    trial = [binary, "--port", "0", "--tls-port", "1"]
    said = subprocess.run(trial, check=False, capture_output=True, timeout=10)
    return b"tls-cert-file" in said.stdout + said.stderr


# Python 3.13 refuses a certificate without these.
_STRICT = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid,issuer\n"
_MAY_SIGN = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")


class Authority:
    """A certificate authority of its own.

    Attributes:
        ca: path of its certificate.

    Raises:
        FileNotFoundError: there is no openssl command.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.ca, self._key = str(folder / "ca.pem"), str(folder / "ca.key")
        _openssl(
            *("req", "-x509", "-subj", "/CN=an authority", *_MAY_SIGN),
            *(*_new(self._key), "-out", self.ca),
        )

    def certificate(self, name: str) -> tuple[str, str]:
        """Vouch for a name. Returns the paths of certificate and key."""
        made = self._folder / name
        request, told = f"{made}.csr", made.with_suffix(".txt")
        told.write_text(f"subjectAltName=DNS:{name}\n{_STRICT}")
        _openssl("req", "-subj", f"/CN={name}", *_new(f"{made}.key"), "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key),
            *("-CAcreateserial", "-days", "2", "-extfile", str(told), "-out", f"{made}.pem"),
        )
        return f"{made}.pem", f"{made}.key"

    def server_config(self, *, port: int) -> tuple[str, ...]:
        """Arguments for a server called localhost that asks its clients for a certificate."""
        certificate, key = self.certificate("localhost")
        return (
            *("--tls-port", str(port), "--tls-auth-clients", "yes"),
            *("--tls-cert-file", certificate, "--tls-key-file", key),
            *("--tls-ca-cert-file", self.ca),
        )


def _new(key: str) -> tuple[str, ...]:
    return ("-newkey", "rsa:2048", "-nodes", "-keyout", key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
