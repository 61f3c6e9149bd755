"""Several nodes: who may join, what is computed together, and how it ends when one goes."""

import contextlib
import hmac
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import cast

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
    TargetProcess,
    collect,
    draft,
    link_states,
    target,
    wait_until_ready,
)
from tests.speculation.generations import OFF, SSD, Generations, request, with_speculation
from tests.suite.scale import FULL, full_only
from tests.target import test_exactness
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


def cluster(**changes: object) -> tuple[ClusterOptions, RankStart]:
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
    return replace(options, **changes), start  # type: ignore[arg-type]


def open_door(caplog: pytest.LogCaptureFixture, **changes: object) -> Door:
    caplog.set_level("INFO")
    leading = Leader(*cluster(**changes))
    return Door(leading, leading._listener.getsockname()[1], caplog)


@pytest.fixture
def door(caplog: pytest.LogCaptureFixture) -> Door:
    return open_door(caplog)


def test_a_node_gets_its_orders_from_the_leader(door: Door) -> None:
    membership = join(door.options(threads=3))
    start, model = membership.start, resolve_model("stories-target")
    assert start.options == replace(door.leader._start.options, directory=model, threads=3)
    assert (start.config, start.role) == (door.leader._start.config, "target")
    assert (start.place.first, start.place.here, start.place.size) == (1, 1, 3)
    assert start.place.host == "127.0.0.1"
    assert membership.timeout == 30.0
    membership.connection.close()


def test_the_secret_itself_is_never_sent_and_no_proof_is_of_use_twice(door: Door) -> None:
    heard = []
    with door.dial() as one, door.dial() as two:
        for stranger in (one, two):
            heard.append(stranger.recv(44, socket.MSG_WAITALL))
            ours = b"SSDNODES\2\0\0\0" + bytes(32)
            proof = hmac_of(b"node", heard[0] + ours)
            stranger.sendall(ours + proof + b"\0\0")
            heard.append(stranger.recv(34, socket.MSG_WAITALL))
    assert heard[0][:12] == heard[2][:12] == ours[:12]
    assert heard[0][12:] != heard[2][12:]
    assert heard[1][:32] == hmac_of(b"leader", heard[0] + ours)
    assert heard[3] == bytes(34)
    assert SECRET not in b"".join(heard)


def hmac_of(role: bytes, openings: bytes) -> bytes:
    key = hmac.digest(SECRET, openings, "sha256")
    return hmac.digest(key, role + b"|", "sha256")


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

        assert "another secret" in door.refusal(secret=b"another secret, just as long")
        assert "must be in [1, 2] for --nodes 3" in door.refusal(node=3)
        assert "node 1 runs ssd 9" in door.refusal(software="ssd 9")
        assert "another checkpoint" in door.refusal(model=str(other))
        assert "another config.json" in door.refusal(model="stories-draft")
        assert "--device cuda: the leader runs on cpu" in door.refusal(device="cuda")

        first = join(door.options())
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


def test_who_is_no_leader_is_not_told_the_secret_and_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        options = MemberOptions("127.0.0.1", impostor.getsockname()[1], 1, SECRET, software(), 5.0)

        def answer(last: bytes) -> None:
            with impostor.accept()[0] as node:
                node.sendall(b"SSDNODES\2\0\0\0" + bytes(32))
                assert SECRET not in node.recv(78, socket.MSG_WAITALL)
                node.sendall(last)

        thread = threading.Thread(target=answer, args=(b"\1" * 32 + b"\0\0",))
        thread.start()
        with pytest.raises(ConfigError, match="does not know the secret"):
            join(options)
        thread.join()
    with pytest.raises(NoLeader, match=r"within --join-timeout 1 s: .*refused"):
        join(replace(options, join_timeout=1.0))
    with pytest.raises(NoLeader, match="no leader at no-such-host"):
        join(replace(options, host="no-such-host.invalid", join_timeout=0.1))


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


def test_a_leader_that_falls_silent_is_lost(door: Door) -> None:
    """The node's own loop, with the leader's end held by this test."""
    start = join(door.options()).start
    ticking = itertools.count(0.0, 0.1).__next__  # a tenth of a second at each look
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pair_of_ends() as (ours, theirs):
            node = make_node(Membership(ours, start, timeout=0.5), ticking)
            with pytest.raises(LeaderLost, match="nothing was heard for 0"):
                node.run()
            assert {kind for kind, _ in theirs.pending()} == {wire.NodeFrameKind.PING}
        with pair_of_ends() as (ours, theirs):
            theirs.write(wire.HEADER.pack(wire.NodeFrameKind.STEP, 1 << 31), time.monotonic() + 5)
            with pytest.raises(LeaderLost, match="2147483648 bytes makes no sense"):
                make_node(Membership(ours, start, timeout=20)).run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# --- At work: real processes.


@dataclass
class NodeProcess:
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text()

    def wait(self) -> int:
        return self.process.wait(timeout=HANG_SECONDS)


@contextlib.contextmanager
def node(folder: Path, address: str, *flags: str, secret: Path) -> Iterator[NodeProcess]:
    """``ssd-target join`` as node 1."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ssd_target", "join", "--leader", address, "--node", "1"]
    command += ["--cluster-secret-file", str(secret), *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield NodeProcess(process, folder / "log")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def secret_file(folder: Path, secret: bytes = SECRET) -> Path:
    file = folder / f"secret-{secret[:4].decode()}"
    file.write_bytes(secret + b"\n")
    file.chmod(0o600)
    return file


def cluster_address(serving: TargetProcess) -> str:
    pattern = r"cluster: listening on (\S+)"
    return wait_until(lambda: re.findall(pattern, serving.log()), serving.log)[0]


@contextlib.contextmanager
def two_nodes(
    folder: Path, *flags: str, node_flags: tuple[str, ...] = ()
) -> Iterator[tuple[TargetProcess, NodeProcess]]:
    secret = secret_file(folder)
    shared = ("--tp", "2", "--nodes", "2", "--cluster-listen", f"{LEADER_HOST}:0")
    shared += ("--cluster-secret-file", str(secret))
    with target(folder / "leader", *shared, *flags, ready=False) as serving:
        address = cluster_address(serving)
        with node(folder / "node", address, *node_flags, secret=secret) as joined:
            wait_until_ready(serving)
            yield serving, joined


def plain(seed: int, max_tokens: int) -> pb.GenerateRequest:
    return with_speculation(request(seed, max_tokens), mode=OFF)


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port: int = probing.getsockname()[1]
        return port


def health_of(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status
    return status


@pytest.mark.parametrize("tp", [2, full_only(4)])
def test_two_nodes_give_the_text_of_one_and_end_together(tmp_path: Path, tp: int) -> None:
    """Plain and with a real draft; then SIGTERM to the leader, while a request runs."""
    secret, probe = secret_file(tmp_path), f"127.0.0.1:{free_port()}"
    flags = ("--tp", str(tp), "--nodes", "2", "--cluster-listen", f"{LEADER_HOST}:0")
    flags += ("--cluster-secret-file", str(secret), *PATIENT)
    with draft(tmp_path / "draft", ready=False) as drafting:
        linked = ("--draft", drafting.address)
        with (
            target(tmp_path / "leader", *flags, *linked, ready=False) as serving,
            one_node(tmp_path / "one", tp) as alone,
        ):
            address = cluster_address(serving)
            assert serving.health("liveness") == health_pb2.HealthCheckResponse.SERVING
            assert serving.health("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            wrong = secret_file(tmp_path, b"wrong, but as long as it must be")
            with node(tmp_path / "wrong", address, secret=wrong) as stranger:
                assert stranger.wait() == 2
                assert "--cluster-secret-file: the leader has another secret" in stranger.log()
            wait_until(lambda: "it has another secret" in serving.log(), serving.log)
            with node(
                tmp_path / "node", address, "--health-listen", probe, secret=secret
            ) as joined:
                wait_until_ready(serving)
                assert health_of(probe, "readiness") == health_pb2.HealthCheckResponse.SERVING
                assert_listening_where_told(serving, joined, ranks=tp // 2)
                wait_until(lambda: link_states(serving) == ["up"])
                assert_same_text(serving, alone)
                assert_ends_together(serving, joined)


@contextlib.contextmanager
def one_node(folder: Path, tp: int) -> Iterator[TargetProcess | None]:
    """As many ranks on one; in full only, as its text is near that of one rank in any case."""
    if FULL:
        with target(folder, "--tp", str(tp)) as alone:
            yield alone
    else:
        yield None


def assert_same_text(serving: TargetProcess, alone: TargetProcess | None) -> None:
    messages = [
        with_speculation(request(seed, max_tokens=150 if FULL else 40), mode=mode)
        for seed in range(12 if FULL else 3)
        for mode in (OFF, SSD)
    ]
    with Generations(serving, messages) as together:
        pass
    texts = together.texts()
    assert texts[::2] == texts[1::2]
    assert sum(stats.accepted_tokens for stats in together.stats()[1::2]) > 0
    assert_near_one_rank(messages[::2], [tokens for _, tokens in texts[::2]])
    if alone is not None:
        with Generations(alone, messages[::2]) as expected:
            pass
        assert texts[::2] == expected.texts()
        ask = pb.GetModelInfoRequest()
        infos = [each.stub().GetModelInfo(ask) for each in (serving, alone)]
        assert infos[0].fingerprint == infos[1].fingerprint
        assert infos[0].tensor_parallel_size == infos[1].tensor_parallel_size


def assert_near_one_rank(messages: list[pb.GenerateRequest], two: list[list[int]]) -> None:
    """One rank, in this process: differences only where the two best scores are within 1e-5."""
    directory = resolve_model("stories-target")
    runner = make_runner(directory)
    tokenizer = Tokenizer(directory, runner.config)
    requests = [
        Request(
            tokenizer.encode(message.text),
            SamplingParams(seed=message.sampling.seed, temperature=message.sampling.temperature),
            message.stop.max_tokens,
        )
        for message in messages
    ]
    one = [result.tokens for result in run_here(make_core(runner), requests)]
    checking = test_exactness.TestTensorParallel()
    for message, ours, theirs in zip(messages, one, two, strict=True):
        if ours != theirs:
            gap = checking.gap_at_difference(message, ours, theirs)
            assert gap < test_exactness.NEAR_TIE
            print(f"excused: seed {message.sampling.seed}, gap {gap:.2e}")


def assert_listening_where_told(serving: TargetProcess, joined: NodeProcess, ranks: int) -> None:
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


def assert_ends_together(serving: TargetProcess, joined: NodeProcess) -> None:
    call = serving.stub().Generate(plain(5, max_tokens=60), timeout=120)
    started = next(call)
    serving.terminate()
    output = collect(iter([started, *call]))
    assert len(output.tokens) == 60
    assert serving.wait_for_exit() == 0
    assert joined.wait() == 0
    assert "the leader has ended" in joined.log()
    assert "Traceback" not in serving.log() + joined.log()


def kill_rank(serving: TargetProcess, joined: NodeProcess) -> None:
    (rank,) = computing(joined.process.pid)
    os.kill(rank, signal.SIGKILL)


def kill_node(serving: TargetProcess, joined: NodeProcess) -> None:
    joined.process.kill()


def kill_leader(serving: TargetProcess, joined: NodeProcess) -> None:
    (engine,) = computing(serving.process.pid)
    os.kill(engine, signal.SIGKILL)


def stop_node(serving: TargetProcess, joined: NodeProcess) -> None:
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
    happens: Callable[[TargetProcess, NodeProcess], None],
    leader_says: str,
    node_says: str,
) -> None:
    seconds = "5" if happens is stop_node else "60"
    with two_nodes(tmp_path, "--cluster-timeout", seconds) as (serving, joined):
        family = [*descendants(serving.process.pid), *descendants(joined.process.pid)]
        call = serving.stub().Generate(plain(1, max_tokens=400), timeout=240)
        next(call)
        next(call)
        happens(serving, joined)
        assert serving.wait_for_exit() == 1
        assert leader_says in serving.log()
        assert joined.wait() == (-9 if happens is kill_node else 1)
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
        call = serving.stub().Generate(plain(1, max_tokens=100), timeout=240)
        started = next(call)
        joined.process.terminate()
        assert len(collect(iter([started, *call])).tokens) == 100
        assert serving.wait_for_exit() == 0
        assert joined.wait() == 0


# --- What an operator types.


def check(command: str, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, [command, *arguments, "--check-config"], env=env)
    return result.exit_code, result.output


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return str(secret_file(tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nodes 2 --tp 2", "--nodes 2 needs --cluster-listen"),
        ("--nodes 2 --tp 2 --cluster-listen :1", "--nodes 2 needs --cluster-secret-file"),
        ("--nodes 2 --tp 2 --cluster-secret-file SECRET", "needs --cluster-listen"),
        ("--nodes 2 --cluster-listen h:1 --cluster-secret-file SECRET", "--tp 1 must be a mult"),
        ("--nodes 3 --tp 4 --cluster-listen h:1 --cluster-secret-file SECRET", "of --nodes 3"),
        ("--nodes 0", "--nodes: must be in [1, 64]"),
        ("--cluster-listen h:1", "--cluster-listen needs --nodes"),
        ("--cluster-secret-file SECRET", "--cluster-secret-file needs --nodes"),
        ("--cluster-timeout 0.1", "--cluster-timeout: must be in [1, "),
        ("--join-timeout nan", "--join-timeout: must be in [1, "),
        (
            "--nodes 2 --tp 2 --cluster-listen nowhere --cluster-secret-file SECRET",
            "--cluster-listen: HOST:PORT",
        ),
    ],
)
def test_a_bad_cluster_option_is_one_line_that_names_it(
    flags: str, words: str, secret: str
) -> None:
    code, output = check("serve", "stories-target", *flags.replace("SECRET", secret).split())
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds 0 bytes, 16 to 4096 are needed"),
        (b"short\n", "holds 5 bytes"),
        (b"x" * 5000, "holds 4097 bytes"),
    ],
)
def test_a_bad_secret_is_one_line_that_says_how_to_make_one(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    flags = ["--leader", "leader:1", "--node", "1", "--cluster-secret-file", str(file)]
    code, output = check("join", *flags)
    assert code == 2
    assert f"--cluster-secret-file: {file} {words}" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--node 1 --cluster-secret-file SECRET", "--leader HOST:PORT is needed"),
        ("--leader h:1 --cluster-secret-file SECRET", "--node is needed"),
        ("--leader h:1 --node 1", "--cluster-secret-file FILE is needed"),
        ("--leader h --node 1 --cluster-secret-file SECRET", "--leader: HOST:PORT"),
        ("--leader h:1 --node 0 --cluster-secret-file SECRET", "--node: must be in [1, 63]"),
        ("--leader h:1 --node 1 --threads 0 --cluster-secret-file SECRET", "--threads: must"),
        ("--leader h:1 --node 1 --health-listen x --cluster-secret-file SECRET", "--health-list"),
        ("--leader h:1 --node 1 --model nothing --cluster-secret-file SECRET", "'nothing' is nei"),
    ],
)
def test_a_bad_option_of_join_is_one_line_that_names_it(
    flags: str, words: str, secret: str
) -> None:
    code, output = check("join", *flags.replace("SECRET", secret).split())
    assert code == 2
    assert words in output


def test_good_options_are_accepted(secret: str) -> None:
    shared = ("--cluster-secret-file", secret)
    good = ("--tp", "2", "--nodes", "2", "--cluster-listen", "0.0.0.0:7412", *shared)
    assert check("serve", "stories-target", *good)[0] == 0
    assert check("join", "--leader", "leader-0.group:7412", "--node", "1", *shared)[0] == 0
    variables = {"SSD_TARGET_LEADER": "leader:7412", "SSD_TARGET_NODE": "3"}
    code, output = check("join", *shared, env=variables)
    assert (code, output) == (0, "ok: node 3 of leader:7412\n")


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


def test_a_draft_runs_on_one_node() -> None:
    from ssd_draft.cli import main as draft_main

    result = CliRunner().invoke(draft_main, ["serve", "stories-draft", "--nodes", "2"])
    assert result.exit_code == 2
    assert "No such option" in result.output
