"""Metrics of what was learned: rewards, losses, gradients, ratios, the critic."""

from __future__ import annotations

LEARNING = (
    (
        "step",
        "",
        "step of the job, 1 to train.steps; 0 for rows of the warm start and for an evaluation before the first step",
    ),
    (
        "phase",
        "",
        "`warm_start` (supervised steps), the job's name, or `eval`: an evaluation of that step beside later ones",
    ),
    ("warm_start/step", "", "supervised step, 1 to warm_start.steps; 0 for the evaluation before the first"),
    ("warm_start/loss", "nats", "mean cross-entropy per supervised token"),
    ("eval/loss", "nats", "loss of held-out rows, of jobs on written text: of job=sft the mean per learnt token"),
    ("eval/perplexity", "", "exponential of eval/loss, with job=sft"),
    ("eval/preference_accuracy", "", "preference/accuracy of held-out pairs"),
    ("eval/preference_margin", "", "preference/margin of held-out pairs"),
    ("tokens/learnt", "tokens", "tokens that the step learnt: of answers, without what they answer"),
    ("data/seconds", "s", "waiting for the step's rows, which are made beside the step before"),
    ("data/epoch", "", "passes over the data that were trained on; of a mixture, draws by the rows of all sources"),
    (
        "data/dropped",
        "sequences",
        "of the step, left out because they, or the other one of their pair, are longer than max_tokens or refused "
        "(on_refused), and rows without a turn to learn; at the first step also those that were left out as .jsonl "
        "files were read",
    ),
    ("data/cut", "sequences", "of the step, trained on without their tokens beyond sft.max_tokens"),
    ("reward/mean", "", "mean reward of the step's completions"),
    ("reward/std", "", "standard deviation of the step's rewards, over all completions"),
    ("reward/sampled_mean", "", "mean reward of all sampled completions, including groups that are left out later"),
    (
        "reward/part/<name>",
        "",
        "unweighted mean of that part of reward.parts, over the completions of reward/sampled_mean whose reward has it",
    ),
    (
        "reward/errors",
        "completions",
        "completions whose reward raised, timed out or was not finite, and trajectories whose environment failed",
    ),
    (
        "reward/late",
        "completions",
        "those of them that were not there within reward.timeout_seconds, or an environment's limits",
    ),
    ("source/<name>/reward", "", "reward/mean of that source of data.sources; this and the rest only with a mixture"),
    ("source/<name>/sampled_reward", "", "reward/sampled_mean of that source"),
    ("source/<name>/zero_advantage", "", "groups/zero_advantage_fraction of that source"),
    ("source/<name>/length", "tokens", "response/length_mean of that source"),
    ("source/<name>/share", "", "share of the groups trained on that are of that source"),
    ("source/<name>/epoch", "", "passes over that source's prompts that were drawn"),
    (
        "curriculum/retired",
        "prompts",
        "prompts that are drawn no more for their pass rate; this and the rest only with data.curriculum",
    ),
    ("curriculum/mean_pass_rate", "", "mean of the prompts' pass rates, of those that are known"),
    ("curriculum/skipped", "draws", "draws so far that found a prompt which is not drawn, or less often"),
    (
        "eval/accuracy",
        "",
        "share of held-out prompts whose reward is at least eval.success_reward; of eval.sets the first",
    ),
    ("eval/errors", "completions", "samples of eval/accuracy without a finite reward; they count as wrong"),
    (
        "eval/own_version_fraction",
        "",
        "share of an evaluation's tokens by the weights of its step, with eval.mode=beside and pinned",
    ),
    ("eval/skipped", "evaluations", "due since the row before, and left out: one was under way, or its servers died"),
    ("eval/servers", "servers", "of evaluations alone that had its weights at its end, with eval.mode=pinned"),
    (
        "eval/<name>/mean_at_<k>",
        "",
        "mean@k of that set of eval.sets: mean over problems of the share of k samples right",
    ),
    ("eval/<name>/pass_at_<k>", "", "chance that one of k samples is right, by the unbiased estimate (pass_at)"),
    ("eval/<name>/all_at_<k>", "", "chance that all of k samples are right, by the unbiased estimate (pass_at)"),
    ("eval/<name>/maj_at_<k>", "", "share of problems whose most frequent answer of k samples is right; ties in part"),
    *(
        (
            f"eval/<name>/{figure}_at_<k>/{end}",
            "",
            f"{which} end of its 95 % interval over problems (docs/evaluation.md)",
        )
        for figure in ("mean", "pass", "all", "maj")
        for end, which in (("low", "lower"), ("high", "upper"))
    ),
    (
        "eval/<name>/length",
        "tokens",
        "mean length of a sample of that set, all its turns together; of prompts whose samples are all there",
    ),
    ("eval/<name>/truncated", "", "share of these samples of which a turn reached max_new_tokens"),
    ("eval/<name>/errors", "completions", "its samples without a finite reward; they count as wrong"),
    ("eval/<name>/seconds", "s", "time that the set took to sample and score"),
    ("loss", "", "policy loss under the algorithm's aggregation, mean over the step's minibatches"),
    ("grad_norm", "", "global L2 norm of the gradient before clipping, mean over the minibatches"),
    ("draft/loss", "nats", "mean cross-entropy of the draft layer per trained token (learner.draft.train)"),
    (
        "draft/acceptance",
        "",
        "share of the tokens that servers' draft layers proposed since the push before which were accepted "
        "(rollout.server.draft_tokens); the model's probability of them in the mean",
    ),
    ("draft/grad_norm", "", "L2 norm of the draft layer's gradient before clipping, mean over the minibatches"),
    ("steps/skipped", "steps", "optimizer steps skipped because their gradient was not finite (train.on_nonfinite)"),
    (
        "steps/made",
        "steps",
        "optimizer steps of the policy, of which algorithm.old_kl_limit may leave some out; only with it",
    ),
    ("learning_rate", "", "learning rate of the step; 0 while the critic trains alone"),
    ("advantage/mean", "", "mean advantage of a trained token"),
    ("advantage/std", "", "standard deviation of the advantages of trained tokens"),
    ("loss/kl", "nats", "the KL term's part of `loss`, coefficient included; only if the loss has one"),
    (
        "loss/nll",
        "nats",
        "the part of `loss` of right or better answers' negative log-likelihood; only if it has one",
    ),
    ("kl/reference", "nats", "KL(old || reference) by algorithm.kl.estimator: completions' mean of their tokens' mean"),
    (
        "kl/reference_age",
        "steps",
        "mean age of the policies that the reference averages, by their weights, where algorithm.kl.follow_rate is set",
    ),
    ("kl/coefficient", "", "weight of the KL to the reference in this step"),
    (
        "kl/old_policy",
        "nats",
        "KL(old || current) per token: k3 estimate from the samples, each before its minibatch's step",
    ),
    ("kl/stopped_at", "nats", "kl/old_policy of the minibatch at which it passed algorithm.old_kl_limit; only then"),
    (
        "kl/rollout",
        "nats",
        "KL(engine || learner) per token before the update: k3 estimate; where there is mismatch/k1",
    ),
    (
        "balance/clip_low",
        "",
        "lower limit of the clip, 1 minus the ratio, mean over minibatches; with algorithm.balance",
    ),
    (
        "balance/clip_high",
        "",
        "upper limit of the clip, the ratio minus 1, mean over minibatches; with algorithm.balance",
    ),
    (
        "balance/positive_share",
        "",
        "share of the loss that tokens of positive advantage have, which algorithm.balance.share is for",
    ),
    ("entropy", "nats", "mean entropy of the policy's next-token distribution at sampled positions"),
    ("entropy/coefficient", "", "weight of the entropy bonus in this step; only with algorithm.entropy_target"),
    (
        "clip_fraction",
        "",
        "share of tokens (of sequences, for a sequence ratio) whose gradient the clip removes, or a cap of the ratio "
        "makes another (cispo, scalerl, topr, dppo_tv, dppo_kl, ce_gppo); none of advantage 0",
    ),
    ("clip_fraction/low", "", "the part of clip_fraction with a ratio below 1"),
    ("clip_fraction/high", "", "the part of clip_fraction with a ratio of 1 or above"),
    ("ratio/mean", "", "mean importance ratio, current over old policy, at the algorithm's level"),
    ("ratio/min", "", "least importance ratio of the step"),
    ("ratio/max", "", "greatest importance ratio of the step"),
    ("ratio/p01", "", "1 % of the tokens have an importance ratio below this; from bins, so its log is within 5 %"),
    ("ratio/p50", "", "median importance ratio of the tokens"),
    ("ratio/p99", "", "99 % of the tokens have an importance ratio below this"),
    ("ratio/effective_fraction", "", "effective sample size over the number of samples, mean(ratio)^2 / mean(ratio^2)"),
    ("ratio/outside", "", "share of sampled tokens whose ratio left 1 +- 0.2 in the update (train.route_flips)"),
    ("ratio/outside/<name>", "", "the same of tokens whose first flip (moe/first_flip) is in that layer, or `none`"),
    (
        "ratio/clamped_fraction",
        "",
        "share of ratios clamped to a safe float32 range; anything but 0 is a fault, unless "
        "algorithm.ratio_level=sequence_sum (topr, vespo), whose ratios of long completions get there",
    ),
    ("correction/weight_mean", "", "mean importance weight, learner over engine, if the loss corrects the mismatch"),
    ("correction/dropped_fraction", "", "share of tokens whose correction weight is 0"),
    ("tokens/chosen_fraction", "", "share of a minibatch's tokens that algorithm.tokens.choose chose"),
    ("preference/pairs", "pairs", "pairs of completions that were trained on"),
    ("preference/accuracy", "", "share of pairs whose margin is above 0"),
    ("reward_model/score_mean", "", "mean score of the texts of the step, with job=reward_model"),
    (
        "preference/margin",
        "nats",
        "mean of beta * (log-ratio to the reference, or without one log-prob, of the chosen minus that of the "
        "rejected); of a reward model the difference of their scores",
    ),
    ("critic/loss", "", "value loss, half a squared error, mean over the minibatches"),
    ("critic/grad_norm", "", "global L2 norm of the critic's gradient before clipping"),
    ("critic/learning_rate", "", "learning rate of the critic"),
    ("critic/value_mean", "", "mean value of a trained position"),
    ("critic/clip_fraction", "", "share of tokens whose clipped value (algorithm.critic.clip) gives the larger loss"),
    ("critic/explained_variance", "", "1 - Var(returns - values) / Var(returns) before the update: 1 is perfect"),
)
