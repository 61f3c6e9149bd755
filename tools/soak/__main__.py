"""Ten minutes of mixed load on loopback, with drafts that are killed, and what is left behind.

    python -m tools.soak [--minutes 10] [--seed 1] [--targets 1] [--clients 8] [--no-attackers]

Exit code 0: every text was that of plain decoding, nothing failed that should not, and nothing has
grown: blocks, sequences, descriptors, threads, memory.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from ssd.v1 import target_pb2_grpc as rpc
from tools.soak.attackers import attacked, write_tokens
from tools.soak.chaos import Chaos, list_drafts
from tools.soak.load import Load
from tools.soak.report import Figures, Key, Trend, grown, lines
from tools.soak.requests import Known, know, make_crowd, make_pool
from tools.soak.services import Service, SoakFailed

IDLE_SECONDS = 120
WHOLE_MINUTES = 5.0  # from here on everything that can happen must have happened
# A target: few places, so that some wait, and a cache that one context fills: others are set aside.
TARGET = [
    "--max-num-seqs", "16", "--max-waiting", "8", "--write-timeout", "3",
    "--max-model-len", "1280", "--num-kv-blocks", "80", "--swap-gib", "0.005",
    "--link-timeout", "1", "--trust-draft", "127.0.0.1:*", "--discover-seconds", "0.5",
    "--no-auto-off", "--threads", "1", "--check-integrity",
]  # fmt: skip
DRAFT = ["--max-num-seqs", "16", "--num-kv-blocks", "300", "--threads", "1", "--check-integrity"]
IDLE = {
    "ssd-target": (
        "ssd_num_requests_running", "ssd_num_requests_waiting", "ssd_kv_cache_usage_ratio",
        "ssd_kv_cache_reserved_blocks", "ssd_kv_swapped_blocks",
    ),
    "ssd-draft": (
        "ssd_sequences_active", "ssd_draft_kv_cache_usage_ratio",
        "ssd_draft_kv_cache_reserved_blocks",
    ),
}  # fmt: skip


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._listing = folder / "drafts"
        found = ["--draft", f"file://{self._listing}", "--token-file", str(write_tokens(folder))]
        self.targets = [
            Service(f"target-{i}", "ssd_target", ["stories-target", *TARGET, *found], folder)
            for i in range(options.targets)
        ]
        self.drafts = [
            Service(f"draft-{i}", "ssd_draft", ["stories-draft", *DRAFT], folder) for i in range(2)
        ]
        self.services = [*self.targets, *self.drafts]
        self.problems: list[str] = []
        self._trends: dict[Key, Trend] = {}
        self._crowd: list[Known] = []

    def run(self) -> None:
        seconds = 60 * self._options.minutes
        self._begin()
        load, chaos = self._load(), self._chaos(seconds)
        warm_up = min(60.0, max(3.0, seconds / 6))
        say(f"warm-up: {warm_up:.0f} s of the same load, without kills")
        self._loaded(load, warm_up)
        before = self._at_rest()
        said = dict(load.counts)
        say(f"soak: {seconds:.0f} s")
        with self._sampled():
            chaos.start()
            self._loaded(load, seconds)
            chaos.stop()
        after = self._at_rest()
        load.counts.subtract(said)
        self._show(load, chaos, before, after, seconds)

    def _begin(self) -> None:
        self._listing.write_text("")
        for service in self.services:
            service.start()
        for service in self.services:
            service.wait_until_ready()
        list_drafts(self._listing, self.drafts)

    def _load(self) -> Load:
        begin = time.monotonic()
        messages = make_pool(self._options.pool, self._options.seed)
        with grpc.insecure_channel(self.targets[0].address) as channel:
            stub = rpc.TargetServiceStub(channel)
            with ThreadPoolExecutor(4) as workers:
                pool: list[Known] = list(workers.map(lambda each: know(stub, each), messages))
            self._crowd = [know(stub, each) for each in make_crowd(self._options.seed)]
        tokens = sum(len(known.tokens) for known in pool)
        spent = time.monotonic() - begin
        say(f"references: {len(pool)} requests, {tokens} tokens, plain, in {spent:.1f} s")
        addresses = [target.address for target in self.targets]
        return Load(addresses, pool, self._options.seed)

    def _chaos(self, seconds: float) -> Chaos:
        every = min(5.0, max(0.5, seconds / 40))
        return Chaos(self.drafts, self._listing, every, self._options.seed)

    def _loaded(self, load: Load, seconds: float) -> None:
        load.start(self._options.clients)
        end = time.monotonic() + seconds
        try:
            with self._attacked():
                while time.monotonic() < end:
                    time.sleep(min(1.0, max(0.0, end - time.monotonic())))
                    for target in self.targets:
                        if target.process.poll() is not None:
                            raise SoakFailed(f"{target.name} died: {target.log()[-2000:]}")
        finally:
            load.stop()
        load.crowd(self._crowd)

    def _attacked(self) -> contextlib.AbstractContextManager[None]:
        attackers = self._options.attackers
        return attacked(self.targets[0]) if attackers else contextlib.nullcontext()

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[None]:
        """Memory of processes that live through it all."""
        stop, begin = threading.Event(), time.monotonic()
        lasting = [*self.targets, self.drafts[0]]
        every = min(2.0, self._options.minutes * 60 / 30)

        def sample() -> None:
            while not stop.wait(every):
                for service in lasting:
                    with contextlib.suppress(OSError):
                        for role, figures in service.figures().items():
                            trend = self._trends.setdefault((service.name, role), Trend())
                            trend.add(time.monotonic() - begin, figures.rss_mib)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _at_rest(self) -> dict[Key, Figures]:
        """Nothing runs, nothing is held; the least that is seen in a while."""
        for service in self.services:
            self._wait_until_idle(service)
        best: dict[Key, Figures] = {}
        for _ in range(8):
            for service in self.services:
                for role, now in service.figures().items():
                    then = best.get((service.name, role), now)
                    best[service.name, role] = Figures(
                        now.rss_mib,
                        min(now.descriptors, then.descriptors),
                        min(now.threads, then.threads),
                        min(now.files, then.files, key=len),
                    )
            time.sleep(0.25)
        return best

    def _wait_until_idle(self, service: Service) -> None:
        kind = "ssd-target" if service in self.targets else "ssd-draft"
        end = time.monotonic() + IDLE_SECONDS
        while True:
            metrics = service.metrics()
            busy = {name: metrics[name] for name in IDLE[kind] if metrics[name]}
            if kind == "ssd-target" and metrics['ssd_link_state{state="up"}'] != len(self.drafts):
                busy["links"] = metrics['ssd_link_state{state="up"}']
            if kind == "ssd-draft" and metrics['ssd_draft_links{state="up"}'] != len(self.targets):
                busy["links"] = metrics['ssd_draft_links{state="up"}']
            if not busy:
                return
            if time.monotonic() > end:
                self.problems.append(f"{service.name} does not come to rest: {busy}")
                return
            time.sleep(0.1)

    def _show(
        self,
        load: Load,
        chaos: Chaos,
        before: dict[Key, Figures],
        after: dict[Key, Figures],
        seconds: float,
    ) -> None:
        for name, count in sorted({**load.counts, **chaos.counts}.items()):
            print(f"{name:<44} {count:>10}")
        print(f"{'tokens per second':<44} {load.counts['tokens'] / seconds:>10.1f}")
        for target in self.targets:
            ended = {
                name.partition('"')[2].rstrip('"}'): count
                for name, count in target.metrics().items()
                if name.startswith("ssd_requests_total{")
            }
            print(f"{target.name}, requests by end, warm-up included:", ended)
            cut = target.metrics()['ssd_streams_cut_total{bound="write_timeout"}']
            print(f"{target.name}, streams of never readers that were cut: {cut:g}")
            aside = target.metrics()["ssd_sequences_set_aside_total"]
            kept = target.metrics()["ssd_sequences_swapped_out_total"]
            print(f"{target.name}, sequences that were set aside: {aside:g}, kept: {kept:g}")
            if self._options.minutes >= WHOLE_MINUTES and not (aside and kept):
                self.problems.append(f"{target.name} has set nobody aside, or kept nothing")
        for line in lines(before, after, self._trends):
            print(line)
        for service in self.services:
            metrics = service.metrics()
            kind = "ssd-target" if service in self.targets else "ssd-draft"
            print(service.name, *(f"{name}={metrics[name]:g}" for name in IDLE[kind]))
        self.problems += load.problems + chaos.problems + grown(before, after)
        self.problems += self._memory() + self._logs() + self._unused(load)
        if self._options.minutes >= WHOLE_MINUTES and not chaos.counts["kills"]:
            self.problems.append("no draft was killed")

    def _memory(self) -> list[str]:
        return [
            f"{' '.join(key)}: memory grew from {trend.begin:.0f} to {trend.end:.0f} MiB"
            for key, trend in self._trends.items()
            if trend.grew
        ]

    def _logs(self) -> list[str]:
        return [
            f"{service.name} has a traceback in its log: "
            f"{service.whole_log().partition('Traceback')[2][:3000]}"
            for service in self.services
            if "Traceback" in service.whole_log()
        ]

    def _unused(self, load: Load) -> list[str]:
        needed = ("texts checked", "tokens from the cache", "cancels", "bad requests refused")
        if self._options.minutes >= WHOLE_MINUTES:
            needed += ("asked: slow reader", "asked: never reader")
        return [f"the load had no {name}" for name in needed if not load.counts[name]]

    def close(self) -> None:
        for service in self.services:
            service.close()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", type=int, choices=(1, 2), default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--attackers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pool", type=int, default=64, help="different requests")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # services end with it
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options, Path(folder))
        try:
            soak.run()
        except SoakFailed as error:
            soak.problems.append(str(error))
        finally:
            soak.close()
    for problem in soak.problems:
        print(f"PROBLEM: {problem}")
    print("soak: " + ("failed" if soak.problems else "nothing was lost, nothing has grown"))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
