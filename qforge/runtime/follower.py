"""A process that shares a model with others, started by `parallel.Followers`."""

from __future__ import annotations

import os
import pickle
import signal
import sys

from qforge.errors import QforgeError
from qforge.models.model import open_model
from qforge.runtime.gpu_decoder import GpuDecoder
from qforge.runtime.parallel import Job, join, leave, open_share
from qforge.runtime.running import blocks_for, running


def main() -> None:
    """Main function of the process; a `Job` as JSON is its argument."""
    told = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer, and nobody would read it
    sys.exit(_follow(Job.from_json(sys.argv[1]), told))


def _follow(job: Job, told: int) -> int:
    """Open a share, say how many cache blocks there is room for, then compute each step that comes in until no more does."""
    try:
        opened = open_share(open_model(job.source, dtype=job.dtype), job)
        blocks = blocks_for(opened, job.where, job.how.kv_cache)
    except QforgeError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send theirs to all processes; which of them still compute, the first decides
        signal.signal(number, signal.SIG_IGN)
    os.write(told, b"%d\n" % blocks)
    try:
        blocks = pickle.load(sys.stdin.buffer)
        join(job)
        runner = running(opened, job.where, blocks, job.how).runner
        compute = runner.logits if isinstance(runner, GpuDecoder) else runner.step
        while True:
            compute(pickle.load(sys.stdin.buffer))
    except EOFError:
        return 0
    finally:
        leave()
