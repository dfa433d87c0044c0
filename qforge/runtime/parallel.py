"""Several processes compute a model together: this one schedules and samples, the others follow step by step.

A follower (`runtime.follower`) is told of each step through its standard input, and ends when that ends. Products exchange their parts by torch.distributed: NCCL between GPUs,
gloo between processors.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qforge import apart
from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.machine_limits import default_threads
from qforge.runtime.opening import Opened, of_model
from qforge.runtime.running import How, Limits, Running, blocks_for, running
from qforge.runtime.sequence import Draw
from qforge.runtime.step import Runner, StepInput

if TYPE_CHECKING:
    import torch

    from qforge.models.model import Model

_PATIENCE = 20.0  # seconds until processes that were told to end are killed
_MOMENT = 2.0  # seconds that a process which broke its pipe, or an exchange, takes to end


@dataclass(frozen=True, slots=True)
class Job:
    """What a follower is to open and run, as JSON on its command line.

    Attributes:
        dtype: of unquantized tensors, as `open_model` takes it.
        where: limits of the run; `where.device` is this follower's own.
        rendezvous: a file by which the processes find each other.
    """

    source: str
    dtype: str
    rank: int
    size: int
    where: Limits
    how: How
    rendezvous: str

    def to_json(self) -> str:
        """As JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """From the JSON that `to_json` writes."""
        values = json.loads(text)
        return Job(**{**values, "where": Limits(**values["where"]), "how": How(**values["how"])})


def open_shared(model: str | Path | Model, where: Limits, how: How, size: int) -> tuple[Opened, Running]:
    """This process's share of a model, and a runner that computes with those of `size - 1` other processes. Raises as `LLM` does."""
    from qforge.models.model import open_model

    _check_alone()
    model = open_model(str(model)) if isinstance(model, str | Path) else model
    if model.adapters:
        raise UnsupportedError(f"'{model.source}' has adapters merged in memory, which other processes do not see; save the merged model and give its folder")
    check_shape(model, size)
    cores = how.threads or default_threads()
    how, meeting = replace(how, threads=max(1, cores // size)), str(Path(tempfile.mkdtemp(prefix="qforge-")) / "rendezvous")
    jobs = [Job(model.source, str(model.dtype).removeprefix("torch."), rank, size, _own(where, rank), how, meeting) for rank in range(size)]
    followers = Followers(jobs[1:])
    opened = open_share(model, jobs[0])
    blocks = min(blocks_for(opened, jobs[0].where, how.kv_cache), *followers.ready())
    followers.tell(blocks)
    followers.join(jobs[0])
    made = running(opened, jobs[0].where, blocks, how)
    return opened, replace(made, runner=SharedRunner(made.runner, followers, size), token_bytes=size * made.token_bytes)


def check_shape(model: Model, size: int) -> None:
    """Refuse, before processes start, a model that so many cannot share. Raises UnsupportedError."""
    from qforge.runtime.shares import Share, of_spec

    if model.spec is not None:
        of_spec(model.spec, Share(0, size))


def open_share(model: Model, job: Job) -> Opened:
    """A process's share."""
    from qforge.runtime.shares import Share

    return of_model(model, job.how.activations, job.how.threads, job.where.device, Share(job.rank, job.size))


def _own(where: Limits, rank: int) -> Limits:
    """On the card of the process's number."""
    return replace(where, device=f"cuda:{rank}") if where.device == "cuda" else where


def check_size(size: int, device: str) -> None:
    """Refuse a number of processes that this machine cannot run.

    Raises:
        UnsupportedError: it makes no sense.
        MissingCapabilityError: there are fewer GPUs.
    """
    if size < 1:
        raise UnsupportedError(f"tensor_parallel is {size}; it must be at least 1")
    if size > 1 and device.startswith("cuda:"):
        raise UnsupportedError(f"device '{device}' is one GPU, and {size} processes need one each: use device cuda")
    if size > 1 and device == "cuda":
        import torch

        if torch.cuda.device_count() < size:
            raise MissingCapabilityError(f"{size} processes need a GPU each, and this machine has {torch.cuda.device_count()}")


def _check_alone() -> None:
    from torch import distributed

    if distributed.is_initialized():
        raise UnsupportedError("this process shares another model already; let go of that LLM first")


def join(job: Job) -> None:
    """Become process `job.rank` of the default process group. Raises UnsupportedError: there is another one already."""
    from torch import distributed

    _check_alone()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # all are on this machine
    backend = "nccl" if job.where.device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, init_method=Path(job.rendezvous).as_uri(), rank=job.rank, world_size=job.size)


def leave() -> None:
    """Be in no process group any more, nor have threads of one, which would be at work still while Python ends (the process would abort)."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


class Followers:
    """The other processes. They end when this object goes, or this process does."""

    def __init__(self, jobs: list[Job]) -> None:
        command = apart.command("qforge.runtime.follower:main")
        self._processes = [subprocess.Popen([*command, job.to_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for job in jobs]
        self._joined = threading.Event()
        self._why: str | None = None  # they are no more
        self.end = weakref.finalize(self, _end, self._processes, Path(jobs[0].rendezvous).parent, self._joined)

    def ready(self) -> list[int]:
        """Wait until each holds its weights; the cache blocks that each has room for.

        Raises:
            MissingCapabilityError: one has ended; why, it has printed.
        """
        found = []
        for number, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.end()
                raise MissingCapabilityError(
                    f"process {number} of {len(self._processes) + 1} that were to share the model has ended (exit code {process.returncode}); its message is above"
                )
            found.append(int(line))
        return found

    def join(self, job: Job) -> None:
        """Become one of their process group, which ends with them."""
        join(job)
        self._joined.set()

    def tell(self, message: Any) -> None:
        """Send to all: first the number of cache blocks, then steps. Raises as `watched`."""
        data = pickle.dumps(message, protocol=5)
        with self.watched():
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(data)
                process.stdin.flush()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What is done together with them; an interrupt of it ends them.

        Raises:
            MissingCapabilityError: it fails because one of them has ended; so then do all.
        """
        try:
            yield
        except (OSError, ValueError, RuntimeError) as e:  # of a pipe, of one that is closed already, of an exchange
            self._why = self._why or self._ended()
            if self._why is None:
                raise
            self.end()
            raise MissingCapabilityError(self._why) from e
        except (KeyboardInterrupt, SystemExit):  # they ignore signals, and would wait for this process's part
            for process in self._processes:
                process.kill()
            raise

    def _ended(self) -> str | None:
        """Which has ended, or does in this moment; of several one that a signal ended, since others end for want of it."""
        end, codes = time.monotonic() + _MOMENT, {}
        for number, process in enumerate(self._processes, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[process.wait(max(0.0, end - time.monotonic()))] = number
        if not codes:
            return None
        what = f"process {codes[min(codes)]} of {len(self._processes) + 1} that share the model has ended (exit code {min(codes)})"
        return f"{what}, for want of memory perhaps; if it had a message, it is above; open the model again"


class SharedRunner:
    """A `Runner` whose steps other processes compute with it.

    Args:
        own: this process's part.
    """

    def __init__(self, own: Runner, followers: Followers, size: int) -> None:
        self.spec, self.batch_invariant, self._own, self._followers, self._size = own.spec, own.batch_invariant, own, followers, size

    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`."""
        self._followers.tell(step)
        with self._followers.watched():
            return self._own.step(step)

    def choose(self, step: StepInput, draws: list[Draw]) -> list[int]:
        """See `Runner.choose`."""
        self._followers.tell(step)
        with self._followers.watched():
            return self._own.choose(step, draws)

    def kernels(self) -> dict[str, int]:
        """See `Runner.kernels`: of each process."""
        return self._own.kernels()

    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`: of all processes, taken to be equal."""
        return self._size * self._own.weight_bytes()


def _end(processes: list[subprocess.Popen[bytes]], folder: Path, joined: threading.Event) -> None:
    """End them, and the process group where this process is in it."""
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    end = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if joined.is_set():
        leave()
    shutil.rmtree(folder, ignore_errors=True)
