"""A small certificate authority for the nodes of a cluster: makes it, issues node certificates, reads certificates.

Only kvtierctl imports this: the daemon looks at its own certificate with ``identity``, which needs the standard library
alone. RSA of 3072 bits everywhere, since MemCache's own TLS takes nothing else for granted.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvtierd.endpoint.names import certificate_names, speaks_for
from kvtierd.errors import ClusterError
from kvtierd.files import write_atomic

KEY_BITS = 3072
NODE_DAYS = 825
CA_DAYS = 3650
LONGEST_DAYS = 36500
CA_CERTIFICATE = "ca.pem"
CA_KEY = "ca.key"
# A node's clock may be behind that of the machine that issues.
BACKDATE = datetime.timedelta(minutes=10)
_MOST_BYTES = 1024 * 1024
_ORGANIZATION = "kvtierd"


@dataclasses.dataclass(frozen=True, slots=True)
class Issued:
    """A node's new certificate and key, as PEM. ``shortened``: it ends earlier than was asked, with its authority."""

    certificate: x509.Certificate
    certificate_pem: bytes
    key_pem: bytes
    shortened: bool


class Authority:
    """The certificate and the key that node certificates are signed with."""

    def __init__(self, certificate: x509.Certificate, key: rsa.RSAPrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def load(cls, directory: Path, *, now: datetime.datetime | None = None) -> Authority:
        """The authority that ``make_authority`` left in this directory.

        Raises:
            ClusterError: ``certs.no-authority``, ``certs.unreadable``, ``certs.key-mismatch``, ``certs.expired``.
        """
        certificate_file, key_file = directory / CA_CERTIFICATE, directory / CA_KEY
        if not certificate_file.exists() and not key_file.exists():
            raise ClusterError(
                f"there is no certificate authority in {directory}",
                hint="make one with: kvtierctl certs init DIR; or name where it is with --ca DIR",
                code="certs.no-authority",
            )
        certificate = read_certificates(certificate_file)[0]
        key = _read_key(key_file)
        if key.public_key().public_numbers() != _public_numbers(certificate):
            raise ClusterError(
                f"{key_file} is not the key of {certificate_file}",
                hint="both are made by one kvtierctl certs init; put the pair that belongs together there",
                code="certs.key-mismatch",
            )
        if not _is_authority(certificate):
            raise ClusterError(
                f"{certificate_file} is not the certificate of an authority: what it signs counts nowhere",
                code="certs.no-authority",
            )
        if certificate.not_valid_after_utc <= (now or _now()):
            raise ClusterError(
                f"the authority in {directory} expired on {certificate.not_valid_after_utc:%Y-%m-%d}",
                why="no node would accept what it signs now",
                hint="make a new one in another directory, put its ca.pem behind the old one in every node's ca.pem, and"
                " issue new certificates",
                code="certs.expired",
            )
        return cls(certificate, key)

    def issue(
        self,
        node: str,
        cluster: str,
        addresses: Iterable[str] = (),
        *,
        days: int = NODE_DAYS,
        now: datetime.datetime | None = None,
    ) -> Issued:
        """A new key and a certificate for it, for one node, as a server and as a client.

        Addresses that are not numbers are left out: nodes check each other's names, which do not come from DNS.

        Raises:
            EndpointError: ``endpoint.names``: the names cannot be in a certificate.
            ClusterError: ``certs.days``.
        """
        _check_days(days)
        began = now or _now()
        asked_until = began + datetime.timedelta(days=days)
        until = min(asked_until, self.certificate.not_valid_after_utc)
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in certificate_names(node, cluster)]
        names += [x509.IPAddress(address) for address in _numbers(addresses)]
        key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
        builder = (
            _builder(_name(node), self.certificate.subject, key, began - BACKDATE, until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(key_encipherment=True), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate, _pem(certificate), _key_pem(key), shortened=until < asked_until)

    def refuse_foreign(self, file: Path, node: str, cluster: str) -> None:
        """Raises ``ClusterError`` (``certs.exists``) when the certificate there is not this node's by this authority."""
        certificate = read_certificates(file)[0]
        if not _signed_by(certificate, self.certificate):
            what = "was signed by another authority"
        elif not speaks_for(_dns_names(certificate), node, cluster):
            what = f"is not for {node} of cluster {cluster}"
        else:
            return
        raise ClusterError(
            f"{file} is there already and {what}",
            hint="nothing was written; move it away, or make a new one in its place with --force",
            code="certs.exists",
        )


def make_authority(
    directory: Path, *, days: int = CA_DAYS, force: bool = False, now: datetime.datetime | None = None
) -> Authority:
    """Makes a new authority: ``ca.pem`` and ``ca.key`` (mode 0600) in this directory, which is made (0700) if missing.

    Raises:
        ClusterError: ``certs.exists``: one is there and ``force`` is not given; ``certs.days``.
        StateError: it cannot be written.
    """
    _check_days(days)
    refuse_existing([directory / CA_CERTIFICATE, directory / CA_KEY], force=force)
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    began = now or _now()
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # Two authorities of one cluster, the old and the new one, must not have the same name.
    name = _name(f"kvtierd CA {identifier.digest.hex()[:8]}")
    certificate = (
        _builder(name, name, key, began - BACKDATE, began + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
    write_pair(directory / CA_CERTIFICATE, _pem(certificate), directory / CA_KEY, _key_pem(key))
    return Authority(certificate, key)


def refuse_existing(files: Iterable[Path], *, force: bool) -> None:
    """Raises ``ClusterError`` (``certs.exists``) when one of the files is there, unless ``force``."""
    there = [str(file) for file in files if file.exists() or file.is_symlink()]
    if there and not force:
        raise ClusterError(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} there already",
            hint="nothing was written; --force makes new ones in their place",
            code="certs.exists",
        )


def write_pair(certificate_file: Path, certificate_pem: bytes, key_file: Path, key_pem: bytes) -> None:
    """Writes both, the key first: whoever reads in between finds two that do not belong together and keeps the old.

    Raises:
        StateError: they cannot be written.
    """
    write_atomic(key_file, key_pem, mode=0o600)
    write_atomic(certificate_file, certificate_pem, mode=0o644)


def read_certificates(file: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file, in its order.

    Raises:
        ClusterError: ``certs.unreadable``.
    """
    data = _read(file)
    if b"PRIVATE KEY-----" in data and b"-----BEGIN CERTIFICATE-----" not in data:
        raise _unreadable(file, "it holds a private key, not a certificate")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise _unreadable(file, "it is not a certificate in PEM form") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What ``kvtierctl certs show`` says of one certificate. Times are UTC, days may be negative."""

    file: str
    subject: str
    issuer: str
    dns_names: tuple[str, ...]
    ip_addresses: tuple[str, ...]
    authority: bool
    not_before: str
    not_after: str
    days_left: int
    valid: bool
    key: str
    serial: str
    fingerprint_sha256: str


def describe(file: Path, *, now: datetime.datetime | None = None) -> list[Description]:
    """Every certificate in the file.

    Raises:
        ClusterError: ``certs.unreadable``.
    """
    return [_describe(file, certificate, now or _now()) for certificate in read_certificates(file)]


def _describe(file: Path, certificate: x509.Certificate, now: datetime.datetime) -> Description:
    names = _alternative_names(certificate)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    public_key = certificate.public_key()
    kind = type(public_key).__name__.removeprefix("_").removesuffix("PublicKey")
    return Description(
        file=str(file),
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        dns_names=_dns_names(certificate),
        ip_addresses=tuple(str(a) for a in names.get_values_for_type(x509.IPAddress)) if names else (),
        authority=_is_authority(certificate),
        not_before=f"{begins:%Y-%m-%dT%H:%M:%SZ}",
        not_after=f"{ends:%Y-%m-%dT%H:%M:%SZ}",
        days_left=(ends - now) // datetime.timedelta(days=1),
        valid=begins <= now < ends,
        key=f"{kind} {getattr(public_key, 'key_size', '')}".strip(),
        serial=f"{certificate.serial_number:x}",
        fingerprint_sha256=certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
    )


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None


def _dns_names(certificate: x509.Certificate) -> tuple[str, ...]:
    names = _alternative_names(certificate)
    return tuple(names.get_values_for_type(x509.DNSName)) if names else ()


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _check_days(days: int) -> None:
    if not 1 <= days <= LONGEST_DAYS:
        raise ClusterError(
            f"a certificate cannot be valid for {days} days", hint=f"choose 1 to {LONGEST_DAYS}", code="certs.days"
        )  # fmt: skip


def _name(common_name: str) -> x509.Name:
    return x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANIZATION),
        x509.NameAttribute(NameOID.COMMON_NAME, common_name),
    ])  # fmt: skip


def _builder(
    subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey, begins: datetime.datetime, ends: datetime.datetime
) -> x509.CertificateBuilder:  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool = False, key_encipherment: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_encipherment=key_encipherment,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _numbers(addresses: Iterable[str]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, None] = {}
    for address in addresses:
        try:
            found[ipaddress.ip_address(address.strip("[]"))] = None
        except ValueError:
            continue
    return list(found)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _public_numbers(certificate: x509.Certificate) -> rsa.RSAPublicNumbers | None:
    key = certificate.public_key()
    return key.public_numbers() if isinstance(key, rsa.RSAPublicKey) else None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(file: Path) -> rsa.RSAPrivateKey:
    data = _read(file)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise _unreadable(file, "it is protected by a password, which kvtierd never asks for") from None
    except ValueError:
        raise _unreadable(file, "it is not a private key in PEM form") from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise _unreadable(file, "it is not an RSA key")
    return key


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None


def _unreadable(file: Path, why: str) -> ClusterError:
    return ClusterError(f"{file} cannot be used", why=why, code="certs.unreadable")
