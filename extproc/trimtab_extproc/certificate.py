"""The server's certificate: files that the user gives, or one that we sign ourselves.

The one rule: gateways encrypt to the picker and do not verify it, so a certificate of our own is the default; the key
never leaves the process.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trimtab_extproc.errors import ConfigError

VALID_DAYS = 3650


class Certificate(NamedTuple):
    """A private key and the chain of certificates that proves it, as PEM."""

    key: bytes
    chain: bytes


def server_certificate(folder: Path | None) -> Certificate:
    """From the folder's `tls.crt` and `tls.key`, or self-signed without a folder. Raises ConfigError."""
    if folder is None:
        return self_signed()
    try:
        return Certificate(key=(folder / "tls.key").read_bytes(), chain=(folder / "tls.crt").read_bytes())
    except OSError as error:
        raise ConfigError(f"--cert-path: {error}") from error


def self_signed() -> Certificate:
    """A new key and a certificate for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trimtab-extproc")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(serialization.Encoding.PEM),
    )
