"""Each attack, with the services that it is led against."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2_grpc as rpc
from ssd_client import Client
from ssd_client.connection.security import Security
from ssd_client.errors import ClientError, ModelMismatchError
from ssd_engine.checkpoints.model_store import resolve_model
from tools.attack.afar import connect
from tools.attack.attackers import HandMadeLink, channel_to
from tools.attack.callers import (
    ATTACKER,
    OTHER,
    OTHERS_PROMPTS,
    TOKEN_FILE,
    bearer,
    request,
)
from tools.attack.watch import Row, Watch, attacker, others_first_token
from tools.soak.services import Service

LONG_CONTEXT = ["--max-model-len", "32768", "--allow-long-context", "--num-kv-blocks", "4096"]
PROBES = 24
NODE_SECONDS = 120


@contextlib.contextmanager
def serving(
    folder: Path, *flags: str, name: str = "target", model: str = "stories-target"
) -> Iterator[Service]:
    """A target whose callers need tokens."""
    tokens = folder / "tokens.toml"
    replace(tokens, TOKEN_FILE)
    more = ["--token-file", str(tokens), "--health-listen", "127.0.0.1:0", *flags]
    with started(Service(name, "ssd_target", [model, *more], folder)) as service:
        yield service


@contextlib.contextmanager
def started(service: Service) -> Iterator[Service]:
    service.start()
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.close()


def replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(file)


def watch(service: Service) -> Watch:
    ask = others_first_token(service.address)
    for number in range(OTHERS_PROMPTS):  # each is cached from now on
        ask(number)
    return Watch(service, ask)


# Callers with tokens


def simple(name: str, *flags: str) -> Callable[[Path], Row]:
    """An attack that is nothing but calls."""

    def lead(folder: Path) -> Row:
        with serving(folder, *flags) as service:
            return watch(service).row(name, attacker(name, service.address))

    return lead


def guessed_prompts(folder: Path) -> Row:
    told: list[tuple[str, int, float]] = []

    @contextlib.contextmanager
    def guessing(address: str) -> Iterator[None]:
        with attacker("guessed_prompts", address) as process:
            yield
        lines = process.stdout.read().split("\n") if process.stdout else []
        for what, cached, first in (line.split() for line in lines if line.count(" ") == 2):
            told.append((what, int(cached), float(first)))

    with serving(folder) as service:
        row = watch(service).row("guessed_prompts", guessing(service.address))
    guessed = [each for each in told if each[0] == "guessed"]
    times = {
        kind: statistics.median([first for what, _, first in told if what == kind] or [0.0])
        for kind in ("guessed", "strange")
    }
    most = max((cached for _, cached, _ in guessed), default=-1)
    row.note = (
        f"{len(guessed)} prompts guessed: {most} cached tokens told at most, first token after "
        f"{times['guessed']:.0f} ms, of strange ones {times['strange']:.0f} ms"
    )
    if most != 0:
        row.problems.append("a guess was confirmed")
    return row


def revocation(folder: Path) -> Row:
    with serving(folder) as service, channel_to(service.address) as channel:
        row = watch(service).row("revocation", no_descriptor_free(service))
        is_refused(channel)  # so that it is connected
        with no_descriptor_free(service):
            replace(folder / "tokens.toml", TOKEN_FILE.replace(ATTACKER, "another token entirely"))
            seconds = seconds_until(lambda: is_refused(channel))
    row.note = f"a token revoked while no descriptor was free was refused after {seconds:.1f} s"
    return row


def is_refused(channel: grpc.Channel) -> bool:
    call = rpc.TargetServiceStub(channel).Generate(
        request("Once", 1), timeout=30, metadata=bearer(ATTACKER)
    )
    try:
        list(call)
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


@contextlib.contextmanager
def no_descriptor_free(service: Service) -> Iterator[None]:
    """Connections that say nothing take all that the front may have."""
    pid = service.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    most = len(os.listdir(f"/proc/{pid}/fd")) + 20
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    with contextlib.ExitStack() as held:
        for _ in range(60):
            with contextlib.suppress(OSError):
                held.enter_context(connect(service.address))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def seconds_until(done: Callable[[], bool], most: float = 120.0) -> float:
    begin = time.monotonic()
    while not done():
        if time.monotonic() - begin > most:
            return float("inf")
        time.sleep(0.02)
    return time.monotonic() - begin


# Callers without


def on_health_port(name: str) -> Callable[[Path], Row]:
    def lead(folder: Path) -> Row:
        with serving(folder) as service:
            address = health_address(service)
            watched = watch(service)
            answered: list[bool] = []

            @contextlib.contextmanager
            def probed() -> Iterator[None]:
                with attacker(name, address):
                    yield
                    answered.extend(is_alive(address) for _ in range(PROBES))

            row = watched.row(f"{name}, health port", probed())
        row.note = f"{sum(answered)} of {PROBES} probes answered"
        if not all(answered):
            row.problems.append("probes were refused")
        return row

    return lead


def health_address(service: Service) -> str:
    words = service.log().partition("health on ")[2].split()
    return words[0]


def is_alive(address: str) -> bool:
    """As a probe asks: on a connection of its own."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = health_pb2.HealthCheckRequest(service="liveness")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(check, timeout=30)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


# Targets of a draft


def long_look_ups(folder: Path) -> Row:
    """Others are a second target; in place of first tokens, its first branches."""
    draft = Service("draft", "ssd_draft", ["--speculator", "ngram"], folder)
    with started(draft):
        link, numbers = HandMadeLink(grpc.insecure_channel(draft.address)), itertools.count()

        def ask(_: int) -> float:
            number, begin = next(numbers), time.monotonic()
            link.open(number, [7 + i % 10 for i in range(60)])
            link.wait_for(number)
            link.close(number)
            return 1e3 * (time.monotonic() - begin)

        watched = Watch(draft, ask)
        watched.phase(1.0)
        row = watched.row("long_look_ups", attacker("long_look_ups", draft.address))
    row.note = "first branches of another target"
    return row


# Disks and nodes


def rotten_weights(folder: Path) -> str:
    """A replica with 200 kB of zeros in its weights; the first one is killed half way."""
    model = Path(shutil.copytree(resolve_model("stories-target"), folder / "model"))
    rot(model / "model.safetensors", 200_000)
    with (
        serving(folder, name="whole") as whole,
        serving(folder, name="rotten", model=str(model)) as rotten,
        Client(
            whole.address, rotten.address, security=Security(token=OTHER, insecure=True)
        ) as client,
        client.stream("Once upon a time", max_tokens=1500, ignore_eos=True, seed=1) as stream,
    ):
        pieces = stream.text()
        next(pieces)
        whole.kill()
        try:
            for _ in pieces:
                pass
        except ModelMismatchError as error:
            return f"not gone on with: {error}"
        except ClientError as error:
            return f"PROBLEM: {error}"
    return "PROBLEM: the text went on with other weights"


def rot(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        spans = [each["data_offsets"] for each in header.values()]
        begin, end = max(spans, key=lambda span: span[1] - span[0])
        opened.seek(8 + length + (begin + end) // 2)
        opened.write(bytes(size))


def strangers(folder: Path) -> str:
    """Two nodes start, alone and beside strangers at the cluster's port."""
    alone, _ = start_of_two_nodes(folder / "alone", attacked=False)
    beside, warnings = start_of_two_nodes(folder / "beside", attacked=True)
    problem = "" if beside < NODE_SECONDS and warnings < 20 else "PROBLEM: "
    return (
        f"{problem}two nodes are ready after {beside:.1f} s beside strangers, {alone:.1f} s "
        f"without; {warnings} warnings"
    )


def start_of_two_nodes(folder: Path, attacked: bool) -> tuple[float, int]:
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("sixteen bytes at least")
    secret.chmod(0o600)
    flags = ["--tp", "2", "--nodes", "2", "--cluster-listen", "127.0.0.1:0"]
    flags += ["--cluster-secret-file", str(secret), "--threads", "1"]
    leader = Service("leader", "ssd_target", ["stories-target", *flags], folder)
    leader.start()
    node: subprocess.Popen[bytes] | None = None
    try:
        seconds_until(
            lambda: "cluster: listening on" in leader.log() or leader.process.poll() is not None
        )
        address = leader.log().partition("cluster: listening on ")[2].split()[0].rstrip(",;")
        with attacker("strangers", address) if attacked else contextlib.nullcontext():
            time.sleep(2.0 if attacked else 0.0)
            begin = time.monotonic()
            command = [sys.executable, "-m", "ssd_target", "join", "--leader", address]
            command += ["--node", "1", "--cluster-secret-file", str(secret), "--threads", "1"]
            with (folder / "node.log").open("wb") as log:
                node = subprocess.Popen(command, stdout=log, stderr=log)
            leader.wait_until_ready()
            return time.monotonic() - begin, leader.log().count("WARNING")
    finally:
        if node is not None:
            node.kill()
        leader.close()
