"""Tests of Stepahead: mirrors the source tree; simulation/, conformance/ and e2e/ cut across it."""
