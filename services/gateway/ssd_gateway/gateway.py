"""What every route needs, made once."""

from dataclasses import dataclass, field

from starlette.requests import Request

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.stall import StallLooker
from ssd_client.errors import ClientError
from ssd_gateway.config import GatewayConfig
from ssd_gateway.http.drain import Drain, leaving
from ssd_gateway.http.errors import ApiError
from ssd_gateway.http.keys import Keys
from ssd_gateway.http.request_headers import request_id_of, traceparent_of
from ssd_gateway.metrics import GatewayMetrics
from ssd_gateway.reading.bodies import BodyReader
from ssd_gateway.reading.prepared import Asked, Prepare, Terms
from ssd_gateway.targets.pool import TargetPool
from ssd_gateway.targets.routing import in_order
from ssd_gateway.targets.target import Metadata, Target


@dataclass
class Gateway:
    config: GatewayConfig
    pool: TargetPool
    keys: Keys
    metrics: GatewayMetrics
    drain: Drain
    bodies: BodyReader
    stalls: StallLooker = field(default_factory=StallLooker)

    async def prepare(self, request: Request, how: Prepare[Asked]) -> tuple[str | None, Asked]:
        """The model that the body names, and what targets are asked for it; the caller may ask."""
        self.keys.check(request)
        if self.drain.begun:
            raise leaving()
        await self._learn(request)
        prepared = await self.bodies.read(request, how, self._terms(request))
        request_id_of(request, prepared.request_id)
        await self._check_served(request, prepared.model)
        if prepared.asked is None:
            raise prepared.problem or RuntimeError("neither an answer nor a problem")
        return prepared.model, prepared.asked

    def _terms(self, request: Request) -> Terms:
        known = [target.info for target in self.pool if target.info is not None]
        return Terms(
            request_id_of(request),
            {None: self._chat_format(None)} | {i.name: self._chat_format(i.name) for i in known},
            max((info.max_request_bytes for info in known), default=0) or None,
            self.config.allow_unknown_fields,
        )

    async def _check_served(self, request: Request, model: str | None) -> None:
        """A refusal names the models that are served, as far as this caller may know them."""
        if not any(target.serves(model) for target in self.pool):
            await self.infos(request)
        self.targets_for(model)

    async def _learn(self, request: Request) -> None:
        """Targets that tell what they serve only to those who have a key are asked with the
        caller's."""
        metadata_of = self.metadata_for(request)
        for target in self.pool:
            if target.info is None and target.ready:
                info = await _info_of(target, metadata_of)
                info.load.Clear()  # it will not be asked again: that is known for now alone
                target.info, target.wants_key = info, True  # until it tells the gateway itself

    async def infos(self, request: Request) -> list[pb.GetModelInfoResponse]:
        """What targets tell this caller of themselves; raises where they want another key."""
        await self._learn(request)
        metadata_of, found = self.metadata_for(request), []
        for target in self.pool:
            if target.wants_key and target.ready:
                found.append(await _info_of(target, metadata_of))
            elif target.info is not None and not target.wants_key:
                found.append(target.info)
        return found

    async def info_for(self, request: Request, target: Target) -> pb.GetModelInfoResponse | None:
        """The same of one target; None where it tells this caller nothing."""
        if not target.wants_key:
            return target.info
        try:
            return await _info_of(target, self.metadata_for(request)) if target.ready else None
        except ClientError:
            return None

    def targets_for(self, model: str | None, affinity: bytes = b"") -> list[Target]:
        """Targets that serve the model, the best one first."""
        known = list(self.pool)
        serving = [target for target in known if target.serves(model)]
        if known and not serving:
            names = ", ".join(sorted({each.info.name for each in known if each.info}))
            raise ApiError(
                404,
                f"model: {model!r} is not served here; {names} is",
                param="model",
                code="model_not_found",
            )
        if not serving:
            raise ApiError(503, "no target is known", "server_error", retry_after=1)
        return in_order(serving, affinity)

    def _chat_format(self, model: str | None) -> pb.ChatFormat:
        """How the model writes calls and thoughts; --tool-parser has the last word on calls."""
        form = pb.ChatFormat()
        known = [each.info for each in self.pool if each.serves(model) and each.info is not None]
        if known:
            form.CopyFrom(known[0].chat_format)
        if self.config.tool_parser != "auto":
            form.tools = self.config.tool_parser
        return form

    def metadata_for(self, request: Request) -> "MetadataFor":
        return MetadataFor(self.keys, request)


@dataclass(frozen=True)
class MetadataFor:
    """What calls on behalf of one caller show a target."""

    keys: Keys
    request: Request

    def __call__(self, target: Target) -> Metadata:
        traced = traceparent_of(self.request)
        context = () if traced is None else (("traceparent", traced),)
        return (*self.keys.metadata_for(self.request, target), *context)


async def _info_of(target: Target, metadata_of: MetadataFor) -> pb.GetModelInfoResponse:
    about = pb.GetModelInfoRequest()
    info: pb.GetModelInfoResponse = await target.ask(
        target.stub.GetModelInfo, about, metadata_of(target)
    )
    return info
