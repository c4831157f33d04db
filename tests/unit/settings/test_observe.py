"""[observe]: where the exporter may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.errors import SettingsError
from kvtierd.settings import load_settings


def loaded(tmp_path: Path, text: str):
    file = tmp_path / "kvtierd.toml"
    file.write_text(f'[pool]\ndram = "1GiB"\n[observe]\n{text}\n')
    return load_settings(file).observe


def test_on_loopback_by_default(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").exporter == "127.0.0.1:9476"


@pytest.mark.parametrize("address", ["off", "127.0.0.1:9999", "[::1]:9476", "localhost:9476"])
def test_plain_on_loopback_or_not_at_all(tmp_path: Path, address: str) -> None:
    assert loaded(tmp_path, f'exporter = "{address}"').tls is None


@pytest.mark.parametrize("address", ["10.0.0.1:9476", "0.0.0.0:9476", "[::]:9476"])
def test_beyond_loopback_only_with_certificates(tmp_path: Path, address: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(tmp_path, f'exporter = "{address}"')
    assert "anybody in the network" in str(caught.value)
    found = loaded(tmp_path, f'exporter = "{address}"\ntls = {{ ca = "/a/ca.pem" }}')
    assert found.tls is not None
    assert found.tls.ca == "/a/ca.pem"


@pytest.mark.parametrize(
    "address",
    ["", "on", "9476", "host:9476", "127.0.0.1", "127.0.0.1:80", "::1:9476", "127.0.0.1:99999"],
)
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(tmp_path, f'exporter = "{address}"')
    assert "not an address to listen on" in str(caught.value)
