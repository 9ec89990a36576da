"""Metrics of what was learned: rewards, losses, gradients, ratios, the critic."""

from __future__ import annotations

from rl_megatron.observability.metrics.curve import Curve, MetricTuples


def _at_k(figure: str) -> Curve:
    name = f"eval/<name>/{figure}_at_<k>"
    band = ", with its 95 % interval"
    title = f"Set <name>: {figure}@<k>"
    return Curve("Evaluation", title, band=band, low=f"{name}/low", high=f"{name}/high", limits=(0.0, 1.0))


LEARNING: MetricTuples = (
    ("step", "", "step of the job, 1 to train.steps; 0 for rows of the warm start and for an evaluation before the "
     "first step"),
    ("phase", "", "`warm_start` (supervised steps), the job's name, or `eval`: an evaluation of that step beside "
     "later ones"),
    ("warm_start/step", "", "supervised step, 1 to warm_start.steps; 0 for the evaluation before the first"),
    ("warm_start/loss", "nats", "mean cross-entropy per supervised token",
     Curve("Optimization", "Warm start: loss by supervised step")),
    ("eval/loss", "nats", "loss of held-out rows, of jobs on written text: of job=sft the mean per learnt token",
     Curve("Headlines", "Held-out loss")),
    ("eval/perplexity", "", "exponential of eval/loss, with job=sft", Curve("Optimization", "Held-out perplexity")),
    ("eval/preference_accuracy", "", "preference/accuracy of held-out pairs",
     Curve("Optimization", "Held-out pairs: share with the right order")),
    ("eval/preference_margin", "", "preference/margin of held-out pairs",
     Curve("Optimization", "Held-out pairs: margin")),
    ("tokens/learnt", "tokens", "tokens that the step learnt: of answers, without what they answer",
     Curve("Optimization", "Learnt tokens of a step")),
    ("data/seconds", "s", "waiting for the step's rows, which are made beside the step before",
     Curve("Optimization", "Seconds of waiting for data")),
    ("data/epoch", "", "passes over the data that were trained on; of a mixture, draws by the rows of all sources",
     Curve("Optimization", "Passes over the data")),
    ("data/dropped", "sequences", "of the step, left out because they, or the other one of their pair, are longer "
     "than max_tokens or refused (on_refused), and rows without a turn to learn; at the first step also those that "
     "were left out as .jsonl files were read", Curve("Optimization", "Sequences left out", hide_constant=True)),
    ("data/cut", "sequences", "of the step, trained on without their tokens beyond sft.max_tokens",
     Curve("Optimization", "Sequences cut", hide_constant=True)),
    ("reward/mean", "", "mean reward of the step's completions",
     Curve("Headlines", "Reward", band=", mean ± standard deviation", spread="reward/std")),
    ("reward/std", "", "standard deviation of the step's rewards, over all completions"),
    ("reward/sampled_mean", "", "mean reward of all sampled completions, including groups that are left out later",
     Curve("Policy", "Reward of all that was sampled")),
    ("reward/part/<name>", "", "unweighted mean of that part of reward.parts, over the completions of "
     "reward/sampled_mean whose reward has it", Curve("Policy", "Reward part <name>")),
    ("reward/errors", "completions", "completions whose reward raised, timed out or was not finite, and trajectories "
     "whose environment failed", Curve("Policy", "Rewards that failed", hide_constant=True)),
    ("reward/late", "completions", "those of them that were not there within reward.timeout_seconds, or an "
     "environment's limits", Curve("Policy", "Rewards that were late", hide_constant=True)),
    ("source/<name>/reward", "", "reward/mean of that source of data.sources; this and the rest only with a mixture",
     Curve("Policy", "Source <name>: reward")),
    ("source/<name>/sampled_reward", "", "reward/sampled_mean of that source",
     Curve("Policy", "Source <name>: reward of all that was sampled")),
    ("source/<name>/zero_advantage", "", "groups/zero_advantage_fraction of that source",
     Curve("Policy", "Source <name>: groups of equal rewards")),
    ("source/<name>/length", "tokens", "response/length_mean of that source",
     Curve("Policy", "Source <name>: response length")),
    ("source/<name>/share", "", "share of the groups trained on that are of that source",
     Curve("Policy", "Source <name>: share of the groups")),
    ("source/<name>/epoch", "", "passes over that source's prompts that were drawn",
     Curve("Policy", "Source <name>: epochs")),
    ("curriculum/retired", "prompts", "prompts that are drawn no more for their pass rate; this and the rest only "
     "with data.curriculum", Curve("Policy", "Prompts that have retired", hide_constant=True)),
    ("curriculum/mean_pass_rate", "", "mean of the prompts' pass rates, of those that are known",
     Curve("Policy", "Pass rate of the prompts")),
    ("curriculum/skipped", "draws", "draws so far that found a prompt which is not drawn, or less often",
     Curve("Policy", "Draws that were skipped", hide_constant=True)),
    ("eval/accuracy", "", "share of held-out prompts whose reward is at least eval.success_reward; of eval.sets the "
     "first", Curve("Headlines", "Held-out accuracy", limits=(0.0, 1.0), warm_start=True)),
    ("eval/errors", "completions", "samples of eval/accuracy without a finite reward; they count as wrong",
     Curve("Headlines", "Held-out samples without a reward", hide_constant=True)),
    ("eval/own_version_fraction", "", "share of an evaluation's tokens by the weights of its step, with "
     "eval.mode=beside", Curve("Evaluation", "Evaluated by the step's own weights", hide_constant=True)),
    ("eval/skipped", "evaluations", "due since the row before, and left out because one was under way",
     Curve("Evaluation", "Evaluations left out", hide_constant=True)),
    ("eval/<name>/mean_at_<k>", "", "mean@k of that set of eval.sets: mean over problems of the share of k samples "
     "right", _at_k("mean")),
    ("eval/<name>/pass_at_<k>", "", "chance that one of k samples is right, by the unbiased estimate (pass_at)",
     _at_k("pass")),
    ("eval/<name>/all_at_<k>", "", "chance that all of k samples are right, by the unbiased estimate (pass_at)",
     _at_k("all")),
    ("eval/<name>/maj_at_<k>", "", "share of problems whose most frequent answer of k samples is right; ties in part",
     _at_k("maj")),
    *((f"eval/<name>/{figure}_at_<k>/{end}", "", f"{which} end of its 95 % interval over problems (docs/evaluation.md)")
      for figure in ("mean", "pass", "all", "maj") for end, which in (("low", "lower"), ("high", "upper"))),
    ("eval/<name>/length", "tokens", "mean length of a sample of that set, all its turns together; of prompts whose "
     "samples are all there", Curve("Evaluation", "Set <name>: length of a sample")),
    ("eval/<name>/truncated", "", "share of these samples of which a turn reached max_new_tokens",
     Curve("Evaluation", "Set <name>: truncated samples", hide_constant=True)),
    ("eval/<name>/errors", "completions", "its samples without a finite reward; they count as wrong",
     Curve("Evaluation", "Set <name>: samples without a reward", hide_constant=True)),
    ("eval/<name>/seconds", "s", "time that the set took to sample and score",
     Curve("Evaluation", "Set <name>: seconds")),
    ("loss", "", "policy loss under the algorithm's aggregation, mean over the step's minibatches",
     Curve("Optimization", "Loss")),
    ("grad_norm", "", "global L2 norm of the gradient before clipping, mean over the minibatches",
     Curve("Optimization", "Gradient norm")),
    ("draft/loss", "nats", "mean cross-entropy of the draft layer per trained token (learner.draft.train)",
     Curve("Health", "Draft layer's loss")),
    ("draft/acceptance", "", "share of the tokens that servers' draft layers proposed since the push before which "
     "were accepted (rollout.server.draft_tokens); the model's probability of them in the mean",
     Curve("Health", "Draft layer's proposals that are accepted")),
    ("draft/grad_norm", "", "L2 norm of the draft layer's gradient before clipping, mean over the minibatches",
     Curve("Health", "Draft layer's gradient norm")),
    ("steps/skipped", "steps", "optimizer steps skipped because their gradient was not finite (train.on_nonfinite)",
     Curve("Optimization", "Optimizer steps left out", hide_constant=True)),
    ("steps/made", "steps", "optimizer steps of the policy, of which algorithm.old_kl_limit may leave some out; only "
     "with it", Curve("Policy", "Optimizer steps of a step")),
    ("learning_rate", "", "learning rate of the step; 0 while the critic trains alone",
     Curve("Optimization", "Learning rate", hide_constant=True)),
    ("advantage/mean", "", "mean advantage of a trained token",
     Curve("Optimization", "Advantage: mean", band=" ± standard deviation", spread="advantage/std")),
    ("advantage/std", "", "standard deviation of the advantages of trained tokens"),
    ("loss/kl", "nats", "the KL term's part of `loss`, coefficient included; only if the loss has one",
     Curve("Optimization", "Loss: KL term")),
    ("loss/nll", "nats", "the part of `loss` of right or better answers' negative log-likelihood; only if it has one",
     Curve("Optimization", "Loss: NLL of right or better answers")),
    ("kl/reference", "nats", "KL(old || reference) by algorithm.kl.estimator: completions' mean of their tokens' mean",
     Curve("Policy", "KL to the reference")),
    ("kl/reference_age", "steps", "mean age of the policies that the reference averages, by their weights, where "
     "algorithm.kl.follow_rate is set", Curve("Policy", "Age of the reference in steps", hide_constant=True)),
    ("kl/old_policy", "nats", "KL(old || current) per token: k3 estimate from the samples, each before its "
     "minibatch's step", Curve("Policy", "KL from the old policy")),
    ("kl/stopped_at", "nats", "kl/old_policy of the minibatch at which it passed algorithm.old_kl_limit; only then",
     Curve("Policy", "KL at which a step ended")),
    ("kl/rollout", "nats", "KL(engine || learner) per token before the update: k3 estimate; where there is mismatch/k1",
     Curve("Health", "KL, engine from learner")),
    ("balance/clip_low", "", "lower limit of the clip, 1 minus the ratio, mean over optimizer steps; with "
     "algorithm.balance", Curve("Policy", "Clip of a minibatch: lower limit")),
    ("balance/clip_high", "", "upper limit of the clip, the ratio minus 1, mean over optimizer steps; with "
     "algorithm.balance", Curve("Policy", "Clip of a minibatch: upper limit")),
    ("balance/positive_share", "", "share that tokens of positive advantage have in the sum over |A| times the ratio, "
     "clipped and weighed by the old policy's probability; below algorithm.balance.share where no limit reaches it",
     Curve("Policy", "Share of tokens of positive advantage in what the clip leaves", limits=(0.0, 1.0))),
    ("entropy", "nats", "mean entropy of the policy's next-token distribution at sampled positions",
     Curve("Policy", "Entropy")),
    ("clip_fraction", "", "share of tokens (of sequences, for a sequence ratio) whose gradient the clip removes, or a "
     "cap of the ratio makes another (cispo, scalerl, topr, dppo_tv, dppo_kl, ce_gppo); none of advantage 0",
     Curve("Policy", "Clip fraction")),
    ("clip_fraction/low", "", "the part of clip_fraction with a ratio below 1",
     Curve("Policy", "Clipped with a ratio below 1", hide_constant=True)),
    ("clip_fraction/high", "", "the part of clip_fraction with a ratio of 1 or above",
     Curve("Policy", "Clipped with a ratio above 1", hide_constant=True)),
    ("ratio/mean", "", "mean importance ratio, current over old policy, at the algorithm's level",
     Curve("Policy", "Importance ratio: mean", band=", min to max", low="ratio/min", high="ratio/max")),
    ("ratio/min", "", "least importance ratio of the step"),
    ("ratio/max", "", "greatest importance ratio of the step"),
    ("ratio/p01", "", "1 % of the tokens have an importance ratio below this; from bins, so its log is within 5 %"),
    ("ratio/p50", "", "median importance ratio of the tokens",
     Curve("Policy", "Importance ratio: median", band=", 1 % to 99 %", low="ratio/p01", high="ratio/p99")),
    ("ratio/p99", "", "99 % of the tokens have an importance ratio below this"),
    ("ratio/effective_fraction", "", "effective sample size over the number of samples, mean(ratio)^2 / mean(ratio^2)",
     Curve("Policy", "Effective sample size, of all")),
    ("ratio/outside", "", "share of sampled tokens whose ratio left 1 +- 0.2 in the update (train.route_flips)",
     Curve("Health", "Ratios outside 1 ± 0.2")),
    ("ratio/outside/<name>", "", "the same of tokens whose first flip (moe/first_flip) is in that layer, or `none`",
     Curve("Health", "Ratios outside 1 ± 0.2, first flip in <name>")),
    ("ratio/clamped_fraction", "", "share of ratios clamped to a safe float32 range; anything but 0 is a fault, "
     "unless algorithm.ratio_level=sequence_sum (topr, vespo), whose ratios of long completions get there",
     Curve("Policy", "Ratios beyond float32's range", hide_constant=True)),
    ("correction/weight_mean", "", "mean importance weight, learner over engine, if the loss corrects the mismatch",
     Curve("Health", "Correction weight")),
    ("correction/dropped_fraction", "", "share of tokens whose correction weight is 0",
     Curve("Health", "Tokens dropped by the correction")),
    ("tokens/chosen_fraction", "", "share of a minibatch's tokens that algorithm.tokens.choose chose",
     Curve("Optimization", "Tokens that a choice trains on", limits=(0.0, 1.0))),
    ("demonstration/share", "", "share of the trained tokens that are of demonstrations; this and the next two only "
     "with algorithm.demonstration_gamma", Curve("Policy", "Share of demonstrated tokens", limits=(0.0, 1.0))),
    ("demonstration/probability", "", "mean probability that the policy gives a token of a demonstration, before its "
     "minibatch's step", Curve("Policy", "Probability of demonstrated tokens", limits=(0.0, 1.0))),
    ("demonstration/reward", "", "mean reward of the step's demonstrations",
     Curve("Policy", "Reward of demonstrations")),
    ("preference/pairs", "pairs", "pairs of completions that were trained on",
     Curve("Policy", "Preference pairs of a step")),
    ("preference/accuracy", "", "share of pairs whose margin is above 0",
     Curve("Policy", "Preference pairs: share with the right order")),
    ("reward_model/score_mean", "", "mean score of the texts of the step, with job=reward_model",
     Curve("Optimization", "Score: mean")),
    ("preference/margin", "nats", "mean of beta * (log-ratio to the reference, or without one log-prob, of the chosen "
     "minus that of the rejected); of a reward model the difference of their scores",
     Curve("Policy", "Preference pairs: margin")),
    ("critic/loss", "", "value loss, half a squared error, mean over the minibatches",
     Curve("Optimization", "Critic: loss")),
    ("critic/grad_norm", "", "global L2 norm of the critic's gradient before clipping",
     Curve("Optimization", "Critic: gradient norm")),
    ("critic/learning_rate", "", "learning rate of the critic",
     Curve("Optimization", "Critic: learning rate", hide_constant=True)),
    ("critic/value_mean", "", "mean value of a trained position", Curve("Optimization", "Critic: mean value")),
    ("critic/clip_fraction", "", "share of tokens whose clipped value (algorithm.critic.clip) gives the larger loss",
     Curve("Optimization", "Critic: clip fraction", hide_constant=True)),
    ("critic/explained_variance", "", "1 - Var(returns - values) / Var(returns) before the update: 1 is perfect",
     Curve("Optimization", "Critic: explained variance")),
)  # fmt: skip
