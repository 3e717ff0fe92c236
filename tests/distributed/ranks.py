"""Processes that are the ranks of a gloo group: started once, then given jobs."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from fanfold.errors import RankError

PRELOAD = ["pytest", "distributed_jobs", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
PATIENCE = 120.0
"""Seconds after which a job counts as hanging: far more than any takes."""


def forking() -> ForkServerContext:
    """Makes processes from a server that has imported what they need, once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_script(script: str, size: int, folder: Path) -> list[str]:
    """What a script prints in `size` processes with the environment that torchrun gives them, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(size):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        here, there = forking().Pipe()
        environment = {name: str(value) for name, value in names.items()}
        processes.append(forking().Process(target=_run, args=(there, script, environment, folder), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    printed: list[str] = []
    for rank, pipe in enumerate(pipes):
        assert pipe.poll(PATIENCE), f"rank {rank} hangs"
        printed.append(pipe.recv())
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * size
    return printed


def _run(pipe: Connection, script: str, environment: dict[str, str], folder: Path) -> None:
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    os.chdir(folder)
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "serve.py", "exec"), {"__name__": "__main__"})
    pipe.send(printed.getvalue())


class Ranks:
    """`size` processes, forked from a server that has imported torch once.

    The store is the parent's, as that of torchrun is the launcher's: it outlives every rank.

    Args:
        size: how many.
        timeout: of the group and its store, in seconds.
        mortal: whether a process ends behind a RankError, as one does whose script does not catch it.
    """

    def __init__(self, size: int, timeout: float = 30.0, *, mortal: bool = False) -> None:
        context = forking()
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, size, self._store.port, timeout, mortal), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def start(self, job: Callable[..., Any], *args: Any) -> None:
        """Gives the job to every rank."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((job, args)))

    def results(self) -> list[Any]:
        """What the ranks' jobs returned, an exception where one raised; None for a rank that is no more."""
        found: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} hangs"
            try:
                found.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                found.append(None)
        return found

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of a job, by rank.

        Raises:
            Exception: what the job raised on the first rank where it did.
        """
        self.start(job, *args)
        found = self.results()
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def lose_the_store(self) -> None:
        """Ends the store, as a machine that fails would."""
        del self._store

    def close(self) -> None:
        """Ends all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float, mortal: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    while True:
        job, args = pickle.loads(pipe.recv_bytes())
        try:
            with torch.inference_mode():
                result = job(*args)
        except Exception as error:
            result = error
        pipe.send_bytes(pickle.dumps(result))
        if mortal and isinstance(result, RankError):
            return
