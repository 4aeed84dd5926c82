"""The model's tokenizer as the scheduler uses it: text and conversations to token ids, token ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenizers import Tokenizer

from stepahead.scheduler.text.chat_template import ChatTemplate, ChatTurn
from stepahead.scheduler.text.decoder_plan import plan_decoder
from stepahead.scheduler.text.errors import ChatTemplateError, EncodeError
from stepahead.scheduler.text.native import panics_as
from stepahead.scheduler.text.pieces import PieceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    """What bundle.json adds to tokenizer.json. Defaults describe a tokenizer that comes alone."""

    bos_token_id: int | None = None
    # Ids that end a choice unless the request ignores them.
    eos_token_ids: tuple[int, ...] = ()
    # Whether encode() makes sure that a text begins with bos_token_id.
    add_bos_token: bool = False
    # Sampling defaults of the model, as in generation_config.json.
    generation_defaults: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


class TextCodec:
    """Encodes and decodes with one tokenizer. Safe to share between threads; holds nothing of a request."""

    __slots__ = (
        "_all_pieces",
        "_chat_template",
        "_special_ids",
        "_text_pieces",
        "_tokenizer",
        "_vocab_size",
        "settings",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        settings: CodecSettings | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Wraps a tokenizer, which must not be changed afterwards.

        Raises:
            BundleError: The tokenizer's decoder cannot be streamed (decoder_plan.py).
        """
        # A tokenizer.json may carry the settings of its training run; a server neither cuts nor pads.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        plan = plan_decoder(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.settings = settings or CodecSettings()
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._all_pieces = PieceTable(tokenizer, plan, frozenset())
        self._text_pieces = PieceTable(tokenizer, plan, self._special_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id of the tokenizer; the model's logits may be wider."""
        return self._vocab_size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat() can work."""
        return self._chat_template is not None

    @property
    def generation_defaults(self) -> Mapping[str, object]:
        """The model's sampling defaults, as in generation_config.json."""
        return self.settings.generation_defaults

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer's post-processor adds.

        The list can be empty (an empty text, a tokenizer without a begin-of-sequence token): the caller
        refuses that (rule V1).

        Raises:
            EncodeError: `text` is not valid Unicode.
        """
        ids = self._encode(text, add_special_tokens=True)
        bos_id = self.settings.bos_token_id
        if self.settings.add_bos_token and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def encode_chat(self, messages: Sequence[ChatTurn], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation. The template writes the special tokens; none are added to its text.

        Raises:
            ChatTemplateError: There is no template, or it cannot render `messages`.
            EncodeError: The rendered text is not valid Unicode.
        """
        if self._chat_template is None:
            raise ChatTemplateError("chat: the model has no chat template")
        text = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole output. Ids unknown to the tokenizer have no text.

        Raises:
            DetokenizeError: An id is no token id of any vocabulary.
        """
        return self.pieces(skip_special_tokens=skip_special_tokens).decode(token_ids)

    def pieces(self, *, skip_special_tokens: bool) -> PieceTable:
        """The shared table of token bytes."""
        return self._text_pieces if skip_special_tokens else self._all_pieces

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            with panics_as(EncodeError, "text"):
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            # What the native code says about a lone surrogate.
            raise EncodeError("text: not valid Unicode") from error
