"""The worker: owns a device, runs step plans."""
