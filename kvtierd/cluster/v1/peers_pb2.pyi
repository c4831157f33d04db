from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ElectionMessage(_message.Message):
    __slots__ = ("cluster", "digest", "sender", "epoch", "number", "probe", "willing", "request", "grant", "refusal", "release", "epoch_query", "epoch_answer")
    class Probe(_message.Message):
        __slots__ = ("incarnation", "lease_seconds")
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        incarnation: int
        lease_seconds: float
        def __init__(self, incarnation: _Optional[int] = ..., lease_seconds: _Optional[float] = ...) -> None: ...
    class Willing(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Request(_message.Message):
        __slots__ = ("incarnation", "lease_seconds")
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        incarnation: int
        lease_seconds: float
        def __init__(self, incarnation: _Optional[int] = ..., lease_seconds: _Optional[float] = ...) -> None: ...
    class Grant(_message.Message):
        __slots__ = ("idle_seconds",)
        IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        idle_seconds: float
        def __init__(self, idle_seconds: _Optional[float] = ...) -> None: ...
    class Refusal(_message.Message):
        __slots__ = ("reason", "holder", "remaining_seconds")
        REASON_FIELD_NUMBER: _ClassVar[int]
        HOLDER_FIELD_NUMBER: _ClassVar[int]
        REMAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
        reason: str
        holder: str
        remaining_seconds: float
        def __init__(self, reason: _Optional[str] = ..., holder: _Optional[str] = ..., remaining_seconds: _Optional[float] = ...) -> None: ...
    class Release(_message.Message):
        __slots__ = ("incarnation", "successor")
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
        incarnation: int
        successor: str
        def __init__(self, incarnation: _Optional[int] = ..., successor: _Optional[str] = ...) -> None: ...
    class EpochQuery(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class EpochAnswer(_message.Message):
        __slots__ = ("remembers", "promise_seconds")
        REMEMBERS_FIELD_NUMBER: _ClassVar[int]
        PROMISE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        remembers: bool
        promise_seconds: float
        def __init__(self, remembers: _Optional[bool] = ..., promise_seconds: _Optional[float] = ...) -> None: ...
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    WILLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_QUERY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ANSWER_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    digest: str
    sender: str
    epoch: int
    number: int
    probe: ElectionMessage.Probe
    willing: ElectionMessage.Willing
    request: ElectionMessage.Request
    grant: ElectionMessage.Grant
    refusal: ElectionMessage.Refusal
    release: ElectionMessage.Release
    epoch_query: ElectionMessage.EpochQuery
    epoch_answer: ElectionMessage.EpochAnswer
    def __init__(self, cluster: _Optional[str] = ..., digest: _Optional[str] = ..., sender: _Optional[str] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., probe: _Optional[_Union[ElectionMessage.Probe, _Mapping]] = ..., willing: _Optional[_Union[ElectionMessage.Willing, _Mapping]] = ..., request: _Optional[_Union[ElectionMessage.Request, _Mapping]] = ..., grant: _Optional[_Union[ElectionMessage.Grant, _Mapping]] = ..., refusal: _Optional[_Union[ElectionMessage.Refusal, _Mapping]] = ..., release: _Optional[_Union[ElectionMessage.Release, _Mapping]] = ..., epoch_query: _Optional[_Union[ElectionMessage.EpochQuery, _Mapping]] = ..., epoch_answer: _Optional[_Union[ElectionMessage.EpochAnswer, _Mapping]] = ...) -> None: ...

class ElectionReply(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[ElectionMessage]
    def __init__(self, answers: _Optional[_Iterable[_Union[ElectionMessage, _Mapping]]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("cluster", "epoch", "master", "address", "meta_service_url", "config_store_url", "since_unix_seconds", "why", "tier_state", "served_life", "revision", "age_seconds", "pool_ranks")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    META_SERVICE_URL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_STORE_URL_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TIER_STATE_FIELD_NUMBER: _ClassVar[int]
    SERVED_LIFE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_RANKS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    epoch: int
    master: str
    address: str
    meta_service_url: str
    config_store_url: str
    since_unix_seconds: float
    why: str
    tier_state: str
    served_life: str
    revision: int
    age_seconds: float
    pool_ranks: _containers.RepeatedCompositeFieldContainer[PoolRank]
    def __init__(self, cluster: _Optional[str] = ..., epoch: _Optional[int] = ..., master: _Optional[str] = ..., address: _Optional[str] = ..., meta_service_url: _Optional[str] = ..., config_store_url: _Optional[str] = ..., since_unix_seconds: _Optional[float] = ..., why: _Optional[str] = ..., tier_state: _Optional[str] = ..., served_life: _Optional[str] = ..., revision: _Optional[int] = ..., age_seconds: _Optional[float] = ..., pool_ranks: _Optional[_Iterable[_Union[PoolRank, _Mapping]]] = ...) -> None: ...

class PoolRank(_message.Message):
    __slots__ = ("rank", "role", "active", "memory_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    role: str
    active: bool
    memory_bytes: int
    def __init__(self, rank: _Optional[int] = ..., role: _Optional[str] = ..., active: _Optional[bool] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("cluster", "sender")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    sender: str
    def __init__(self, cluster: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...

class NodeFacts(_message.Message):
    __slots__ = ("node", "version", "memcache_version", "hash_seed", "world_size", "protocol", "settings_digest", "role", "epoch", "master", "uptime_seconds", "endpoint_life", "survivors_missing", "clean_epoch", "memory", "ranks", "engines", "busy_groups")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMCACHE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_LIFE_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_MISSING_FIELD_NUMBER: _ClassVar[int]
    CLEAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    BUSY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    memcache_version: str
    hash_seed: str
    world_size: int
    protocol: str
    settings_digest: str
    role: str
    epoch: int
    master: str
    uptime_seconds: float
    endpoint_life: str
    survivors_missing: int
    clean_epoch: int
    memory: HostMemory
    ranks: _containers.RepeatedCompositeFieldContainer[OwnRank]
    engines: _containers.RepeatedCompositeFieldContainer[EngineIdentity]
    busy_groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., memcache_version: _Optional[str] = ..., hash_seed: _Optional[str] = ..., world_size: _Optional[int] = ..., protocol: _Optional[str] = ..., settings_digest: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., master: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., endpoint_life: _Optional[str] = ..., survivors_missing: _Optional[int] = ..., clean_epoch: _Optional[int] = ..., memory: _Optional[_Union[HostMemory, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[OwnRank, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineIdentity, _Mapping]]] = ..., busy_groups: _Optional[_Iterable[str]] = ...) -> None: ...

class HostMemory(_message.Message):
    __slots__ = ("available_bytes", "total_bytes", "headroom_bytes", "room_bytes", "holders")
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    available_bytes: int
    total_bytes: int
    headroom_bytes: int
    room_bytes: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, available_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., room_bytes: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class OwnRank(_message.Message):
    __slots__ = ("rank", "unit")
    RANK_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    unit: str
    def __init__(self, rank: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...

class EngineIdentity(_message.Message):
    __slots__ = ("unit", "group", "hash_seed", "model", "block_tokens")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    group: str
    hash_seed: str
    model: str
    block_tokens: int
    def __init__(self, unit: _Optional[str] = ..., group: _Optional[str] = ..., hash_seed: _Optional[str] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("cluster", "facts", "view")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    facts: NodeFacts
    view: View
    def __init__(self, cluster: _Optional[str] = ..., facts: _Optional[_Union[NodeFacts, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("facts", "view", "received_unix_seconds", "sent_unix_seconds")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    facts: NodeFacts
    view: View
    received_unix_seconds: float
    sent_unix_seconds: float
    def __init__(self, facts: _Optional[_Union[NodeFacts, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., received_unix_seconds: _Optional[float] = ..., sent_unix_seconds: _Optional[float] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("cluster", "sender", "epoch")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    sender: str
    epoch: int
    def __init__(self, cluster: _Optional[str] = ..., sender: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ("epoch", "code", "problem", "why", "hint")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    code: str
    problem: str
    why: str
    hint: str
    def __init__(self, epoch: _Optional[int] = ..., code: _Optional[str] = ..., problem: _Optional[str] = ..., why: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("cluster", "sender", "epoch", "seconds")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    sender: str
    epoch: int
    seconds: float
    def __init__(self, cluster: _Optional[str] = ..., sender: _Optional[str] = ..., epoch: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("code", "problem", "why", "hint")
    CODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    code: str
    problem: str
    why: str
    hint: str
    def __init__(self, code: _Optional[str] = ..., problem: _Optional[str] = ..., why: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class PeerEventsRequest(_message.Message):
    __slots__ = ("cluster", "sender", "last", "after_id")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    sender: str
    last: int
    after_id: int
    def __init__(self, cluster: _Optional[str] = ..., sender: _Optional[str] = ..., last: _Optional[int] = ..., after_id: _Optional[int] = ...) -> None: ...

class PeerEventsReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PeerEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PeerEvent, _Mapping]]] = ...) -> None: ...

class PeerEvent(_message.Message):
    __slots__ = ("id", "at_unix_seconds", "severity", "kind", "unit", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: int
    at_unix_seconds: float
    severity: str
    kind: str
    unit: str
    message: str
    def __init__(self, id: _Optional[int] = ..., at_unix_seconds: _Optional[float] = ..., severity: _Optional[str] = ..., kind: _Optional[str] = ..., unit: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ChangeHoldersRequest(_message.Message):
    __slots__ = ("cluster", "sender", "epoch", "token", "reason", "add_bytes", "remove_unit")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOVE_UNIT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    sender: str
    epoch: int
    token: str
    reason: str
    add_bytes: int
    remove_unit: str
    def __init__(self, cluster: _Optional[str] = ..., sender: _Optional[str] = ..., epoch: _Optional[int] = ..., token: _Optional[str] = ..., reason: _Optional[str] = ..., add_bytes: _Optional[int] = ..., remove_unit: _Optional[str] = ...) -> None: ...

class ChangeHoldersReply(_message.Message):
    __slots__ = ("code", "problem", "why", "hint", "unit", "memory_bytes")
    CODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    code: str
    problem: str
    why: str
    hint: str
    unit: str
    memory_bytes: int
    def __init__(self, code: _Optional[str] = ..., problem: _Optional[str] = ..., why: _Optional[str] = ..., hint: _Optional[str] = ..., unit: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...
