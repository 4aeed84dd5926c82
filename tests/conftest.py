"""Settings of every test: how many examples Hypothesis tries.

STEPAHEAD_HYPOTHESIS_PROFILE picks a profile: `dev` (default), `ci` (more, the same ones every time), `nightly`.
No profile has a deadline: how long an example takes says something about the machine, not about the code.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("STEPAHEAD_HYPOTHESIS_PROFILE", "dev"))
