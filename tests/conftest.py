"""Settings of hypothesis for all tests: no result depends on how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ringtrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ringtrain")
