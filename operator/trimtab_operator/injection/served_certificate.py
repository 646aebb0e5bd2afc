"""The TLS context of a server whose certificate changes while it serves.

The one rule: a new pair is tried on a context of its own first; only one that works is put into the context in use,
where it counts from the next connection on. The key never touches a disk.
"""

import os
import ssl

from trimtab_operator.injection.authority import ServingPair


class CertificateUnusableError(ValueError):
    """The pair cannot be served; the one before it goes on."""


class ServedCertificate:
    """`context` serves nothing until the first `use`."""

    def __init__(self) -> None:
        self.context = _context()
        self.pair: ServingPair | None = None

    def use(self, pair: ServingPair) -> bool:
        """False: it is in use already. Raises CertificateUnusableError."""
        if self.pair is not None and (self.pair.certificate, self.pair.key) == (pair.certificate, pair.key):
            return False
        _load(_context(), pair)
        _load(self.context, pair)
        self.pair = pair
        return True


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load(context: ssl.SSLContext, pair: ServingPair) -> None:
    """OpenSSL's binding reads files only: one without a name, in memory."""
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(pair.certificate + b"\n" + pair.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    except (ssl.SSLError, OSError) as error:
        raise CertificateUnusableError(f"{type(error).__name__}: {error}") from error
    finally:
        os.close(file)
