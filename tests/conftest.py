"""What all tests share."""

from hypothesis import HealthCheck, settings

# Properties are about values. How long an example takes on a busy machine proves nothing.
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")
