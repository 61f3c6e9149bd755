"""A stand-in for nvidia-cuda-mps-control that notes how it is called.

Its daemon is a `sleep` that, as a careless daemon would, keeps the stderr that it was given.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """#!/bin/sh
folder={folder}
input=
[ "$1" = -d ] || input=$(cat)
echo "$*;$input;$CUDA_MPS_PIPE_DIRECTORY;$CUDA_MPS_LOG_DIRECTORY" >> $folder/calls
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    if [ -e $folder/stderr ]; then
        echo noise
        cat $folder/stderr >&2
        exit 1
    fi
    sleep 600 &
    echo $! > $pid_file
    cp $pid_file $folder/pid
    [ ! -e $folder/slow ] || sleep 60
elif [ "$input" = quit ] && [ -e $pid_file ]; then
    kill $(cat $pid_file)
fi
"""


@dataclass(frozen=True)
class Call:
    arguments: str
    stdin: str
    pipes: str
    logs: str


class FakeMps:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "nvidia-cuda-mps-control"
        program.write_text(_SCRIPT.format(folder=folder))
        program.chmod(0o755)

    def fail_with(self, stderr: str) -> None:
        (self.folder / "stderr").write_text(stderr)

    def be_slow(self) -> None:
        (self.folder / "slow").touch()

    def calls(self) -> list[Call]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Call(*line.split(";")) for line in lines]

    def has_daemon(self) -> bool:
        return (self.folder / "pid").exists()

    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def check_started_and_stopped(self) -> str:
        """The folder of a daemon that was started once and stopped once, and left nothing."""
        start, stop = self.calls()
        assert (start.arguments, start.stdin, stop.arguments, stop.stdin) == ("-d", "", "", "quit")
        assert start.pipes == start.logs == stop.pipes == stop.logs
        assert os.path.isabs(start.pipes)
        assert not os.path.exists(start.pipes)
        return start.pipes
