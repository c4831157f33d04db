"""Mode static: who the master is, in a file that survives. What it holds outlives the settings' word for epoch 1."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvtierd.cluster.epoch_store import read_sealed, write_sealed
from kvtierd.errors import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class MasterRecord:
    """The latest master that this node knows of.

    Attributes:
        master: Its node; "" when the settings name another one now that has not been heard of as the master yet.
        named: Whom the settings named when this was written; another name there later is an operator's word.
    """

    epoch: int
    master: str
    named: str


class MasterStore:
    """A node's file.

    Args:
        path: The file; its directory is made when needed.
        cluster: Whose file it is; one of another cluster is refused.
    """

    def __init__(self, path: Path, cluster: str) -> None:
        self.path = path
        self._cluster = cluster

    def load(self) -> MasterRecord | None:
        """What was written last, ``None`` when there is no file: then the settings' master in epoch 1 counts.

        Raises:
            ClusterError: ``cluster.epoch-damaged``, ``cluster.epoch-foreign``.
            StateError: The file cannot be read.
        """
        content = read_sealed(
            self.path,
            "master",
            remedy="look at kvtierctl status on the other nodes for the master and its epoch, then move the file away: this "
            "node asks the others when it starts, and follows the settings only if none of them can be reached",
        )
        if content is None:
            return None
        if content["cluster"] != self._cluster:
            raise ClusterError(
                f"{self.path} belongs to cluster {content['cluster']}, not to {self._cluster}",
                hint="move it away if this node has changed clusters",
                code="cluster.epoch-foreign",
            )
        return MasterRecord(content["epoch"], content["master"], content["named"])

    def save(self, record: MasterRecord) -> None:
        """Writes and syncs. When it returns the record is on disk; when it raises the old one is.

        Raises:
            StateError: It cannot be written.
        """
        write_sealed(self.path, "master", {"cluster": self._cluster, **dataclasses.asdict(record)})
