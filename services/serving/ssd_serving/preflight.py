"""What --check-config looks at beyond options and model: ports, devices and memory as they are."""

import errno
import os
import socket

from ssd_engine.checkpoints.model_expansion import grow_config
from ssd_engine.errors import ConfigError
from ssd_engine.process.host_memory import available_memory
from ssd_serving.config import ServiceConfig, parse_address
from ssd_serving.plan import ModelPlan

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a weight
LISTENING = ("listen", "health_listen", "metrics_listen")


def check_here(config: ServiceConfig, plan: ModelPlan | None, ranks: int) -> None:
    """``plan`` is None where there is no model; ``ranks`` are those of this node."""
    for name in LISTENING:
        address = getattr(config, name)
        if address is not None:
            _check_port(f"--{name.replace('_', '-')}", address)
    if plan is None:
        return
    if plan.runner.device == "cuda":
        _check_cuda(plan, ranks)
    else:
        _check_host(plan)


def _check_port(flag: str, address: str) -> None:
    """Raises ConfigError where somebody has the address; port 0 is anybody's."""
    host, port = parse_address(flag, address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except socket.gaierror as error:
        raise ConfigError(f"{flag} {address}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{flag} {address}: another process listens there") from error
        raise ConfigError(f"{flag} {address}: {os.strerror(error.errno or 0)}") from error


def _check_cuda(plan: ModelPlan, ranks: int) -> None:
    import torch  # takes seconds

    from ssd_engine.execution.device_memory import check_weights_fit
    from ssd_engine.models.tensor_parallel import rank_device
    from ssd_engine.parallel.ranks.group import check_devices

    check_devices(plan.runner, ranks)
    shape, dtype = plan.runner.expand_to, getattr(torch, plan.runner.dtype)
    config = plan.model if shape is None else grow_config(plan.model, shape)
    device = rank_device("cuda", 0, plan.runner.devices)
    check_weights_fit(config, plan.runner, ranks, dtype, device)


def _check_host(plan: ModelPlan) -> None:
    needed, free = plan.num_parameters * BYTES[plan.runner.dtype], available_memory()
    if needed > free:
        raise ConfigError(
            f"{plan.name}: the weights take {needed / GIB:.1f} GiB in {plan.runner.dtype}, "
            f"{free / GIB:.1f} GiB of this host's memory are free: take a smaller model, or "
            "--dtype bfloat16"
        )
