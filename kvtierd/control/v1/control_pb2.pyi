from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WhyRequest(_message.Message):
    __slots__ = ("unit", "last")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    unit: str
    last: int
    def __init__(self, unit: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("rule", "about", "state", "sees", "verdict", "next_in_seconds", "would")
    RULE_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEES_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NEXT_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WOULD_FIELD_NUMBER: _ClassVar[int]
    rule: str
    about: str
    state: str
    sees: str
    verdict: str
    next_in_seconds: float
    would: str
    def __init__(self, rule: _Optional[str] = ..., about: _Optional[str] = ..., state: _Optional[str] = ..., sees: _Optional[str] = ..., verdict: _Optional[str] = ..., next_in_seconds: _Optional[float] = ..., would: _Optional[str] = ...) -> None: ...

class ActionEntry(_message.Message):
    __slots__ = ("id", "at", "ended", "rule", "target", "what", "why", "precondition", "state", "outcome", "undo", "node", "step")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PRECONDITION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    id: int
    at: float
    ended: float
    rule: str
    target: str
    what: str
    why: str
    precondition: str
    state: str
    outcome: str
    undo: str
    node: str
    step: str
    def __init__(self, id: _Optional[int] = ..., at: _Optional[float] = ..., ended: _Optional[float] = ..., rule: _Optional[str] = ..., target: _Optional[str] = ..., what: _Optional[str] = ..., why: _Optional[str] = ..., precondition: _Optional[str] = ..., state: _Optional[str] = ..., outcome: _Optional[str] = ..., undo: _Optional[str] = ..., node: _Optional[str] = ..., step: _Optional[str] = ...) -> None: ...

class WhyReply(_message.Message):
    __slots__ = ("unit", "rules", "actions", "events", "state", "reason")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    unit: str
    rules: _containers.RepeatedCompositeFieldContainer[Explanation]
    actions: _containers.RepeatedCompositeFieldContainer[ActionEntry]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    state: str
    reason: str
    def __init__(self, unit: _Optional[str] = ..., rules: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ..., actions: _Optional[_Iterable[_Union[ActionEntry, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolicyReply(_message.Message):
    __slots__ = ("policy_json", "adjustments_json", "problems", "undone")
    POLICY_JSON_FIELD_NUMBER: _ClassVar[int]
    ADJUSTMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    UNDONE_FIELD_NUMBER: _ClassVar[int]
    policy_json: str
    adjustments_json: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    undone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy_json: _Optional[str] = ..., adjustments_json: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., undone: _Optional[_Iterable[str]] = ...) -> None: ...

class ResetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PicturesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Picture(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("rule", "what", "why", "age_seconds", "outcome", "in_seconds")
    RULE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rule: str
    what: str
    why: str
    age_seconds: float
    outcome: str
    in_seconds: float
    def __init__(self, rule: _Optional[str] = ..., what: _Optional[str] = ..., why: _Optional[str] = ..., age_seconds: _Optional[float] = ..., outcome: _Optional[str] = ..., in_seconds: _Optional[float] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "address", "voter", "witness", "this_node", "role", "epoch", "last_contact_seconds", "version", "memcache_version", "clock_offset_seconds", "settings_digest", "differences", "problem", "uptime_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VOTER_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    THIS_NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_CONTACT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMCACHE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    voter: bool
    witness: bool
    this_node: bool
    role: str
    epoch: int
    last_contact_seconds: float
    version: str
    memcache_version: str
    clock_offset_seconds: float
    settings_digest: str
    differences: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    uptime_seconds: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., voter: _Optional[bool] = ..., witness: _Optional[bool] = ..., this_node: _Optional[bool] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., last_contact_seconds: _Optional[float] = ..., version: _Optional[str] = ..., memcache_version: _Optional[str] = ..., clock_offset_seconds: _Optional[float] = ..., settings_digest: _Optional[str] = ..., differences: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ..., uptime_seconds: _Optional[float] = ...) -> None: ...

class PeersReply(_message.Message):
    __slots__ = ("cluster", "mode", "role", "epoch", "master", "since", "why", "view_age_seconds", "lease_left_seconds", "paused", "peers", "problems")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    VIEW_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    mode: str
    role: str
    epoch: int
    master: str
    since: float
    why: str
    view_age_seconds: float
    lease_left_seconds: float
    paused: bool
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cluster: _Optional[str] = ..., mode: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., master: _Optional[str] = ..., since: _Optional[float] = ..., why: _Optional[str] = ..., view_age_seconds: _Optional[float] = ..., lease_left_seconds: _Optional[float] = ..., paused: _Optional[bool] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class SwitchoverRequest(_message.Message):
    __slots__ = ("node", "wait_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    wait_seconds: float
    def __init__(self, node: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class SwitchoverReply(_message.Message):
    __slots__ = ("epoch", "seconds", "note")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seconds: float
    note: str
    def __init__(self, epoch: _Optional[int] = ..., seconds: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: _Optional[bool] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("on", "reason")
    ON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    reason: str
    def __init__(self, on: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "where", "state", "capacity_bytes", "used_bytes", "query_tokens", "hit_tokens", "hit_rate", "age_seconds", "capacity_tokens", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    where: str
    state: str
    capacity_bytes: int
    used_bytes: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    age_seconds: float
    capacity_tokens: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., where: _Optional[str] = ..., state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., hit_rate: _Optional[float] = ..., age_seconds: _Optional[float] = ..., capacity_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("id", "kind", "name", "state", "reason", "pid", "since", "restarts", "next_try_in_seconds", "last_lines", "stale", "last_exit", "remark")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TRY_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_LINES_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    LAST_EXIT_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    name: str
    state: str
    reason: str
    pid: int
    since: float
    restarts: int
    next_try_in_seconds: float
    last_lines: _containers.RepeatedScalarFieldContainer[str]
    stale: bool
    last_exit: str
    remark: str
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., pid: _Optional[int] = ..., since: _Optional[float] = ..., restarts: _Optional[int] = ..., next_try_in_seconds: _Optional[float] = ..., last_lines: _Optional[_Iterable[str]] = ..., stale: _Optional[bool] = ..., last_exit: _Optional[str] = ..., remark: _Optional[str] = ...) -> None: ...

class EndpointClient(_message.Message):
    __slots__ = ("pid", "process", "kind", "lookups", "lookup_hits", "writes", "connected")
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    pid: int
    process: str
    kind: str
    lookups: int
    lookup_hits: int
    writes: int
    connected: bool
    def __init__(self, pid: _Optional[int] = ..., process: _Optional[str] = ..., kind: _Optional[str] = ..., lookups: _Optional[int] = ..., lookup_hits: _Optional[int] = ..., writes: _Optional[int] = ..., connected: _Optional[bool] = ...) -> None: ...

class Hugepages(_message.Message):
    __slots__ = ("page_size_bytes", "asked_pages", "got_pages", "problem")
    PAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASKED_PAGES_FIELD_NUMBER: _ClassVar[int]
    GOT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    page_size_bytes: int
    asked_pages: int
    got_pages: int
    problem: str
    def __init__(self, page_size_bytes: _Optional[int] = ..., asked_pages: _Optional[int] = ..., got_pages: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "series", "emulated", "epoch", "master", "backend", "version", "memcache_version", "tier_state", "tier_reasons", "tiers", "units", "clients", "hugepages", "problems", "endpoint_mode", "started", "at", "role", "master_why", "view_age_seconds", "paused", "last_decision", "next_decision", "dry_run")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    EMULATED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMCACHE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIER_STATE_FIELD_NUMBER: _ClassVar[int]
    TIER_REASONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    HUGEPAGES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_MODE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MASTER_WHY_FIELD_NUMBER: _ClassVar[int]
    VIEW_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_DECISION_FIELD_NUMBER: _ClassVar[int]
    NEXT_DECISION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    node: str
    series: str
    emulated: bool
    epoch: int
    master: str
    backend: str
    version: str
    memcache_version: str
    tier_state: str
    tier_reasons: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    units: _containers.RepeatedCompositeFieldContainer[Unit]
    clients: _containers.RepeatedCompositeFieldContainer[EndpointClient]
    hugepages: Hugepages
    problems: _containers.RepeatedScalarFieldContainer[str]
    endpoint_mode: str
    started: float
    at: float
    role: str
    master_why: str
    view_age_seconds: float
    paused: bool
    last_decision: Decision
    next_decision: Decision
    dry_run: bool
    def __init__(self, node: _Optional[str] = ..., series: _Optional[str] = ..., emulated: _Optional[bool] = ..., epoch: _Optional[int] = ..., master: _Optional[str] = ..., backend: _Optional[str] = ..., version: _Optional[str] = ..., memcache_version: _Optional[str] = ..., tier_state: _Optional[str] = ..., tier_reasons: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., units: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[EndpointClient, _Mapping]]] = ..., hugepages: _Optional[_Union[Hugepages, _Mapping]] = ..., problems: _Optional[_Iterable[str]] = ..., endpoint_mode: _Optional[str] = ..., started: _Optional[float] = ..., at: _Optional[float] = ..., role: _Optional[str] = ..., master_why: _Optional[str] = ..., view_age_seconds: _Optional[float] = ..., paused: _Optional[bool] = ..., last_decision: _Optional[_Union[Decision, _Mapping]] = ..., next_decision: _Optional[_Union[Decision, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanReply(_message.Message):
    __slots__ = ("plan_json",)
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    def __init__(self, plan_json: _Optional[str] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("restart_changed",)
    RESTART_CHANGED_FIELD_NUMBER: _ClassVar[int]
    restart_changed: bool
    def __init__(self, restart_changed: _Optional[bool] = ...) -> None: ...

class ReloadReply(_message.Message):
    __slots__ = ("changed_files", "new_units", "removed_units", "stale_units", "notes")
    CHANGED_FILES_FIELD_NUMBER: _ClassVar[int]
    NEW_UNITS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_UNITS_FIELD_NUMBER: _ClassVar[int]
    STALE_UNITS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    changed_files: _containers.RepeatedScalarFieldContainer[str]
    new_units: _containers.RepeatedScalarFieldContainer[str]
    removed_units: _containers.RepeatedScalarFieldContainer[str]
    stale_units: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed_files: _Optional[_Iterable[str]] = ..., new_units: _Optional[_Iterable[str]] = ..., removed_units: _Optional[_Iterable[str]] = ..., stale_units: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "last", "cluster")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    last: int
    cluster: bool
    def __init__(self, follow: _Optional[bool] = ..., last: _Optional[int] = ..., cluster: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "at", "severity", "kind", "unit", "message", "node")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    id: int
    at: float
    severity: str
    kind: str
    unit: str
    message: str
    node: str
    def __init__(self, id: _Optional[int] = ..., at: _Optional[float] = ..., severity: _Optional[str] = ..., kind: _Optional[str] = ..., unit: _Optional[str] = ..., message: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("unit", "lines", "follow")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    unit: str
    lines: int
    follow: bool
    def __init__(self, unit: _Optional[str] = ..., lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ControlUnitRequest(_message.Message):
    __slots__ = ("unit", "action", "wait_seconds")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[ControlUnitRequest.Action]
        ACTION_START: _ClassVar[ControlUnitRequest.Action]
        ACTION_STOP: _ClassVar[ControlUnitRequest.Action]
        ACTION_RESTART: _ClassVar[ControlUnitRequest.Action]
        ACTION_DRAIN: _ClassVar[ControlUnitRequest.Action]
    ACTION_UNSPECIFIED: ControlUnitRequest.Action
    ACTION_START: ControlUnitRequest.Action
    ACTION_STOP: ControlUnitRequest.Action
    ACTION_RESTART: ControlUnitRequest.Action
    ACTION_DRAIN: ControlUnitRequest.Action
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    action: ControlUnitRequest.Action
    wait_seconds: float
    def __init__(self, unit: _Optional[str] = ..., action: _Optional[_Union[ControlUnitRequest.Action, str]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class ControlUnitReply(_message.Message):
    __slots__ = ("unit", "note")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    unit: Unit
    note: str
    def __init__(self, unit: _Optional[_Union[Unit, _Mapping]] = ..., note: _Optional[str] = ...) -> None: ...

class StopAllRequest(_message.Message):
    __slots__ = ("wait_seconds",)
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wait_seconds: float
    def __init__(self, wait_seconds: _Optional[float] = ...) -> None: ...

class StopAllReply(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[Unit]
    def __init__(self, units: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PurgeReply(_message.Message):
    __slots__ = ("removed_keys", "seconds")
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    removed_keys: int
    seconds: float
    def __init__(self, removed_keys: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SwitchL3Request(_message.Message):
    __slots__ = ("unit", "on", "wait_seconds")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    on: bool
    wait_seconds: float
    def __init__(self, unit: _Optional[str] = ..., on: _Optional[bool] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class SwitchL3Reply(_message.Message):
    __slots__ = ("unit", "on", "seconds", "note")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    unit: str
    on: bool
    seconds: float
    note: str
    def __init__(self, unit: _Optional[str] = ..., on: _Optional[bool] = ..., seconds: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class PluginsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Plugin(_message.Message):
    __slots__ = ("name", "distribution", "version", "drivers", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRIVERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    distribution: str
    version: str
    drivers: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    def __init__(self, name: _Optional[str] = ..., distribution: _Optional[str] = ..., version: _Optional[str] = ..., drivers: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ...) -> None: ...

class PluginsReply(_message.Message):
    __slots__ = ("plugins",)
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    plugins: _containers.RepeatedCompositeFieldContainer[Plugin]
    def __init__(self, plugins: _Optional[_Iterable[_Union[Plugin, _Mapping]]] = ...) -> None: ...

class VersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionReply(_message.Message):
    __slots__ = ("version", "api_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    api_version: int
    def __init__(self, version: _Optional[str] = ..., api_version: _Optional[int] = ...) -> None: ...
