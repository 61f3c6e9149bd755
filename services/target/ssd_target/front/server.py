"""A target's server: what it adds to ``ServiceServer``, which runs any service."""

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.generation_config import load_sampling_defaults
from ssd_engine.checkpoints.heads.head_config import is_head
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.parallel.cluster.options import ClusterOptions
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.process.host_memory import available_memory
from ssd_engine.speculation.features import FeatureOffer
from ssd_engine.tensor_plane.protocol.handshake import kinds_named
from ssd_engine.text.tokenizer import Tokenizer, read_chat_template
from ssd_serving.config import StepSizes, max_message_bytes
from ssd_serving.engine.records import Ready
from ssd_serving.observability.telemetry import make_spans
from ssd_serving.plan import ModelPlan, plan_model
from ssd_serving.rpc.status import HandedOver
from ssd_serving.security.allowances import Accounts, Allowance
from ssd_serving.server import ServiceServer
from ssd_serving.server_security import check_security, make_access
from ssd_serving.supervisor import Supervisor
from ssd_target import __version__
from ssd_target.config import (
    DRAFT_STEP_ROWS,
    EngineOptions,
    TargetConfig,
    check_config,
    check_feature_memory,
    default_mode,
    feature_bytes,
    feature_options,
    modes,
    speculation_options,
)
from ssd_target.front.chat_format import find_chat_format
from ssd_target.front.engine_client import EngineClient
from ssd_target.front.head_plan import HeadPlan, plan_head
from ssd_target.front.metrics import TargetMetrics
from ssd_target.front.requests import RequestLimits, largest_request
from ssd_target.front.service import SERVICE, TargetServicer, TargetServing
from ssd_target.front.speculation_requests import SpeculationTerms
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.endpoint_addresses import AddressFile, parse_draft
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.links import Links
from ssd_target.node import cluster_options
from ssd_target.records.engine_records import Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetPlan:
    target: ModelPlan
    draft: ModelPlan | None  # for synchronous speculation
    head: HeadPlan | None = None  # likewise, in place of a model

    def load_tokenizer(self) -> Tokenizer:
        """The target's tokenizer; raises ConfigError when the draft model has another one."""
        tokenizer = self.target.load_tokenizer()
        tokenizer.check_template()
        if self.draft is not None:
            other = self.draft.load_tokenizer()
            if other.fingerprint != tokenizer.fingerprint:
                raise ConfigError(
                    f"--draft-model: {self.draft.name} has another tokenizer than "
                    f"{self.target.name}"
                )
        return tokenizer

    @property
    def inside(self) -> pb.DraftInside | None:
        """What is told of the draft inside the target."""
        draft = self.draft or self.head
        return None if draft is None else pb.DraftInside(kind=self.kind_inside, name=draft.name)

    @property
    def kind_inside(self) -> str | None:
        """The kind of the draft inside the target."""
        if self.head is not None:
            return "head"
        return None if self.draft is None else "model"

    def __str__(self) -> str:
        draft = self.draft or self.head
        return str(self.target) if draft is None else f"{self.target}; draft {draft}"


def plan_target(config: TargetConfig) -> TargetPlan:
    """Raise SSDError for whatever can be known to be wrong without loading weights."""
    check_config(config)
    check_security(config)
    _check_draft_credentials(config)
    rows = config.max_num_seqs * (config.depth + 1)
    sizes = StepSizes(rows, step_rows=config.depth + 1)
    target = _with_defaults(config, plan_model(config.model, config, sizes))
    target = _with_features(config, target)
    if config.draft_model is None:
        return TargetPlan(target, None)
    directory = resolve_model(config.draft_model)
    if is_head(directory):
        head = plan_head(config, directory, target, rows)
        return TargetPlan(_with_head(target, head.options.kept_bytes), None, head)
    if config.aux_layers is not None:
        raise ConfigError("--aux-layers is of an EAGLE-3 head, --draft-model is none: leave it out")
    own = replace(
        config,
        name=None,
        tp=1,
        nodes=1,
        devices=config.devices and config.devices.split(",")[0],  # that of the first rank
        num_kv_blocks=None,
        expand_to=config.draft_expand_to,
    )
    path = config.depth
    sizes = StepSizes(rows, exact=False, step_rows=DRAFT_STEP_ROWS, ranks=2, max_path=path)
    draft = plan_model(config.draft_model, own, sizes)
    if draft.model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"--draft-model: a vocabulary of {draft.model.vocab_size}, "
            f"the target has {target.model.vocab_size}"
        )
    return TargetPlan(target, draft)


def _with_defaults(config: TargetConfig, plan: ModelPlan) -> ModelPlan:
    plan = replace(plan, allow_control_tokens=config.allow_control_tokens)
    if config.chat_template is not None:
        plan = replace(plan, chat_template=read_chat_template(config.chat_template))
    if config.generation_config == "none":
        return plan
    directory, vocab_size = plan.runner.directory, plan.model.vocab_size
    return replace(plan, sampling=load_sampling_defaults(directory, vocab_size))


def _with_features(config: TargetConfig, plan: ModelPlan) -> ModelPlan:
    """Its KV leaves room for what links may be told of."""
    needed = feature_bytes(config, feature_options(config, plan.grown, plan.runner.dtype))
    sized = plan.runner.device == "cpu" and plan.runner.num_kv_blocks is None  # with the KV
    if not sized:
        check_feature_memory(needed, available_memory())
    return replace(plan, runner=replace(plan.runner, host_bytes=needed))


def _with_head(plan: ModelPlan, kept_bytes: int) -> ModelPlan:
    """And for what a head inside keeps of them."""
    return replace(plan, runner=replace(plan.runner, told_bytes=kept_bytes))


class TargetServer(ServiceServer):
    role = "target"
    service = SERVICE
    active = "running requests"

    def __init__(
        self,
        config: TargetConfig,
        plan: TargetPlan,
        tokenizer: Tokenizer,
        forks: ForkServer | None = None,
    ) -> None:
        self._config = config
        self._plan, self._inside = plan.target, plan.inside
        self._tokenizer = tokenizer
        farewell, bidden = Pipe(duplex=False)
        cluster = cluster_options(config, plan.target, farewell)
        self._engine = EngineClient(
            _engine_options(config, plan, cluster),
            config.max_backlog_kib * 1024,
            None if cluster is None else bidden,
            forks,
        )
        self._digest: asyncio.Future[str] | None = None
        supervisor = Supervisor(lambda task: metrics.task_failed(task))
        self._links = Links(
            config.draft,
            config.allow_draft,
            config.trust_draft,
            self._engine.send,
            lambda: self._engine.backlog,
            _draft_credentials(config),
            config.discover_seconds,
            supervisor=supervisor,
        )
        self._engine.links = self._links
        metrics = TargetMetrics(
            lambda: self._engine.stats,
            lambda: self._engine.num_blocks,
            self._links,
            config.depth,
            plan.kind_inside,
        )
        access = make_access(config, metrics)
        accounts = Accounts(
            _allowance(config), lambda limit: metrics.limited_requests.labels(limit).inc()
        )
        spans = make_spans(config.otlp_endpoint, "ssd-target", __version__)
        self._servicer = TargetServicer(
            metrics, config.write_timeout, access, accounts, spans, config.log_prompts
        )
        self._max_live = config.max_num_seqs + config.max_waiting
        largest = max_message_bytes(config, largest_request(plan.target.runner.max_model_len))
        super().__init__(
            config,
            self._engine,
            self._servicer,
            metrics,
            access,
            self._max_live,
            largest,
            spans,
            name=plan.target.name,
            supervisor=supervisor,
        )

    def prepare(self) -> None:
        if self._config.synthetic_acceptance is not None:
            log.warning("--synthetic-acceptance: texts are not the model's, for load tests alone")
        tokenizer = self._tokenizer
        self._engine.send(
            Vocabulary(tokenizer.token_bytes, tokenizer.control_spellings, tokenizer.serialized())
        )
        if self._digest is None:  # while the engine loads the same files
            self._digest = self.in_background(partial(self._plan.digest, self._tokenizer))

    def _grammars(self) -> GrammarCompiler | None:
        """None where texts are not the model's, and no grammar could hold them."""
        if self._config.synthetic_acceptance is not None:
            return None
        model = self._plan.model
        return GrammarCompiler(self._tokenizer.serialized(), model.vocab_size, model.eos_token_ids)

    def open(self, ready: Ready) -> list[str]:
        plan = self._plan
        digest = "" if self._digest is None else self._digest.result()
        self._links.start(
            TargetIdentity(
                plan.name,
                self._tokenizer.fingerprint,
                plan.model.vocab_size,
                self._config.depth,
                self._engine.plane_offer,
                self._feature_offer(),
            )
        )
        info = _model_info(self._config, plan, self._tokenizer, ready, digest)
        info.max_request_bytes = self._max_request_bytes
        if self._inside is not None:
            info.draft_inside.CopyFrom(self._inside)
        self._servicer.serving = TargetServing(
            engine=self._engine,
            tokenizer=self._tokenizer,
            limits=RequestLimits(
                vocab_size=plan.model.vocab_size,
                max_model_len=plan.runner.max_model_len,
                kv_tokens=ready.num_blocks * plan.runner.block_size,
                eos_token_ids=plan.model.eos_token_ids,
                synthetic=self._config.synthetic_acceptance is not None,
                sampling=plan.sampling,
                grammars=self._grammars(),
            ),
            info=info,
            terms=SpeculationTerms(
                modes(self._config),
                self._config.depth,
                self._links.number_of,
                default_mode(self._config),
            ),
            share_prefixes=self._config.share_prefixes,
            links=self._links,
            max_live=self._max_live,
            max_num_seqs=self._config.max_num_seqs,
        )
        return [
            *plan.describe(ready.num_blocks, self._config.tp),
            f"sampling defaults: {plan.sampling}",
            f"speculation: {self._about_speculation()}",
        ]

    def _feature_offer(self) -> FeatureOffer | None:
        """What links are told that this target can tell."""
        plan, offer = self._plan, self._engine.plane_offer
        if offer is None or not self._engine.tells_features:
            return None
        about = (plan.grown.hidden_size, plan.grown.num_layers, plan.runner.dtype)
        return FeatureOffer(*about, replace(offer, streams=()))

    def _about_speculation(self) -> str:
        config = self._config
        inside = f"{config.draft_model} inside" if config.draft_model else "no draft model inside"
        endpoints = ", ".join(config.draft) or "none"
        return f"mode {config.mode}, depth {config.depth}; {inside}; endpoints: {endpoints}"

    async def engine_lost(self) -> None:
        await self._links.stop()

    def cut_off(self) -> None:
        self._engine.end_all(HandedOver("the server stops; resume on another endpoint"))

    async def close(self) -> None:
        await self._links.stop()


def _draft_credentials(config: TargetConfig) -> DraftCredentials:
    return DraftCredentials(
        config.draft_tls_ca,
        config.tls_cert,
        config.tls_key,
        config.draft_token_file,
        config.insecure,
        config.insecure_plane,
    )


def _check_draft_credentials(config: TargetConfig) -> None:
    credentials = _draft_credentials(config)
    credentials.check()
    for text in config.draft:
        place = parse_draft(text)
        if not isinstance(place, AddressFile):
            credentials.check_host(place.host)


def _allowance(config: TargetConfig) -> Allowance:
    """The allowance of an identity that has none of its own."""
    return Allowance(
        config.limit_requests, config.limit_tokens_per_minute, config.limit_prompt_tokens
    )


def _engine_options(
    config: TargetConfig, plan: TargetPlan, cluster: ClusterOptions | None
) -> EngineOptions:
    draft = plan.draft
    return EngineOptions(
        model=plan.target.model,
        runner=plan.target.runner,
        tp=config.tp,
        prefill_chunk=config.prompt_rows,
        log_level=config.log_level,
        log_format=config.log_format,
        check_integrity=config.check_integrity,
        trace_events=config.trace_events,
        synthetic_acceptance=config.synthetic_acceptance,
        swap_gib=config.swap_gib,
        speculation=speculation_options(config),
        features=feature_options(config, plan.target.grown, plan.target.runner.dtype),
        draft_model=None if draft is None else draft.model,
        draft_runner=None if draft is None else draft.runner,
        head=None if plan.head is None else plan.head.options,
        cluster=cluster,
        plane_kinds=kinds_named(config.plane_kind),
        hides_rows=config.draft_tls_ca is not None and not config.insecure_plane,
    )


def _model_info(
    config: TargetConfig, plan: ModelPlan, tokenizer: Tokenizer, ready: Ready, digest: str
) -> pb.GetModelInfoResponse:
    rate = config.synthetic_acceptance
    made_up = "" if rate is None else f"-synthetic-{rate:g}"  # nobody resumes elsewhere
    return pb.GetModelInfoResponse(
        name=plan.name,
        fingerprint=plan.fingerprint(tokenizer) + made_up,
        digest=digest + made_up,
        synthetic_acceptance=config.synthetic_acceptance or 0.0,
        tokenizer_fingerprint=tokenizer.fingerprint,
        architecture=plan.model.architecture,
        num_parameters=plan.num_parameters,
        vocab_size=plan.model.vocab_size,
        max_model_len=plan.runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        dtype=plan.runner.dtype,
        device=plan.runner.device,
        tensor_parallel_size=config.tp,
        num_kv_blocks=ready.num_blocks,
        block_size=plan.runner.block_size,
        eos_token_ids=plan.model.eos_token_ids,
        has_chat_template=tokenizer.has_chat_template,
        version=__version__,
        speculation_modes=[int(mode) for mode in modes(config)],  # type: ignore[misc]
        max_speculation_depth=config.depth,
        sampling_defaults=pb.SamplingOptions(**plan.sampling.options()),
        chat_format=find_chat_format(tokenizer),
    )
