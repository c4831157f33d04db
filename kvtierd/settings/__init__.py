"""The operator's settings: one TOML file, drop-ins beside it, ``KVTIERD_*`` from the environment."""

from kvtierd.settings.load import SettingsProblem, check_settings, load_settings
from kvtierd.settings.model import (
    ClusterSettings,
    DaemonSettings,
    EngineSettings,
    MetaSettings,
    NodeSettings,
    ObserveSettings,
    PathsSettings,
    PeerSettings,
    PolicySettings,
    PoolSettings,
    Settings,
)

__all__ = [
    "ClusterSettings",
    "DaemonSettings",
    "EngineSettings",
    "MetaSettings",
    "NodeSettings",
    "ObserveSettings",
    "PathsSettings",
    "PeerSettings",
    "PolicySettings",
    "PoolSettings",
    "Settings",
    "SettingsProblem",
    "check_settings",
    "load_settings",
]
