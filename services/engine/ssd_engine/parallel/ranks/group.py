"""The process group of ranks, over NCCL or gloo, and the devices and threads of each rank."""

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models.tensor_parallel import GroupThroughHost, RankGroup, rank_device
from ssd_engine.parallel.cluster.interface import interface_of
from ssd_engine.parallel.ranks.rank_start import RankPlacement
from ssd_engine.process.nccl_library import loaded_version, share_gpus

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
GLOO_AT_ADDRESS = "gloo_at_address"


def check_devices(options: RunnerOptions, ranks: int) -> None:
    if options.device != "cuda":
        return
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.devices is not None:
        missing = [device for device in options.devices if device >= visible]
        if missing:
            raise ConfigError(
                f"--devices: there is no GPU {missing[0]}, {visible} CUDA devices are visible"
            )
    elif visible < ranks:
        raise ConfigError(
            f"--device cuda with {ranks} ranks on this node: {visible} CUDA devices are visible"
        )


def configure_threads(options: RunnerOptions, ranks: int) -> None:
    """One core is left to the front process, the others are dealt out to the ranks of the node."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(options.threads or max(1, (cores - 1) // ranks))
    if options.device == "cpu" and options.dtype == "float32":
        # oneDNN reorders a weight at every call; plain BLAS does not (measured: 2 to 3 times
        # faster for 16 to 64 rows on Arm, the same on x86, where fp32 goes to BLAS anyway).
        torch.backends.mkldnn.set_flags(False)


def loopback_store() -> dist.TCPStore:
    """A store that listens on loopback alone: left to itself it takes every interface."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def dial_store(port: int) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, port, is_master=False)


def join_group(rank: int, place: RankPlacement, store: Any, options: RunnerOptions) -> RankGroup:
    local_rank = rank - place.first
    device = rank_device(options.device, local_rank, options.devices)
    through_host = options.shares_gpus and not _nccl_shares_gpus(options)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    if options.device == "cuda" and not through_host:
        backend = "nccl"
        if place.host is not None:  # "=" asks for this very name, not for names that begin so
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(place.host)}")
    elif place.host is not None:
        backend = _gloo_at(place.host)
    else:
        backend = "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=place.size)
    if through_host:
        return GroupThroughHost(rank, place.size, torch.device("cpu"), local_rank, place.here)
    return RankGroup(rank, place.size, device, local_rank, place.here)


def _nccl_shares_gpus(options: RunnerOptions) -> bool:
    """Whether ranks exchange by NCCL on the GPUs that they share, which the log tells."""
    named = ",".join(map(str, options.devices or ()))
    missing = share_gpus()
    if missing is None:
        log.info("--devices %s: NCCL %s joins ranks that share a GPU", named, _spelled_version())
        return True
    log.warning(
        "--devices %s names a GPU twice, and %s: sums go through the host's memory and steps are "
        "launched kernel by kernel, which is slow",
        named,
        missing,
    )
    return False


def _spelled_version() -> str:
    return ".".join(map(str, loaded_version() or ()))


def _gloo_at(host: str) -> str:
    """The name of a backend that listens at this address alone; gloo's own takes an interface."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # the stubs do not know its options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timeout
        return gloo(store, rank, size, options)

    dist.Backend.register_backend(GLOO_AT_ADDRESS, create, devices=["cpu"])
    return GLOO_AT_ADDRESS
