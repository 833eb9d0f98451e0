use crate::{Column, Init, Request, Requests, Step};

/// What every policy is, whichever slots it fills.
pub trait Policy: Sized {
    /// Short name.
    const NAME: &'static str;
    /// Version, free form.
    const VERSION: &'static str;
    /// One sentence: what it optimises and what it costs.
    const SUMMARY: &'static str;

    /// Make an instance from the operator's `[scheduler]` table and the policy's options. An error refuses the policy;
    /// the operator is shown its text and the options.
    ///
    /// # Errors
    /// The field, and what was expected.
    fn new(init: Init<'_>) -> Result<Self, String>;

    /// These requests have ended, by their numbers in the column `request`; called before a decision, for a policy that reads
    /// that column.
    fn finished(&mut self, _requests: &[u32]) {}

    /// The state worth keeping over a swap; empty when there is none.
    fn snapshot(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Take over another instance's snapshot.
    ///
    /// # Errors
    /// The state was not understood; this instance starts fresh.
    fn restore(&mut self, _state: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// A dispatch policy: for each engine step a key for each candidate, and optionally a token budget and token caps.
///
/// The host calls it from one thread, once a step. It must not block. In a component a panic is a trap and costs the
/// decision: the host decides the step by its default and makes a new instance.
pub trait DispatchPolicy: Policy {
    /// The columns that `key` and `token_cap` read, no column twice.
    const INPUTS: &'static [Column];
    /// Whether `token_cap` is to be asked.
    const CAPS_TOKENS: bool = false;
    /// Whether `victim_key` is to be asked.
    const CHOOSES_VICTIMS: bool = false;

    /// Take note of the batch; called once for each step that the policy decides, before the first key is asked for. For
    /// policies with a state of their own, and for those whose answer for one candidate depends on the others.
    fn observe(&mut self, _step: &Step, _batch: &Requests<'_, Self>) {}

    /// The candidate's key: lower goes first, equal keys keep their present order, NaN goes last.
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32;

    /// Write the key of each candidate, in the batch's order. For policies that find the keys of many candidates at once faster than
    /// one after the other; they are those of `key`.
    #[inline(always)]
    fn keys(&self, step: &Step, batch: &Requests<'_, Self>, keys: &mut [f32]) {
        for (index, key) in keys.iter_mut().enumerate() {
            *key = self.key(step, &batch.get(index));
        }
    }

    /// Tokens the step may carry; `None` for the engine's own budget.
    fn token_budget(&self, _step: &Step) -> Option<u32> {
        None
    }

    /// Whether a candidate may have a cap in this step. Asked after `observe`, only with `CAPS_TOKENS`: a step without caps costs
    /// the engine less.
    fn has_caps(&self, _step: &Step) -> bool {
        true
    }

    /// At most this many tokens for the candidate in this step; 0 leaves it out. Asked only with `CAPS_TOKENS`.
    fn token_cap(&self, _step: &Step, _request: &Request<'_, Self>) -> u32 {
        u32::MAX
    }

    /// Where a waiting request may take the place of running ones (`preempt_for_waiting`): of those behind it the lowest
    /// key gives way first, NaN never. Asked only with `CHOOSES_VICTIMS`.
    fn victim_key(&self, _step: &Step, _request: &Request<'_, Self>) -> f32 {
        f32::NAN
    }

    /// Whether the policy decides this step at all; `false` leaves it to the host's default.
    fn applies(&self, _step: &Step) -> bool {
        true
    }
}

/// What a policy decided; the fields are those of the WIT record `decision`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// A key for each candidate; empty leaves the step to the default.
    pub keys: Vec<f32>,
    /// Tokens the step may carry.
    pub token_budget: Option<u32>,
    /// A cap for each candidate; empty for no caps.
    pub token_caps: Vec<u32>,
    /// Which running request gives way first; empty for the host's default.
    pub victim_keys: Vec<f32>,
}

impl Decision {
    /// Forget the last decision, keep its memory.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.token_budget = None;
        self.token_caps.clear();
        self.victim_keys.clear();
    }
}

/// Decide one step with `policy`, into `decision`. `columns` is laid out as in WIT `dispatch.decide`.
///
/// Both the component's glue and the host's native build call this, so that they cannot differ.
///
/// # Panics
/// When `columns` does not hold `P::INPUTS.len() * candidates` values.
#[inline]
pub fn decide<P: DispatchPolicy>(
    policy: &mut P,
    step: &Step,
    candidates: usize,
    columns: &[f32],
    decision: &mut Decision,
) {
    decision.clear();
    if !policy.applies(step) {
        return;
    }
    let rows = Requests::<P>::rows(candidates, columns);
    // The keys have rows of their own: of those that functions which are not inlined see, the compiler forgets the lengths.
    let seen = rows;
    let batch = Requests::new(&seen, candidates);
    policy.observe(step, &batch);
    let policy = &*policy;
    decision.keys.resize(candidates, 0.0);
    policy.keys(step, &Requests::new(&rows, candidates), &mut decision.keys[..candidates]);
    decision.token_budget = policy.token_budget(step);
    if P::CAPS_TOKENS && policy.has_caps(step) {
        decision.token_caps.extend(batch.iter().map(|request| policy.token_cap(step, &request)));
    }
    if P::CHOOSES_VICTIMS {
        decision.victim_keys.extend(batch.iter().map(|request| policy.victim_key(step, &request)));
    }
}
