"""A draft's server: what it adds to ``ServiceServer``, which runs any service."""

from ssd.v1 import speculation_pb2 as pb
from ssd_draft import __version__
from ssd_draft.config import (
    CONTEXT_WITHOUT_MODEL,
    DraftConfig,
    DraftEngineOptions,
    check_config,
    fan_outs,
    plane_ports,
    scratch_tokens,
)
from ssd_draft.front.engine_client import DraftEngine
from ssd_draft.front.handshake import DraftIdentity
from ssd_draft.front.head_plan import DraftHeadPlan, plan_head
from ssd_draft.front.metrics import DraftMetrics
from ssd_draft.front.sequence_watch import TextOf, make_watch
from ssd_draft.front.service import SERVICE, DraftServicer, DraftServing
from ssd_draft.planning.plan import RANKS
from ssd_draft.records import GrammarVocabulary
from ssd_draft.speculators.registry import KINDS, kind_of
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.speculation.features import FeatureTerms
from ssd_engine.speculation.frames import PROTOCOL_VERSION
from ssd_engine.tensor_plane.protocol.handshake import kinds_named
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.config import StepSizes, max_message_bytes, parse_address
from ssd_serving.engine.records import Ready
from ssd_serving.observability.telemetry import make_spans
from ssd_serving.plan import ModelPlan, plan_model
from ssd_serving.rpc.feature_messages import encode_feature_terms
from ssd_serving.rpc.frame_messages import largest_message
from ssd_serving.rpc.speculator_kinds import kind_name
from ssd_serving.rpc.status import NotServing
from ssd_serving.server import ServiceServer
from ssd_serving.server_security import check_security, make_access
from ssd_serving.supervisor import Supervisor

MESSAGES_IN_FLIGHT = 2  # largest messages that one link may have on their way to the engine


def plan_draft(config: DraftConfig) -> ModelPlan | None:
    """Raise SSDError for whatever can be known to be wrong without loading weights.

    Returns None where there is no model.
    """
    check_config(config)
    kind = KINDS[kind_of(config)]
    check_security(config)
    if not kind.is_head:
        _check_no_head(config)
    if config.model is None:
        return None
    if kind.is_head:
        return plan_head(config, resolve_model(config.model), _head_sizes(config))
    sizes = _sizes(config, config.depth + 1)
    return plan_model(config.model, config, sizes)


def _check_no_head(config: DraftConfig) -> None:
    for flag, value in (
        ("--target-model", config.target_model),
        ("--aux-layers", config.aux_layers),
    ):
        if value is not None:
            raise ConfigError(f"{flag} is of an EAGLE-3 head, MODEL is none: leave it out")
    if config.feature_window != DraftConfig.feature_window:
        raise ConfigError("--feature-window is of an EAGLE-3 head, MODEL is none: leave it out")


def _head_sizes(config: DraftConfig) -> StepSizes:
    """A round's rows are read as the target has told them, with the chain that is verified."""
    return _sizes(config, 2 * (config.depth + 1))


def _sizes(config: DraftConfig, step_rows: int) -> StepSizes:
    return StepSizes(
        config.max_rows,
        # A row of a tree sees the chain that is verified, and the branches.
        max_tail=config.depth + scratch_tokens(config),
        exact=False,
        step_rows=step_rows,
        branches=config.budget,
        ranks=RANKS + 1,
        max_path=2 * config.depth + 1,  # a chain, an outcome, and its branch
    )


class DraftServer(ServiceServer):
    role = "draft"
    service = SERVICE
    active = "links"

    def __init__(
        self,
        config: DraftConfig,
        plan: ModelPlan | None,
        tokenizer: Tokenizer | None,
        forks: ForkServer | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._tokenizer = tokenizer
        metrics = self._metrics = DraftMetrics(
            stats=lambda: self._engine.stats,
            num_blocks=lambda: self._engine.num_blocks,
            num_links=lambda state: self._engine.count()[state],
        )
        largest = max_message_bytes(config, largest_message(_max_context(config, plan)))
        self._engine = DraftEngine(
            _engine_options(config, plan),
            max_frames=config.max_frames,
            max_bytes=MESSAGES_IN_FLIGHT * largest,
            on_drop=metrics.frames_dropped.labels("slow_reader").inc,
            trace_events=config.trace_events,
            forks=forks,
        )
        access = make_access(config, metrics)
        self._servicer = DraftServicer(self._engine, metrics, config.link_write_timeout, access)
        self._spans = make_spans(config.otlp_endpoint, "ssd-draft", __version__)
        super().__init__(
            config,
            self._engine,
            self._servicer,
            metrics,
            access,
            config.max_links,
            largest,
            self._spans,
            name=kind_of(config) if plan is None else plan.name,
            supervisor=Supervisor(metrics.task_failed),
        )

    def prepare(self) -> None:
        if self._plan is not None and self._tokenizer is not None:
            model = self._plan.model
            self._engine.send(
                GrammarVocabulary(
                    self._tokenizer.serialized(), model.vocab_size, tuple(model.eos_token_ids)
                )
            )

    def open(self, ready: Ready) -> list[str]:
        self._servicer.watch = make_watch(self._spans, self._text_of())
        endpoint = _endpoint(self._config, self._plan, self._tokenizer)
        self._metrics.show_kind(kind_name(pb.SpeculatorKind.Value(endpoint.speculator)))
        self._servicer.serving = DraftServing(
            endpoint=endpoint,
            info=_draft_info(endpoint, self._config, self._plan, self._tokenizer, ready),
            max_links=self._config.max_links,
            max_links_per_identity=self._config.max_links_per_identity or self._config.max_links,
        )
        if self._plan is None:
            return [endpoint.name]
        return [
            *self._plan.describe(ready.num_blocks, self._config.tp),
            f"branches of {endpoint.depth} tokens, {endpoint.budget} a round at most",
        ]

    def _text_of(self) -> TextOf | None:
        """How prompts are logged; without a tokenizer, as the numbers that came."""
        if not self._config.log_prompts:
            return None
        return str if self._tokenizer is None else self._tokenizer.text_of

    async def engine_lost(self) -> None:
        """Targets have heard it: their links have failed."""

    def cut_off(self) -> None:
        self._engine.end_all(NotServing("the endpoint stops; use another one"))

    async def close(self) -> None:
        """Targets have heard it: their streams have ended."""


def _max_context(config: DraftConfig, plan: ModelPlan | None) -> int:
    """Tokens of a sequence."""
    if isinstance(plan, DraftHeadPlan):
        return plan.max_context
    if plan is not None:
        return plan.runner.max_model_len
    return config.max_model_len or CONTEXT_WITHOUT_MODEL


def _engine_options(config: DraftConfig, plan: ModelPlan | None) -> DraftEngineOptions:
    fan_out_hit, fan_out_miss = fan_outs(config)
    return DraftEngineOptions(
        speculator=kind_of(config),
        model=None if plan is None else plan.model,
        runner=None if plan is None else plan.runner,
        head=plan.head if isinstance(plan, DraftHeadPlan) else None,
        tp=config.tp,
        prefill_chunk=config.prompt_rows,
        depth=config.depth,
        budget=config.budget,
        fan_out_hit=fan_out_hit,
        fan_out_miss=fan_out_miss,
        max_rows=config.max_rows,
        max_num_seqs=config.max_num_seqs,
        max_seqs_per_link=config.max_seqs_per_link,
        vocab_size=None if plan is None else plan.model.vocab_size,
        max_context=_max_context(config, plan) if plan is None else plan.runner.max_model_len,
        block_size=config.block_size,
        listen_host=parse_address("--listen", config.listen)[0],
        plane_ports=plane_ports(config),
        plane_kinds=kinds_named(config.plane_kind),
        log_level=config.log_level,
        log_format=config.log_format,
        check_integrity=config.check_integrity,
        trace_events=config.trace_events,
    )


def _endpoint(
    config: DraftConfig, plan: ModelPlan | None, tokenizer: Tokenizer | None
) -> DraftIdentity:
    per_link = config.max_seqs_per_link or config.max_num_seqs
    kind = kind_of(config)
    head = plan.head if isinstance(plan, DraftHeadPlan) else None
    return DraftIdentity(
        name=plan.name if plan is not None else config.name or kind,
        speculator=f"SPECULATOR_KIND_{kind.upper()}",
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        vocab_size=None if plan is None else plan.model.vocab_size,
        max_context=_max_context(config, plan),
        max_sequences=min(per_link, config.max_num_seqs),
        depth=config.depth,
        budget=config.budget,
        features=None if head is None else FeatureTerms(head.needs, head.window),
        verifier="" if head is None else head.config.verifier,
    )


def _draft_info(
    endpoint: DraftIdentity,
    config: DraftConfig,
    plan: ModelPlan | None,
    tokenizer: Tokenizer | None,
    ready: Ready,
) -> pb.GetDraftInfoResponse:
    info = pb.GetDraftInfoResponse(
        name=endpoint.name,
        speculator=endpoint.speculator,
        max_context=endpoint.max_context,
        max_sequences=config.max_num_seqs,
        max_depth=endpoint.depth,
        max_branches=endpoint.budget,
        protocol_version=PROTOCOL_VERSION,
        version=__version__,
        features=None if endpoint.features is None else encode_feature_terms(endpoint.features),
    )
    if plan is None or tokenizer is None:
        return info
    about_model = pb.GetDraftInfoResponse(
        fingerprint=plan.fingerprint(tokenizer),
        tokenizer_fingerprint=tokenizer.fingerprint,
        architecture=plan.model.architecture,
        num_parameters=plan.num_parameters,
        vocab_size=plan.model.vocab_size,
        dtype=plan.runner.dtype,
        device=plan.runner.device,
        num_kv_blocks=ready.num_blocks,
        block_size=plan.runner.block_size,
    )
    info.MergeFrom(about_model)
    return info
