"""The files of `conf/` as Hydra reads them, with one rule more: a boolean field holds true or false.

OmegaConf takes every number and some words for booleans when it merges a file into the schema (``fsdp_cpu: 7`` is true), and
nothing of it is left to see in the composition.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.file_config_source import FileConfigSource

from europa_exp.config import io
from europa_exp.config.errors import ConfigError

if TYPE_CHECKING:
    from hydra.plugins.config_source import ConfigResult

SCHEME = "conf"


class ConfSource(FileConfigSource):
    """Reads `conf/`. Loading a file raises ConfigError that names it and what it gives to boolean fields instead."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        from omegaconf import OmegaConf

        result = super().load_config(config_path)
        group = config_path.rpartition("/")[0].replace("/", ".")
        package = result.header.get("package") or group
        package = {"_global_": "", "_group_": group}.get(package, package)
        content = OmegaConf.to_container(result.config, resolve=False)
        for name in reversed(package.split(".") if package else []):
            content = {name: content}
        if problems := io.wrong_booleans(content, Path(self.path, self._normalize_file_name(config_path))):
            raise ConfigError([("", problem) for problem in problems])
        return result
