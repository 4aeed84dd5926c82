"""Images, compose files and manifests."""
