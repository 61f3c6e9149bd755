"""TargetService: the gRPC edge. Translates, follows a sequence, never computes."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import grpc

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError, SSDError
from ssd_engine.text.completion import Completion, FinishReason
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.engine.client import EngineGone
from ssd_serving.engine.records import Beat
from ssd_serving.observability.telemetry import Spans
from ssd_serving.rpc.messages import Kind
from ssd_serving.rpc.plane_messages import encode_report
from ssd_serving.rpc.status import (
    HandedOver,
    NotServing,
    ReaderBehind,
    ReaderStalled,
    RequestFailed,
    ServerFull,
    abort,
)
from ssd_serving.rpc.streams import write_in_time
from ssd_serving.security.access import Access
from ssd_serving.security.allowances import Accounts, IdentityAccount
from ssd_target.front.backlog import BEAT_SECONDS, Backlog, Item, size_of
from ssd_target.front.engine_client import EngineClient
from ssd_target.front.metrics import TargetMetrics
from ssd_target.front.parsing import Parser
from ssd_target.front.prompt_event import PromptEvents, logprobs_message
from ssd_target.front.request_watch import RequestWatch, Watches
from ssd_target.front.requests import ParsedRequest, RequestLimits
from ssd_target.front.speculation_requests import (
    SpeculationTerms,
    speculation_message,
    speculation_stats,
    unknown_values,
)
from ssd_target.front.tokenizing import detokenize, tokenize
from ssd_target.links.links import Links
from ssd_target.records.engine_records import Delta, TargetEngineStats
from ssd_target.records.speculation_options import SpeculationRequest
from ssd_target.records.speculation_stats import SpeculationStats

SERVICE = "ssd.v1.TargetService"
MAX_GATHERED = 16_384  # bytes of deltas, about, in one message: a slow reader takes it in time
RETRY_BOUNDS = (0.1, 30.0)
LOADING_SECONDS = 2.0  # after which it is worth asking again
FAILURES = (EngineGone, RequestFailed, ReaderStalled, ReaderBehind)
REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
BEAT = pb.GenerateResponse(beat=pb.GenerateBeat())
Answer = TypeVar("Answer")


@dataclass
class TargetServing:
    """Everything that a request needs; it is there once the model is loaded."""

    engine: EngineClient
    tokenizer: Tokenizer
    limits: RequestLimits
    info: pb.GetModelInfoResponse
    max_live: int
    max_num_seqs: int
    terms: SpeculationTerms
    links: Links
    share_prefixes: bool = False


class TargetServicer:
    def __init__(
        self,
        metrics: TargetMetrics,
        write_timeout: float,
        access: Access,
        accounts: Accounts,
        spans: Spans,
        log_prompts: bool,
    ) -> None:
        self._metrics = metrics
        self._watches = Watches(metrics, spans, log_prompts)
        self._access = access
        self._accounts = accounts
        self._write_timeout = write_timeout
        self._mean_seconds = 1.0
        self._parser = Parser()
        self.serving: TargetServing | None = None
        self._active: set[grpc.aio.ServicerContext] = set()
        self.draining = False

    @property
    def num_active(self) -> int:
        """Calls that have not ended, GetModelInfo aside."""
        return len(self._active)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What has a prompt takes raw bytes: a long one is parsed away from the event loop."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate,
                    response_serializer=pb.GenerateResponse.SerializeToString,
                ),
                "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                    self.get_model_info,
                    request_deserializer=pb.GetModelInfoRequest.FromString,
                    response_serializer=pb.GetModelInfoResponse.SerializeToString,
                ),
                "Tokenize": grpc.unary_unary_rpc_method_handler(
                    self.tokenize, response_serializer=pb.TokenizeResponse.SerializeToString
                ),
                "Detokenize": grpc.unary_unary_rpc_method_handler(
                    self.detokenize, response_serializer=pb.DetokenizeResponse.SerializeToString
                ),
            },
        )

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        try:
            return _with_endpoints(self._ready())
        except SSDError as error:
            await abort(context, error)

    async def tokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        return await self._answer(pb.TokenizeRequest, data, tokenize, context)

    async def detokenize(
        self, data: bytes, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        return await self._answer(pb.DetokenizeRequest, data, detokenize, context)

    async def _answer(
        self,
        kind: type[Kind],
        data: bytes,
        answer: Callable[[Kind, Tokenizer, RequestLimits, int | None], Answer],
        context: grpc.aio.ServicerContext,
    ) -> Answer:
        """Admitted, counted and read as requests of Generate are, and answered with no engine."""
        self._enter(context)
        try:
            serving = self._admit()
            with self._accounts.request(self._access.identity(context)) as account:
                about = (serving.tokenizer, serving.limits, account.allowance.prompt_tokens)
                holder = self._access.holder(context)
                return await self._parser.read(
                    kind, data, lambda m: answer(m, *about), account, holder
                )
        except SSDError as error:
            await abort(context, error)

    async def generate(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        watch, outcome, problem = self._watches.begin(context), "cancelled", None
        self._enter(context)
        try:
            serving = self._admit()
            identity = self._access.identity(context)
            watch.known_as(identity=identity.name)
            with self._accounts.request(identity) as account:
                request = await self._parse(serving, data, account, watch, context)
                data = b""  # it may be large, and the request may take long
                response = await self._serve(serving, request, account, watch, context)
            outcome = pb.FinishReason.Name(response.finish.reason).rsplit("_", 1)[1].lower()
        except SSDError as error:
            problem = error
            watch.refused(data)
            outcome = _outcome(error)
            if isinstance(error, ReaderStalled | ReaderBehind):
                self._cut(context, error)
            await abort(context, error)
        finally:
            elapsed = watch.end(outcome, problem)
            if outcome in ("stop", "length"):
                self._mean_seconds += 0.1 * (elapsed - self._mean_seconds)

    async def _parse(
        self,
        serving: TargetServing,
        data: bytes,
        account: IdentityAccount,
        watch: RequestWatch,
        context: grpc.aio.ServicerContext,
    ) -> ParsedRequest:
        tokenizer, limits = serving.tokenizer, serving.limits
        holder = self._access.holder(context)
        request = await self._parser.parse(data, tokenizer, limits, account, holder)
        watch.known_as(request_id=request.request_id)
        self._refuse_while_draining()  # a drain may have begun meanwhile
        return request

    async def _serve(
        self,
        serving: TargetServing,
        request: ParsedRequest,
        account: IdentityAccount,
        watch: RequestWatch,
        context: grpc.aio.ServicerContext,
    ) -> pb.GenerateResponse:
        """Returns the last response."""
        speculation = serving.terms.settle(request.speculation, watch.trace_context)
        self._accounts.check_prompt(account, "prompt", len(request.prompt))
        self._accounts.spend(account, len(request.prompt) + len(request.generated))
        for field in unknown_values(request.speculation):
            self._metrics.unknown_values.labels(field).inc()
        stream = self._stream(serving, request, speculation, account, watch, context)
        async with aclosing(stream) as responses:
            async for response in responses:
                self._accounts.spend(account, len(response.tokens.token_ids))
                await write_in_time(context, response, self._write_timeout, "--write-timeout")
        return response

    def _enter(self, context: grpc.aio.ServicerContext) -> None:
        """Count the call for as long as it lasts, however it ends."""
        self._active.add(context)
        context.add_done_callback(lambda _: self._active.discard(context))

    def _cut(self, context: grpc.aio.ServicerContext, error: SSDError) -> None:
        """To gRPC the call lasts until its client has read all of it; to us it is over."""
        self._active.discard(context)
        bound = "write_timeout" if isinstance(error, ReaderStalled) else "backlog"
        self._metrics.streams_cut.labels(bound).inc()

    def _ready(self) -> TargetServing:
        if self.serving is None:
            raise NotServing(
                "the model is loading; readiness says when it can be used", LOADING_SECONDS
            )
        return self.serving

    def _admit(self) -> TargetServing:
        serving = self._ready()
        self._refuse_while_draining()
        if self.num_active + serving.engine.num_leaving > serving.max_live:
            wait = self._mean_seconds * serving.max_live / serving.max_num_seqs / 2
            wait = min(max(wait, RETRY_BOUNDS[0]), RETRY_BOUNDS[1])
            raise ServerFull(
                f"the server is full ({serving.max_live} requests running or waiting); "
                f"try again in {wait:.1f} s",
                wait,
            )
        return serving

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise NotServing("the server is draining; use another endpoint")

    async def _stream(
        self,
        serving: TargetServing,
        request: ParsedRequest,
        speculation: SpeculationRequest,
        account: IdentityAccount,
        watch: RequestWatch,
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        completion, cached, stats = request.completion, 0, SpeculationStats()
        spellings = serving.tokenizer.spelled_bytes if request.token_bytes else None
        sequence, deltas = serving.engine.open()

        def close(_: object = None) -> None:
            serving.engine.close(sequence, completion.finish is not None)

        # However the call ends, also in the middle of a write, the sequence ends with it.
        context.add_done_callback(close)
        try:
            if completion.finish is None:
                shared = serving.share_prefixes
                record = request.submit(sequence, speculation, account.identity.name, shared)
                serving.engine.submit(record, account)
            watch.started(request, sequence, lambda: serving.tokenizer.text_of(request.prompt))
            yield _started(request, sequence, serving)
            spelled = serving.tokenizer.spelled_bytes
            prompt = PromptEvents(spelled, request.prompt, request.token_bytes)
            if request.prompt_logprobs is not None:
                yield prompt.first()
            elif request.return_prompt:
                for event in prompt.unscored():
                    yield event
            while completion.finish is None:
                batch = await next_committed(deltas)
                if not batch:
                    yield BEAT
                    continue
                for scores in [delta.prompt_scores for delta in batch if delta.prompt_scores]:
                    for response in prompt.scored(scores, request.prompt_logprobs or 0):
                        yield response
                batch = [delta for delta in batch if not delta.prompt_scores]
                if not batch:
                    continue
                watch.deltas(batch)
                cached, stats = batch[-1].cached_tokens, batch[-1].speculation or stats
                response = _tokens(batch, completion, spellings)
                watch.text(response.tokens.text)
                yield response
        finally:
            close()
        said = speculation_stats(speculation, stats)
        said.synthetic_acceptance = serving.info.synthetic_acceptance
        yield _finish(request, completion, cached, said)


def _outcome(error: SSDError) -> str:
    """The outcome of a request that was not finished, as metrics name it."""
    if isinstance(error, HandedOver):
        return "handed_over"
    return "error" if isinstance(error, FAILURES) else "refused"


async def next_committed(deltas: Backlog) -> list[Delta]:
    """Wait for one delta, then take all that have gathered: a slow reader gets larger pieces. An
    error is raised only after what was committed before it. Nothing, where the engine goes on and
    has none yet."""
    first = await deltas.get()
    if isinstance(first, Beat):
        return []
    if not _is_committed(first):
        raise _failure(first)
    batch = [first]
    size = size_of(first)
    while not (deltas.empty() or batch[-1].finished or size >= MAX_GATHERED):
        if not _is_committed(head := deltas.head):
            break
        batch.append(head)
        deltas.get_nowait()
        size += size_of(head)
    return batch


def _is_committed(item: Item) -> TypeGuard[Delta]:
    return isinstance(item, Delta) and item.error is None and not item.returned


def _failure(item: Delta | SSDError) -> SSDError:
    """Why there are no more tokens."""
    if isinstance(item, SSDError):
        return item
    if item.error is None:
        return HandedOver("the server is draining, and had not begun; use another endpoint")
    # The caller's fault where a field of the request is named.
    return InputError(item.field, item.error) if item.field else RequestFailed(item.error)


def _with_endpoints(serving: TargetServing) -> pb.GetModelInfoResponse:
    """What is served, and the endpoints as they stand now."""
    info = pb.GetModelInfoResponse()
    info.CopyFrom(serving.info)
    stats = serving.engine.stats
    known = {e.link: e for e in stats.endpoints} if stats is not None else {}
    for link in serving.links.links.values():
        endpoint = info.speculation_endpoints.add(
            address=link.address,
            state=link.state.value,
            draft_name=link.report.draft_name,
            reason=link.report.reason,
            source=link.source,
        )
        if (held := known.get(link.number)) is not None:
            endpoint.open_sequences, endpoint.payoff = held.sequences, held.payoff
            endpoint.acceptance = held.acceptance
            endpoint.planes.extend(map(encode_report, held.planes))
    if stats is not None:
        info.load.CopyFrom(_load(stats))
    return info


def _load(stats: TargetEngineStats) -> pb.TargetLoad:
    return pb.TargetLoad(
        running=stats.running,
        waiting=stats.waiting,
        used_kv_blocks=stats.used_blocks,
        speculation=speculation_message(stats.speculation),
        prompt_tokens=stats.prompt_tokens,
        forwards=stats.forwards,
        forward_micros=int(1e6 * stats.forward_seconds),
    )


def _started(request: ParsedRequest, sequence: int, serving: TargetServing) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=request.request_id,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt),
            model_fingerprint=serving.info.fingerprint,
            model_digest=serving.info.digest,
            sequence=sequence,
            beat_millis=int(1000 * BEAT_SECONDS),
        )
    )


def _tokens(
    batch: list[Delta], completion: Completion, spellings: Sequence[bytes] | None
) -> pb.GenerateResponse:
    """``spellings``: the bytes of tokens, where log probabilities name them."""
    message = pb.GenerateTokens()
    for delta in batch:
        message.token_ids.extend(delta.tokens)
        pieces = [completion.push(token) for token in delta.tokens]
        message.text += "".join(pieces)
        message.text_lengths.extend(len(piece.encode()) for piece in pieces)
        if delta.logprobs is not None:
            pairs = zip(delta.tokens, delta.logprobs, strict=True)
            message.logprobs.extend(logprobs_message(*pair, spellings) for pair in pairs)
        message.origins.extend([delta.source] * delta.accepted)  # type: ignore[list-item]
        message.origins.extend([pb.TOKEN_ORIGIN_TARGET] * (len(delta.tokens) - delta.accepted))
    return pb.GenerateResponse(tokens=message)


def _finish(
    request: ParsedRequest, completion: Completion, cached: int, speculation: pb.SpeculationStats
) -> pb.GenerateResponse:
    finish = completion.finish
    if finish is None:
        raise RuntimeError("not finished")
    message = pb.GenerateFinish(
        reason=REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=completion.num_tokens,
            cached_prompt_tokens=min(cached, len(request.prompt)),
        ),
        seed=request.sampling.seed,
        speculation=speculation,
    )
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return pb.GenerateResponse(finish=message)
