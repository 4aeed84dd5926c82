"""The scheduler: owns request state and every batching decision."""
