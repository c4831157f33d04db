"""PURE: what kvtierd keeps in an etcd, and the transactions that change it.

Under ``<prefix>/<cluster>/``:

- ``leader``: the master's name. Its create revision is the epoch. Lives as long as the master's lease.
- ``boot``: the boot id of the master's host, with the same lease. A restarted kvtierd goes on with its lease by this; two
  hosts that were given one name are told apart by it.
- ``last``: for good, what is known of the last master's MetaService. ``released``: it was stopped before its term ended.
  ``held``: it may live for the kill margin after that. ``unsure``: there may be one of a term that etcd knows nothing of,
  and the holder has not waited for its end yet.
- ``next``: the target of a switchover, for a few seconds. While it is there nobody else becomes the master.
- ``epoch-base``: added to the create revision, for good. Only there when etcd's revisions had fallen below epochs that
  the nodes had seen: it was emptied or restored from a backup, or the cluster had another mode before.

etcd's own Election API is not used: its candidates stand in a queue, so the next master could not be chosen, and one
that is no longer fit would still be next.
"""

from __future__ import annotations

import dataclasses

from kvtierd.cluster.etcd_v3 import rpc_pb2 as pb
from kvtierd.errors import ClusterError

HELD = "held"
RELEASED = "released"
UNSURE = "unsure"


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the leader key."""

    node: str
    boot: str
    create_revision: int
    mod_revision: int
    lease: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys of the cluster at one revision.

    Attributes:
        revision: etcd's, of all its keys.
        raft_term: The member that answered had applied entries of this term.
        last: ``HELD``, ``RELEASED``, ``UNSURE``, or "" when etcd knows of no term.
        successor: The target of a switchover; "" when there is none.
        base: See ``epoch-base``.
        last_mod, successor_mod, base_mod: Revisions of those keys, 0 when they are not there.
    """

    revision: int
    raft_term: int
    holder: Holder | None
    last: str
    successor: str
    base: int
    last_mod: int
    successor_mod: int
    base_mod: int


class Keys:
    """The keys of one cluster."""

    def __init__(self, prefix: str, cluster: str) -> None:
        root = f"{prefix.rstrip('/')}/{cluster}/".encode()
        self.first = root
        self.end = root[:-1] + bytes([root[-1] + 1])
        self.leader = root + b"leader"
        self.boot = root + b"boot"
        self.last = root + b"last"
        self.next = root + b"next"
        self.base = root + b"epoch-base"

    def read(self) -> pb.RangeRequest:
        """Asks for all of them, as a majority of etcd's members has them now."""
        return pb.RangeRequest(key=self.first, range_end=self.end)

    def watch(self) -> pb.WatchRequest:
        """Asks to be told of changes."""
        return pb.WatchRequest(
            create_request=pb.WatchCreateRequest(key=self.first, range_end=self.end)
        )  # fmt: skip

    def snapshot(self, header: pb.ResponseHeader, found: pb.RangeResponse) -> Snapshot:
        """What an answer to ``read`` says.

        Raises:
            ClusterError: ``cluster.etcd-damaged``: somebody else wrote there.
        """
        at = {pair.key: pair for pair in found.kvs}
        nothing = pb.KeyValue()
        last, following, base = (at.get(key, nothing) for key in (self.last, self.next, self.base))
        try:
            base_epoch = int(base.value or b"0")
        except ValueError:
            raise ClusterError(
                f"{self.base.decode()} in etcd is not a number: {base.value[:40]!r}",
                hint="kvtierd writes its keys itself; delete this one",
                code="cluster.etcd-damaged",
            ) from None
        holder = None
        if (leader := at.get(self.leader)) is not None:
            holder = Holder(
                node=_text(leader.value),
                boot=_text(at.get(self.boot, nothing).value),
                create_revision=leader.create_revision,
                mod_revision=leader.mod_revision,
                lease=leader.lease,
                epoch=base_epoch + leader.create_revision,
            )
        return Snapshot(
            revision=header.revision,
            raft_term=header.raft_term,
            holder=holder,
            last=_text(last.value),
            successor=_text(following.value),
            base=base_epoch,
            last_mod=last.mod_revision,
            successor_mod=following.mod_revision,
            base_mod=base.mod_revision,
        )

    def gain(
        self, seen: Snapshot, node: str, boot: str, lease: int, *, base: int, last: str
    ) -> pb.TxnRequest:
        """Makes this node the master if nobody is and nothing else has changed since ``seen``."""
        changes = [
            _put(self.leader, node, lease),
            _put(self.boot, boot, lease),
            _put(self.last, last),
            _delete(self.next),
        ]
        if base != seen.base:
            changes.append(_put(self.base, str(base)))
        conditions = [
            pb.Compare(target=pb.Compare.CREATE, key=self.leader, create_revision=0),
            _unchanged(self.last, seen.last_mod),
            _unchanged(self.next, seen.successor_mod),
            _unchanged(self.base, seen.base_mod),
        ]
        return self._transaction(conditions, changes)

    def attach(self, holder: Holder, lease: int) -> pb.TxnRequest:
        """Gives the holder's key another lease; its create revision stays.

        The condition is on the last change: an earlier attempt that was taken for lost and comes through late must not
        put its older lease in the place of this one.
        """
        changes = [_put(self.leader, holder.node, lease), _put(self.boot, holder.boot, lease)]
        return self._transaction([_unchanged(self.leader, holder.mod_revision)], changes)

    def settle(self, holder: Holder) -> pb.TxnRequest:
        """The holder has waited long enough for whatever may have been before it."""
        return self._transaction([_unchanged(self.leader, holder.mod_revision)], [_put(self.last, HELD)])

    def release(self, holder: Holder, to: str, lease: int, *, served: bool) -> pb.TxnRequest:
        """Ends the holder's term, whose MetaService has been stopped; the other node has a head start of that lease.

        ``served`` false: it has not begun to serve, so its successor must wait for what it had to wait for.
        """
        changes = [_delete(self.leader), _delete(self.boot), _put(self.next, to, lease)]
        if served:
            changes.append(_put(self.last, RELEASED))
        return self._transaction([_unchanged(self.leader, holder.mod_revision)], changes)

    def depose(self, holder: Holder) -> pb.TxnRequest:
        """Ends a term of an epoch that nobody may follow. Its holder may not know yet, and serve for a while."""
        changes = [_delete(self.leader), _delete(self.boot), _put(self.last, UNSURE)]
        return self._transaction([_unchanged(self.leader, holder.mod_revision)], changes)

    def _transaction(self, conditions: list[pb.Compare], changes: list[pb.RequestOp]) -> pb.TxnRequest:
        otherwise = pb.RequestOp(request_range=self.read())
        return pb.TxnRequest(compare=conditions, success=changes, failure=[otherwise])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _unchanged(key: bytes, mod_revision: int) -> pb.Compare:
    return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=mod_revision)


def _put(key: bytes, value: str, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value.encode(), lease=lease))


def _delete(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
