"""What all tests share."""

from hypothesis import HealthCheck, settings

# Properties are about values. How long an example takes on a busy machine proves nothing.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples on each run: what fails then is what was changed. To look for new ones, run the tests with
# `--hypothesis-profile explore`.
settings.register_profile("outrider", ANY_SPEED, derandomize=True)
settings.register_profile("explore", ANY_SPEED, print_blob=True)
settings.load_profile("outrider")
