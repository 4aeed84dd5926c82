"""Finds the files a model specification means: a directory, a GGUF file or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.config import ModelConfig, read_config
from stepahead.worker.model.family_source import FamilySource
from stepahead.worker.model.gguf_parts import first_file
from stepahead.worker.model.random_checkpoint import PREFIX as RANDOM_PREFIX
from stepahead.worker.model.random_checkpoint import RandomCheckpoint
from stepahead.worker.model.weights import SafetensorsSource, WeightSource

SPEC_FORMS = (
    "a directory with config.json and safetensors or one GGUF model, a FILE.gguf (of several the first), a hub id "
    "OWNER/NAME, toy:NAME (score-table, running-sum, window-sum, tagged, sleep), or random:NAME (llama-8b, "
    "llama-tiny)"
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]


class Checkpoint(Protocol):
    """An opened model. `close` ends reading; tensors read before stay valid."""

    name: str
    config: ModelConfig

    @property
    def weights(self) -> WeightSource:
        """The tensors."""
        ...

    @property
    def path(self) -> Path:
        """The directory or the file, for `open_checkpoint`."""
        ...

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to make a bundle of."""
        ...

    def tokenizer_bundle(self) -> bytes:
        """Returns the tokenizer bundle, empty where there is no tokenizer; costs memory, see `bundle_process`."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


class DirectoryCheckpoint:
    """A Hugging Face model directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.config = read_config(directory)
        self._files = SafetensorsSource(directory)
        self.weights = FamilySource(self._files, self.config, add_one=self.config.offset_norms)
        self.path = directory

    @property
    def has_tokenizer(self) -> bool:
        """See `Checkpoint.has_tokenizer`."""
        return any((self.path / name).exists() for name in _TOKENIZER_FILES)

    def tokenizer_bundle(self) -> bytes:
        """See `Checkpoint.tokenizer_bundle`."""
        from stepahead.worker.model.tokenizer_bundle import bundle_from_directory  # noqa: PLC0415 - slow import

        return bundle_from_directory(self.path) if self.has_tokenizer else b""

    def close(self) -> None:
        """See `Checkpoint.close`."""
        self._files.close()


def open_checkpoint(spec: str) -> Checkpoint:
    """Opens what `spec` names; a hub id may be downloaded first.

    Raises:
        OptionRefused: nothing is there that fits.
        ModelError: the model cannot be read or is not supported.
    """
    if spec.startswith(RANDOM_PREFIX):
        return RandomCheckpoint(spec)
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise OptionRefused(f"--model {spec}: no such file")
        return _open_gguf(path)
    if path.is_dir():
        files = sorted({first_file(file) for file in path.glob("*.gguf")})
        if not files or (path / "config.json").exists():
            return DirectoryCheckpoint(path, path.resolve().name)
        if len(files) > 1:
            raise OptionRefused(
                f"--model {path} holds several GGUF models; name one: {', '.join(file.name for file in files)}"
            )
        return _open_gguf(files[0])
    if _HUB_ID.fullmatch(spec):
        return DirectoryCheckpoint(_download(spec), spec)
    raise OptionRefused(f"--model {spec!r} is nothing that exists here; a model is {SPEC_FORMS}")


def _open_gguf(path: Path) -> Checkpoint:
    from stepahead.worker.model.gguf_checkpoint import GgufCheckpoint  # noqa: PLC0415 - slow import

    return GgufCheckpoint(path)


def _download(hub_id: str) -> Path:
    import huggingface_hub  # noqa: PLC0415 - slow import

    try:
        download = cast("Callable[..., str]", huggingface_hub.snapshot_download)  # pyright: ignore[reportUnknownMemberType]
        return Path(download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        # The hub's own errors derive from one of these; their texts run over many lines.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"hub model {hub_id!r} is not in the local cache and cannot be fetched ({reason}); give a model "
            f"directory or a GGUF file, or go online once"
        ) from error
