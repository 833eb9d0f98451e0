//! A timeline of a simulated engine, on its simulated clock. Decisions take no time there.

use meridian_core::{EngineFacts, MeridianScheduler, RowId, SlotName, ThinkPhase};
use meridian_runtime::timeline::{Timeline, TimelineDecision, TimelineStep};
use meridian_runtime::{DecisionMark, DispatchSlot};

type Scheduler = MeridianScheduler<DispatchSlot>;

pub(super) struct Seen(Timeline);

impl Seen {
    pub(super) fn new(title: &str, scheduler: &mut Scheduler) -> Self {
        scheduler.mirror().table.keep_transitions(true);
        scheduler.decider().keep_marks(true);
        Self(Timeline::new(title, 0.0))
    }

    pub(super) fn planned(&mut self, scheduler: &mut Scheduler, facts: &EngineFacts) {
        let source = scheduler.last_source();
        let plan = scheduler.latest_plan();
        let (token_budget, capped) = (plan.token_budget, plan.token_caps.len() as u32);
        let begin_ms = scheduler.mirror().now_ms();
        self.0.step(TimelineStep {
            begin_ms,
            token_budget,
            engine_budget: facts.token_budget,
            waiting: facts.waiting,
            free_blocks: facts.free_blocks,
            capped,
            source,
            ..TimelineStep::default()
        });
        for DecisionMark { source, candidates, policy, fault, .. } in scheduler.decider().take_marks() {
            let candidates = candidates as u32;
            self.0.decision(TimelineDecision {
                slot: SlotName::Dispatch,
                begin_ms,
                ms: None,
                policy,
                source,
                candidates,
                fault,
            });
        }
        self.take(scheduler);
    }

    pub(super) fn scheduled(&mut self, scheduler: &mut Scheduler, given: &[(RowId, u32)]) {
        let mirror = scheduler.mirror();
        let mut running = [0; 3];
        for (row, tokens) in given {
            let Some(request) = mirror.table.get(*row) else { continue };
            let computes_prompt = request.first_token_ms().is_none();
            let phase = if computes_prompt { ThinkPhase::Prefill } else { request.phase() };
            running[phase as usize] += 1;
            if computes_prompt {
                self.0.prefill(request.number(), *tokens);
            }
        }
        let (load, cause) = (mirror.latest_load(), mirror.table.cause_of_waiting());
        if let Some(step) = self.0.open_step() {
            step.running = running;
            step.cause = Some(cause);
            if let Some((load, predicted_ms)) = load {
                (step.decode_tokens, step.prefill_tokens) = (load.decode_tokens, load.prefill_tokens);
                step.predicted_ms = predicted_ms;
            }
        }
    }

    pub(super) fn idle(&mut self, now_ms: f64) {
        self.0.step_ends(now_ms);
    }

    fn take(&mut self, scheduler: &mut Scheduler) {
        let lost = scheduler.mirror().table.take_transitions(|transition| self.0.transition(transition));
        self.0.lose(lost);
    }

    pub(super) fn timeline(mut self, scheduler: &mut Scheduler) -> Timeline {
        self.take(scheduler);
        self.0.end(scheduler.mirror().now_ms());
        self.0
    }
}
