from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.endpoint.config import load_config, parse_config
from kvtierd.endpoint.targets import Address, PeerTarget, Target
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
    assert isinstance(config.target, Target)
    assert (config.peers, config.peer_listen, config.tls, config.insecure) == ((), None, None, False)
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


TLS = {"ca": "/c/ca.pem", "cert": "/c/cert.pem", "key": "/c/key.pem"}
PEERS = [{"name": "node-a", "address": "10.0.0.1:5443"}, {"name": "node-b", "address": "[fd00::2]:5443"}]
NODE = GOOD | {
    "cluster": "prod",
    "node": "node-b",
    "peer_listen": "10.0.0.2:5443",
    "peers": PEERS,
    "tls": TLS,
    "target": {"peer": "node-a"},
}


def test_a_node_of_a_cluster() -> None:
    config = parse_config(NODE)
    assert config.target == PeerTarget("node-a")
    assert config.peer("node-a") == config.peers[0]
    assert config.peer("node-b") is None  # itself
    assert config.peers[1].address == Address("fd00::2", 5443)
    assert parse_config(json.loads(json.dumps(config.as_dict()))) == config
    assert parse_config(NODE | {"target": None}).target is None
    assert parse_config(NODE | {"tls": None, "insecure": True}).insecure


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tls": None}, "peers need tls"),
        ({"insecure": True}, "exclude each other"),
        ({"tls": {"ca": "/c/ca.pem"}}, "tls: expected"),
        ({"tls": TLS | {"key": "key.pem"}}, "tls.key"),
        ({"cluster": ""}, "cluster and node"),
        ({"node": ""}, "cluster and node"),
        ({"cluster": "prod.eu"}, "'prod.eu'"),
        ({"node": "Node B"}, "'Node B'"),
        ({"peers": PEERS + PEERS[:1]}, "two have the same name"),
        ({"peers": [{"name": "node-a"}]}, "peers: expected"),
        ({"peers": [{"name": "node-a", "address": "10.0.0.1"}]}, "peers.node-a.address"),
        ({"peers": "node-a"}, "peers: expected a list"),
        ({"peer_listen": 5443}, "peer_listen"),
        ({"target": {"peer": "node-c"}}, "not among the peers"),
        ({"target": {"peer": "node-b"}}, "this node itself"),
        ({"target": {"meta": "127.0.0.1:1", "config_store": "10.0.0.2:5443"}}, "the endpoint itself"),
        ({"hop_seconds": 0}, "hop_seconds"),
        ({"max_peer_links": 0}, "max_peer_links"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(EndpointError, match=named) as caught:
        parse_config(NODE | change)
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
