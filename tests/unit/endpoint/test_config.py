from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.endpoint.config import Address, load_config, parse_config
from kvtierd.errors import EndpointError

GOOD: dict[str, Any] = {
    "listen": {"meta": "127.0.0.1:5000", "config_store": "127.0.0.1:6000"},
    "target": {"meta": "127.0.0.1:15000", "config_store": "[::1]:16000"},
    "control_socket": "/run/kvtierd/endpoint.sock",
    "state_file": "/var/lib/kvtierd/endpoint.json",
}


def test_a_minimal_file_and_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text(json.dumps(GOOD))
    config = load_config(path)
    assert config.listen.meta == Address("127.0.0.1", 5000)
    assert config.target.config_store == Address("::1", 16000)
    assert str(config.target.config_store) == "[::1]:16000"
    assert config.purge_on_unclean
    assert config.silence_seconds < 1.0
    assert parse_config(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lissten": 1}, "lissten"),
        ({"listen": {"meta": "127.0.0.1:5000"}}, "listen"),
        ({"listen": {"meta": "127.0.0.1", "config_store": "127.0.0.1:6000"}}, "listen.meta"),
        ({"target": {"meta": "127.0.0.1:0", "config_store": "127.0.0.1:6000"}}, "target.meta"),
        ({"target": {"meta": "127.0.0.1:99999", "config_store": "127.0.0.1:6000"}}, "target.meta"),
        ({"target": {"meta": "127.0.0.1:5000", "config_store": "127.0.0.1:6001"}}, "four different"),
        ({"control_socket": "relative.sock"}, "control_socket"),
        ({"control_socket": "/" + "x" * 120}, "107"),
        ({"state_file": 5}, "state_file"),
        ({"purge_on_unclean": 1}, "purge_on_unclean"),
        ({"silence_seconds": "1s"}, "silence_seconds"),
        ({"silence_seconds": True}, "silence_seconds"),
        ({"max_connections": 1.5}, "max_connections"),
        ({"waiting_room": -1}, "waiting_room"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(EndpointError, match=named) as caught:
        parse_config(GOOD | change)
    assert caught.value.stable_code == "endpoint.config"


def test_a_missing_key_is_named() -> None:
    with pytest.raises(EndpointError, match="'target' is missing"):
        parse_config({key: value for key, value in GOOD.items() if key != "target"})


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text(text)
    with pytest.raises(EndpointError):
        load_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="No such file"):
        load_config(tmp_path / "none.json")
