"""[[engine]]: one inference engine of a host."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvtierd.quantities import parse_cpu_list
from kvtierd.settings.section import AbsolutePath, Port, RunnerSettings, Size, UnitName


class EngineSettings(RunnerSettings):
    """[[engine]]: one inference engine on this host."""

    name: UnitName = Field(description="name of the engine", examples=["qwen3"])
    plugin: str = Field(
        description="which engine driver runs it", examples=["vllm-ascend", "sglang", "refengine"]
    )
    model: str = Field(
        "", description="model path or name, as the engine takes it", examples=["/data/weights/Qwen3-32B"]
    )
    nodes: tuple[UnitName, ...] = Field(
        (), description="nodes that run it; default: every node that reads this file", examples=[["host-a"]]
    )
    devices: tuple[Annotated[int, Field(ge=0, le=63)], ...] = Field(
        (), description="NPU devices (dies) it uses", examples=[[0, 1]]
    )
    port: Port | None = Field(None, description="its HTTP port; default: the driver's", examples=[8113])
    host: str = Field(
        "127.0.0.1", description="address its HTTP server listens on", examples=["127.0.0.1", "0.0.0.0"]
    )
    user: str | None = Field(None, description="user that runs it; default: kvtierd's own")
    group: UnitName | None = Field(
        None, description="engines of one group replace each other: a rolling restart keeps one of them ready",
        examples=["chat"],
    )  # fmt: skip
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="its part in prefill/decode disaggregation", examples=["both", "prefill"]
    )
    version: str | None = Field(
        None, pattern=r"^\d+(\.\d+)*[\w.+-]*$", description="version of the engine; default: as installed",
        examples=["0.13.0"],
    )  # fmt: skip
    l2: Size | None = Field(
        None,
        description="host memory for the engine's own second tier, for the whole engine",
        examples=["64GiB"],
    )
    l3_switch: bool = Field(
        False,
        description="its L3 can be taken off and on while it runs (kvtierctl l3); for SGLang this sets an admin key",
        examples=[True],
    )
    shm_size: str = Field(
        "500g", description="size of the container's /dev/shm (runner = docker)", examples=["500g"]
    )
    python: AbsolutePath | None = Field(
        None, description="its interpreter; default: [meta] python", examples=["/usr/bin/python3"]
    )
    cpus: str = Field(
        "auto",
        description="CPUs it may use: auto (those of its devices' NUMA nodes), all, or a list",
        examples=["auto", "all", "0-23,96-119"],
    )
    nice: int = Field(
        0, ge=-20, le=19, description="its priority: -20 is the highest, 19 the lowest", examples=[5]
    )
    memory_max: Size | None = Field(
        None,
        description="most host memory it may take before the kernel ends it; not hugepages. Needs systemd or docker",
        examples=["256GiB"],
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="the engine's own options, by their name",
        examples=[{"max-model-len": 32768}],
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="environment on top of what kvtierd sets",
        examples=[{"HCCL_BUFFSIZE": "1024"}],
    )

    @model_validator(mode="after")
    def _host(self) -> Self:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"host {self.host!r} is not an IP address") from None
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one device twice")
        if self.cpus not in {"auto", "all"}:
            parse_cpu_list(self.cpus)
        return self
