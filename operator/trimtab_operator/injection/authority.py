"""Certificates of the webhook: a CA of its own and a serving certificate, made together.

The one rule: the CA's key signs one certificate and is forgotten, so a pair is always replaced as a whole, and nobody
can be made to trust anything else by it. Pure: the time is handed in.
"""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE_S: Final = 90 * 86_400.0
RENEW_SHARE: Final = 2 / 3
"""Share of its life after which a certificate is replaced."""
BEFORE_S: Final = 3_600.0
"""It counts as valid from this long before it was made: clocks differ."""
CAS_MAX: Final = 3
"""CAs that are trusted at once; of more, those that end last."""
PEM_END: Final = b"-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPair:
    """PEM texts."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes
    """Of this certificate; other CAs may stand after it."""


def make_pair(hosts: Sequence[str], *, now_s: float, life_s: float = LIFE_S) -> ServingPair:
    """For these DNS names and IP addresses."""
    begins = datetime.datetime.fromtimestamp(now_s - BEFORE_S, datetime.UTC)
    ends = datetime.datetime.fromtimestamp(now_s + life_s, datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # A name of its own, so that two CAs in one bundle are never mistaken for each other.
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"trimtab webhook {serial:x}"[:64])])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), begins, ends, serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(name, ca_name, key.public_key(), begins, ends, x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return ServingPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        ca=ca.public_bytes(serialization.Encoding.PEM),
    )


def fault_of(pair: ServingPair, hosts: Sequence[str]) -> str | None:
    """What is wrong with the pair, whatever the time is; None: nothing."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
        cas = x509.load_pem_x509_certificates(pair.ca)
    except (ValueError, TypeError) as error:
        return f"cannot be read: {type(error).__name__}"
    if certificate.public_key() != key.public_key():
        return "its key is another one's"
    if not any(_signed(certificate, ca) for ca in cas):
        return "none of its CAs has signed it"
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "it names no host"
    missing = [host for host in hosts if _host(host) not in names]
    return f"it does not name {missing[0]}" if missing else None


def life_of(certificate: bytes) -> tuple[float, float]:
    """(begin, end) in Unix seconds. Raises ValueError."""
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()


def renew_at_s(certificate: bytes) -> float:
    """Unix time from which it is to be replaced. Raises ValueError."""
    begin_s, end_s = life_of(certificate)
    return begin_s + (end_s - begin_s) * RENEW_SHARE


def ca_bundle(own: bytes, others: Iterable[bytes], *, now_s: float) -> bytes:
    """The first CA in `own`, then of all others those that still hold, each once, at most CAS_MAX. No damaged ones."""
    first, *rest = split_bundle(own)
    known = {*rest, *(pem for bundle in others for pem in split_bundle(bundle))} - {first}
    later = sorted(known, key=lambda pem: (-life_of(pem)[1], pem))
    return b"".join([first, *(pem for pem in later if life_of(pem)[1] > now_s)][:CAS_MAX])


def split_bundle(bundle: bytes) -> list[bytes]:
    """The PEM certificates in it; what is damaged is left out."""
    found = []
    for part in bundle.split(PEM_END)[:-1]:
        pem = part[max(part.rfind(b"-----BEGIN CERTIFICATE-----"), 0) :] + PEM_END
        try:
            found.append(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.PEM))
        except ValueError:
            continue
    return found


def _signed(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins: datetime.datetime,
    ends: datetime.datetime,
    serial: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
