//! What a trace holds, in a few figures.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::{Prefix, Trace};

/// Figures of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Name of the file, without its folder.
    pub file: String,
    /// Its format.
    pub format: String,
    /// Requests that a replay sends.
    pub requests: usize,
    /// Seconds from the first arrival to the last; none for sessions in closed loop, which have no arrivals.
    pub span_s: Option<f64>,
    /// Requests a second; none where all arrive at once.
    pub requests_per_s: Option<f64>,
    /// Tokens of prompts.
    pub prompt: Lengths,
    /// Tokens of thinking.
    pub think: Lengths,
    /// Tokens of answers.
    pub output: Lengths,
    /// Conversations of several requests.
    pub sessions: usize,
    /// Requests in these.
    pub in_sessions: usize,
    /// Share of the prompt tokens that an unlimited prefix cache would have.
    pub reuse: f64,
    /// Tenants with a name.
    pub tenants: usize,
    /// What the reader left out, changed or assumed.
    pub notes: Vec<String>,
}

/// Token counts of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Lengths {
    /// Of all requests together.
    pub sum: u64,
    /// Per request.
    pub mean: f64,
    /// Of the middle request.
    pub p50: u32,
    /// Of the request that 5 % exceed.
    pub p95: u32,
    /// Of the longest.
    pub max: u32,
}

impl Lengths {
    fn of(values: impl Iterator<Item = u32>) -> Self {
        let mut values: Vec<u32> = values.collect();
        values.sort_unstable();
        let Some(max) = values.last().copied() else { return Self::default() };
        let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
        let sum: u64 = values.iter().map(|value| u64::from(*value)).sum();
        Self { sum, mean: sum as f64 / values.len() as f64, p50: at(0.5), p95: at(0.95), max }
    }
}

impl Summary {
    /// Of a trace that was read.
    pub fn of(trace: &Trace) -> Self {
        let mut turns: HashMap<u64, usize> = HashMap::new();
        let mut reused = 0_u64;
        let lengths: Vec<[u32; 3]> = if trace.sessions.is_empty() {
            reused = reuse(trace, &mut turns);
            trace.requests.iter().map(|one| [one.prompt_tokens, one.think_tokens, one.output_tokens]).collect()
        } else {
            for (id, session) in trace.sessions.iter().enumerate() {
                turns.insert(id as u64, session.requests.len());
                let known = session.requests.iter().map(|one| u64::from(one.known_blocks));
                reused += known.sum::<u64>() * u64::from(session.block_tokens);
            }
            let all = trace.sessions.iter().flat_map(|session| &session.requests);
            all.map(|one| [one.prompt_tokens, one.think_tokens, one.output_tokens]).collect()
        };
        let [prompt, think, output] = [0, 1, 2].map(|phase| Lengths::of(lengths.iter().map(|one| one[phase])));
        let span_s = trace.requests.last().map(|last| last.arrival_s);
        let several = || turns.values().filter(|turns| **turns > 1);
        let tenants: HashSet<&str> =
            trace.requests.iter().map(|one| &*one.tenant).filter(|name| !name.is_empty()).collect();
        Self {
            file: trace.name.clone(),
            format: trace.format.name().to_owned(),
            requests: lengths.len(),
            span_s,
            requests_per_s: span_s.filter(|span| *span > 0.0).map(|span| (lengths.len() - 1) as f64 / span),
            prompt,
            think,
            output,
            sessions: several().count(),
            in_sessions: several().sum(),
            reuse: reused as f64 / prompt.sum.max(1) as f64,
            tenants: tenants.len(),
            notes: trace.notes.clone(),
        }
    }
}

/// Prompt tokens that were in a prompt or an answer before, with the requests of each conversation.
fn reuse(trace: &Trace, turns: &mut HashMap<u64, usize>) -> u64 {
    let mut known: HashSet<u64> = HashSet::new();
    let mut history: HashMap<u64, u32> = HashMap::new();
    let mut reused = 0;
    for request in &trace.requests {
        match &request.prefix {
            Prefix::None | Prefix::Ranges { .. } => {}
            Prefix::Blocks { tokens, ids } => {
                let seen = ids.iter().take_while(|id| known.contains(*id)).count();
                known.extend(&ids[seen..]);
                reused += (seen as u64 * u64::from(*tokens)).min(u64::from(request.prompt_tokens));
            }
            Prefix::Session { id, .. } => {
                *turns.entry(*id).or_default() += 1;
                let said = request.prompt_tokens.saturating_add(request.output_tokens);
                let before = history.insert(*id, said).unwrap_or(0);
                reused += u64::from(before.min(request.prompt_tokens));
            }
        }
    }
    reused
}
