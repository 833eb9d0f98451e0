//! The thinking of an engine's requests, where something can end it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use meridian_core::budget::{BudgetStatus, EndRules, Load, ThinkBudgets, ThinkSettings, ThinkThresholds};
use meridian_core::{Error, Pattern, RequestTable};

use crate::Driver;

/// Keys of requests are not used again in a process: a sampler may remember those of an engine that was taken out.
static NEXT_FIRST_KEY: AtomicU64 = AtomicU64::new(1);

/// What recognising the ends of lines and of thinking takes, in tokens of the model.
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
}

impl Driver {
    /// Follow the thinking of the requests from here on: whoever samples can force its end. With `can_probe` the engine can
    /// run probes.
    ///
    /// # Errors
    /// The forced ending does not end thinking.
    pub fn follow_thinking(&mut self, tokens: ThinkTokens, can_probe: bool) -> Result<(), Error> {
        let ThinkTokens { forced, line_ends, boundaries, interrupts } = tokens;
        let entropy = &self.config.entropy;
        let settings = ThinkSettings {
            rules: EndRules::new(self.settings.markers.clone(), forced)?,
            configured: ThinkThresholds::from_config(&self.config.scheduler, entropy),
            unit: entropy.unit,
            measures: entropy.enabled,
            can_probe,
            probe_at: entropy.probe_at,
            block_tokens: self.settings.block_tokens,
            line_ends,
            boundaries,
            interrupts: interrupts.into(),
            guards_eos: self.config.model.eos_guard,
            steps_ahead: u32::try_from(self.settings.steps_ahead).unwrap_or(u32::MAX),
            first_key: NEXT_FIRST_KEY.fetch_add(1, Ordering::Relaxed) << 40,
        };
        ThinkBudgets::forget(&mut self.scheduler.mirror().table);
        self.thinking = Some(ThinkBudgets::new(settings));
        Ok(())
    }

    /// Ask the budget slot about what is new; returns what is to be told to the samplers before the next step.
    pub fn judge_thinking(&mut self, now_ms: f64, free_blocks: u32, total_blocks: u32) -> &[u8] {
        let [_, thinking, answering] =
            self.scheduler.mirror().phases().map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let waiting = self.waiting;
        let load = Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, ..Load::default() };
        match &mut self.thinking {
            Some(budgets) => budgets.decide(&mut self.scheduler.mirror().table, &mut self.budget, load),
            None => &[],
        }
    }

    /// The budgets and the table that they are about, for what the samplers and probes report; `None` where nothing is
    /// followed.
    pub fn thinking(&mut self) -> Option<(&mut ThinkBudgets, &mut RequestTable)> {
        let Self { thinking, scheduler, .. } = self;
        Some((thinking.as_mut()?, &mut scheduler.mirror().table))
    }

    /// What was done to the thinking of its requests; `None` where nothing is followed.
    #[must_use]
    pub fn thinking_status(&self) -> Option<BudgetStatus> {
        self.thinking.as_ref().map(ThinkBudgets::status)
    }
}
