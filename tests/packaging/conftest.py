"""Fixtures: the packages, built once a session, and a small Debian to install them into."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The test directories are no packages; this lets the tests of this directory say ``from debian import Debian``.
sys.path.insert(0, str(Path(__file__).parent))

from debian import CannotHaveError, Debian, build_packages, debian_image

BUILD_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the packages."""
    for item in items:
        item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of this checkout; KVTIERD_TEST_DIST names a directory with ones that are built already."""
    if os.environ.get("KVTIERD_TEST_DIST"):
        return Path(os.environ["KVTIERD_TEST_DIST"])
    directory = tmp_path_factory.mktemp("dist")
    build_packages(directory)
    return directory


@pytest.fixture(scope="session")
def image() -> Path:
    """A small Debian as an archive."""
    try:
        return debian_image()
    except CannotHaveError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def debian(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Debian:
    """A small Debian with nothing of kvtierd in it."""
    return Debian.unpack(image, tmp_path_factory.mktemp("debian"))
