"""Which master counts: the rules of epochs. Pure.

An epoch is a number that an election gives to a master; a higher one always wins. This endpoint is *told* a target
with its epoch by the daemon, and may *see* a higher one in what another endpoint says. From then on what it was told
is out of date, and it relays for nobody until it is told anew. The highest epoch is kept over restarts and reboots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvtierd.endpoint.hop import MAX_EPOCH
from kvtierd.endpoint.targets import AnyTarget, parse_target, target_dict
from kvtierd.errors import EndpointError


@dataclasses.dataclass(slots=True)
class Epochs:
    """``told``: the epoch of the target that was set, 0 before the first. ``seen``: the highest known from anywhere.

    ``master`` is the target that was set under ``told``; ``None`` when none was, or when the configuration has changed
    since, so that it may be set once more.
    """

    cluster: str = ""
    told: int = 0
    seen: int = 0
    master: AnyTarget | None = None

    @property
    def outdated(self) -> bool:
        """Somebody has a higher epoch than the one this endpoint was told."""
        return self.seen > self.told

    def told_target(self, epoch: int | None, target: AnyTarget | None) -> Epochs:
        """What holds after ``set_target`` with this epoch. Nothing changes here: it is to be saved first.

        Without an epoch everything stays, and that is allowed only before the first one. ``None`` as a target is
        allowed under the same epoch (its master is away), and so is the way back to that master.

        Raises:
            EndpointError: ``endpoint.stale-epoch``, or ``endpoint.epoch-conflict`` for two masters of one epoch.
        """
        if epoch is None:
            if self.seen:
                raise EndpointError(
                    f"set_target without an epoch, after epoch {self.seen}",
                    hint="give the epoch of this master",
                    code="endpoint.stale-epoch",
                )
            return self
        if epoch < self.seen:
            raise EndpointError(
                f"epoch {epoch} is over: epoch {self.seen} is known here",
                hint="ask the cluster who is master now. After founding the cluster anew, stop the endpoint and remove "
                "its state file",
                code="endpoint.stale-epoch",
            )
        if epoch > self.told:
            return dataclasses.replace(self, told=epoch, seen=epoch, master=target)
        if target is not None and self.master is not None and target != self.master:
            raise EndpointError(
                f"epoch {epoch} has another master: {self.master}",
                why="one epoch never has two masters",
                code="endpoint.epoch-conflict",
            )
        return dataclasses.replace(self, master=self.master or target)

    def saw(self, epoch: int) -> Epochs:
        """What holds after another endpoint named this epoch."""
        return dataclasses.replace(self, seen=max(self.seen, min(epoch, MAX_EPOCH)))

    def to_save(self) -> dict[str, Any]:
        """For the state file."""
        return {
            "cluster": self.cluster,
            "told": self.told,
            "seen": self.seen,
            "master": target_dict(self.master),
        }

    @classmethod
    def restore(cls, saved: object, cluster: str, *, same_configuration: bool) -> Epochs:
        """From ``to_save``; a fresh start for another cluster, or when there is nothing or it is damaged."""
        fresh = cls(cluster)
        if not isinstance(saved, dict) or saved.get("cluster") != cluster:
            return fresh
        told, seen = saved.get("told"), saved.get("seen")
        if not (isinstance(told, int) and isinstance(seen, int) and 0 <= told <= seen <= MAX_EPOCH):
            return fresh
        try:
            master = parse_target(saved.get("master")) if same_configuration else None
        except EndpointError:
            master = None
        return cls(cluster, told, seen, master)
