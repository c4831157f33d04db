"""The two epochs a node must never forget, each in a small file of its own.

- ``EpochStore``: what a *voter* has granted. Written and synced before its answer leaves.
- ``SeenEpochStore``: the highest epoch of a master that this node has *followed*, voter or not: it is the fence that
  keeps a node from going back to a master that has been replaced.

A file is written to a temporary name, synced, renamed, and its directory synced, so kill -9 and a power cut leave the
old or the new one. A disk can still give back something else; the checksum says so, and then the file is refused:
neither zeroed nor guessed. A voter's file that is *missing* is a different matter. It may never have been, or be lost
with its disk, and nothing on this host can tell which. So a voter without a file does not vote until the other voters
have told it enough (``recollection``); that makes a first start and a replaced disk safe without anybody's help. Only
when a majority of the voters lost their files must somebody say which epoch to go on from (``EpochStore.create``).

What no checksum can tell is an *old* file: a state directory restored from a backup or a snapshot makes a voter forget
what it granted since. Leave these files out of backups; without them the voter asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochState
from kvtierd.errors import ClusterError, StateError
from kvtierd.files import write_atomic

VERSION = 1
_MAX_BYTES = 64 * 1024


class EpochStore:
    """A voter's file.

    Args:
        path: The file; its directory is made when needed.
        config: Whose file it is: one of another node or cluster, or from a time with other voters, is refused.
    """

    def __init__(self, path: Path, config: ElectorConfig) -> None:
        self.path = path
        self._config = config
        self._epoch = 0

    def load(self) -> EpochState | None:
        """What was granted last, or ``None`` when there is no file (see above for what that means).

        Raises:
            ClusterError: ``cluster.epoch-damaged``, ``cluster.epoch-foreign``, ``cluster.voters-changed``.
            StateError: The file cannot be read.
        """
        content = self._content()
        if content is None:
            return None
        if content["digest"] != self._config.digest:
            raise ClusterError(
                f"{self.path} was written with other voters, clock drift or kill margin than the settings have now",
                why="voters that go by the old list and voters that go by the new one could both elect a master",
                hint="stop kvtierd on every voter, of the old list and of the new one; only then accept the new list on each"
                " of them and start them. To take this change back, write the old list again",
                code="cluster.voters-changed",
            )
        return self._state(content)

    def save(self, state: EpochState) -> None:
        """Writes and syncs. When it returns the state is on disk; when it raises the old one is.

        Raises:
            StateError: It cannot be written. The elector that asked for it must be thrown away.
            ClusterError: ``cluster.epoch-backwards``; a voter's epoch never falls.
        """
        if state.epoch < self._epoch:
            raise ClusterError(
                f"{self.path} holds epoch {self._epoch}; {state.epoch} must not be written over it",
                why="a voter that forgets an epoch could grant it a second time",
                hint="this is a fault of kvtierd: restart it, and please report it",
                code="cluster.epoch-backwards",
            )
        write_sealed(self.path, "voter", self._whose() | dataclasses.asdict(state))
        self._epoch = state.epoch

    def create(self, epoch: int) -> EpochState:
        """An operator's word: no epoch above this one has ever been used. For when a majority lost their files.

        Too high a number does no harm, too low a one does. A file that is there is not overwritten.

        Raises:
            ClusterError: ``cluster.epoch-exists``.
        """
        if self.path.exists():
            raise ClusterError(
                f"{self.path} is there already",
                hint="it needs no other; if it is damaged, move it away first",
                code="cluster.epoch-exists",
            )
        state = EpochState(epoch=epoch, incarnation=secrets.randbits(53))
        self.save(state)
        return state

    def accept_voters(self) -> None:
        """An operator's word: every voter, of the old list and the new one, is stopped. Keeps the epoch.

        Raises:
            ClusterError: The file is missing, damaged or another node's.
        """
        content = self._content()
        if content is None:
            raise ClusterError(
                f"{self.path} is missing, so there is nothing to accept",
                hint="start kvtierd: a voter without a file asks the others",
                code="cluster.epoch-missing",
            )
        self.save(self._state(content))

    def _content(self) -> dict[str, Any] | None:
        content = read_sealed(
            self.path,
            "voter",
            remedy="move it away and start kvtierd: a voter without a file does not vote until the other voters have told "
            "it the epoch, and needs a majority of them with their files for that",
        )
        if content is None:
            return None
        whose = (content.get("cluster"), content.get("node"))
        if whose != (self._config.cluster, self._config.node):
            raise ClusterError(
                f"{self.path} belongs to node {whose[1]} of cluster {whose[0]}; this is {self._config.node} of "
                f"{self._config.cluster}",
                why="two nodes with one memory would be one voter that votes twice",
                hint="if this host was copied from another one or renamed, move the file away: without it the voter asks "
                "the others",
                code="cluster.epoch-foreign",
            )
        self._epoch = content["epoch"]
        return content

    def _whose(self) -> dict[str, Any]:
        config = self._config
        return {"cluster": config.cluster, "node": config.node, "digest": config.digest}

    @staticmethod
    def _state(content: dict[str, Any]) -> EpochState:
        return EpochState(**{field.name: content[field.name] for field in dataclasses.fields(EpochState)})


class SeenEpochStore:
    """The fence: a node follows no master of an earlier epoch than the latest it has followed.

    A missing file counts as "none seen yet": the fence of a node without a memory rests on what the voters say.
    """

    def __init__(self, path: Path, cluster: str) -> None:
        self.path = path
        self.epoch = 0
        self.master = ""
        self._cluster = cluster

    def load(self) -> int:
        """The highest epoch followed, 0 when none.

        Raises:
            ClusterError: ``cluster.epoch-damaged``, ``cluster.epoch-foreign``.
            StateError: The file cannot be read.
        """
        content = read_sealed(
            self.path,
            "seen",
            remedy="move it away when the other nodes agree on who the master is; this node then follows the same one",
        )
        if content is None:
            return 0
        if content["cluster"] != self._cluster:
            raise ClusterError(
                f"{self.path} belongs to cluster {content['cluster']}, not to {self._cluster}",
                hint="move it away if this node has changed clusters",
                code="cluster.epoch-foreign",
            )
        self.epoch, self.master = content["epoch"], content["master"]
        return self.epoch

    def admit(self, epoch: int, master: str) -> bool:
        """Whether this master may be followed. A later epoch is on disk before the answer is yes.

        Raises:
            StateError: It cannot be written; the master must not be followed then.
        """
        if epoch < self.epoch or (epoch == self.epoch and master != self.master):
            return False
        if epoch > self.epoch:
            write_sealed(self.path, "seen", {"cluster": self._cluster, "epoch": epoch, "master": master})
            self.epoch, self.master = epoch, master
        return True


def _encode(kind: str, content: dict[str, Any]) -> bytes:
    body = json.dumps({"version": VERSION, "kind": kind, **content}, sort_keys=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return f"{body}\n{checksum}\n".encode()


def write_sealed(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Writes and syncs a file of this kind with its checksum. Raises ``StateError``; the old one is there then."""
    write_atomic(path, _encode(kind, content), mode=0o600)


def read_sealed(path: Path, kind: str, *, remedy: str) -> dict[str, Any] | None:
    """The content, or ``None`` when there is no file. One that is not exactly what was written is refused."""
    _clear_leftovers(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(
            f"{path} cannot be read", why=error.strerror or "", code="state.not-readable"
        ) from error
    try:
        content: dict[str, Any] = json.loads(data.split(b"\n")[0])
        rest = {name: value for name, value in content.items() if name not in {"version", "kind"}}
        intact = _encode(kind, rest) == data
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ClusterError(
            f"{path} is damaged, or was written by another version of kvtierd",
            why="its checksum does not fit; what it held decides whom this node may vote for or follow, so no guesses",
            hint=remedy,
            code="cluster.epoch-damaged",
        )
    return rest


def _clear_leftovers(path: Path) -> None:
    """Temporary files of writes that were cut off; only one kvtierd works on a state directory."""
    with contextlib.suppress(OSError):
        for leftover in path.parent.glob(f".{path.name}.*"):
            leftover.unlink()
