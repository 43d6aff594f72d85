"""torch's pipeline schedules for micro-batches that are no tensors.

A schedule cuts tensors along their first dimension and passes on tensors of one shape, whereas a micro-batch holds
sequences of many lengths. So a stage is told the number of a micro-batch and looks it up, and the last stage prices its
decisions within its own forward and gives the schedule the loss.

Deviations: the schedules put the mean of losses and scale gradients for it; here losses are summed. Stages are told the
shape of what they receive, for torch's own way of finding it runs a forward and a backward pass and then drops
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from cosmos_core.errors import CosmosError

Schedule: TypeAlias = Literal["1f1b", "interleaved", "zero-bubble"]

START: Final = torch.empty(1, dtype=torch.int64, device="meta")
"""Input of the first stage: nothing that it needs, as torch cuts something for it."""
LOSS: Final = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
"""Output of the last stage."""


@attrs.frozen(kw_only=True)
class Message:
    """The tensor that one stage gives to the next.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """A tensor of this shape that takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=True)


@attrs.frozen(kw_only=True, eq=False)
class StageWork:
    """A stage, and what it does with a micro-batch.

    Attributes:
        index: Its place in the order of stages.
        module: Its weights. Of an FSDP module torch keeps whole weights and gradients until the last micro-batch.
        forward: Gives what the next stage receives, or of the last stage the loss (a scalar), from what is received (by
            the first stage: nothing of use) and the number of the micro-batch.
    """

    index: int
    module: nn.Module
    forward: Callable[[torch.Tensor, int], torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Line:
    """The pipeline that stages are run in.

    Attributes:
        group: Its processes.
        num_stages: Stages of all of them.
        device: Where this process computes.
        message: What stages give to one another.
        splits_backward: Whether a zero-bubble schedule computes gradients of weights apart from those of activations.
    """

    group: dist.ProcessGroup
    num_stages: int
    device: torch.device
    message: Message
    splits_backward: bool


def run_schedule(schedule: Schedule, works: Sequence[StageWork], line: Line, number: int) -> None:
    """Forward and backward of micro-batches; gradients are added to those there are.

    Args:
        schedule: Their order.
        works: This process's stages, in the order of the model.
        line: The pipeline.
        number: Micro-batches; of `num_filled`.

    Raises:
        CosmosError: What a stage raised.
    """
    stages = [_NumberedStage(work, line) for work in works]
    options: dict[str, Any] = {"n_microbatches": number, "loss_fn": _loss, "scale_grads": False}
    match schedule:
        case "1f1b":
            runner: Any = Schedule1F1B(stages[0], **options)
        case "interleaved":
            runner = ScheduleInterleaved1F1B(stages, **options)  # type: ignore[arg-type]
        case "zero-bubble":
            runner = ScheduleZBVZeroBubble(stages, **options)  # type: ignore[arg-type]
    cuttable = torch.arange(number)
    try:
        runner.step(*((cuttable,) if stages[0].is_first else ()), target=cuttable if stages[-1].is_last else None)
    except RuntimeError as error:
        # torch wraps what a stage raises.
        if isinstance(error.__cause__, CosmosError):
            raise error.__cause__ from error
        raise


def num_filled(number: int, size: int, schedule: Schedule) -> int:
    """The least number of micro-batches, from `number` on, that a schedule takes.

    Args:
        number: Micro-batches there are.
        size: Processes of the pipeline.
        schedule: `1f1b` needs as many as there are processes, `interleaved` rounds of equal length.
    """
    match schedule:
        case "1f1b":
            return max(number, size)
        case "interleaved":
            return next(n for n in range(number, number + size) if n % max(1, n // size) == 0)
        case "zero-bubble":
            return number


class _NumberedStage(PipelineStage):
    """A stage that looks its micro-batches up.

    The module is torch's to see, since it may have to tell FSDP when to reduce gradients; the forward is ours.
    """

    def __init__(self, work: StageWork, line: Line) -> None:
        is_first, is_last = work.index == 0, work.index == line.num_stages - 1
        super().__init__(
            work.module,
            work.index,
            line.num_stages,
            line.device,
            input_args=START if is_first else line.message.like(),
            output_args=LOSS if is_last else line.message.like(),
            group=line.group,
            # Of a backward pass that was run whole nothing is deferred.
            dw_builder=None if line.splits_backward else lambda: lambda: None,
        )
        self._forward = work.forward
        self._number = -1
        # Before the first forward torch drops the gradients of FSDP modules.
        self._gradients = [(parameter, parameter.grad) for parameter in work.module.parameters()]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note which micro-batch it is."""
        self._number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, received: torch.Tensor) -> torch.Tensor:
        """Run the stage in torch's stead."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        output = self._forward(received, self._number)
        # torch detaches or frees it in place, so it is no view, and shares no memory with anything.
        return (output.float().reshape(1) if self.is_last else output).clone()


def _loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    # Another tensor than the output: torch detaches both in place.
    return output.sum()
