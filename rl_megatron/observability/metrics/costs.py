"""Metrics of what a step costs: packing, weights, servers, tokens, memory, seconds and checkpoints."""

from __future__ import annotations

from rl_megatron.observability.metrics.curve import Curve, MetricTuples

COSTS: MetricTuples = (
    ("packing/imbalance", "", "work of the slowest rank at each micro-batch over the mean rank's; 1 is even",
     Curve("Health", "Packing imbalance")),
    ("packing/padding_fraction", "", "share of the packed positions that are padding",
     Curve("Health", "Packing padding")),
    ("plane/bytes", "bytes", "columns of the batch, as the controller sent them to ranks",
     Curve("Speed", "Bytes of a step's columns to ranks")),
    ("plane/seconds", "s", "the controller made these, beside its event loop",
     Curve("Speed", "Seconds in which these were made")),
    ("weights/bytes", "bytes", "weight bytes that crossed a process boundary to the rollout engine"),
    ("weights/route", "", "how they got there, as text: file, process_group, cuda_ipc, carried; shared_file through "
     "a file system that nodes share"),
    ("weights/quantization_error", "", "largest relative error of a tensor that was quantised for engine servers, as "
     "Frobenius norms", Curve("Health", "Error of quantised weights")),
    ("engine/healthy", "servers", "engine servers that serve after the step's push; only if servers sample",
     Curve("Health", "Engine servers that serve", hide_constant=True, first=True)),
    ("engine/restarts", "", "restarts of dead engine servers since the run was started",
     Curve("Health", "Engine server restarts", hide_constant=True)),
    ("tokens/rollout", "tokens", "tokens sampled for the step, also of groups and trajectories that are left out, and "
     "greedily; not of what was cut off before its answer came"),
    ("tokens/train", "tokens", "positions of the optimizer steps, prompts included, padding excluded"),
    ("tokens_per_second/rollout", "tokens/s", "of seconds/rollout; of seconds/step with train.max_staleness",
     Curve("Speed", "Rollout speed", first=True)),
    ("tokens_per_second/train", "tokens/s", "tokens/train over seconds/train",
     Curve("Speed", "Training speed", first=True)),
    ("flops/train", "FLOP", "FLOPs of the policy's model, and of a draft layer that is trained, in forward and "
     "backward over tokens/train, without what is computed again and gradients of frozen weights; those of sampling "
     "and scores are not counted (rl_megatron/scaling/flops.py)"),
    ("mfu/train", "", "flops/train over seconds/train at the bfloat16 peak of the policy's GPUs; only where that is "
     "known", Curve("Speed", "Share of the GPUs' peak in training (MFU)")),
    ("seconds/rollout", "s", "sampling and rewards"),
    ("seconds/logprobs", "s", "log-probs of the old policy by the learner, and of the new one (train.route_flips)"),
    ("seconds/reference", "s", "log-probs of the reference; on separate ranks, only the wait after seconds/logprobs"),
    ("seconds/values", "s", "values by the critic; on separate ranks, only the wait after the scores before it"),
    ("seconds/critic", "s", "forward, backward and optimizer of the critic's minibatches; on separate ranks, the wait "
     "after seconds/train"),
    ("seconds/train", "s", "forward, backward and optimizer of all minibatches"),
    ("seconds/weights", "s", "weight push to the rollout engine"),
    ("seconds/verify", "s", "part of seconds/weights: digests of the tensors sent and of those received, on the "
     "slowest rank", Curve("Speed", "Seconds of weight digests")),
    ("seconds/pause", "s", "part of seconds/weights: the push paused sampling, on the server that it paused longest",
     Curve("Speed", "Seconds for which a push paused sampling")),
    ("memory/peak", "bytes", "the most that a learner rank has held since its start: of its GPU as torch's allocator "
     "has it, of a CPU's resident memory; with two ranks or more",
     Curve("Speed", "Most memory that a rank has held", first=True)),
    ("ranks/slowest", "rank", "the learner rank whose passes took longest, its waits included; log.txt names its node; "
     "with two ranks or more", Curve("Speed", "Slowest rank")),
    ("seconds/eval", "s", "held-out evaluation; only in rows that evaluated"),
    ("checkpoint/stage_seconds", "s", "training waited for the copy of the state (checkpoint.async_save)",
     Curve("Speed", "Seconds for which a step waited for a save's copy")),
    ("checkpoint/bytes", "bytes", "what ranks wrote into the last checkpoint; only in rows after it was written"),
    ("checkpoint/write_seconds", "s", "the slowest rank wrote into it, policy and critic together; in the same rows",
     Curve("Speed", "Seconds in which a checkpoint was written")),
    ("checkpoint/step", "", "step of the newest complete checkpoint; only in rows after it was completed"),
    ("seconds/checkpoint", "s", "training waited for checkpoints; only in rows after one was begun or written"),
    ("seconds/step", "s", "since the previous row: the step, its evaluation, the wait for checkpoints",
     Curve("Speed", "Seconds a step", compared=True)),
    ("loop/longest_ms", "ms", "the longest since the last row that the controller served nothing",
     Curve("Speed", "Longest that the controller served nothing, ms")),
    ("devices/<name>", "devices", "the role of this name held: GPUs, or on CPUs the cores that its ranks compute "
     "with; what learner and engines share is the learner's"),
    ("devices/layout", "", "the degrees of every role's layout that are not 1, and what else a resume may change that "
     "changes a step's seconds or memory, without defaults, as text"),
    ("metrics/non_finite", "", "values of this row that were NaN or infinite and are null; only if there are any"),
)  # fmt: skip
