//! The thinking of an engine's requests, where something can end it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use meridian_core::budget::{EndRules, Load, ThinkThresholds};
use meridian_core::{Error, NewRequest, Pattern, RowId, Signals};
use meridian_runtime::thinking::{BudgetStatus, ClientBudget, Enrolled, ThinkBudgets, ThinkSettings, Thinker};

use crate::Driver;

/// Numbers of requests are not used again in a process: a sampler may remember those of an engine that was taken out.
static NEXT_BASE: AtomicU64 = AtomicU64::new(1);

/// The thinking budgets of one engine, and where its numbers of requests begin.
pub(crate) struct Thinking {
    base: u64,
    budgets: ThinkBudgets,
}

impl Thinking {
    /// What the sampler calls the request with this number in the mirror.
    fn key(&self, number: u64) -> u64 {
        self.base + number
    }

    pub(crate) fn generated(&mut self, number: u64, tokens: &[u32], now_ms: f64) {
        self.budgets.generated(self.key(number), tokens, now_ms);
    }

    pub(crate) fn signals(&self, number: u64) -> Option<Signals> {
        self.budgets.signals(self.key(number))
    }

    pub(crate) fn remove(&mut self, number: u64) {
        self.budgets.remove(self.key(number));
    }
}

/// What the process that samples has to know of a request from its first token on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForSampler {
    /// The number of the request in reports and orders.
    pub key: u64,
    /// Think tokens at most, as long as no order says otherwise.
    pub max_think_tokens: u32,
    /// The entropy of its tokens is wanted.
    pub is_measured: bool,
}

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
        };
        let base = NEXT_BASE.fetch_add(1, Ordering::Relaxed) << 40;
        self.thinking = Some(Thinking { base, budgets: ThinkBudgets::new(settings) });
        Ok(())
    }

    /// Follow the thinking of a request that arrives; `None` where nothing is followed.
    pub(crate) fn enroll(
        &mut self,
        row: RowId,
        id: &str,
        request: &NewRequest<'_>,
        client: ClientBudget,
    ) -> Option<ForSampler> {
        let state = self.scheduler.mirror().table.get(row)?;
        let (number, prompt_tokens) = (state.id().0, state.prompt_tokens());
        let (priority, tenant, deadline_ms) = state.client_facts();
        let thinking = self.thinking.as_mut()?;
        let key = thinking.key(number);
        let NewRequest { prompt, max_tokens, .. } = *request;
        let thinker = Thinker { id, prompt, prompt_tokens, max_tokens, priority, tenant, deadline_ms, client };
        let Enrolled { max_think_tokens, is_measured } = thinking.budgets.add(key, &thinker);
        Some(ForSampler { key, max_think_tokens, is_measured })
    }

    /// Ask the budget slot about what is new; returns what is to be told to the samplers before the next step.
    pub fn judge_thinking(&mut self, now_ms: f64, free_blocks: u32, total_blocks: u32) -> &[u8] {
        let [_, thinking, answering] =
            self.scheduler.mirror().phases().map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let waiting = self.waiting;
        let load = Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, ..Load::default() };
        match &mut self.thinking {
            Some(followed) => followed.budgets.decide(&mut self.budget, load),
            None => &[],
        }
    }

    /// The budgets, for what the samplers and probes report; `None` where nothing is followed.
    pub fn thinking(&mut self) -> Option<&mut ThinkBudgets> {
        self.thinking.as_mut().map(|thinking| &mut thinking.budgets)
    }

    /// What was done to the thinking of its requests; `None` where nothing is followed.
    #[must_use]
    pub fn thinking_status(&self) -> Option<BudgetStatus> {
        self.thinking.as_ref().map(|thinking| thinking.budgets.status())
    }
}
