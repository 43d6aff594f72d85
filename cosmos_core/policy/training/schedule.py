"""Learning rate by step: a linear warm-up, then a shape. It depends on the step only, so it has no state."""

from __future__ import annotations

import math

from cosmos_core.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """The learning rate of one optimizer step.

    Warm-up step k of W has k / W of the peak. After it, `constant` stays at the peak; `linear` and `cosine` reach
    `final_lr_ratio` of it at the last step.

    Args:
        config: The stage's optimizer.
        step: Step of the stage, from 1.
        steps: Steps of the stage.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * shape)
