//! The thinking of an engine's requests, where Meridian can end it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU8, Ordering};

use meridian_core::budget::{AnswerRules, BudgetDecider, BudgetStatus, EndRules, Load, ThinkBudgets, ThinkSettings};
use meridian_core::{Error, Pattern, RequestTable};

use crate::Driver;

/// A sampler may remember the keys of an engine that was taken out.
static NEXT_EPOCH: AtomicU8 = AtomicU8::new(1);

/// The model's tokens for the ends of lines and of thinking.
#[derive(Clone, Debug, Default)]
pub struct ThinkTokens {
    /// The forced ending.
    pub forced: Vec<u32>,
    /// Tokens that end a line.
    pub line_ends: HashSet<u32>,
    /// Tokens that end a line, a sentence or a clause.
    pub boundaries: HashSet<u32>,
    /// Generating any of these ends thinking.
    pub interrupts: Vec<Pattern>,
    /// Most draft tokens that a step verifies for a request; 0 without speculative decoding.
    pub drafts: u32,
    /// Whether a sampler can begin to follow a request later than at its arrival.
    pub wakes: bool,
}

impl Driver {
    /// Follow the thinking of requests from now on: the samplers can force its end. With `can_probe`, the engine can
    /// run probes.
    ///
    /// # Errors
    /// The forced ending does not end thinking.
    pub fn follow_thinking(&mut self, tokens: ThinkTokens, can_probe: bool) -> Result<(), Error> {
        let ThinkTokens { forced, line_ends, boundaries, interrupts, drafts, wakes } = tokens;
        let entropy = &self.config.entropy;
        // The samplers alone guard answers.
        let reserve_tokens = self.config.scheduler.answer_reserve_tokens;
        let answers = AnswerRules { reserve_tokens, ..AnswerRules::default() };
        let settings = ThinkSettings {
            rules: EndRules::new(self.settings.markers.clone(), forced)?.with_answers(answers),
            configured: self.config.thresholds(),
            measures: entropy.enabled,
            can_probe,
            probe_at: entropy.probe_at,
            block_tokens: self.settings.block_tokens,
            line_ends,
            boundaries,
            interrupts: interrupts.into(),
            guards_eos: self.config.model.eos_guard,
            ends_loops: self.config.scheduler.end_loops,
            wakes,
            tokens_ahead: u32::try_from(self.settings.steps_ahead).unwrap_or(u32::MAX).saturating_mul(drafts + 1),
            epoch: NEXT_EPOCH.fetch_add(1, Ordering::Relaxed),
        };
        ThinkBudgets::forget(&mut self.scheduler.mirror().table);
        let mut budgets = ThinkBudgets::new(settings);
        budgets.begins_to_decide(&self.budget.wants());
        self.thinking = Some(budgets);
        Ok(())
    }

    /// Ask the budget slot about new facts; returns the orders for the samplers before the next step.
    pub fn judge_thinking(&mut self, now_ms: f64, free_blocks: u32, total_blocks: u32) -> &[u8] {
        self.take_changes();
        let [_, thinking, answering] =
            self.scheduler.mirror().phases().map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let waiting = self.waiting;
        let load = Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, ..Load::default() };
        let wants = self.budget.wants();
        if self.thinking.as_mut().is_some_and(|budgets| budgets.begins_to_decide(&wants)) {
            self.follow_all();
        }
        match &mut self.thinking {
            Some(budgets) => budgets.decide(&mut self.scheduler.mirror().table, &mut self.budget, load),
            None => &[],
        }
    }

    /// Follow the thinking of all live requests from here on.
    fn follow_all(&mut self) {
        let Self { thinking: Some(budgets), scheduler, by_id, .. } = self else { return };
        let table = &mut scheduler.mirror().table;
        for (id, row) in by_id {
            budgets.enroll_late(table, *row, id);
        }
    }

    /// Whether the thinking of any live request is followed, or its samplers are to be told anything.
    pub fn follows_thinking(&mut self) -> bool {
        let Self { thinking, scheduler, .. } = self;
        thinking.as_ref().is_some_and(|budgets| budgets.is_active(&scheduler.mirror().table))
    }

    /// The budgets and the table of their requests, for the reports of samplers and probes; `None` if no thinking is
    /// followed.
    pub fn thinking(&mut self) -> Option<(&mut ThinkBudgets, &mut RequestTable)> {
        let Self { thinking, scheduler, .. } = self;
        Some((thinking.as_mut()?, &mut scheduler.mirror().table))
    }

    /// Counters of the budget actions on its requests; `None` if no thinking is followed.
    #[must_use]
    pub fn thinking_status(&self) -> Option<BudgetStatus> {
        self.thinking.as_ref().map(ThinkBudgets::status)
    }
}
