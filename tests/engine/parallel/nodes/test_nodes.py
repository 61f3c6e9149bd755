"""Several nodes: who may join, what is computed together, and how it ends when one goes."""

import contextlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.parallel.cluster import wire
from ssd_engine.parallel.cluster.options import ClusterOptions
from ssd_engine.parallel.nodes.leader import JoinTimeout, Leader
from ssd_engine.parallel.nodes.member import MemberOptions, Membership, NoLeader, join
from ssd_engine.parallel.nodes.node import LeaderLost, Node
from ssd_engine.parallel.ranks.rank_start import RankPlacement, RankStart
from ssd_engine.process import fork_server
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.process.unknown_connections import MAX_STRANGERS
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.cli import join as join_command
from ssd_target.cli import main
from ssd_target.config import JoinConfig, TargetConfig
from ssd_target.front.server import plan_target
from ssd_target.node import check_join, software
from tests.harness import Request, make_core, make_runner
from tests.harness import run as run_here
from tests.process_tree import computing, descendants, is_alive
from tests.processes import (
    PATIENT,
    ServiceProcess,
    TargetProcess,
    collect,
    draft,
    link_states,
    target,
    wait_until_ready,
)
from tests.speculation.generations import OFF, SSD, Generations, request, with_speculation
from tests.suite.forked_services import start_service
from tests.suite.scale import full_only
from tests.target.test_lifecycle import listening
from tests.waiting import HANG_SECONDS, wait_until

LEADER_HOST = "127.0.0.2"  # another address of the loopback than a node has that dials it
SECRET = b"sixteen bytes at least"
FRONT, FORKS = 4194305, 4194306  # no process has these numbers


# --- Who may join: a real leader and real nodes, before there are ranks.


@dataclass
class Door:
    """A leader that waits for two nodes, of which one never comes: so it never starts."""

    leader: Leader
    port: int
    caplog: pytest.LogCaptureFixture

    def options(self, node: int = 1, **changes: object) -> MemberOptions:
        options = MemberOptions(LEADER_HOST, self.port, node, SECRET, software(), 60.0)
        return replace(options, **changes)  # type: ignore[arg-type]

    def dial(self) -> socket.socket:
        return socket.create_connection((LEADER_HOST, self.port), timeout=20)

    def refusal(self, **changes: object) -> str:
        """The reason, which both sides give."""
        with pytest.raises(ConfigError) as refused:
            join(self.options(**changes))  # type: ignore[arg-type]
        return str(refused.value)

    def until_logged(self, words: str) -> None:
        wait_until(lambda: words in self.caplog.text)

    def joined(self) -> list[int]:
        return sorted(self.leader._nodes)


def open_door(caplog: pytest.LogCaptureFixture, **changes: object) -> Door:
    caplog.set_level("INFO")
    plan = plan_target(TargetConfig(model="stories-target", tp=2)).target
    options = ClusterOptions(
        nodes=3,
        host=LEADER_HOST,
        port=0,
        secret=SECRET,
        software=software(),
        model="stories-target",
        digest=plan.checkpoint.digest,
        join_timeout=600.0,
        timeout=30.0,
        farewell=Pipe(duplex=False)[0],
    )
    start = RankStart(plan.model, plan.runner, RankPlacement(3, 0, 1), "target", "info")
    leading = Leader(replace(options, **changes), start)  # type: ignore[arg-type]
    return Door(leading, leading._listener.getsockname()[1], caplog)


@pytest.fixture
def door(caplog: pytest.LogCaptureFixture) -> Door:
    return open_door(caplog)


def test_strangers_are_refused_and_hold_nobody_up(door: Door, tmp_path: Path) -> None:
    other = Path(shutil.copytree(resolve_model("stories-target"), tmp_path / "model"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 10] ^= 1
    (other / "model.safetensors").write_bytes(data)

    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_STRANGERS // 2):  # silent ones
            strangers.enter_context(door.dial())
        garbage = strangers.enter_context(door.dial())
        garbage.sendall(secrets.token_bytes(5000))
        door.until_logged("it is no node, or speaks another version")

        other_secret = door.refusal(secret=b"another secret, just as long")
        assert "--cluster-secret-file: the leader has another secret" in other_secret
        assert "must be in [1, 2] for --nodes 3" in door.refusal(node=3)
        assert "node 1 runs ssd 9" in door.refusal(software="ssd 9")
        assert "another checkpoint" in door.refusal(model=str(other))
        assert "another config.json" in door.refusal(model="stories-draft")
        assert "--device cuda: the leader runs on cpu" in door.refusal(device="cuda")

        first = join(door.options(threads=3))
        assert (first.start.place.first, first.start.options.threads) == (1, 3)
        assert "--node 1: this node is here already" in door.refusal()
        second_model = join(door.options(node=2, model=str(resolve_model("stories-target"))))
        wait_until(lambda: door.joined() == [1, 2])
        first.connection.close()
        second_model.connection.close()
    for words in ("another secret", "[1, 2]", "ssd 9", "another checkpoint", "here already"):
        assert re.search(rf"cluster: refused 127.0.0.1:\d+: .*{re.escape(words)}", door.caplog.text)


def test_strangers_without_end_keep_no_node_out_and_fill_no_log(door: Door) -> None:
    """From another address than the node's, as many as there is room for, several times over."""
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * MAX_STRANGERS):
            strangers.enter_context(
                socket.create_connection((LEADER_HOST, door.port), 20, ("127.0.0.2", 0))
            )
        joined = [join(door.options(node=node)) for node in (1, 2)]
        wait_until(lambda: door.joined() == [1, 2])
        for each in joined:
            each.connection.close()
    warnings = [record for record in door.caplog.records if record.levelname == "WARNING"]
    assert len(warnings) < 10


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probing:
        return int(probing.getsockname()[1])


def test_a_leader_that_is_not_there_is_given_up_in_time() -> None:
    options = MemberOptions("127.0.0.1", free_port(), 1, SECRET, software(), join_timeout=0.1)
    with pytest.raises(NoLeader, match=r"within --join-timeout 0\.1 s: .*refused"):
        join(options)
    with pytest.raises(NoLeader, match="no leader at no-such-host"):
        join(replace(options, host="no-such-host.invalid"))


def test_a_node_that_goes_before_the_start_is_waited_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door(caplog, timeout=600.0)
    membership = join(door.options())
    wait_until(lambda: door.joined() == [1])
    membership.connection.close()
    door.until_logged("node 1 has left: the connection was closed")
    impatient = open_door(caplog, timeout=0.5)
    silent = join(impatient.options())  # says nothing from here on, as if it were stopped
    impatient.until_logged("node 1 has left: nothing was heard in time")
    wait_until(lambda: impatient.joined() == [])
    silent.connection.close()


def test_a_leader_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    door = open_door(caplog, join_timeout=0.1)
    with pytest.raises(JoinTimeout, match=r"nodes 1, 2 did not join within --join-timeout 0\.1 s"):
        door.leader.gather()
    assert "waiting for nodes 1, 2" in caplog.text


@contextlib.contextmanager
def pair_of_ends() -> Iterator[tuple[wire.NodeConnection, wire.NodeConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    ends = wire.NodeConnection(dialled), wire.NodeConnection(accepted)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def make_node(membership: Membership, clock: Callable[[], float] = time.monotonic) -> Node:
    """One that starts no rank, and so needs no server for it."""
    return Node(membership, cast(ForkServer, None), lambda: None, lambda: None, clock)


def test_a_leader_that_falls_silent_is_lost(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own loop, with the leader's end held by this test."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    start = join(door.options()).start
    ticking = itertools.count(0.0, 0.1).__next__  # a tenth of a second at each look
    with pair_of_ends() as (ours, theirs):
        with pytest.raises(LeaderLost, match="nothing was heard for 0"):
            make_node(Membership(ours, start, timeout=0.5), ticking).run()
        assert {kind for kind, _ in theirs.pending()} == {wire.NodeFrameKind.PING}
    with pair_of_ends() as (ours, theirs):
        theirs.write(wire.HEADER.pack(wire.NodeFrameKind.STEP, 1 << 31), time.monotonic() + 5)
        with pytest.raises(LeaderLost, match="2147483648 bytes makes no sense"):
            make_node(Membership(ours, start, timeout=20)).run()


# --- At work: real processes.


@contextlib.contextmanager
def node(folder: Path, address: str, *flags: str, secret: Path) -> Iterator[ServiceProcess]:
    """``ssd-target join`` as node 1."""
    folder.mkdir()
    command = ["join", "--leader", address, "--node", "1", "--cluster-secret-file", str(secret)]
    process = start_service("ssd_target", [*command, *flags], folder / "log", False)
    try:
        yield ServiceProcess(process, address, folder / "log")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def secret_file(folder: Path) -> Path:
    file = folder / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    return file


def cluster_address(serving: TargetProcess) -> str:
    pattern = r"cluster: listening on (\S+)"
    return wait_until(lambda: re.findall(pattern, serving.log()), serving.log)[0]


@contextlib.contextmanager
def leader(folder: Path, secret: Path, *flags: str, tp: int = 2) -> Iterator[TargetProcess]:
    shared = ["--tp", str(tp), "--nodes", "2", "--cluster-listen", f"{LEADER_HOST}:0"]
    shared += ["--cluster-secret-file", str(secret)]
    with target(folder, *shared, *flags, ready=False) as serving:
        yield serving


@contextlib.contextmanager
def two_nodes(folder: Path, *flags: str) -> Iterator[tuple[TargetProcess, ServiceProcess]]:
    secret = secret_file(folder)
    with (
        leader(folder / "leader", secret, *flags) as serving,
        node(folder / "node", cluster_address(serving), secret=secret) as joined,
    ):
        wait_until_ready(serving)
        yield serving, joined


def begin(serving: TargetProcess, max_tokens: int) -> Iterator[pb.GenerateResponse]:
    """A plain text that has begun."""
    message = with_speculation(request(1, max_tokens), mode=OFF)
    call = serving.stub().Generate(message, timeout=HANG_SECONDS)
    return itertools.chain([next(call)], call)


@pytest.mark.parametrize("tp", [2, full_only(4)])
def test_two_nodes_give_the_text_of_one_and_end_together(tmp_path: Path, tp: int) -> None:
    """Plain and with a real draft; then SIGTERM to the leader, while a request runs."""
    secret = secret_file(tmp_path)
    with (
        draft(tmp_path / "draft", ready=False) as drafting,
        leader(
            tmp_path / "leader", secret, *PATIENT, "--draft", drafting.address, tp=tp
        ) as serving,
    ):
        address = cluster_address(serving)
        assert serving.health("liveness") == health_pb2.HealthCheckResponse.SERVING
        assert serving.health("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
        probe = f"127.0.0.1:{free_port()}"
        with node(tmp_path / "node", address, "--health-listen", probe, secret=secret) as joined:
            wait_until_ready(serving)
            joined.address = probe
            assert joined.health("readiness") == health_pb2.HealthCheckResponse.SERVING
            assert_listening_where_told(serving, joined, ranks=tp // 2)
            wait_until(lambda: link_states(serving) == ["up"])
            assert_same_text_as_of_one_rank(serving)
            assert_ends_together(serving, joined)


def assert_same_text_as_of_one_rank(serving: TargetProcess) -> None:
    """The one is in this process."""
    messages = [request(seed, 40) for seed in range(3)]
    for mode in (OFF, SSD):
        with Generations(serving, [with_speculation(each, mode=mode) for each in messages]) as made:
            pass
        assert [tokens for _, tokens in made.texts()] == one_rank(messages)
    assert sum(stats.accepted_tokens for stats in made.stats()) > 0


def one_rank(messages: list[pb.GenerateRequest]) -> list[list[int]]:
    runner = make_runner(resolve_model("stories-target"))
    tokenizer = Tokenizer(runner.options.directory, runner.config)
    requests = [
        Request(
            tokenizer.encode(message.text),
            SamplingParams(seed=message.sampling.seed, temperature=message.sampling.temperature),
            message.stop.max_tokens,
        )
        for message in messages
    ]
    return [result.tokens for result in run_here(make_core(runner), requests)]


def assert_listening_where_told(serving: TargetProcess, joined: ServiceProcess, ranks: int) -> None:
    """The kernel writes addresses in hexadecimal, the last byte first."""
    here, there = "0100007F", "0200007F"
    leaders = addresses(serving.process.pid)
    assert sorted(leaders) == sorted([there, *[there] * ranks, here])  # cluster, gloo; gRPC
    nodes = addresses(joined.process.pid)
    assert sorted(nodes) == sorted([*[here] * ranks, here])  # gloo; health


def addresses(pid: int) -> list[str]:
    """gRPC writes an IPv4 address as one of IPv6, where it can."""
    found = listening({pid, *descendants(pid)})
    return [each.removeprefix("0000000000000000FFFF0000") for each in found]


def assert_ends_together(serving: TargetProcess, joined: ServiceProcess) -> None:
    running = begin(serving, max_tokens=60)
    serving.terminate()
    assert len(collect(running).tokens) == 60
    assert serving.wait_for_exit() == 0
    assert joined.wait_for_exit() == 0
    assert "the leader has ended" in joined.log()
    assert "Traceback" not in serving.log() + joined.log()


def kill_rank(serving: TargetProcess, joined: ServiceProcess) -> None:
    os.kill(*computing(joined.process.pid), signal.SIGKILL)


def kill_node(serving: TargetProcess, joined: ServiceProcess) -> None:
    joined.process.kill()


def kill_leader(serving: TargetProcess, joined: ServiceProcess) -> None:
    os.kill(*computing(serving.process.pid), signal.SIGKILL)


def stop_node(serving: TargetProcess, joined: ServiceProcess) -> None:
    joined.process.send_signal(signal.SIGSTOP)
    serving.wait_for_exit()
    joined.process.send_signal(signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize(
    ("happens", "leader_says", "node_says"),
    [
        pytest.param(
            kill_rank,
            "node 1: rank 1 died with exit code -9; the engine stops",
            "error: rank 1 died with exit code -9",
            id="a rank of the node dies",
        ),
        pytest.param(kill_node, "node 1: the connection", "", id="the node dies"),
        pytest.param(
            kill_leader,
            "the engine process ended with exit code -9",
            "error: the leader is lost: the connection",
            id="the leader dies",
        ),
        pytest.param(
            stop_node,
            "node 1: nothing was heard in time; the engine stops",
            "error: the ",  # cluster ends, or leader is lost: whatever it reads first
            id="the node is stopped",
        ),
    ],
)
def test_whoever_dies_takes_all_along_with_its_reason(
    tmp_path: Path,
    happens: Callable[[TargetProcess, ServiceProcess], None],
    leader_says: str,
    node_says: str,
) -> None:
    seconds = "5" if happens is stop_node else "60"
    with two_nodes(tmp_path, "--cluster-timeout", seconds) as (serving, joined):
        family = [*descendants(serving.process.pid), *descendants(joined.process.pid)]
        next(begin(serving, max_tokens=400))
        happens(serving, joined)
        assert serving.wait_for_exit() == 1
        assert leader_says in serving.log()
        assert joined.wait_for_exit() == (-9 if happens is kill_node else 1)
        assert node_says in joined.log()
        wait_until(lambda: not any(is_alive(pid) for pid in family))


@pytest.mark.parametrize("parent", [FORKS, 1])
def test_a_front_that_has_ended_is_not_told_to_drain_nor_is_who_took_its_children(
    door: Door, monkeypatch: pytest.MonkeyPatch, parent: int
) -> None:
    """In a container that is process 1."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(fork_server, "_parents", fork_server._Parents(FORKS, FRONT))
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(os, "kill", lambda *how: killed.append(how))
    with pair_of_ends() as (connection, _):
        door.leader._handle(1, connection, wire.NodeFrameKind.LEAVING, b"")
    assert killed == ([(FRONT, signal.SIGTERM)] if parent == FORKS else [])


@pytest.mark.full
def test_a_node_that_is_told_to_stop_drains_the_whole_cluster(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (serving, joined):
        running = begin(serving, max_tokens=100)
        joined.terminate()
        assert len(collect(running).tokens) == 100
        assert serving.wait_for_exit() == 0
        assert joined.wait_for_exit() == 0


# --- What an operator types.


def check(command: str, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, [command, *arguments, "--check-config"], env=env)
    return result.exit_code, result.output


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return str(secret_file(tmp_path))


SERVE = "serve stories-target"
BOTH = "--cluster-listen h:1 --cluster-secret-file SECRET"
JOIN = "join --leader h:1 --node 1 --cluster-secret-file"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{SERVE} --nodes 2 --tp 2", "--nodes 2 needs --cluster-listen"),
        (f"{SERVE} --nodes 2 --tp 2 --cluster-listen :1", "--nodes 2 needs --cluster-secret-file"),
        (f"{SERVE} --nodes 2 --tp 2 --cluster-secret-file SECRET", "needs --cluster-listen"),
        (f"{SERVE} --nodes 2 {BOTH}", "--tp 1 must be a mult"),
        (f"{SERVE} --nodes 3 --tp 4 {BOTH}", "of --nodes 3"),
        (f"{SERVE} --nodes 0", "--nodes: must be in [1, 64]"),
        (f"{SERVE} --cluster-listen h:1", "--cluster-listen needs --nodes"),
        (f"{SERVE} --cluster-secret-file SECRET", "--cluster-secret-file needs --nodes"),
        (f"{SERVE} --cluster-timeout 0.1", "--cluster-timeout: must be in [1, "),
        (f"{SERVE} --join-timeout nan", "--join-timeout: must be in [1, "),
        (
            f"{SERVE} --nodes 2 --tp 2 {BOTH} --cluster-listen nowhere",
            "--cluster-listen: HOST:PORT",
        ),
        ("join --node 1 --cluster-secret-file SECRET", "--leader HOST:PORT is needed"),
        ("join --leader h:1 --cluster-secret-file SECRET", "--node is needed"),
        ("join --leader h:1 --node 1", "--cluster-secret-file FILE is needed"),
        (f"{JOIN} SECRET --leader h", "--leader: HOST:PORT"),
        (f"{JOIN} SECRET --node 0", "--node: must be in [1, 63]"),
        (f"{JOIN} SECRET --threads 0", "--threads: must"),
        (f"{JOIN} SECRET --health-listen x", "--health-list"),
        (f"{JOIN} SECRET --model nothing", "'nothing' is nei"),
        (f"{JOIN} /nowhere", "--cluster-secret-file: /nowhere cannot be read: No such file"),
        (f"{JOIN} /dev/null", "/dev/null holds 0 bytes, 16 to 4096 are needed"),
        (f"{JOIN} SECRET.short", "SECRET.short holds 5 bytes"),
        (f"{JOIN} SECRET.long", "SECRET.long holds 4097 bytes"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(command: str, words: str, secret: str) -> None:
    Path(f"{secret}.short").write_bytes(b"short\n")
    Path(f"{secret}.long").write_bytes(b"x" * 5000)
    code, output = check(*command.replace("SECRET", secret).split())
    assert code == 2
    assert words.replace("SECRET", secret) in output
    assert len(output.strip().splitlines()) == 1


def test_good_options_are_accepted(secret: str) -> None:
    shared = ("--cluster-secret-file", secret)
    good = ("--tp", "2", "--nodes", "2", "--cluster-listen", "0.0.0.0:7412", *shared)
    assert check("serve", "stories-target", *good)[0] == 0
    assert check("join", "--leader", "leader-0.group:7412", "--node", "1", *shared)[0] == 0
    variables = {"SSD_TARGET_LEADER": "leader:7412", "SSD_TARGET_NODE": "3"}
    assert check("join", *shared, env=variables) == (0, "ok: node 3 of leader:7412\n")


def test_a_secret_that_all_can_read_is_warned_of(
    secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_join(JoinConfig("leader:7412", 1, Path(secret)))
    assert "--cluster-secret-file" not in caplog.text
    Path(secret).chmod(0o644)
    check_join(JoinConfig("leader:7412", 1, Path(secret)))
    assert "is open to every user" in caplog.text


def test_every_option_of_join_has_a_variable() -> None:
    options = {p.name: p for p in join_command.params if p.name != "help"}
    assert options.keys() == {*JoinConfig.__dataclass_fields__, "check_config"}
    for name, option in options.items():
        assert option.envvar == f"SSD_TARGET_{name.upper()}"
