"""PURE: how a voter without an epoch file comes by its epoch again.

A lost file cannot be told from one that never was, so both are treated alike: the voter grants nothing and campaigns
for nothing until the other voters have told it what it may have forgotten. Silence after the start alone would not do:
it covers forgotten promises, but not forgotten epochs, and an epoch used twice is no fencing token.

Two answers are enough of an answer:

- As many *others* as a majority have their files. Every majority that ever granted an epoch together with this voter
  contains at least one of them, and it wrote the epoch down before it answered, so the highest of theirs is not below
  any that was used. The question is asked when the silence is over: what was under way before can then no longer
  become a lease.
- *All* others have answered and none has ever granted an epoch: the cluster is new. Its first master is elected only
  when every voter has a file, so that none that is still waiting has to wonder what it missed.

Neither holds when a majority lost their files: then an operator decides (``epoch_store.create_epoch_file``).
"""

from __future__ import annotations

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochAnswer


class Recollection:
    """Collects the answers of the other voters."""

    def __init__(self, config: ElectorConfig) -> None:
        self._config = config
        self._epochs: dict[str, int | None] = {}
        self.promise_seconds = config.promise_seconds  # the longest that anybody remembers

    def note(self, answer: EpochAnswer) -> None:
        """Takes an answer to a question of this life into account; a newer one replaces an older one."""
        if answer.sender in self._config.others:
            self._epochs[answer.sender] = answer.epoch if answer.remembers else None
            self.promise_seconds = max(self.promise_seconds, answer.promise_seconds)

    def forget(self) -> None:
        """All answers so far came too early."""
        self._epochs.clear()

    def epoch(self) -> int | None:
        """The epoch that is certainly not below any that was ever used, or ``None`` while that is not known."""
        known = [epoch for epoch in self._epochs.values() if epoch is not None]
        if len(known) >= self._config.quorum:
            return max(known)
        if len(self._epochs) == len(self._config.others) and not any(known):
            return 0
        return None

    def everybody_has_a_file(self) -> bool:
        """All others have answered that they have one."""
        return len(self._epochs) == len(self._config.others) and None not in self._epochs.values()

    def waits_for(self) -> tuple[str, ...]:
        """The voters that have not answered, or that have no file either."""
        return tuple(voter for voter in self._config.others if self._epochs.get(voter) is None)
