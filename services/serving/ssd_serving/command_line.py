"""What the command lines of the services share: options, their variables, exit codes."""

import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ssd_engine.errors import ConfigError, ModelError, SSDError
from ssd_engine.execution.runner_options import DTYPE_NAMES, KERNELS
from ssd_engine.process.log import FORMATS, end_process, is_structured, setup_logging
from ssd_engine.tensor_plane.protocol.handshake import KIND_NAMES
from ssd_serving.config import DEVICES, LOG_LEVELS

log = logging.getLogger(__name__)

EXIT_BAD_INPUT, EXIT_FAILED = 2, 1
Decorator = Callable[[Any], Any]


EVERYDAY = "Everyday"
# Groups of --help, everyday ones first; options have their names without dashes.
GROUPS: dict[str, tuple[str, ...]] = {
    EVERYDAY: (
        "listen",
        "name",
        "device",
        "devices",
        "tp",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "draft",
        "draft_model",
        "mode",
        "depth",
        "speculator",
        "target_model",
        "metrics_listen",
        "check_config",
    ),
    "Requests": (
        "generation_config",
        "chat_template",
        "allow_control_tokens",
        "max_waiting",
        "write_timeout",
        "max_backlog_kib",
        "max_message_mib",
    ),
    "Memory and speed": (
        "gpu_memory_utilization",
        "num_kv_blocks",
        "block_size",
        "swap_gib",
        "prefill_chunk",
        "threads",
        "kernels",
        "kernel_cache",
        "self_check",
        "allow_long_context",
    ),
    "Speculation": (
        "adapt_depth",
        "auto_off",
        "wait",
        "backup",
        "budget",
        "fan_out",
        "fan_out_miss",
        "max_rows",
        "aux_layers",
        "feature_window",
        "keep_features",
        "discover_seconds",
        "allow_draft",
        "trust_draft",
        "link_timeout",
    ),
    "Targets of a draft": (
        "max_links",
        "max_links_per_identity",
        "max_seqs_per_link",
        "max_frames",
        "link_write_timeout",
        "plane_ports",
    ),
    "Who may connect": (
        "tls_cert",
        "tls_key",
        "tls_ca",
        "token_file",
        "insecure",
        "draft_tls_ca",
        "draft_token_file",
        "insecure_plane",
        "share_prefixes",
        "limit_requests",
        "limit_tokens_per_minute",
        "limit_prompt_tokens",
    ),
    "Several nodes": (
        "nodes",
        "leader",
        "node",
        "model",
        "cluster_listen",
        "cluster_secret_file",
        "join_timeout",
        "cluster_timeout",
    ),
    "Operation": (
        "health_listen",
        "port_file",
        "drain_timeout",
        "engine_timeout",
        "engine_restarts",
        "keepalive_seconds",
        "reflection",
        "log_level",
        "log_format",
        "log_prompts",
        "otlp_endpoint",
        "trace_events",
    ),
    "Testing and debugging": (
        "expand_to",
        "draft_expand_to",
        "synthetic_acceptance",
        "eager",
        "plane_kind",
        "check_integrity",
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
VERSION = "%(prog)s %(version)s"


class GroupedCommand(click.Command):
    """A command whose --help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, dict[str, tuple[str, str]]] = {group: {} for group in GROUPS}
        for param in self.get_params(ctx):
            record, name = param.get_help_record(ctx), param.name or ""
            # click's own option, --help, is an everyday one.
            if record is not None and isinstance(param, click.Option):
                records[_GROUP_OF.get(name, EVERYDAY)][name] = record
        for group, named in records.items():
            lines = sorted(named.items(), key=lambda each: _place(group, each[0]))
            if lines:
                with formatter.section(group):
                    formatter.write_dl([record for _, record in lines])


def _place(group: str, name: str) -> int:
    names = GROUPS[group]
    return names.index(name) if name in names else len(names)


class OptionFactory:
    """Makes options whose defaults are a configuration's; --tp has the variable PREFIX_TP."""

    def __init__(self, config: type[Any], prefix: str) -> None:
        self._defaults = {f.name: f.default for f in dataclasses.fields(config)}
        self._prefix = prefix

    def variable(self, name: str) -> str:
        return f"{self._prefix}_{name.upper()}"

    def __call__(self, flag: str, help_text: str, **kwargs: Any) -> Decorator:
        name = flag.removeprefix("--").split("/")[0].replace("-", "_")
        default = self._defaults[name]
        return click.option(
            flag,
            default=default,
            show_default=default is not None,
            envvar=self.variable(name),
            help=help_text,
            **kwargs,
        )

    def model(self) -> Decorator:
        """Where to listen, how the model is run, and how its rows travel."""
        return _all(self._place(), self._sizes(), self._execution(), self._plane())

    def _place(self) -> Decorator:
        return _all(
            self("--listen", "HOST:PORT of the gRPC service; port 0 takes a free one."),
            self("--port-file", "Write the port here once the service listens.", type=Path),
            self("--name", "Name under which the model is served."),
            self("--tp", "Tensor-parallel ranks.", type=int),
            self("--device", "Where to run.", type=click.Choice(DEVICES)),
            self(
                "--devices",
                "GPUs that this process takes, one for each rank, such as 0,1,2,3. Default: the "
                "first ones.",
                metavar="N,N",
            ),
            self("--dtype", "auto: float32 on CPU.", type=click.Choice(("auto", *DTYPE_NAMES))),
        )

    def _sizes(self) -> Decorator:
        return _all(
            self(
                "--max-model-len",
                "Context: prompt and output together. Default: the model's.",
                type=int,
            ),
            self(
                "--allow-long-context",
                "Allow a context beyond the model's, for timing.",
                is_flag=True,
            ),
            self("--max-num-seqs", "Sequences that run at a time.", type=int),
            self(
                "--prefill-chunk",
                "Prompt tokens per prefill forward. Default: 128 on a CPU, 512 on a GPU.",
                type=int,
            ),
            self("--block-size", "Tokens per KV block.", type=int),
            self("--num-kv-blocks", "KV blocks. Default: sized from memory.", type=int),
            self("--gpu-memory-utilization", "Share of a GPU's memory to use.", type=float),
        )

    def _execution(self) -> Decorator:
        return _all(
            self(
                "--eager",
                "Debug: on a GPU, launch steps kernel by kernel instead of as graphs.",
                is_flag=True,
            ),
            self(
                "--kernels",
                "The fastest; Triton's, on a GPU; or torch's own operations alone (slow).",
                type=click.Choice(KERNELS),
            ),
            self(
                "--kernel-cache",
                "Directory in which kernels that are compiled at the first start are kept for "
                "the next. Default: in the home.",
                type=Path,
            ),
            self(
                "--self-check/--no-self-check",
                "Before it serves, hold what the loaded model computes against plain torch, and "
                "exit when they differ by more than rounding. Default: on a GPU.",
            ),
            self("--threads", "CPU threads per rank. Default: all cores but one.", type=int),
            self(
                "--expand-to",
                "Serve the model grown to a larger shape, for timing: a name such as "
                "llama-3.1-8b, or dimensions such as hidden=1024,layers=12. Its function, "
                "and so its text, stays.",
                metavar="SHAPE",
            ),
        )

    def _plane(self) -> Decorator:
        return self(
            "--plane-kind",
            "Debug: rows between target and draft go this way alone. auto: by NCCL between two "
            "GPUs, else by shared memory on one host, else by TCP.",
            type=click.Choice(KIND_NAMES),
        )

    def security(self) -> Decorator:
        """Who may connect, and what they may do."""
        return _all(
            self("--tls-cert", "Serve over TLS with this certificate (PEM).", type=Path),
            self("--tls-key", "Key of the certificate (PEM).", type=Path),
            self(
                "--tls-ca",
                "Mutual TLS: clients, and whoever scrapes metrics, need certificates signed by "
                "this one (PEM). Certificates, keys and tokens are read again when their files "
                "change.",
                type=Path,
            ),
            self(
                "--token-file",
                "Callers need a bearer token of this file (TOML: name, roles, token or sha256).",
                type=Path,
            ),
            self(
                "--insecure",
                "Allow ports beyond this host whose callers show neither certificate nor token.",
                is_flag=True,
            ),
            self(
                "--health-listen",
                "HOST:PORT for health checks alone, without TLS: probes speak none.",
            ),
        )

    def operation(self, drained: str) -> Decorator:
        """How the process behaves; ``drained`` is what SIGTERM waits for."""
        return _all(
            self("--drain-timeout", f"Seconds that {drained} get after SIGTERM.", type=float),
            self(
                "--engine-timeout",
                "Seconds without progress of the engine, a single step included, after which "
                "requests are sent elsewhere; after twice as many it is taken for dead.",
                type=float,
            ),
            self(
                "--engine-restarts",
                "How often within ten minutes an engine that has ended is started again behind its "
                "front; one more time ends the service, as does an engine of several nodes.",
                type=int,
            ),
            self(
                "--max-message-mib",
                "Largest gRPC message, in MiB; none is taken that is larger than it needs to be.",
                type=int,
            ),
            self("--keepalive-seconds", "Interval of HTTP/2 pings to clients.", type=float),
            self("--reflection", "Offer gRPC reflection.", is_flag=True),
            self("--metrics-listen", "HOST:PORT of Prometheus metrics. Default: none."),
            self(
                "--trace-events",
                "Keep so many of the engine's last events, for timelines; 0: none.",
                type=int,
            ),
            self("--log-level", "How much to log.", type=click.Choice(LOG_LEVELS)),
            self(
                "--log-format",
                "Lines for people, or one JSON object a line.",
                type=click.Choice(FORMATS),
            ),
            self("--log-prompts", "Log what is asked and what is answered, too.", is_flag=True),
            self(
                "--otlp-endpoint",
                "URL of an OpenTelemetry collector (OTLP over gRPC), such as "
                "http://127.0.0.1:4317, for traces of requests. Default: none.",
                metavar="URL",
            ),
            self(
                "--check-integrity",
                "Debug: check the engine's books after every step.",
                is_flag=True,
            ),
            self.check_config(),
        )

    def check_config(self) -> Decorator:
        return click.option(
            "--check-config",
            is_flag=True,
            envvar=self.variable("check_config"),
            help="Check options, model, device, memory and ports, and exit.",
        )


def _all(*decorators: Decorator) -> Decorator:
    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


@contextmanager
def running_command(role: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Logs as the options say; errors for users become one line and an exit code."""
    setup_logging(role, options["log_level"] or "info", log_format=options["log_format"])
    try:
        with _early_end():
            yield
    except (ConfigError, ModelError) as error:
        _exit(EXIT_BAD_INPUT, error)
    except SSDError as error:
        _exit(EXIT_FAILED, error)


@contextmanager
def _early_end() -> Iterator[None]:
    """Until there is something to end in order, SIGTERM ends it at once. That includes process 1
    of a container, where a signal without a handler is no signal."""

    def end(number: int, frame: object) -> None:
        end_process(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:  # else somebody else took over
            signal.signal(signal.SIGTERM, before)


def _exit(code: int, error: Exception) -> None:
    if is_structured():
        log.critical("%s", error)
    else:
        click.echo(f"error: {_printable(str(error))}", err=True)
    raise SystemExit(code)


def _printable(text: str) -> str:
    """One line, that moves no cursor: some of it may be the name of a stranger's file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def serving_extra(program: str, extra: str = "serve") -> Iterator[None]:
    """Import what only an extra brings in here: without it, say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ssd"):
            raise
        raise ConfigError(
            f'{program} needs the extra "{extra}": pip install "ssd-serve[{extra}]"'
        ) from None
