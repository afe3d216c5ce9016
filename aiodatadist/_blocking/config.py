"""The LLMConfig with upstream's defaults: a mode that was not switched on is off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from aiodatadist import legacy
from aiodatadist._config import llm_config as config
from aiodatadist._config import option_rules as rules
from aiodatadist._values import checks
from aiodatadist._values.signatures import readable

_MODES: Final = {
    "enable_cache_manager": "llm.EnableCacheManager",
    "enable_remote_cache_accessible": "llm.EnableRemoteCacheAccessible",
}
KEY_FILE: Final = "AIODATADIST_AUTH_KEY_FILE"


@readable
class LLMConfig(config.LLMConfig):
    """Upstream's options; see :class:`aiodatadist.LLMConfig`, in which both modes are on unless they are switched off.

    Here they read as off until they are set, and are in the option dictionary only then.
    """

    enable_cache_manager: Annotated[bool, rules.flag("enable_cache_manager")] = False
    enable_remote_cache_accessible: Annotated[bool, rules.flag("enable_remote_cache_accessible")] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**dict.fromkeys(_MODES, False), **options})
        self.model_fields_set.difference_update(_MODES.keys() - options.keys())

    def generate_options(self) -> dict[str, str]:
        """Return a new option dictionary for ``LLMDataDist.init``."""
        unset = {key for field, key in _MODES.items() if field not in self.model_fields_set}
        return {key: value for key, value in super().generate_options().items() if key not in unset}


LlmConfig = LLMConfig


def config_of(options: Mapping[str, str] | config.LLMConfig) -> config.LLMConfig:
    """Return the configuration with which a cluster is initialised.

    In a dictionary a missing mode is off, unless another option implies it. A key that is needed to listen on a network
    is in no dictionary: it is read from the file that ``AIODATADIST_AUTH_KEY_FILE`` names, or from a folder of trust.

    Raises:
        TypeError, ValueError, ParamInvalid: if an option is wrong, or the file cannot be read, or others may read or
            write it.
    """
    if isinstance(options, config.LLMConfig):
        return options
    wanted = legacy.LLMConfig.from_options(checks.instance(options, "options", dict))
    add_key(wanted)
    return wanted


def add_key(wanted: config.LLMConfig) -> None:
    """Read a configuration's key from the file that ``AIODATADIST_AUTH_KEY_FILE`` names, unless it has a folder of trust.

    Raises:
        ParamInvalid: if the file cannot be read, or others may read or write it.
    """
    file = os.environ.get(KEY_FILE)
    if file and wanted.trust is None:
        config.use_key_file(wanted, Path(file), f"the file of {KEY_FILE}")
