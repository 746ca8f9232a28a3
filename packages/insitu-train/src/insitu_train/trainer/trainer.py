"""The trainer: one plan in, one update per epoch out, or an error that leaves the weights unchanged.

Log-probabilities come from a full forward without the sampler's caches. The first forward compares them with
the sampler's record: tokens of the current version must agree, which checks the path from sampled id to
training row; the few that rounding separates are excluded. Same plan, weights and thread count give the same
bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from insitu.errors import BadStepError, ConfigError, TrainError
from insitu_train.embedded.model import Qwen3
from insitu_train.loss.fused_head import FusedLoss, Objective, Scores, kept_gradient, objective, score
from insitu_train.loss.inputs import StepInputs
from insitu_train.loss.losses import LossInputs, token_loss
from insitu_train.loss.metrics import LossSums, result_of
from insitu_train.memory.plan import MemoryPlanner
from insitu_train.model.base import PLAIN, MemoryOptions, Policy
from insitu_train.model.hf import HfPolicy
from insitu_train.options import StepResult, TrainConfig
from insitu_train.plan.packing import MicroBatch, pack
from insitu_train.plan.step import StepPlan, check_versions
from insitu_train.trainer.batch import TensorBatch, make_batch, states
from insitu_train.trainer.distributed import RankLostError, Ranks, Together
from insitu_train.trainer.mismatch import Mismatch, refused
from insitu_train.trainer.optimizer import Optimiser
from insitu_train.trainer.owners import held_whole
from insitu_train.trainer.parts import HeldError, SharedTime, agreed, described, divided
from insitu_train.trainer.reference import Scorer
from insitu_train.trainer.score_recorder import ScoreRecorder
from insitu_train.trainer.utilization import utilization

T = TypeVar("T")


class Trainer:
    """A model under reinforcement learning, with its optimizer, step count and policy version."""

    def __init__(
        self,
        model: Policy,
        config: TrainConfig,
        *,
        version: int = 0,
        reference: Scorer | None = None,
        ranks: Ranks | None = None,
        reserved: int = 0,
    ) -> None:
        """Set up. Raises ConfigError when the loss needs a `reference`.

        reserved: bytes of memory that a sampler in this process may still fill.
        """
        self.model, self.config = model, config
        self.ranks = ranks or Ranks()
        if config.loss.kl != "none" and reference is None:
            raise ConfigError(f"kl={config.loss.kl} needs a reference policy")
        self.reference = reference if config.loss.kl != "none" else None
        self.optimiser = Optimiser(model, config.optim)
        self.fit = self._fit_of(model, reserved) if isinstance(model, HfPolicy | Qwen3) else None
        """Chooses memory options; None = they stay as they are."""
        self._chosen: dict[MicroBatch, MemoryOptions] = {}
        self._using = PLAIN
        """Memory options of the current or last micro-batch."""
        self._ran_out = ""
        """Warning of a step that ran out of memory."""
        self._excluded: dict[MicroBatch, Tensor] = {}
        """Tokens of the step that are excluded because sampler and trainer disagree."""
        self._recorder: ScoreRecorder | None = None
        self._shared = SharedTime()
        self.steps = 0
        """Optimizer steps done."""
        self.version = version
        """+1 with every update of the weights."""

    @property
    def _supervised(self) -> bool:
        """Rows may have any origin: they are not compared with the sampler's record."""
        return self.config.loss.loss == "nll"

    def step(self, plan: StepPlan, scores: Path | None = None) -> StepResult:
        """Train one plan. A plan without rows is skipped and leaves the version unchanged.

        scores: file for scores of trained tokens (storage/scores.py); a failure to write it is logged.
        Raises TrainError, with weights and optimizer unchanged, when tokens of the current version differ
        from the sampler's record by more than rounding, a token's version is too old or unknown, a loss or
        gradient is not finite, or a row exceeds the model's context or the device's memory.
        """
        began = time.monotonic()
        if not plan.rows:
            return StepResult(
                optimizer_steps=self.steps, version=self.version, skipped=plan.skipped or "nothing to train"
            )
        self._check_lengths(plan)
        plan = self._laid_out(plan)
        if not self._supervised:
            check_versions(plan, self.version, self.config.max_staleness)
        whole, plan = plan, self._fit_memory(plan)
        self._recorder = None if scores is None else ScoreRecorder(plan, scores, self.ranks.rank)
        try:
            with self._deterministic(), self._undone_on_error():
                result = self._epochs(plan, StepInputs(plan, self.config.loss, whole))
        except BadStepError as error:
            self._recorder = None
            return refused(error, self.config, self.steps, self.version)
        if self._recorder is not None:
            self._recorder.write()
            self._recorder = None
        seconds, world = time.monotonic() - began, self.ranks.world
        mfu = utilization(self.model, whole, epochs=self.config.epochs, ranks=world, seconds=seconds)
        return replace(result, seconds=seconds, mfu=mfu, ranks=world)

    @contextmanager
    def whole(self, *, moments: bool = False, owners: int = 1, frozen: bool = True) -> Iterator[None]:
        """Gather sharded weights, and the optimizer's `moments`, for reading meanwhile.

        All ranks call it. The first `owners` ranks hold the tensors in host memory, each its own
        (trainer/owners.py). frozen: else trained weights only.
        """
        if not (self.ranks.sharded and isinstance(self.model, HfPolicy)):
            yield
            return
        with held_whole(
            self.ranks, self.model, self.optimiser, moments=moments, owners=owners, frozen=frozen
        ):
            yield

    def release_cache(self) -> None:
        """Free torch's GPU memory cache after a step, for an engine that shares the GPU."""
        if self.config.share_gpu and self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _epochs(self, plan: StepPlan, terms: StepInputs) -> StepResult:
        norm = lr = 0.0
        every = list[LossSums]()
        self._excluded.clear()
        self._ran_out = ""
        self._shared = SharedTime()
        for epoch in range(self.config.epochs):
            self.optimiser.zero()
            sums = self._summed(plan, terms, epoch, measure=epoch == 0 and not self._supervised)
            norm = self.optimiser.clip()
            if not (math.isfinite(sums.loss) and math.isfinite(norm)):
                raise BadStepError(f"step {self.steps}: loss {sums.loss}, gradient norm {norm}: no update")
            lr = self.optimiser.update(self.steps + epoch)
            every.append(sums)
        self.optimiser.zero()
        self.ranks.agree(self.optimiser.named.values())
        self.steps += self.config.epochs
        self.version += 1
        result = result_of(every, self.config)
        shared = [batch for batch in plan.batches if batch.ranks > 1]
        seconds = self.ranks.most([round(1000 * self._shared.seconds)])[0] / 1000 if shared else 0.0
        note = described(shared, self._chosen, self.ranks.world, seconds)
        return replace(
            result,
            alarm="; ".join(filter(None, (result.alarm, self._ran_out, note))),
            shared_rows=len(shared),
            shared_s=seconds,
            optimizer_steps=self.steps,
            version=self.version,
            grad_norm=norm,
            lr=lr,
            rows=len(plan.rows),
            row_tokens=sum(len(row.ids) for row in plan.rows),
            micro_batches=len(plan.batches),
        )

    def gradients(self, plan: StepPlan) -> float:
        """Leave the gradients of the step's loss in `.grad`, change nothing else; return the loss."""
        self.optimiser.zero()
        whole = self._laid_out(plan)
        plan = self._fit_memory(whole)
        with self._deterministic():
            return self._summed(plan, StepInputs(plan, self.config.loss, whole), 0, measure=False).loss

    def logprobs(self, plan: StepPlan) -> list[Tensor]:
        """Return, per row of the plan, the trainer's log-probabilities of its trained tokens."""
        plan = self._laid_out(plan)
        with self._deterministic():
            found = self._precompute_logprobs(plan, plan.batches)
        return [found[i] for i in range(len(plan.rows))]

    @property
    def _references(self) -> tuple[Policy, ...]:
        return () if self.reference is None else self.reference.policies

    def _laid_out(self, plan: StepPlan) -> StepPlan:
        """Return the plan with a micro-batch for each row where a model runs by rows."""
        models = (self.model, *self._references)
        if not any(isinstance(model, HfPolicy) and model.by_rows for model in models):
            return plan
        ids = [row.ids for row in plan.rows]
        return replace(plan, batches=pack(ids, [], 0, layout="rows", ranks=self.ranks.world))

    def _batch(self, plan: StepPlan, micro: MicroBatch) -> TensorBatch:
        those = self.ranks.among(micro)
        ranks = those if isinstance(those, Together) else None
        return self.ranks.in_step(lambda: make_batch(plan, micro, self.model.device, ranks))

    def _precompute_logprobs(
        self,
        plan: StepPlan,
        batches: Sequence[MicroBatch],
        only: Callable[[MicroBatch], bool] | None = None,
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for micro in self._shared.over(batches):
                batch = self._batch(plan, micro)
                self._use(micro)
                logp = self._scores(batch).logp
                if only is None or only(micro):
                    found.update(zip(micro.rows, torch.split(logp, batch.counts), strict=True))
        if isinstance(self.model, HfPolicy):
            self.model.rest()
        return found

    def _scores(self, batch: TensorBatch) -> Scores:
        return score(self.model, *self._states(batch), self.config.temperature)

    def _states(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        # of supervised rows the experts are another model's, or an older one's
        return states(self.model, batch, replay=not self._supervised)

    def _summed(self, plan: StepPlan, terms: StepInputs, epoch: int, *, measure: bool) -> LossSums:
        """Compute gradients and metrics of the whole plan. measure: compare with the sampler's record."""
        mine = self.ranks.mine(plan.batches)
        if self.config.loss.needs_old_logprobs(epoch):
            precompute = partial(self._precompute_logprobs, plan, mine, self.ranks.counts)
            terms.set_logprobs(
                self.ranks.attempt(lambda: self._in_memory(plan, precompute)), epoch, self.ranks.total
            )

        def accumulate() -> tuple[LossSums, Mismatch | None]:
            mismatch = Mismatch(self.config.max_logprob_gap, self.version) if measure else None
            return self._accumulate(plan, mine, terms, epoch, mismatch), mismatch

        sums, mismatch = self.ranks.attempt(lambda: self._in_memory(plan, accumulate))
        self.ranks.combine(list(self.optimiser.named.values()), sums)
        if self.reference is not None:
            self._combine_sets(plan, sums)
        if mismatch is not None:
            mismatch.judge(sums)
        return sums

    def _combine_sets(self, plan: StepPlan, sums: LossSums) -> None:
        """Sum the divergence of each task set over ranks; each may hold rows of other sets."""
        names = sorted({row.part for row in plan.rows} - {""})
        own = torch.tensor([sums.kl_of_sets.get(name, [0.0, 0.0]) for name in names], dtype=torch.float64)
        total = self.ranks.total(own) if names else own
        sums.kl_of_sets = dict(zip(names, total.tolist(), strict=True))

    def _in_memory(self, plan: StepPlan, work: Callable[[], T]) -> T:
        """Return `work()`, repeated with the next memory options when the device runs out of memory.

        `work` leaves nothing but gradients. Raises TrainError when no options are left.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if self.ranks.sharded:
                    raise  # the other ranks are inside a layer and cannot restart
                line = str(error).partition("\n")[0]
                if any(batch.ranks > 1 for batch in plan.batches):
                    raise RankLostError(
                        f"out of memory on a rank that shares a row ({line}): lower policy.memory_gib"
                    ) from error
            # after the except block, which frees the tensors of the traceback
            self.optimiser.zero()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.fit is None or not self.fit.ran_out(self._using):
                raise TrainError(
                    f"out of memory on {self.model.device} with {self._using}, the last memory options"
                    f" ({line}): lower train.token_budget: no update"
                )
            chosen = self._choose(plan, tuple(self.ranks.mine(plan.batches)), self.fit)
            if not all(isinstance(options, MemoryOptions) for options in chosen.values()):
                raise TrainError(
                    f"out of memory on {self.model.device}: no rank holds a row alone: no update"
                )
            self._ran_out = (
                f"out of memory on {self.model.device}: a pass needed more than predicted and was repeated"
                f" with other memory options ({line})"
            )

    def _accumulate(
        self,
        plan: StepPlan,
        batches: Sequence[MicroBatch],
        terms: StepInputs,
        epoch: int,
        mismatch: Mismatch | None,
    ) -> LossSums:
        """Run forward and backward over some micro-batches. mismatch: compares with the sampler's record."""
        sums, held = LossSums(), HeldError()
        for micro in self._shared.over(batches):
            batch, counts = self._batch(plan, micro), self.ranks.counts(micro)
            self._use(micro)
            if not counts:
                self._dummy_step(batch, measure=mismatch is not None)
                continue
            # an error between the passes of a shared row must reach all of its ranks, who go on: the next row
            # may be shared with others
            shared, ours = micro.ranks > 1, partial(self._ref, terms, micro, batch)
            ref = held.kept(partial(self.ranks.among(micro).attempt, ours)) if shared else ours()
            given = terms.of(micro, batch.mu, batch.advantage, ref)
            joint = shared or self.ranks.sharded
            weighted = self._weighted(batch, given, mismatch, self._excluded.get(micro))
            fused = self._objective(batch, held.instead(weighted) if joint else weighted)
            scores = fused.scores
            fused.total.backward()  # type: ignore[no-untyped-call]
            if mismatch is not None:
                count = partial(held.before, partial(mismatch.count, batch, scores.logp, sums))
                if shared:
                    excluded = held.kept(partial(self.ranks.among(micro).attempt, count))
                else:
                    excluded = self.ranks.in_step(count)
                if excluded is not None:
                    self._excluded[micro] = excluded
            sums.loss += float(fused.total.detach())
            if held.error is not None:
                continue
            out = token_loss(scores.logp, given, self.config.loss)
            sums.add(out, batch.advantage)
            if out.kl is not None:
                sums.add_sets(out.kl.detach(), [row.part for row in batch.rows], batch.counts)
            if epoch == 0 and self._recorder is not None:
                self._recorder.add(micro, batch, scores, out, self._excluded.get(micro))
            sums.entropy += float(scores.entropy.sum())
            if epoch == 0 and self.config.epochs > 1:
                terms.remember(micro, scores.logp, ref)
        return held.before(lambda: sums)

    def _dummy_step(self, batch: TensorBatch, *, measure: bool) -> None:
        """Run a zero-loss forward and backward, so that collectives of sharded ranks stay in step."""
        fused = self._objective(batch, lambda logp, part: logp * 0.0)
        fused.total.backward()  # type: ignore[no-untyped-call]
        if measure:
            self.ranks.in_step(lambda: None)

    def _weighted(
        self, batch: TensorBatch, given: LossInputs, mismatch: Mismatch | None, excluded: Tensor | None
    ) -> Objective:
        """Return the weighted loss as a function of a token's log-probability.

        Tokens excluded for mismatch, now or before the first update, have loss 0.
        """

        def weighted(logp: Tensor, part: slice) -> Tensor:
            loss = token_loss(logp, given.part(part), self.config.loss).loss * batch.weight[part]
            if mismatch is not None:
                return torch.where(mismatch.over(batch, logp, part), 0.0, loss)
            return loss if excluded is None else torch.where(excluded[part], 0.0, loss)

        return weighted

    def _objective(self, batch: TensorBatch, weighted: Objective) -> FusedLoss:
        """Return the loss of a micro-batch with its gradients."""
        hidden, targets = self._states(batch)
        weight = self.model.head_weight
        into = kept_gradient(weight)
        cap = self.model.soft_cap
        return objective(hidden, weight, targets, self.config.temperature, weighted, into=into, soft_cap=cap)

    def _fit_of(self, model: HfPolicy | Qwen3, reserved: int) -> MemoryPlanner:
        return MemoryPlanner.of(
            model,
            self.config.policy.memory_gib,
            copies=self.config.epochs > 1,
            references=[one for one in self._references if isinstance(one, HfPolicy | Qwen3)],
            ranks=self.ranks.world,
            here=self.ranks.here,
            reserved=reserved,
        )

    def _fit_memory(self, plan: StepPlan) -> StepPlan:
        """Choose memory options; return the plan with the rows that several ranks must compute together."""
        while (fit := self.fit) is not None:
            mine = tuple(self.ranks.mine(plan.batches))
            chosen = self.ranks.attempt(partial(self._choose, plan, mine, fit))
            before, plan = plan, divided(plan, chosen, self.ranks)
            if plan is before:
                self._chosen |= agreed(plan.batches, self._chosen, self.ranks)
                break
        return plan

    def _choose(
        self, plan: StepPlan, mine: tuple[MicroBatch, ...], fit: MemoryPlanner
    ) -> dict[MicroBatch, MemoryOptions | int]:
        chosen = dict(zip(mine, fit.plan(replace(plan, batches=mine)), strict=True))
        self._chosen = {
            micro: options for micro, options in chosen.items() if isinstance(options, MemoryOptions)
        }
        self.optimiser.park(any(t.offload_optimizer for t in self._chosen.values()))
        return chosen

    def _use(self, micro: MicroBatch) -> None:
        if isinstance(self.model, HfPolicy) and micro in self._chosen:
            self.model.techniques = self._using = self._chosen[micro]

    def _ref(self, terms: StepInputs, micro: MicroBatch, batch: TensorBatch) -> Tensor | None:
        if self.reference is None:
            return None
        known = terms.reference(micro)
        if known is not None:
            return known
        return self.reference.logprobs(batch, self.config.temperature, self._chosen.get(micro, PLAIN))

    def _check_lengths(self, plan: StepPlan) -> None:
        limit = self.model.max_positions
        if self.reference is not None:
            limit = min(limit, self.reference.max_positions)
        for row in plan.rows:
            if len(row.ids) > limit:
                raise TrainError(
                    f"rollout {row.rollout_id} segment {row.segment}: {len(row.ids)} tokens exceed"
                    f" the model's {limit} positions"
                )

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Restore weights and moments when a later epoch fails; one epoch fails before its update."""
        weights, moments = {}, {}
        if self.config.epochs > 1:
            weights = {n: p.detach().clone() for n, p in self.optimiser.named.items()}
            moments = {n: t.clone() for n, t in self.optimiser.tensors().items()}
        try:
            yield
        except TrainError:
            self.optimiser.zero()
            if self.config.epochs > 1:
                with torch.no_grad():
                    for name, tensor in weights.items():
                        self.optimiser.named[name].copy_(tensor)
                self.optimiser.restore(moments)
            raise

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Set thread count and deterministic mode meanwhile; the sampler's are restored."""
        threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
        torch.set_num_threads(self.config.threads)
        # Not `use_deterministic_algorithms`, which loads torch's compiler. On a GPU this mode refuses some
        # products and makes scatters much slower.
        on_cpu = self.model.device.type == "cpu"
        torch.set_deterministic_debug_mode("error" if on_cpu else "default")
        # new tensors are written before they are read: nan in all of them would be work for nothing
        settings: Any = torch.utils.deterministic
        found, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = found
