"""Mutual TLS and tokens between real processes: who is let in, who is not, and with which code."""

import datetime
import json
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ssd.v1 import (
    target_pb2,
    target_pb2_grpc,
)
from tests.process_tree import engine_held
from tests.processes import ServiceProcess, collect
from tests.security.certificates import Authority, Pair, replace
from tests.security.conftest import TOKEN_FILE, TOKENS, Guarded
from tests.waiting import HANG_SECONDS, wait_until

Code = grpc.StatusCode
SECONDS = HANG_SECONDS  # of a call
PROMPT = "Once upon a time"


def request(tokens: int = 16, prompt: str = PROMPT) -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(
        text=prompt,
        sampling=target_pb2.SamplingOptions(temperature=0.8, seed=5),
        stop=target_pb2.StopOptions(max_tokens=tokens, ignore_eos=True),
    )


def plain_health(service: ServiceProcess) -> int:
    """As a probe asks: without TLS, on the port for it."""
    found = re.search(r"health on (\S+)", service.log())
    if found is None:
        return 0
    with grpc.insecure_channel(found[1]) as channel:
        check = health_pb2.HealthCheckRequest(service="readiness")
        status: int = health_pb2_grpc.HealthStub(channel).Check(check, timeout=SECONDS).status
    return status


@pytest.fixture(scope="module")
def services(guarded: Guarded) -> Guarded:
    for service in (guarded.target, guarded.draft):
        wait_until(lambda service=service: plain_health(service) == 1, service.log())  # type: ignore[misc]
    wait_until(lambda: link_state(guarded) == "up", "the link comes up")
    return guarded


def link_state(guarded: Guarded, token: str = TOKENS["user"]) -> str:
    with guarded.channel(guarded.target.address, token) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = stub.GetModelInfo(target_pb2.GetModelInfoRequest(), timeout=SECONDS)
    return str(info.speculation_endpoints[0].state)


def generate(channel: grpc.Channel, message: target_pb2.GenerateRequest | None = None) -> list[int]:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    return collect(stub.Generate(message or request(), timeout=SECONDS)).tokens


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def client_command(guarded: Guarded, *command: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "ssd_client", *command]
    return subprocess.run(program, capture_output=True, text=True, timeout=200)


def test_the_right_certificates_and_tokens_serve_a_request_with_speculation(
    services: Guarded,
) -> None:
    """The link between target and draft is guarded in the same way."""
    prompt = [PROMPT, "--max-tokens", "40", "--ignore-eos", "--json"]
    done = client_command(services, "generate", *prompt, *services.flags())
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) == 40
    assert answer["speculation"]["accepted_tokens"] > 0  # of the draft: it was waited for


def test_the_clients_commands_reach_guarded_services(services: Guarded) -> None:
    both = client_command(services, "status", "--json", *services.flags("admin"))
    assert both.returncode == 0, both.stderr
    seen = json.loads(both.stdout)["services"]
    assert [each["role"] for each in seen] == ["target", "draft"]
    assert [each["health"] for each in seen] == ["ready", "ready"]


def strangers(guarded: Guarded, address: str) -> Iterator[grpc.Channel]:
    """Whose certificate is not right, with a token that is."""
    ca, mine = guarded.authority.cert, guarded.client
    another = Authority("another")
    yield guarded.channel(address, TOKENS["admin"], another.sign("client"))
    old = guarded.authority.sign("client", valid=-datetime.timedelta(days=1))
    yield guarded.channel(address, TOKENS["admin"], old)
    yield grpc.secure_channel(address, grpc.ssl_channel_credentials(ca))
    yield grpc.insecure_channel(address)
    yield guarded.channel(address, TOKENS["admin"], ca=another.cert)  # it is the client who refuses
    credentials = grpc.ssl_channel_credentials(ca, mine.key, mine.cert)
    other_host = [("grpc.ssl_target_name_override", "other.example.org")]
    yield grpc.secure_channel(address, credentials, other_host)


def test_a_certificate_that_is_wrong_expired_missing_or_of_another_host_is_refused(
    services: Guarded,
) -> None:
    for service in (services.target, services.draft):
        for channel in strangers(services, service.address):
            with channel:
                assert refusal(lambda: generate(channel))[0] is Code.UNAVAILABLE  # noqa: B023


OF_TARGET = ("Generate", "GetModelInfo", "Tokenize", "Detokenize")
METHODS = [("target", f"/ssd.v1.TargetService/{name}") for name in OF_TARGET]
METHODS += [
    ("draft", f"/ssd.v1.SpeculationService/{name}") for name in ("GetDraftInfo", "Speculate")
]
CLOCK = "/ssd.v1.TraceService/GetClock"
OTHER_ROLE = {"target": TOKENS["link"], "draft": TOKENS["user"]}


class TestTokens:
    def call(self, services: Guarded, role: str, method: str, token: str | None) -> list[bytes]:
        """Any method, with an empty message."""
        service = services.target if role == "target" else services.draft
        with services.channel(service.address, token) as channel:
            return list(channel.stream_stream(method)(iter([b""]), timeout=SECONDS))

    @pytest.mark.parametrize(
        ("token", "code", "words"),
        [
            (None, Code.UNAUTHENTICATED, "a token is needed"),
            ("not-a-token-of-this-server", Code.UNAUTHENTICATED, "not known here"),
            (TOKENS["expired"], Code.UNAUTHENTICATED, "has expired"),
            (TOKENS["link"], Code.PERMISSION_DENIED, "not the role generate"),
        ],
    )
    def test_that_are_missing_wrong_expired_or_of_another_role_are_refused(
        self, services: Guarded, token: str | None, code: grpc.StatusCode, words: str
    ) -> None:
        got, details = refusal(lambda: self.call(services, *METHODS[0], token))
        assert got is code
        assert words in details

    @pytest.mark.parametrize(("role", "method"), [*METHODS, ("target", CLOCK), ("draft", CLOCK)])
    def test_are_needed_for_every_method(self, services: Guarded, role: str, method: str) -> None:
        """A trace is the operator's."""
        for token, code in (
            (None, Code.UNAUTHENTICATED),
            (OTHER_ROLE[role], Code.PERMISSION_DENIED),
        ):
            assert refusal(lambda: self.call(services, role, method, token))[0] is code  # noqa: B023
        if method == CLOCK:
            assert self.call(services, role, method, TOKENS["admin"])

    def test_pay_for_their_tokens(self, services: Guarded) -> None:
        """One request may take more than a minute's worth; the next one waits for it."""
        with services.channel(services.target.address, TOKENS["thrifty"]) as channel:
            assert len(generate(channel)) == 16
            with pytest.raises(grpc.RpcError) as caught:
                generate(channel)
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        assert "12 tokens a minute" in caught.value.details()
        (detail,) = rpc_status.from_call(caught.value).details
        info = error_details_pb2.RetryInfo()
        assert detail.Unpack(info)
        assert 0 < info.retry_delay.ToMilliseconds() <= 60_000

    def test_a_second_link_of_the_same_identity_waits_for_the_first(
        self, services: Guarded
    ) -> None:
        code, details = refusal(lambda: self.call(services, *METHODS[-1], TOKENS["link"]))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "--max-links-per-identity" in details
        words = r"\('link'\): /ssd.v1.SpeculationService/Speculate: RESOURCE_EXHAUSTED: 'link' has"
        wait_until(
            lambda: re.search(rf"refused 127.0.0.1:\d+ {words}", services.draft.log()),
            services.draft.log,
        )

    def test_whose_bearer_is_refused_is_logged_with_the_name_of_the_certificate(
        self, services: Guarded
    ) -> None:
        """Which may try to write lines of its own."""
        forger = services.authority.sign("x\n12:00:00.000 ERROR target forged \x1b[31m")
        with services.channel(services.draft.address, client=forger) as channel:
            ask = channel.unary_unary(
                "/ssd.v1.TraceService/GetTrace"
            )  # by nobody else: logs are sparse
            assert refusal(lambda: ask(b"", timeout=SECONDS))[0] is Code.UNAUTHENTICATED
        wait_until(lambda: "forged" in services.draft.log(), services.draft.log)
        (line,) = [each for each in services.draft.log().splitlines() if "forged" in each]
        assert r"('x\n12:00:00.000 ERROR target forged \x1b[31m'): /ssd.v1" in line


def scrape(services: Guarded, service: ServiceProcess, client: Pair | None) -> str:
    """As Prometheus does, which may have a certificate to show."""
    found = re.search(r"metrics on (https://\S+)", service.log())
    assert found
    context = ssl.create_default_context(cadata=services.authority.cert.decode())
    if client is not None:
        context.load_cert_chain(*client.write(services.folder, "scraper"))
    with urllib.request.urlopen(found[1], timeout=SECONDS, context=context) as response:
        text: str = response.read().decode()
    return text


def test_probes_and_scrapes_are_served(services: Guarded) -> None:
    """Health on a plain port; metrics to those who show a certificate, as all callers must."""
    for service in (services.target, services.draft):
        assert plain_health(service) == 1
        for stranger in (None, Authority("another").sign("scraper")):
            with pytest.raises(OSError, match=r"(?i)alert|reset|EOF"):
                scrape(services, service, stranger)
        wait_until(
            lambda service=service: re.search(  # type: ignore[misc]
                r"refused 127.0.0.1:\d+: metrics: the TLS handshake failed: PEER_DID_NOT_RETURN",
                service.log(),
            ),
            service.log,
        )
        refused = 'ssd_refusals_total{method="metrics",reason="unauthenticated"} 2.0'
        assert refused in scrape(services, service, services.client)
    with services.channel(services.target.address) as channel:  # TLS, and no token
        check = health_pb2.HealthCheckRequest(service="readiness")
        assert health_pb2_grpc.HealthStub(channel).Check(check, timeout=SECONDS).status == 1


def test_rotation_takes_effect_and_drops_no_stream(services: Guarded) -> None:
    """Certificates, authority and tokens all change while a stream runs. Comes last: what was
    right before is wrong afterwards."""
    next_year = {"user": "the-token-of-next-year", "link": "the-token-of-next-years-targets"}
    new, old_client = Authority("the next authority"), services.client
    message = request(tokens=60)
    with services.channel(services.target.address, TOKENS["user"]) as channel:
        expected = generate(channel, message)
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with engine_held(services.target.process.pid):
            stream = stub.Generate(message, timeout=SECONDS)
            assert next(stream).WhichOneof("event") == "started"
            for name in ("target", "draft"):
                new.sign(name).write(services.folder, name)
            replace(services.folder / "ca.crt", new.cert)
            changed = TOKEN_FILE.replace(TOKENS["user"], next_year["user"])
            replace(services.folder / "tokens.toml", changed.encode())
        with services.channel(services.target.address, next_year["user"]) as old:
            assert refusal(lambda: generate(old))[0] is Code.UNAVAILABLE
        services.authority, services.client = new, new.sign("client")
        with services.channel(services.target.address, next_year["user"]) as now:
            assert generate(now, message) == expected
        # the old token, on the old connection
        assert refusal(lambda: generate(channel))[0] is Code.UNAUTHENTICATED
        assert [token for each in stream for token in each.tokens.token_ids] == expected
    assert "ssd_ready" in scrape(services, services.target, services.client)
    with pytest.raises(OSError, match=r"(?i)alert|reset|EOF"):
        scrape(services, services.target, old_client)
    assert link_state(services, next_year["user"]) == "up"  # the link is the same stream
    (services.folder / "link.token").write_text(next_year["link"])
    replace(
        services.folder / "tokens.toml", changed.replace(TOKENS["link"], next_year["link"]).encode()
    )
    services.draft.process.send_signal(signal.SIGSTOP)  # for longer than --link-timeout
    with services.channel(services.target.address, next_year["user"]) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        asked = stub.Generate(request(tokens=400), timeout=SECONDS)
        wait_until(lambda: link_state(services, next_year["user"]) != "up", "it is left")
        services.draft.process.send_signal(signal.SIGCONT)
        # and dialled again, with the token and certificates of now
        wait_until(lambda: link_state(services, next_year["user"]) == "up", "it is dialled again")
        asked.cancel()
