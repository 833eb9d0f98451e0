//! Tenants share the service: the virtual token counter of VTC (Sheng et al., OSDI'24, arXiv 2401.00588).
//!
//! A counter a tenant adds up the tokens it was served, prompts weighted less than what is generated. The tenant with the lowest
//! counter goes first. A tenant that comes back is lifted to the lowest counter of those that queue, so that nobody saves up
//! service by not using it.
//!
//! Neither `request` nor `served-tokens` is read, so service is told from other columns: a running request that made progress since
//! the previous step was served in it. One decode each step is charged; the prompt, less what the prefix cache had, with the first
//! token.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Policy, Request, Requests, State, Step, clamped, export_policy,
};
use serde::Deserialize;

/// The host numbers tenants up to 65,536, 0 is none; any other number counts as the last of these.
const MAX_TENANTS: usize = (1 << 16) + 1;
/// Precedes everything else in a snapshot.
const SNAPSHOT_VERSION: u8 = 1;
const HEADER_BYTES: usize = 13;
const ACCOUNT_BYTES: usize = 9;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    input_weight: f64,
    output_weight: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { input_weight: 1.0, output_weight: 2.0 }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct FairShare {
    options: Options,
    /// By the tenant's number, as far as one was seen.
    accounts: Vec<Account>,
    /// Counts the steps in which the whole queue was seen; 0 before the first.
    round: u64,
    /// When the previous step was decided.
    decided_ms: Option<f64>,
    /// Of the tenants that queued last, the one with the lowest counter.
    last_queued: Option<usize>,
    /// The lowest counter of this step.
    least: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    counter: f64,
    /// The last round in which the tenant had a request that waits; 0 for none.
    queued: u64,
}

impl Policy for FairShare {
    const NAME: &'static str = "fair-share";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "The least served tenant first (VTC): isolates tenants, ignores phases.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let options: Options = init.config()?;
        for (name, weight) in [("input_weight", options.input_weight), ("output_weight", options.output_weight)] {
            if !(0.0..=1000.0).contains(&weight) {
                return Err(format!("{name}: {weight}: must be in 0..=1000"));
            }
        }
        Ok(Self { options, accounts: Vec::new(), round: 0, decided_ms: None, last_queued: None, least: 0.0 })
    }

    /// All that decides, so that a swap and a replay go on where this instance was: the version, the time of the previous
    /// step (NaN for none), the tenant that queued last (`u32::MAX` for none), and an account each.
    fn snapshot(&self) -> Vec<u8> {
        let mut state = Vec::with_capacity(HEADER_BYTES + self.accounts.len() * ACCOUNT_BYTES);
        state.push(SNAPSHOT_VERSION);
        state.extend(self.decided_ms.unwrap_or(f64::NAN).to_le_bytes());
        state.extend(self.last_queued.map_or(u32::MAX, |tenant| tenant as u32).to_le_bytes());
        for account in &self.accounts {
            state.extend(account.counter.to_le_bytes());
            state.push(u8::from(account.queued > 0 && account.queued == self.round));
        }
        state
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), String> {
        let Some((&[SNAPSHOT_VERSION, header @ ..], accounts)) = state.split_first_chunk::<HEADER_BYTES>() else {
            return Err(format!("state: expected version {SNAPSHOT_VERSION} and at least {HEADER_BYTES} bytes"));
        };
        let (chunks, count) = (accounts.chunks_exact(ACCOUNT_BYTES), accounts.len() / ACCOUNT_BYTES);
        if !chunks.remainder().is_empty() || count > MAX_TENANTS {
            let bytes = accounts.len();
            return Err(format!("state: {bytes} bytes: expected {ACCOUNT_BYTES} for each of at most {MAX_TENANTS}"));
        }
        let [d0, d1, d2, d3, d4, d5, d6, d7, last @ ..] = header;
        let decided_ms = f64::from_le_bytes([d0, d1, d2, d3, d4, d5, d6, d7]);
        let last = u32::from_le_bytes(last);
        if decided_ms.is_infinite() {
            return Err(format!("state: time {decided_ms}: must be finite"));
        }
        if last != u32::MAX && last as usize >= count {
            return Err(format!("state: tenant {last}: must be one of {count}"));
        }
        let mut restored = Vec::with_capacity(count);
        for chunk in chunks {
            let Some((bytes, &[queued])) = chunk.split_first_chunk() else { return Err("state: no account".into()) };
            let counter = f64::from_le_bytes(*bytes);
            if !(0.0..=f64::MAX).contains(&counter) || queued > 1 {
                return Err(format!("state: counter {counter}: must be finite and at least 0, and its flag 0 or 1"));
            }
            restored.push(Account { counter, queued: queued.into() });
        }
        self.accounts = restored;
        self.round = 1;
        self.decided_ms = (!decided_ms.is_nan()).then_some(decided_ms);
        self.last_queued = (last != u32::MAX).then_some(last as usize);
        Ok(())
    }
}

/// A NaN counts as none.
#[inline(always)]
fn tenant(request: &Request<'_, FairShare>) -> usize {
    (request.tenant() as usize).min(MAX_TENANTS - 1)
}

impl FairShare {
    /// What the request was served in the step before, if it was served.
    fn served(&self, step: &Step, elapsed_ms: f32, request: &Request<'_, Self>) -> f64 {
        let generated = request.generated_tokens();
        let was_served = request.state() == State::Running && request.since_progress_ms() <= elapsed_ms;
        // One that computes again what a preemption lost, or the rest of its prompt, has nothing new to show.
        let is_decoding = request.computed_tokens() + step.decode_tokens as f32 >= request.prompt_tokens() + generated;
        if !was_served || !is_decoding || generated.is_nan() || generated < 1.0 {
            return 0.0;
        }
        let prompt = if generated == 1.0 {
            clamped(request.prompt_tokens() - request.cached_tokens(), 0.0, f32::MAX)
        } else {
            0.0
        };
        let Options { input_weight, output_weight } = self.options;
        f64::from(prompt) * input_weight + f64::from(step.decode_tokens) * output_weight
    }

    /// Charge the step that ended.
    fn charge(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let elapsed_ms = step.elapsed_ms(&mut self.decided_ms);
        for request in batch.iter() {
            let served = self.served(step, elapsed_ms, &request);
            let counter = &mut self.accounts[tenant(&request)].counter;
            if *counter + served <= f64::MAX {
                *counter += served;
            }
        }
    }

    /// Lift the tenants that begin to queue to those that queue already, or to the last that did.
    fn lift(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let waiting = || batch.iter().filter(|request| request.state() != State::Running);
        let sees_all = waiting().count() >= step.waiting as usize;
        let before = self.round;
        // While requests wait unseen, those who queued before may still do so.
        self.round += u64::from(sees_all || before == 0);
        let lowest = |accounts: &[Account], round: u64| {
            let queued = waiting().map(|request| tenant(&request)).filter(|tenant| accounts[*tenant].queued == round);
            queued.min_by(|one, other| accounts[*one].counter.total_cmp(&accounts[*other].counter))
        };
        if let Some(lowest) = lowest(&self.accounts, before).or(self.last_queued).filter(|_| before > 0) {
            let least = self.accounts[lowest].counter;
            for request in waiting() {
                let account = &mut self.accounts[tenant(&request)];
                if account.queued != before && account.counter < least {
                    account.counter = least;
                }
            }
        }
        for request in waiting() {
            self.accounts[tenant(&request)].queued = self.round;
        }
        self.last_queued = lowest(&self.accounts, self.round).or(self.last_queued);
    }
}

impl DispatchPolicy for FairShare {
    const INPUTS: &'static [Column] = &[
        Column::State,
        Column::Tenant,
        Column::SinceProgressMs,
        Column::PromptTokens,
        Column::CachedTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
    ];

    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let tenants = batch.iter().map(|request| tenant(&request) + 1).max().unwrap_or(0);
        if tenants > self.accounts.len() {
            self.accounts.resize(tenants, Account::default());
        }
        self.charge(step, batch);
        self.lift(step, batch);
        let counters = batch.iter().map(|request| self.accounts[tenant(&request)].counter);
        self.least = counters.fold(f64::MAX, |least, counter| if counter < least { counter } else { least });
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        // Differences stay exact long after the counters would not fit a key.
        (self.accounts[tenant(request)].counter - self.least) as f32
    }
}

export_policy!(dispatch: FairShare);

#[cfg(test)]
mod tests;
