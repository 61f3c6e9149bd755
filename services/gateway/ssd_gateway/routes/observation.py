"""GET /ssd/fleet and /ssd/timeline: what targets and drafts do, for the page."""

import asyncio
import time
from contextlib import closing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.drafts import message_fields
from ssd_client.connection.endpoints import Endpoint, linked_drafts
from ssd_client.connection.security import Security
from ssd_client.errors import ClientError
from ssd_client.generate.speculation import stats_of
from ssd_client.status.traces import TraceEvent, TraceReader
from ssd_gateway.gateway import Gateway
from ssd_gateway.http.errors import ApiError, bad_request
from ssd_gateway.http.keys import OBSERVE
from ssd_gateway.routes.models import json_response
from ssd_gateway.targets.target import Target

HISTORY = 20_000  # events of a service that are looked through
LONGEST = 120.0  # seconds of a timeline
DETAILS = ("kind", "sequence", "round", "rows", "tokens", "accepted", "origin", "look_up")


class ObservationRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def fleet(self, request: Request) -> Response:
        self._gateway.keys.check(request)
        targets = list(self._gateway.pool)
        infos = await asyncio.gather(*(self._gateway.info_for(request, each) for each in targets))
        return json_response({"targets": list(map(_about, targets, infos))})

    async def timeline(self, request: Request) -> Response:
        self._gateway.keys.check(request, OBSERVE)
        target = self._gateway.pool.find(request.query_params.get("target", ""))
        if target is None:
            raise ApiError(404, "target: is not one of this gateway's", param="target")
        seconds = _number(request, "seconds", 30.0, LONGEST)
        sequence = int(_number(request, "sequence", 0, 2**63))
        security = self._gateway.keys.security_for(request, target)
        content = await asyncio.to_thread(self._timeline, target, security, sequence, seconds)
        return json_response(content)

    def _timeline(
        self, target: Target, security: Security, sequence: int, seconds: float
    ) -> dict[str, Any]:
        """Runs on a thread: it waits for several services."""
        since, problems = time.monotonic() - seconds, []
        drafts = linked_drafts(target.info) if target.info else {}
        if drafts and not self._gateway.config.draft_traces:
            problems.append("drafts are not asked for their part (--no-draft-traces)")
            drafts = {}
        places = [(target.address, target.server_name, security)]
        places += [(*draft, security.for_named_by_others()) for draft in drafts.items()]
        tracks = []
        for place in places:
            try:
                events = _events_of(*place)
            except ClientError as error:
                problems.append(str(error))
                continue
            kept = [each for each in events if each.begin >= since and _concerns(each, sequence)]
            tracks.append((place[0], kept))
        zero = min((each.begin for _, events in tracks for each in events), default=0.0)
        return {
            "tracks": [_track(address, events, zero) for address, events in tracks if events],
            "problem": "; ".join(problems),
        }


def _events_of(address: str, server_name: str | None, security: Security) -> list[TraceEvent]:
    with closing(Endpoint(address, server_name, security)) as endpoint:
        return TraceReader(endpoint, HISTORY).take()


def _concerns(event: TraceEvent, sequence: int) -> bool:
    """Forwards are of all sequences; other events, at a target, of one."""
    return not sequence or event.service != "target" or event.sequence in (0, sequence)


def _track(address: str, events: list[TraceEvent], zero: float) -> dict[str, Any]:
    role = events[0].service
    return {
        "name": f"{role} {address}",
        "role": role,
        "events": [
            {
                "begin_ms": 1e3 * (event.begin - zero),
                "duration_ms": 1e3 * event.seconds,
                **{name: getattr(event, name) for name in DETAILS},
            }
            for event in sorted(events, key=lambda each: each.begin)
        ],
    }


def _number(request: Request, name: str, default: float, most: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise bad_request(name, f"must be a number from 0 to {most:g}, got {text!r}")
    return value


def _about(target: Target, info: pb.GetModelInfoResponse | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "address": target.address,
        "ready": target.ready,
        "problem": target.problem,
        "in_flight": target.in_flight,
    }
    if info is None:
        return {**content, "endpoints": []}
    stats, load = stats_of(info.load.speculation), info.load
    tokens_per_round = None
    if stats.rounds:
        tokens_per_round = (stats.accepted_tokens + stats.rounds) / stats.rounds
    return {
        **content,
        "model": info.name,
        "version": info.version,
        "architecture": info.architecture,
        "device": info.device,
        "dtype": info.dtype,
        "max_num_seqs": info.max_num_seqs,
        "running": load.running,
        "waiting": load.waiting,
        "used_kv_blocks": load.used_kv_blocks,
        "num_kv_blocks": info.num_kv_blocks,
        "hit_rate": stats.hit_rate,
        "acceptance": stats.acceptance,
        "tokens_per_round": tokens_per_round,
        "endpoints": [message_fields(each) for each in info.speculation_endpoints],
    }
