"""The one model this scheduler serves, as its workers describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepahead.scheduler.text.codec import TextCodec
from stepahead.v1 import generation_pb2, worker_pb2

MAX_PROMPT_BYTES = 4 * 2**20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_NUM_CHOICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that leaves sampling open gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Facts of the model; equal on all workers (the fingerprint says so)."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    largest_window: int = 0
    """Positions that its layers with a sliding window see at most, if workers keep no more; 0: there are none."""
    codec: TextCodec | None
    tokenizer_sha256: str
    tokenizer_bundle: bytes = field(default=b"", repr=False)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @classmethod
    def from_worker(
        cls, info: worker_pb2.GetWorkerInfoResponse, *, codec: TextCodec | None, bundle: bytes, sha256: str
    ) -> ServedModel:
        """From what the first worker answered."""
        return cls(
            name=info.model.name,
            fingerprint=info.model.fingerprint,
            vocab_size=info.model.vocab_size,
            max_model_len=info.limits.max_model_len,
            eos_token_ids=frozenset(info.model.eos_token_ids),
            bos_token_id=info.model.bos_token_id if info.model.HasField("bos_token_id") else None,
            largest_window=max((group.window_tokens for group in info.limits.kv_groups), default=0),
            codec=codec,
            tokenizer_sha256=sha256,
            tokenizer_bundle=bundle,
            defaults=_defaults(codec),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether it can be asked in conversations."""
        return self.codec is not None and self.codec.has_chat_template

    def difference(self, info: worker_pb2.GetWorkerInfoResponse) -> str | None:
        """Why a further worker cannot join, or None."""
        if info.model.fingerprint != self.fingerprint:
            return f"it serves {info.model.name} ({info.model.fingerprint[:12]}), not {self.name}"
        if info.limits.max_model_len != self.max_model_len:
            return f"its max_model_len is {info.limits.max_model_len}, not {self.max_model_len}"
        return None

    def to_proto(self, *, default_max_tokens: int, max_waiting: int) -> generation_pb2.GetModelResponse:
        """As GetModel answers."""
        response = generation_pb2.GetModelResponse(
            model=self.name,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=sorted(self.eos_token_ids),
            has_chat_template=self.has_chat_template,
            has_tokenizer=self.codec is not None,
            tokenizer_sha256=self.tokenizer_sha256,
            default_sampling=generation_pb2.SamplingParams(
                temperature=self.defaults.temperature,
                top_p=self.defaults.top_p,
                top_k=self.defaults.top_k,
                min_p=self.defaults.min_p,
            ),
            limits=generation_pb2.ApiLimits(
                default_max_tokens=default_max_tokens,
                max_stop_strings=MAX_STOP_STRINGS,
                max_stop_string_bytes=MAX_STOP_STRING_BYTES,
                max_stop_token_ids=MAX_STOP_TOKEN_IDS,
                max_num_choices=MAX_NUM_CHOICES,
                max_prompt_bytes=MAX_PROMPT_BYTES,
                max_waiting_requests=max_waiting,
            ),
        )
        if self.bos_token_id is not None:
            response.bos_token_id = self.bos_token_id
        return response


def _defaults(codec: TextCodec | None) -> SamplingDefaults:
    """The model's generation defaults where they are numbers that make sense, ours elsewhere."""
    given: Mapping[str, object] = codec.generation_defaults if codec is not None else {}
    base = SamplingDefaults()

    def number(name: str, default: float, low: float, high: float) -> float:
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        return default

    return SamplingDefaults(
        temperature=number("temperature", base.temperature, 0.0, 100.0),
        top_p=number("top_p", base.top_p, 1e-6, 1.0),
        top_k=int(number("top_k", base.top_k, 0, 2**31 - 1)),
        min_p=number("min_p", base.min_p, 0.0, 1.0),
    )
