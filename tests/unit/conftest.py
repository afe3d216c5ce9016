"""Property tests may take their time: this machine is shared, and a slow example is not a wrong one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("aiodatadist", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("aiodatadist")
