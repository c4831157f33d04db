"""What the other nodes have to do with a recovery of the tier: whose survivors are missing, and who was there before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from kvtierd.node.coordination import Coordination
from kvtierd.node.direct import DirectClients
from kvtierd.node.state import Node

# While survivors of other nodes are waited for: all of them are asked again after so long, and a node.
GREET_AGAIN_SECONDS = 0.1
GREET_NODE_SECONDS = 0.005
FRESH_SECONDS = 3.0  # a peer that was not heard of for longer does not keep the others waiting


class Elsewhere:
    """What the tier's keeper has to know of other nodes before it lets anybody read.

    Args:
        node: The running node.
        part: Its coordinator and its network.
        clients: This node's clients, where they have no endpoint.

    Attributes:
        epoch_before: The last epoch of another master; 0 when none was heard of.
    """

    def __init__(self, node: Node, part: Coordination, clients: DirectClients) -> None:
        self._node, self._part, self._clients = node, part, clients
        self.epoch_before = 0
        self._next_greeting = 0.0
        self._greeting: asyncio.Task[set[str]] | None = None

    @property
    def handed_over(self) -> bool:
        """The master before this one ended its epoch with nothing in flight."""
        if not self.epoch_before:
            return False
        links = self._part.network.links.values()
        return any(k.facts is not None and k.facts.clean_epoch == self.epoch_before for k in links)

    @property
    def founding(self) -> bool:
        """No MetaService has been there before, as far as anybody knows: the first epoch, and nobody to come back."""
        if self._part.coordinator.standing.epoch != 1 or missing_survivors(self._node.endpoint_status):
            return False
        links = self._part.network.links.values()
        return all(link.facts is None or not link.facts.survivors_missing for link in links)

    @property
    def inherited(self) -> bool:
        """No endpoint tells of the masters before this one, and there may have been some."""
        return self._clients.plan is not None and self._part.coordinator.standing.epoch != 1

    def survivors_missing(self) -> int:
        """Processes on nodes that can be reached which knew the MetaService and are not back, as those nodes say.

        A node whose endpoint has not reached this MetaService yet counts as one.
        """
        status = self._node.endpoint_status
        life = str(status["backend"]["life"] or "") if status is not None and "epoch" in status else ""
        if self._clients.plan is not None:
            life = f"epoch {self._part.coordinator.standing.epoch}"
        missing = 0
        for name, link in self._part.network.links.items():
            facts, ago = link.facts, self._part.network.contact(name).last_contact_seconds
            if facts is None or ago is None or ago > FRESH_SECONDS or not facts.world_size:
                continue
            missing += facts.survivors_missing if facts.endpoint_life == life else 1
        return missing

    def hear_from_all(self) -> None:
        """Has the others asked how far their survivors are; at most a few times a second, never two at once."""
        now = time.monotonic()
        if now < self._next_greeting or (self._greeting is not None and not self._greeting.done()):
            return
        names = list(self._part.network.links)
        self._next_greeting = now + GREET_AGAIN_SECONDS + GREET_NODE_SECONDS * len(names)
        self._greeting = asyncio.create_task(self._part.network.greet(names))


def missing_survivors(endpoint: Mapping[str, Any] | None) -> int:
    """How many processes of this node knew the MetaService and have no link to the present one."""
    if endpoint is None:
        return 0
    return max(0, int(endpoint["survivors"]["expected"]) - int(endpoint["survivors"]["back"]))
