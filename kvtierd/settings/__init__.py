"""The operator's settings: one TOML file, drop-ins beside it, ``KVTIERD_*`` from the environment."""

from kvtierd.settings.cluster import ClusterSettings, PeerSettings
from kvtierd.settings.engine import EngineSettings
from kvtierd.settings.load import SettingsProblem, check_settings, load_settings
from kvtierd.settings.model import (
    DaemonSettings,
    MetaSettings,
    NodeSettings,
    PathsSettings,
    PoolSettings,
    Settings,
)
from kvtierd.settings.observe import ObserveSettings
from kvtierd.settings.policy import PolicySettings

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
