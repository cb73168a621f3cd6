"""A shared target that loses a rank at a step over tokens that only rank 0's device knows.

Run as ``python -m tests.model_executor.distributed.lost_rank DEVICE RANK`` by ``test_gpu_path.py``. Prints the other
rank's process id, and nothing more: the step cannot end.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from outrider.model_executor.distributed.process_group import Leader
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.row_batch import RowBatch
from outrider.model_executor.worker_commands import Operation, WorkerCommand
from tests.model_executor.gpu_path import shared_settings


def lose(rank: int) -> None:
    """Let a rank be killed when the command is sent and neither rank has run it."""
    publish = Leader.publish

    def publish_and_kill(self: Leader, command: WorkerCommand) -> None:
        is_drawn, follower = command.operation == Operation.FORWARD_DRAWN, self.process_ids()[1]
        if is_drawn:
            _say(follower)
        if is_drawn and rank:
            os.kill(follower, signal.SIGSTOP)
        publish(self, command)
        if is_drawn:
            os.kill(follower if rank else os.getpid(), signal.SIGKILL)

    Leader.publish = publish_and_kill  # type: ignore[method-assign]


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(device: str, rank: int) -> None:
    lose(rank)
    runner = open_runner(shared_settings("target", device))
    with torch.inference_mode():
        sequence = runner.sequences.open(20)
        logits = runner.forward([ForwardRow(sequence, [5, 6, 7], 1)])
        ahead, _ = runner.forward_batch(RowBatch.drawn([sequence]), drawn=logits.argmax(-1).int())
    _say(ahead.tolist())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
