"""Whose sockets count when the MetaService is in a container."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from kvtierd.tier.meta_check import check_meta


@pytest.fixture
def docker(tmp_path):
    """A docker that says what ``answer`` holds."""
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    program.chmod(0o755)
    return program


def check(address, pid, container):
    return asyncio.run(check_meta("http://127.0.0.1:9", {address}, pid, container=container))


def test_the_container_s_process_is_looked_at_not_docker_s_client(docker):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (docker.parent / "answer").write_text(str(os.getpid()))
        problem = check(listening.getsockname(), 1, ("kvtier-meta-main", str(docker)))
    assert "does not listen" not in problem
    assert "/health" in problem


def test_a_container_that_docker_does_not_know_is_said(docker):
    (docker.parent / "answer").write_text("")
    problem = check(("127.0.0.1", 1), os.getpid(), ("kvtier-meta-main", str(docker)))
    assert "the container kvtier-meta-main" in problem
