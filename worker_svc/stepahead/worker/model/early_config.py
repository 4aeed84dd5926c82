"""A model's configuration before anything is loaded, downloaded or imported that takes long."""

from __future__ import annotations

from pathlib import Path

from stepahead.worker.model.config import ModelConfig, read_config


def early_config(spec: str) -> ModelConfig | None:
    """Returns the configuration of files that lie here; None for what `checkpoint` alone can find.

    Args:
        spec: as `checkpoint.open_checkpoint` takes it.

    Raises:
        ModelError: it cannot be read, or asks for something unsupported.
    """
    path = Path(spec).expanduser()
    if (path / "config.json").is_file():
        return read_config(path)
    if path.suffix != ".gguf" or not path.is_file():
        return None
    # Half a second, which a directory need not spend.
    from stepahead.worker.model.gguf_config import GgufMetadata  # noqa: PLC0415
    from stepahead.worker.model.gguf_parts import part_files  # noqa: PLC0415
    from stepahead.worker.model.gguf_reader import read_gguf  # noqa: PLC0415

    return GgufMetadata(*[read_gguf(file) for file in part_files(path)]).config()
