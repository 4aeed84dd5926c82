"""ModelService: what is served, and its tokenizer."""

from __future__ import annotations

from typing import cast

import grpc
from typing_extensions import override

from stepahead.scheduler.errors import FieldViolation, InvalidRequest, NotFound
from stepahead.scheduler.front_end import FrontEnd
from stepahead.scheduler.guard import Context, guarded
from stepahead.scheduler.prompt_input import prompt_token_ids
from stepahead.scheduler.served_model import ServedModel
from stepahead.scheduler.text.errors import TextError
from stepahead.scheduler.validation import check_model
from stepahead.v1 import generation_pb2, generation_pb2_grpc

CHUNK_BYTES = 2**20


class ModelService(generation_pb2_grpc.ModelServiceServicer):
    """See the proto for what each call promises."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    def _model(self, name: str) -> ServedModel:
        model = self._front_end.cluster.require_model()
        check_model(name, model)
        return model

    @override
    async def GetModel(
        self,
        request: generation_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetModelRequest, generation_pb2.GetModelResponse],
    ) -> generation_pb2.GetModelResponse:
        return await guarded(cast(Context, context), self._get_model(request))

    async def _get_model(self, request: generation_pb2.GetModelRequest) -> generation_pb2.GetModelResponse:
        settings = self._front_end.settings
        return self._model(request.model).to_proto(
            default_max_tokens=settings.default_max_tokens, max_waiting=settings.max_waiting_requests
        )

    @override
    async def Tokenize(
        self,
        request: generation_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[generation_pb2.TokenizeRequest, generation_pb2.TokenizeResponse],
    ) -> generation_pb2.TokenizeResponse:
        return await guarded(cast(Context, context), self._tokenize(request))

    async def _tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        model = self._model(request.model)
        return generation_pb2.TokenizeResponse(token_ids=await prompt_token_ids(request, model))

    @override
    async def Detokenize(
        self,
        request: generation_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[generation_pb2.DetokenizeRequest, generation_pb2.DetokenizeResponse],
    ) -> generation_pb2.DetokenizeResponse:
        return await guarded(cast(Context, context), self._detokenize(request))

    async def _detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        model = self._model(request.model)
        if model.codec is None:
            raise InvalidRequest([FieldViolation("token_ids", "the model has no tokenizer")])
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        for index, token_id in enumerate(request.token_ids):
            if token_id >= model.vocab_size:
                text = f"{token_id} is not below the vocabulary size {model.vocab_size}"
                raise InvalidRequest([FieldViolation(f"token_ids[{index}]", text)])
        try:
            text = model.codec.decode(request.token_ids, skip_special_tokens=skip)
        except TextError as error:
            raise InvalidRequest([FieldViolation("token_ids", str(error))]) from error
        return generation_pb2.DetokenizeResponse(text=text)

    @override
    async def GetTokenizer(  # pyright: ignore[reportIncompatibleMethodOverride] - writes instead of yielding
        self,
        request: generation_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetTokenizerRequest, generation_pb2.GetTokenizerResponse],
    ) -> None:
        await guarded(cast(Context, context), self._get_tokenizer(request, context))

    async def _get_tokenizer(
        self,
        request: generation_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GetTokenizerRequest, generation_pb2.GetTokenizerResponse],
    ) -> None:
        model = self._model(request.model)
        bundle = model.tokenizer_bundle
        if not bundle:
            raise NotFound("tokenizer", model.name, "model: it has no tokenizer")
        for start in range(0, len(bundle), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(bundle)
            await context.write(
                generation_pb2.GetTokenizerResponse(
                    data=bundle[start : start + CHUNK_BYTES],
                    sha256=model.tokenizer_sha256 if last else "",
                )
            )
