"""Mutual TLS and tokens between real processes: who is let in, who is not, and with which code."""

import contextlib
import datetime
import json
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ssd.v1 import (
    speculation_pb2,
    speculation_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
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


def link_state(guarded: Guarded) -> str:
    with guarded.channel(guarded.target.address, TOKENS["user"]) as channel:
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
    wrong = client_command(services, "info", *services.flags("link"))
    assert wrong.returncode == 2
    assert "role generate" in wrong.stderr


class TestCertificates:
    def refused(
        self, services: Guarded, client: Pair | None = None, ca: bytes | None = None
    ) -> None:
        for service in (services.target, services.draft):
            with services.channel(service.address, TOKENS["admin"], client, ca) as channel:
                assert refusal(lambda: generate(channel))[0] is Code.UNAVAILABLE

    def test_of_another_authority_are_refused(self, services: Guarded) -> None:
        self.refused(services, Authority("another").sign("client"))

    def test_that_have_expired_are_refused(self, services: Guarded) -> None:
        old = services.authority.sign("client", valid=-datetime.timedelta(days=1))
        self.refused(services, old)

    def test_that_are_missing_are_refused(self, services: Guarded) -> None:
        for service in (services.target, services.draft):
            credentials = grpc.ssl_channel_credentials(services.authority.cert)
            with grpc.secure_channel(service.address, credentials) as channel:
                assert refusal(lambda: generate(channel))[0] is Code.UNAVAILABLE
            with grpc.insecure_channel(service.address) as channel:
                assert refusal(lambda: generate(channel))[0] is Code.UNAVAILABLE

    def test_of_a_server_that_nobody_knows_are_refused_by_the_client(
        self, services: Guarded
    ) -> None:
        self.refused(services, ca=Authority("another").cert)

    def test_are_made_out_to_a_host(self, services: Guarded) -> None:
        """A good certificate of another host is a wrong one."""
        pair = services.client
        credentials = grpc.ssl_channel_credentials(services.authority.cert, pair.key, pair.cert)
        options = [("grpc.ssl_target_name_override", "other.example.org")]
        with grpc.secure_channel(services.target.address, credentials, options) as channel:
            assert refusal(lambda: generate(channel))[0] is Code.UNAVAILABLE


class TestTokens:
    def call(self, services: Guarded, token: str | None) -> tuple[grpc.StatusCode, str]:
        with services.channel(services.target.address, token) as channel:
            return refusal(lambda: generate(channel))

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
        got, details = self.call(services, token)
        assert got is code
        assert words in details

    def test_are_needed_for_every_method_of_a_target(self, services: Guarded) -> None:
        expected = {None: Code.UNAUTHENTICATED, TOKENS["link"]: Code.PERMISSION_DENIED}
        for token, code in expected.items():
            with services.channel(services.target.address, token) as channel:
                stub = target_pb2_grpc.TargetServiceStub(channel)
                for method, message in (
                    (stub.GetModelInfo, target_pb2.GetModelInfoRequest()),
                    (stub.Tokenize, target_pb2.TokenizeRequest(text="Once")),
                    (stub.Detokenize, target_pb2.DetokenizeRequest()),
                ):
                    assert refusal(lambda: method(message, timeout=SECONDS))[0] is code  # noqa: B023
        with services.channel(services.target.address, TOKENS["small"]) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            assert stub.Tokenize(target_pb2.TokenizeRequest(text="Once")).token_ids
            long = target_pb2.TokenizeRequest(text="Once " * 1000)
            code, details = refusal(lambda: stub.Tokenize(long, timeout=SECONDS))
            assert code is Code.INVALID_ARGUMENT
            assert "8 tokens are allowed" in details

    def test_of_a_user_open_neither_the_draft_nor_the_trace(self, services: Guarded) -> None:
        with services.channel(services.draft.address, TOKENS["user"]) as channel:
            stub = speculation_pb2_grpc.SpeculationServiceStub(channel)
            info = speculation_pb2.GetDraftInfoRequest()
            code, _ = refusal(lambda: stub.GetDraftInfo(info, timeout=SECONDS))
            assert code is Code.PERMISSION_DENIED
            empty: list[speculation_pb2.SpeculateRequest] = []
            code, _ = refusal(lambda: list(stub.Speculate(iter(empty), timeout=SECONDS)))
            assert code is Code.PERMISSION_DENIED
        for token, expected in (("user", Code.PERMISSION_DENIED), ("admin", None)):
            with services.channel(services.target.address, TOKENS[token]) as channel:
                traces = trace_pb2_grpc.TraceServiceStub(channel)
                clock = trace_pb2.GetClockRequest()
                if expected is None:
                    assert traces.GetClock(clock, timeout=SECONDS).clock_nanos > 0
                else:
                    code, _ = refusal(lambda: traces.GetClock(clock, timeout=SECONDS))  # noqa: B023
                    assert code is expected

    def test_have_limits_of_their_own(self, services: Guarded) -> None:
        with services.channel(services.target.address, TOKENS["small"]) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            with services.channel(services.target.address, TOKENS["user"]) as other:
                with engine_held(services.target.process.pid):  # so that none of them ends
                    running = stub.Generate(request(tokens=500, prompt="Once"), timeout=SECONDS)
                    next(running)
                    code, details = refusal(lambda: generate(channel, request(prompt="Once")))
                    assert code is Code.RESOURCE_EXHAUSTED
                    assert "'small' may run 1 requests" in details
                    others = target_pb2_grpc.TargetServiceStub(other).Generate(
                        request(), timeout=SECONDS
                    )
                    started = next(others)
                assert len(collect(iter([started, *others])).tokens) == 16
            running.cancel()

            def freed() -> bool:
                with contextlib.suppress(grpc.RpcError):
                    return len(generate(channel, request(prompt="Once"))) == 16
                return False

            wait_until(freed, "the place of a cancelled request is free again")
            code, details = refusal(lambda: generate(channel, request(prompt=PROMPT * 10)))
            assert code is Code.INVALID_ARGUMENT
            assert "may send 8 at most" in details

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
        with services.channel(services.draft.address, TOKENS["link"]) as channel:
            stub = speculation_pb2_grpc.SpeculationServiceStub(channel)
            hello = speculation_pb2.SpeculateRequest(hello=speculation_pb2.Hello())
            code, details = refusal(lambda: list(stub.Speculate(iter([hello]), timeout=SECONDS)))
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
            stub = speculation_pb2_grpc.SpeculationServiceStub(channel)
            info = speculation_pb2.GetDraftInfoRequest()
            code, _ = refusal(lambda: stub.GetDraftInfo(info, timeout=SECONDS))
            assert code is Code.UNAUTHENTICATED
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
    with services.channel(services.target.address, TOKENS["user"]) as channel:
        expected = generate(channel, request(tokens=60))
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with engine_held(services.target.process.pid):
            stream = stub.Generate(request(tokens=60), timeout=SECONDS)
            assert next(stream).WhichOneof("event") == "started"
            new = Authority("the next authority")
            for name in ("target", "draft"):
                new.sign(name).write(services.folder, name)
            replace(services.folder / "ca.crt", new.cert)
            changed = TOKEN_FILE.replace(TOKENS["user"], "the-token-of-next-year")
            replace(services.folder / "tokens.toml", changed.encode())
            fresh = new.sign("client")
        with services.channel(
            services.target.address, "the-token-of-next-year", fresh, new.cert
        ) as now:
            assert generate(now, request(tokens=60)) == expected
            code, _ = refusal(lambda: generate(channel))  # the old token, on the old connection
            assert code is Code.UNAUTHENTICATED
        with services.channel(services.target.address, "the-token-of-next-year") as old:
            assert refusal(lambda: generate(old))[0] is Code.UNAVAILABLE
        received = [token for response in stream for token in response.tokens.token_ids]
        assert received == expected
    old_client = services.client
    services.authority, services.client = new, fresh
    assert "ssd_ready" in scrape(services, services.target, fresh)
    with pytest.raises(OSError, match=r"(?i)alert|reset|EOF"):
        scrape(services, services.target, old_client)
    with services.channel(services.target.address, "the-token-of-next-year", fresh) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = stub.GetModelInfo(target_pb2.GetModelInfoRequest(), timeout=SECONDS)
        assert info.speculation_endpoints[0].state == "up"  # the link is the same stream
    (services.folder / "link.token").write_text("the-token-of-next-years-targets")
    changed = changed.replace(TOKENS["link"], "the-token-of-next-years-targets")
    replace(services.folder / "tokens.toml", changed.encode())
    services.draft.process.send_signal(signal.SIGSTOP)  # for longer than --link-timeout

    def state() -> str:
        info = stub.GetModelInfo(target_pb2.GetModelInfoRequest(), timeout=SECONDS)
        return str(info.speculation_endpoints[0].state)

    with services.channel(services.target.address, "the-token-of-next-year", fresh) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        asked = stub.Generate(request(tokens=400), timeout=SECONDS)
        wait_until(lambda: state() != "up", "a link that stands still is left")
        services.draft.process.send_signal(signal.SIGCONT)
        wait_until(
            lambda: state() == "up", "and dialled again, with the token and certificates of now"
        )
        asked.cancel()
