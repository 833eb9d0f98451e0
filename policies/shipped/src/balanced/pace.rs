//! How many prompt tokens a step carries beside its decodes.

/// Prompts that a decode stands back for: the time of a step is shared between prompts and decodes by number, a prompt counting
/// as so many.
const PROMPT_WEIGHT: f32 = 30.0;
/// While nobody is shut out, the prompts that are there are to be computed within this time, milliseconds.
pub(crate) const PROMPTS_WITHIN_MS: f32 = 200.0;
/// Of a step, the part that this may take for it; more only by number.
const MOST_FOR_TIME: f32 = 0.3;
/// While requests are shut out, a prompt may take this part of the time that they have waited, up to a limit: a queue hides it.
const OF_THE_WAIT: f32 = 0.1;
const LONGEST_WITHIN_MS: f32 = 4000.0;
/// A step with prompts takes at least so many times what its decodes alone take; while requests are shut out, the second.
const LEAST_STRETCH: f32 = 1.25;
const LEAST_STRETCH_SHUT_OUT: f32 = 1.1;
/// And at least so many prompt tokens.
const LEAST_TOKENS: f32 = 128.0;
/// The longest step with prompts is so many times the TPOT budget: the budget is a mean over steps, most of which carry none.
const TPOT_BUDGETS: f32 = 1.75;
/// With a service level, this part of what it allows, so that many such steps in a row keep it too.
const OF_PROMISED_TPOT: f32 = 0.7;
/// Or so many times what its decodes alone take, where that is longer: prompts of an engine that cannot meet the budget at all
/// would not keep up, and its seats stay empty.
const LONGEST_STRETCH: f32 = 1.4;
/// Of the gaps between two tokens of an answer, the part that may be longer: less than one in a hundred, so that a p99 does not
/// show them. Within it prompts are computed at full speed, as stock vLLM does: where traffic leaves prompts that rare, all are.
const RARE: f32 = 0.009;
/// Of the time that a service level allows between two tokens, the part that such steps may add in the mean.
const ADDED_BY_THE_LONG: f32 = 0.1;
/// Steps over which that is counted.
const RARE_OF_STEPS: f32 = 10_000.0;
/// Most of a step that prompts may take.
const MOST: f32 = 0.98;
/// While prompts wait that could be admitted, those that run leave them a part: so many share the tokens at most.
const SHARED_BY: u32 = 8;
/// A part has at least so many tokens.
const LEAST_PART: f32 = 64.0;

/// What a step could carry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    /// Requests that decode.
    pub(crate) decodes: u32,
    /// Those of them that answer.
    pub(crate) answers: f32,
    /// What a step with these alone takes, milliseconds.
    pub(crate) decode_only_ms: f32,
    /// Prompts that run, or could be admitted.
    pub(crate) prompts: u32,
    /// Their tokens that are not computed.
    pub(crate) prompt_tokens: f32,
    /// Of the waiting requests, the part that has no seat or no KV blocks to be admitted to.
    pub(crate) shut_out: f32,
    /// How long they have waited, the mean, milliseconds.
    pub(crate) waited_ms: f32,
    /// Tokens whose KV running requests hold, and the blocks.
    pub(crate) context_tokens: f32,
    pub(crate) context_blocks: f32,
}

impl Load {
    /// Tokens that the free KV blocks have room for, when each running request takes one more.
    pub(crate) fn room(&self, free_blocks: u32, running: u32) -> f32 {
        if self.context_blocks < 1.0 {
            return f32::MAX;
        }
        free_blocks.saturating_sub(running) as f32 * (self.context_tokens / self.context_blocks)
    }
}

/// What a running prompt takes of a step at most, so that waiting ones are computed beside it. An engine serves running requests
/// before waiting ones: one long prompt would hold all others back for as long as it is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Longer prompts than this are held to the part; the others end in this step.
    pub(crate) longest: f32,
    /// Tokens.
    pub(crate) tokens: u32,
}

impl Part {
    /// Of `tokens` for prompts, while `running` of the prompts run; `None` where nobody waits who could be admitted.
    pub(crate) fn of(tokens: f32, running: u32, load: &Load) -> Option<Self> {
        // Where some are shut out, a prompt that runs holds what they wait for: the sooner it is computed the better.
        let shares = running > 0 && load.prompts > running && load.shut_out <= 0.0;
        let part = tokens / running.saturating_add(1).min(SHARED_BY) as f32;
        // `as` saturates.
        shares.then(|| Self { longest: tokens, tokens: part.max(LEAST_PART) as u32 })
    }
}

/// Paces prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    longest_ms: f32,
    /// Gaps in answers, a step, and those of longer steps: means of the latest.
    gaps: f32,
    long_gaps: f32,
}

impl Pace {
    pub(crate) fn new(tpot_budget_ms: f32) -> Self {
        Self { longest_ms: TPOT_BUDGETS * tpot_budget_ms, gaps: 0.0, long_gaps: 0.0 }
    }

    /// What was counted.
    pub(crate) fn counted(&self) -> [f32; 2] {
        [self.gaps, self.long_gaps]
    }

    /// The same, counted so far; at least 0 and finite.
    pub(crate) fn with_counted(self, [gaps, long_gaps]: [f32; 2]) -> Self {
        Self { gaps, long_gaps, ..self }
    }

    /// Prompt tokens of the step, when each takes `token_ms`. `promised_tpot_ms` is the shortest that a service level allows;
    /// infinite without any. Where a request runs that has none, its steps are no longer than without levels.
    pub(crate) fn prompt_tokens(
        &mut self,
        load: &Load,
        token_ms: f32,
        promised_tpot_ms: f32,
        has_no_level: bool,
    ) -> f32 {
        let work_ms = load.prompt_tokens * token_ms;
        let alone_ms = load.decode_only_ms;
        let is_shut_out = load.shut_out > 0.0;
        let within_ms = PROMPTS_WITHIN_MS + load.shut_out * (OF_THE_WAIT * load.waited_ms).min(LONGEST_WITHIN_MS);
        let for_time = (work_ms / within_ms).min(if is_shut_out { 1.0 } else { MOST_FOR_TIME });
        let weight = PROMPT_WEIGHT * load.prompts as f32;
        let by_number = weight / (weight + load.decodes as f32).max(1.0) * (1.0 - load.shut_out);
        let share = for_time.max(by_number).min(MOST);
        let stretch = if is_shut_out { LEAST_STRETCH_SHUT_OUT } else { LEAST_STRETCH };
        let is_promised = promised_tpot_ms < f32::INFINITY;
        let promised_ms = OF_PROMISED_TPOT * promised_tpot_ms;
        let longest_ms = match (is_promised, has_no_level) {
            (false, _) => self.longest_ms,
            (true, false) => promised_ms,
            (true, true) => promised_ms.min(self.longest_ms),
        };
        let longest_ms = longest_ms.max(LONGEST_STRETCH * alone_ms);
        let mut step_ms = (alone_ms / (1.0 - share)).max(stretch * alone_ms).min(longest_ms);
        self.gaps += (load.answers - self.gaps) / RARE_OF_STEPS;
        let whole_ms = alone_ms + work_ms;
        let is_kept = RARE * whole_ms <= ADDED_BY_THE_LONG * promised_tpot_ms;
        if whole_ms > step_ms && is_kept && !is_shut_out && (load.answers < 1.0 || self.long_gaps < RARE * self.gaps) {
            step_ms = whole_ms;
        }
        let long_gaps = if step_ms > longest_ms { load.answers } else { 0.0 };
        self.long_gaps += (long_gaps - self.long_gaps) / RARE_OF_STEPS;
        ((step_ms - alone_ms) / token_ms).max(if is_promised { LEAST_PART } else { LEAST_TOKENS })
    }
}
