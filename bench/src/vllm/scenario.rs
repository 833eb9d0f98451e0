//! The workloads that the real engine is measured with, each with the engine that it was made for.

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use crate::trace::{Arrivals, Generator, Prefix, TraceRequest, Workload};

/// A workload for the real engine on a small machine, and the size of the engine that it was made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scenario {
    /// As the command line names it.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// Its requests.
    pub load: Load,
    /// Its engine.
    pub engine: EngineSize,
    /// What an operator of this engine would set in `meridian.toml`: dotted field and value.
    pub settings: &'static [(&'static str, &'static str)],
}

/// The size of an engine, by vLLM's names. `None` leaves vLLM's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSize {
    /// Most running requests.
    pub max_num_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// Most tokens of a request; as many as the longest needs.
    pub max_model_len: Option<u32>,
    /// KV blocks.
    pub kv_blocks: Option<u32>,
    /// Tokens of a KV block.
    pub block_size: u32,
}

/// Requests of a scenario.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Requests that come whether others are done or not.
    Open(Open),
    /// Chats: a turn comes when the answer before it is complete.
    Chats(Chats),
}

/// Requests of [`Workload::reasoning_chat`], shortened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Open {
    /// How many.
    pub requests: usize,
    /// Requests a second.
    pub rate_per_s: f64,
    /// Factor on the lengths of prompts.
    pub prompt_factor: f64,
    /// Factor on those of thinking and answers.
    pub generated_factor: f64,
}

/// Conversations that all begin at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chats {
    /// How many.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Tokens that a user says in a turn.
    pub user_tokens: u32,
    /// Tokens that the first turn of a session has more: a document, what is known of the user.
    pub context_tokens: u32,
    /// Seconds from an answer to the next turn.
    pub gap_s: f64,
    /// The prompt of a turn holds the thinking of those before it.
    pub preserves_thinking: bool,
}

/// Lengths beyond this quantile are cut to it: one longer request would outlive all others and be half of a run alone.
const LONGEST: f64 = 0.95;
/// Requests of which the lengths of one are taken.
const OVERSAMPLING: usize = 64;
/// Tokens of a context length are a multiple of this.
const CONTEXT_STEP: u32 = 512;
/// What a chat template may add to a turn, and end markers: a context has room for it.
pub(super) const TEMPLATE_TOKENS: u32 = 24;
/// Tokens of an answer in a chat.
const ANSWER_TOKENS: (f64, f64) = (40.0, 80.0);
/// Median of the thinking in a chat, tokens.
const CHAT_THINK_MEDIAN: f64 = 200.0;

// A full batch of the small model decodes in about 13 ms on two cores, and a step that carries prefill takes longer than its
// tokens account for: a target near 13 ms would spend its time on many small chunks of prefill.
const TARGET: &[(&str, &str)] = &[("scheduler.output_tpot_budget_ms", "24")];

/// Every scenario. Chosen by experiment with vLLM 0.32's own scheduler on two cores and the small random model: under
/// `loaded` the batch is full while requests arrive and nothing is preempted; `kv-tight` preempts tens of requests, some while
/// they answer; in `multi-turn` stock vLLM finds about half of the prompt tokens in its prefix cache.
pub const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "loaded",
        about: "KV ample, batch full",
        load: Load::Open(Open { requests: 240, rate_per_s: 22.0, prompt_factor: 0.6, generated_factor: 0.08 }),
        engine: EngineSize {
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: Some(4096),
            kv_blocks: None,
            block_size: 32,
        },
        settings: TARGET,
    },
    Scenario {
        name: "kv-tight",
        about: "KV short, requests are preempted",
        load: Load::Open(Open { requests: 120, rate_per_s: 12.0, prompt_factor: 0.2, generated_factor: 0.08 }),
        engine: EngineSize {
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: Some(2048),
            kv_blocks: Some(160),
            block_size: 32,
        },
        settings: TARGET,
    },
    Scenario {
        name: "multi-turn",
        about: "chat sessions whose next turn follows the answer, batch full",
        load: Load::Chats(Chats {
            sessions: 30,
            turns: 5,
            user_tokens: 100,
            context_tokens: 200,
            gap_s: 0.0,
            preserves_thinking: false,
        }),
        engine: EngineSize {
            max_num_seqs: 16,
            max_num_batched_tokens: 2048,
            max_model_len: None,
            kv_blocks: Some(950),
            block_size: 32,
        },
        settings: TARGET,
    },
];

impl Scenario {
    /// The scenario with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SCENARIOS.into_iter().find(|scenario| scenario.name == name)
    }

    /// Its requests: the same for the same seed.
    #[must_use]
    pub fn requests(&self, seed: u64) -> Vec<TraceRequest> {
        match &self.load {
            Load::Open(open) => open.requests(seed),
            Load::Chats(chats) => chats.requests(seed),
        }
    }

    /// Most tokens of one of these requests, in an engine of this scenario: what it was made for, or what they need.
    #[must_use]
    pub fn context_tokens(&self, requests: &[TraceRequest]) -> u32 {
        self.engine.max_model_len.unwrap_or_else(|| {
            let all = |r: &TraceRequest| r.prompt_tokens + r.think_tokens + r.output_tokens + TEMPLATE_TOKENS;
            requests.iter().map(all).max().unwrap_or(0).div_ceil(CONTEXT_STEP) * CONTEXT_STEP
        })
    }
}

impl Open {
    fn requests(&self, seed: u64) -> Vec<TraceRequest> {
        let workload = Workload { arrivals: Arrivals { regime: None, ..Arrivals::default() }, ..Workload::default() };
        let drawn = |salt: u64, count| generated(&workload, seed ^ salt, count);
        let mut rng = Pcg64::seed_from_u64(seed);
        let mut requests = drawn(0, self.requests);
        let many = drawn(1, self.requests * OVERSAMPLING);
        let prompts = stratified(&mut rng, &many, self.requests, |request| request.prompt_tokens);
        let generated = stratified(&mut rng, &many, self.requests, |r| r.think_tokens + r.output_tokens);
        let span_s = requests.last().map_or(0.0, |last| last.arrival_s).max(1e-9);
        let stretch = self.requests as f64 / self.rate_per_s / span_s;
        for ((request, prompt), generated) in requests.iter_mut().zip(prompts).zip(generated) {
            request.arrival_s *= stretch;
            request.prompt_tokens = times(prompt.prompt_tokens, self.prompt_factor).max(1);
            request.think_tokens = times(generated.think_tokens, self.generated_factor);
            request.output_tokens = times(generated.output_tokens, self.generated_factor).max(1);
        }
        requests
    }
}

impl Chats {
    fn requests(&self, seed: u64) -> Vec<TraceRequest> {
        let count = self.sessions * self.turns;
        let mut rng = Pcg64::seed_from_u64(seed);
        let many = generated(&Workload::default(), seed ^ 1, count * OVERSAMPLING);
        let thinking: Vec<TraceRequest> = many.into_iter().filter(|request| request.think_tokens > 0).collect();
        let mut lengths: Vec<u32> = thinking.iter().map(|request| request.think_tokens).collect();
        lengths.sort_unstable();
        let factor = CHAT_THINK_MEDIAN / f64::from(lengths[lengths.len() / 2].max(1));
        let think = stratified(&mut rng, &thinking, count, |request| request.think_tokens);
        let (least, most) = ANSWER_TOKENS;
        let mut answers: Vec<u32> = (0..count)
            .map(|i| (least * (most / least).powf((i as f64 + rng.random::<f64>()) / count as f64)).round() as u32)
            .collect();
        answers.shuffle(&mut rng);
        let mut requests = Vec::with_capacity(count);
        for session in 0..self.sessions {
            let mut prompt_tokens = self.context_tokens;
            for turn in 0..self.turns {
                let at = session * self.turns + turn;
                let think_tokens = times(think[at].think_tokens, factor).max(1);
                let output_tokens = answers[at];
                prompt_tokens += self.user_tokens;
                requests.push(TraceRequest {
                    prompt_tokens,
                    think_tokens,
                    output_tokens,
                    prefix: Prefix::Session { id: session as u64, turn: turn as u32 },
                    ..TraceRequest::default()
                });
                prompt_tokens += output_tokens + if self.preserves_thinking { think_tokens } else { 0 };
            }
        }
        requests
    }
}

fn generated(workload: &Workload, seed: u64, count: usize) -> Vec<TraceRequest> {
    Generator::new(workload, seed).expect("the presets are in range").take(count).collect()
}

fn times(tokens: u32, factor: f64) -> u32 {
    (f64::from(tokens) * factor).round() as u32
}

/// One request from each of `count` equal shares of the requests by length, those beyond [`LONGEST`] left out, in an order of
/// their own. Plain draws of so heavy a tail differ several-fold in total work from seed to seed; these differ little.
fn stratified<'a>(
    rng: &mut Pcg64,
    many: &'a [TraceRequest],
    count: usize,
    length: impl Fn(&TraceRequest) -> u32,
) -> Vec<&'a TraceRequest> {
    let mut sorted: Vec<&TraceRequest> = many.iter().collect();
    sorted.sort_by_key(|request| length(request));
    let kept = ((sorted.len() as f64 * LONGEST) as usize).max(1);
    let mut chosen: Vec<&TraceRequest> = (0..count)
        .map(|i| {
            let share = (i as f64 + rng.random::<f64>()) / count as f64;
            // What is beyond the quantile is cut to it.
            sorted[((share * sorted.len() as f64) as usize).min(kept - 1)]
        })
        .collect();
    chosen.shuffle(rng);
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_work_differs_little_from_seed_to_seed() {
        for scenario in SCENARIOS {
            let total = |seed| {
                let requests = scenario.requests(seed);
                requests.iter().map(|r| f64::from(r.think_tokens + r.output_tokens)).sum::<f64>()
            };
            let totals: Vec<f64> = (1..=8).map(total).collect();
            let (least, most) =
                (totals.iter().copied().fold(f64::MAX, f64::min), totals.iter().copied().fold(0.0, f64::max));
            assert!(most / least < 1.1, "{}: {totals:?}", scenario.name);
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_others() {
        for scenario in SCENARIOS {
            assert_eq!(scenario.requests(3), scenario.requests(3));
            assert_ne!(scenario.requests(3), scenario.requests(4));
        }
    }

    #[test]
    fn open_requests_fill_the_time_that_the_rate_says() {
        let Load::Open(open) = SCENARIOS[0].load else { panic!("the first is open") };
        let requests = open.requests(5);
        assert!(requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
        let last_s = requests.last().expect("requests").arrival_s;
        assert!((last_s - open.requests as f64 / open.rate_per_s).abs() < 1e-6, "{last_s}");
        assert!(requests.iter().all(|r| r.prompt_tokens > 0 && r.output_tokens > 0));
    }

    #[test]
    fn a_turn_holds_what_was_said_before_it() {
        let Load::Chats(chats) = SCENARIOS[2].load else { panic!("the last is chats") };
        for preserves_thinking in [false, true] {
            let requests = Chats { preserves_thinking, ..chats }.requests(1);
            assert_eq!(requests.len(), 150);
            for turns in requests.chunks(chats.turns) {
                assert_eq!(turns[0].prompt_tokens, 300, "the user and the context");
                for pair in turns.windows(2) {
                    let kept = if preserves_thinking { pair[0].think_tokens } else { 0 };
                    assert_eq!(pair[1].prompt_tokens, pair[0].prompt_tokens + pair[0].output_tokens + kept + 100);
                }
            }
        }
    }

    #[test]
    fn a_context_has_room_for_the_longest_request() {
        let scenario = SCENARIOS[2];
        let requests = scenario.requests(1);
        let most = requests.iter().map(|r| r.prompt_tokens + r.think_tokens + r.output_tokens).max().expect("requests");
        let context = scenario.context_tokens(&requests);
        assert!(context.is_multiple_of(CONTEXT_STEP) && (most + 16..most + 16 + 2 * CONTEXT_STEP).contains(&context));
    }
}
