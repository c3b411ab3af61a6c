"""`strata certs`: an authority of one's own, and certificates of the coordinator and of those who call it.

The role of a client stands in its certificate, as the organisational unit (`worker`, or `worker:JOB`); the coordinator reads
it there. Keys are private files. Nothing that exists is overwritten.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.common import LiteralGroup, console
from strata.cli.extras import need
from strata.core.messages import InvalidArgument
from strata.errors import StrataError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

app = typer.Typer(
    name="certs",
    cls=LiteralGroup,
    help="Certificates for TLS between coordinator, workers and users.",
    no_args_is_help=True,
)

AUTHORITY_DAYS = 3650
BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of a cluster differ."""

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the files.")]
Expires = Annotated[str, typer.Option(help="Lifetime: 365d, 12h.")]


class CertificateError(StrataError):
    code = "tls"


@app.command()
def init(
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the coordinator; may be repeated. [this machine's]"),
    ] = None,
    folder: Folder = Path("certs"),
    expires: Expires = "365d",
) -> None:
    """Create a certificate authority, and certificates for a coordinator, a worker and an admin."""
    need("cryptography", feature="strata certs")
    _fresh(folder, "ca", "coordinator", "worker", "admin")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = hosts or _own_names()
    authority = _Authority.create(folder)
    authority.issue("coordinator", expires=expires, hosts=names)
    for role in ("worker", "admin"):
        authority.issue(role, expires=expires, unit=role)
    console.print(
        f"Certificates are in {folder}. The coordinator ({', '.join(names)}):", markup=False, soft_wrap=True
    )
    for line in (
        f"  strata serve --host 0.0.0.0  with STRATA_TLS_CERT={folder}/coordinator.pem",
        f"    STRATA_TLS_KEY={folder}/coordinator.key STRATA_TLS_CLIENT_CA={folder}/ca.pem",
        f"    STRATA_TASK_TLS_CERT={folder}/worker.pem STRATA_TASK_TLS_KEY={folder}/worker.key",
        "Workers, and users with admin.pem and admin.key:",
        f"  STRATA_TLS_CA={folder}/ca.pem STRATA_TLS_CERT={folder}/worker.pem STRATA_TLS_KEY={folder}/worker.key",
        f"Keep {folder}/ca.key private: it can issue certificates for any role.",
    ):
        console.print(line, markup=False, soft_wrap=True)


@app.command()
def issue(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Common name of the certificate, and name of its files.")
    ],
    role: Annotated[str, typer.Option(help="viewer, worker, operator or admin.")] = "worker",
    job: Annotated[str | None, typer.Option(help="Restrict it to this job. [all jobs]")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", help="Issue a coordinator's certificate for this name or address; may be repeated."
        ),
    ] = None,
    folder: Folder = Path("certs"),
    expires: Expires = "365d",
) -> None:
    """Issue another certificate from the authority that `init` created."""
    need("cryptography", feature="strata certs")
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise InvalidArgument(
            "name", f"'{name[:40]}' is not a valid name.", hint="Use letters, digits, '-', '_' and '.'."
        )
    _fresh(folder, name)
    from strata.coordinator.auth.tokens import as_role

    authority = _Authority.open(folder)
    if hosts:
        authority.issue(name, expires=expires, hosts=hosts)
    else:
        authority.issue(name, expires=expires, unit=as_role(role) + (f":{job}" if job else ""))
    console.print(f"{folder / name}.pem and {folder / name}.key are written.", markup=False, soft_wrap=True)


class _Authority:
    def __init__(self, folder: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, folder: Path) -> _Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Strata authority of " + socket.gethostname()[:40])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            _builder(name, name, key, now + datetime.timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, _sha256())
        )
        _write(folder / "ca", certificate, key)
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> _Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(
                f"The authority in {folder} cannot be used: {error}.",
                hint="Create one with `strata certs init`.",
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{folder / 'ca.key'} was not created by `strata certs init`.")
        return cls(folder, certificate, key)

    def issue(self, name: str, *, expires: str, hosts: list[str] | None = None, unit: str = "") -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        from strata.coordinator.auth.tokens import parse_expiry

        lasts_s = parse_expiry(expires)
        if lasts_s is None:
            raise InvalidArgument("expires", "must be a time span.", hint="Write 365d or 12h.")
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=lasts_s)
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        until = min(until, self._certificate.not_valid_after_utc)
        builder = (
            _builder(_name(name, unit), self._certificate.subject, key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        _write(self._folder / name, builder.sign(self._key, _sha256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - BACKDATED)
        .not_valid_after(until)
    )


def _name(common: str, unit: str = "") -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if unit:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
    return x509.Name(parts)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sha256() -> SHA256:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _write(stem: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from strata.files import write_file

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_file(stem.with_name(stem.name + ".key"), secret, durable=True, mode=0o600)
    write_file(
        stem.with_name(stem.name + ".pem"), certificate.public_bytes(Encoding.PEM), durable=True, mode=0o644
    )


def _fresh(folder: Path, *names: str) -> None:
    for name in names:
        for path in (folder / f"{name}.pem", folder / f"{name}.key"):
            if path.exists():
                raise CertificateError(
                    f"{path} exists already.", hint="Remove it first, or choose another --dir or name."
                )


def _own_names() -> list[str]:
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()]))
