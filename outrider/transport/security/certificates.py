"""Certificates, private keys and authorities, checked before the first connection.

The checks require ``cryptography``, which is not part of the base install. Without it only the PEM markers are checked;
other problems appear when a connection is made.
"""

from __future__ import annotations

from datetime import UTC, datetime

from outrider.errors import ConfigError
from outrider.transport.security.files import read

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
except ModuleNotFoundError:
    CAN_CHECK = False
else:
    CAN_CHECK = True


def read_authority(setting: str, path: str) -> bytes:
    """The certificates of authorities in PEM; ``ConfigError`` if the file has none that is currently valid."""
    content = read(setting, path)
    if not CAN_CHECK:
        return _require_pem(setting, path, content, "CERTIFICATE")
    certificates = _certificates(setting, path, content)
    if all(_validity_problem(certificate) for certificate in certificates):
        raise ConfigError(setting, f"{path}: {_validity_problem(certificates[0])}; a valid authority is needed")
    return content


def read_pair(cert_setting: str, cert_path: str, key_setting: str, key_path: str) -> tuple[bytes, bytes]:
    """(private key, certificate chain) in PEM; ``ConfigError`` if they do not match or are not currently valid."""
    chain, key = read(cert_setting, cert_path), read(key_setting, key_path)
    if not CAN_CHECK:
        _require_pem(cert_setting, cert_path, chain, "CERTIFICATE")
        return _require_pem(key_setting, key_path, key, "PRIVATE KEY"), chain
    leaf = _certificates(cert_setting, cert_path, chain)[0]
    if _public_bytes_of_key(key_setting, key_path, key) != _public_bytes(leaf.public_key()):
        raise ConfigError(
            key_setting, f"{key_path} does not belong to the certificate in {cert_path}; both should be of one pair"
        )
    if problem := _validity_problem(leaf):
        raise ConfigError(cert_setting, f"{cert_path}: {problem}; a valid certificate is needed")
    return key, chain


def _require_pem(setting: str, path: str, content: bytes, kind: str) -> bytes:
    if f"{kind}-----".encode() not in content:
        raise ConfigError(setting, f"{path} should hold PEM (BEGIN {kind})")
    return content


def _certificates(setting: str, path: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigError(setting, f"{path} should hold certificates in PEM (BEGIN CERTIFICATE)") from error


def _public_bytes_of_key(setting: str, path: str, content: bytes) -> bytes:
    try:
        return _public_bytes(load_pem_private_key(content, password=None).public_key())
    except TypeError as error:
        raise ConfigError(setting, f"{path} is encrypted; the key should be stored without a password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(setting, f"{path} should hold a private key in PEM (BEGIN PRIVATE KEY)") from error


def _public_bytes(key: object) -> bytes:
    content: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return content


def _validity_problem(certificate: x509.Certificate) -> str:
    """Reason why the certificate is not valid now; empty when it is."""
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        return f"the certificate has expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return f"the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return ""
