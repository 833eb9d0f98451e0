//! Replays requests under several policies, at several rates, with several seeds.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use meridian_core::slot::TrialFault;
use meridian_core::{MeridianConfig, SlotName};
use meridian_engine::timeline::Timeline;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;

use crate::bound::most_in_time;
use crate::limits::engines_within;
use crate::load::{Course, Endless};
use crate::policies::{BELADY, Choice, Inject, Loader, Policies, PolicyArg, PolicySet, configured};
use crate::results::{EngineFacts, GivenUp, MadeBy, Results, Run, SCHEMA, Slo, TraceFacts};
use crate::sim::{Admitted, ClosedLoop, EngineConfig, HandoffFleet, Outcome, Router, Simulation, Swap, Transfer};
use crate::trace::{Generator, Prefix, Session, SessionRequest, TraceRequest, Workload};

/// What is replayed.
#[derive(Clone, Debug)]
pub enum Input {
    /// A recorded trace. With seed 1 it is replayed as it is; with others the bodies of its requests change places, except
    /// those that share a prefix: their order means something.
    Trace {
        /// Its name.
        name: String,
        /// Sorted by arrival.
        requests: Arc<[TraceRequest]>,
    },
    /// Recorded sessions, in closed loop. With seed 1 they begin in the order of the trace; others draw an order.
    Sessions {
        /// Name of the trace.
        name: String,
        /// At least one.
        sessions: Arc<[Session]>,
        /// How many are under way at a time.
        at_once: u32,
        /// See [`ClosedLoop::admitting`].
        admitted: Admitted,
    },
    /// A generated workload.
    Generated {
        /// Its name.
        name: String,
        /// Its parameters.
        workload: Box<Workload>,
        /// How many requests.
        requests: usize,
    },
}

impl Input {
    /// Name of the trace or the workload.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Trace { name, .. } | Self::Sessions { name, .. } | Self::Generated { name, .. } => name,
        }
    }
}

/// A rate to replay at.
///
/// ```
/// use meridian_bench::replay::Rate;
///
/// assert_eq!("2.5".parse(), Ok(Rate::PerSecond(2.5)));
/// assert_eq!("4x".parse(), Ok(Rate::TimesItsOwn(4.0)));
/// assert!("0".parse::<Rate>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Requests a second.
    PerSecond(f64),
    /// As many times the trace's own.
    TimesItsOwn(f64),
}

impl std::fmt::Display for Rate {
    /// In words.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PerSecond(rate) => write!(f, "{rate} req/s"),
            Self::TimesItsOwn(times) => write!(f, "{times} times its own rate"),
        }
    }
}

impl std::str::FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, made): (_, fn(f64) -> Self) = match text.strip_suffix('x') {
            Some(number) => (number, Self::TimesItsOwn),
            None => (text, Self::PerSecond),
        };
        match number.parse::<f64>() {
            Ok(rate) if (1e-6..=1e9).contains(&rate) => Ok(made(rate)),
            _ => Err(format!(
                "{text}: expected requests a second from 1e-6 to 1e9, or a multiple of the trace's own rate: 2x"
            )),
        }
    }
}

/// How many tokens clients ask for: what a policy knows of the length of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// As many as each request will need: lengths are known.
    Exact,
    /// One number for all requests.
    AtMost(u32),
}

impl std::str::FromStr for MaxTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "exact" => Ok(Self::Exact),
            Ok(tokens) if tokens > 0 => Ok(Self::AtMost(tokens)),
            _ => Err(format!("{text}: expected a number of tokens, or `exact`")),
        }
    }
}

/// What to replay, and in what.
#[derive(Clone, Debug)]
pub struct Options {
    /// One engine.
    pub engine: EngineConfig,
    /// Its name.
    pub engine_name: String,
    /// How many engines.
    pub engines: u32,
    /// How requests come to them.
    pub router: Router,
    /// How KV blocks travel in fleets with a handoff.
    pub transfer: Transfer,
    /// Service levels.
    pub slo: Slo,
    /// What the others are compared with.
    pub baseline: PolicySet,
    /// The others.
    pub policies: Vec<PolicySet>,
    /// At least one.
    pub rates: Vec<Rate>,
    /// Load over time, factors of a rate; without it, requests arrive as in the trace.
    pub course: Option<Course>,
    /// At least one.
    pub seeds: Vec<u64>,
    /// Eviction policy of those that name none.
    pub eviction: Option<PolicyArg>,
    /// Budget policy of those that name none: early exit.
    pub budget: Option<PolicyArg>,
    /// Faults of the policies that are compared; the baseline has none.
    pub inject: Option<Inject>,
    /// Another policy takes over after so many seconds; not in the baseline.
    pub swaps: Vec<(f64, PolicyArg)>,
    /// What clients ask for.
    pub max_tokens: MaxTokens,
    /// Deadline of requests that have none, milliseconds after arrival.
    pub deadline_ms: Option<f64>,
    /// Deadlines are those of the service levels: an engine that knows how long each request will think.
    pub deadlines_of_slo: bool,
    /// Targets and KV settings, as an engine's `meridian.toml`.
    pub config: MeridianConfig,
    /// Command line, for the results.
    pub command: String,
}

impl Options {
    /// Stock vLLM alone in one engine of the default shape, with limits of 32,768 tokens, no deadlines and no rates yet.
    ///
    /// # Panics
    /// Never: `fcfs` is a policy.
    #[must_use]
    pub fn stock(slo: Slo, seeds: Vec<u64>, config: MeridianConfig, command: String) -> Self {
        Self {
            engine: EngineConfig::default(),
            engine_name: String::new(),
            engines: 1,
            router: Router::default(),
            transfer: Transfer::default(),
            slo,
            baseline: "fcfs".parse().expect("a policy"),
            policies: Vec::new(),
            rates: Vec::new(),
            course: None,
            seeds,
            eviction: None,
            budget: None,
            inject: None,
            swaps: Vec::new(),
            max_tokens: MaxTokens::AtMost(32_768),
            deadline_ms: None,
            deadlines_of_slo: false,
            config,
            command,
        }
    }
}

impl Options {
    /// Whether these options can replay that input.
    ///
    /// # Errors
    /// The option, and what was expected instead.
    pub fn fits(&self, input: &Input) -> anyhow::Result<()> {
        for set in self.policies.iter().chain([&self.baseline]) {
            let Some([think, answer]) = set.handoff else { continue };
            let engines = self.engines;
            ensure!(
                think.checked_add(answer) == Some(engines),
                "handoff={think}:{answer}: expected as many engines as --engines {engines}"
            );
            ensure!(
                self.engine.kv_token_bytes > 0.0,
                "handoff={think}:{answer}: --engine {} has no kv_token_bytes, expected the bytes of the KV of one token",
                self.engine_name
            );
        }
        if let Input::Sessions { name, .. } = input {
            ensure!(
                self.rates == [Rate::TimesItsOwn(1.0)],
                "--rate: sessions of {name} arrive when others end, expected --at-once instead"
            );
            ensure!(
                self.course.is_none(),
                "--day: sessions of {name} arrive when others end, expected --at-once instead"
            );
            return Ok(());
        }
        let bounds = |set: &PolicySet| set.eviction.as_ref().is_some_and(|source| source.source == BELADY);
        let is_bound = self.policies.iter().chain([&self.baseline]).any(bounds)
            || self.eviction.as_ref().is_some_and(|source| source.source == BELADY);
        ensure!(!is_bound, "eviction=belady: knows when sessions come back, expected --trace with sessions");
        Ok(())
    }
}

/// Replay everything. `progress` is told the run (from 0), how many there are, and the share of the run that is done.
///
/// # Errors
/// A policy that does not load; nothing to replay.
pub fn replay(
    options: &Options,
    input: &Input,
    progress: &mut dyn FnMut(usize, usize, f64),
) -> anyhow::Result<Results> {
    engines_within(options.engines, options.engine.kv_blocks)?;
    options.fits(input)?;
    let facts = facts(input)?;
    let mut loader = Loader::new(options.config.clone());
    let policies: Vec<&PolicySet> = std::iter::once(&options.baseline).chain(&options.policies).collect();
    let labels = labels(options);
    let all = options.rates.len() * options.seeds.len() * policies.len();
    let mut runs = Vec::<Run>::with_capacity(all);
    let mut given_up = Vec::<GivenUp>::new();
    let mut begun = 0;
    for rate in &options.rates {
        let rate = match rate {
            Rate::PerSecond(rate) => *rate,
            Rate::TimesItsOwn(times) => facts.rate * times,
        };
        for seed in &options.seeds {
            for (number, policy) in policies.iter().enumerate() {
                let (at, label) = (begun, &labels[number]);
                begun += 1;
                if given_up.iter().any(|given_up| given_up.policy == *label) {
                    continue;
                }
                let is_baseline = number == 0;
                let mut told = |share: f64| progress(at, all, share);
                let play = Play { rate, own_rate: facts.rate, seed: *seed };
                let outcome = run(options, &mut loader, input, policy, is_baseline, &play, None, &mut told);
                match why_given_up(&mut loader, outcome, is_baseline)? {
                    Ok(outcome) => runs.push(Run { policy: label.clone(), rate, seed: *seed, ..outcome.run }),
                    Err(why) => {
                        // Without all of its runs it cannot be compared.
                        runs.retain(|run| run.policy != *label);
                        given_up.push(GivenUp { policy: label.clone(), rate, seed: *seed, why });
                    }
                }
            }
        }
    }
    let EngineConfig { step, max_num_seqs, max_num_batched_tokens, kv_blocks, block_tokens, .. } = options.engine;
    Ok(Results {
        schema: SCHEMA,
        made_by: MadeBy {
            version: env!("CARGO_PKG_VERSION").into(),
            command: options.command.clone(),
            machine: machine(),
        },
        trace: facts,
        engine: EngineFacts {
            preset: options.engine_name.clone(),
            engines: options.engines,
            router: options.router.name().into(),
            step_model: step.by_name(),
            max_num_seqs,
            max_num_batched_tokens,
            kv_blocks,
            block_tokens,
            slo: options.slo,
        },
        baseline: labels[0].clone(),
        runs,
        given_up,
        most_in_time: None,
        notes: Vec::new(),
    })
}

/// The timeline of the first engine in one run: of the first policy, or the baseline if there is no other, at the first
/// rate, with the first seed.
///
/// # Errors
/// As [`replay`].
pub fn timeline(options: &Options, input: &Input) -> anyhow::Result<Timeline> {
    engines_within(options.engines, options.engine.kv_blocks)?;
    let facts = facts(input)?;
    let mut loader = Loader::new(options.config.clone());
    let (policy, is_baseline) = match options.policies.first() {
        Some(policy) => (policy, false),
        None => (&options.baseline, true),
    };
    let rate = match options.rates.first() {
        Some(Rate::PerSecond(rate)) => *rate,
        Some(Rate::TimesItsOwn(times)) => facts.rate * times,
        None => facts.rate,
    };
    let play = Play { rate, own_rate: facts.rate, seed: options.seeds.first().copied().unwrap_or(AS_IT_IS) };
    let title = format!("{} under {}", facts.source, policy.label);
    let outcome = run(options, &mut loader, input, policy, is_baseline, &play, Some(&title), &mut |_| ())?;
    outcome.timeline.context("no engine")
}

/// Whether a run is one to compare, or why its policy is given up.
///
/// # Errors
/// What is not the policy's own doing, or ends every run: it is the baseline, or of a slot that all runs share.
fn why_given_up(
    loader: &mut Loader,
    outcome: anyhow::Result<Outcome>,
    is_baseline: bool,
) -> anyhow::Result<Result<Outcome, String>> {
    let watches = loader.take_watches();
    let outcome = match outcome {
        Err(error) if !is_baseline && error.is::<TrialFault>() => return Ok(Err(format!("{error:#}"))),
        outcome => outcome?,
    };
    for watch in watches {
        let Some(why) = watch.given_up() else { continue };
        ensure!(!is_baseline, "{why}");
        return Ok(Err(why));
    }
    Ok(Ok(outcome))
}

/// One run's load.
struct Play {
    rate: f64,
    own_rate: f64,
    seed: u64,
}

/// The seed with which a trace is replayed as it is.
const AS_IT_IS: u64 = 1;

/// A name for each policy, the baseline's first. Results are told apart by it, so no two are the same: a second one of the
/// same name, from another folder or with injected faults, is numbered.
fn labels(options: &Options) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for policy in std::iter::once(&options.baseline).chain(&options.policies) {
        let same = (1..).map(|n| if n == 1 { policy.label.clone() } else { format!("{} #{n}", policy.label) });
        out.extend(same.into_iter().find(|label| !out.contains(label)));
    }
    out
}

#[expect(clippy::too_many_arguments, reason = "the parts of one run")]
fn run(
    options: &Options,
    loader: &mut Loader,
    input: &Input,
    policy: &PolicySet,
    is_baseline: bool,
    play: &Play,
    timeline: Option<&str>,
    progress: &mut dyn FnMut(f64),
) -> anyhow::Result<Outcome> {
    let dispatch = match &policy.dispatch {
        Some(dispatch) => dispatch.clone(),
        None => configured(loader.config(), SlotName::Dispatch)?,
    };
    let choice = Choice {
        dispatch,
        eviction: policy.eviction.clone().or_else(|| options.eviction.clone()),
        budget: policy.budget.clone().or_else(|| options.budget.clone()),
        inject: options.inject.filter(|_| !is_baseline),
    };
    let engines = 0..options.engines;
    let policies: Vec<Policies> = engines
        .clone()
        .map(|i| Policies::load(loader, &choice, play.seed ^ u64::from(i) << 32))
        .collect::<Result<_, _>>()?;
    let slots = policies.first().map(Policies::by_slot).unwrap_or_default();
    let mut swaps = Vec::new();
    for (at_s, source) in options.swaps.iter().filter(|_| !is_baseline) {
        let candidates = engines
            .clone()
            .map(|i| loader.dispatch(source, options.inject, play.seed ^ u64::from(i) << 32))
            .collect::<Result<_, _>>()?;
        swaps.push(Swap { at_ms: at_s * 1e3, candidates, label: source.label.clone() });
    }
    let course = options.course.as_ref();
    let count = match input {
        _ if let Some(course) = course => course.requests(play.rate).ceil() as usize,
        Input::Trace { requests, .. } => requests.len(),
        Input::Sessions { sessions, .. } => sessions.iter().map(|session| session.requests.len()).sum(),
        Input::Generated { requests, .. } => *requests,
    };
    let mut simulation =
        Simulation::new(&options.engine, policies, options.slo, count).with_router(options.router).with_swaps(swaps);
    if let Some([think, _]) = policy.handoff {
        let disagg = &options.config.disagg;
        let policy = disagg.policy.policy(disagg.offload_threshold_blocks);
        simulation =
            simulation.with_handoff(HandoffFleet { think: think as usize, policy, transfer: options.transfer });
    }
    if let Some(course) = course {
        simulation = simulation.measuring(course.measured);
    }
    if let Some(title) = timeline {
        simulation = simulation.with_timeline(title);
    }
    if let MaxTokens::AtMost(tokens) = options.max_tokens {
        simulation = simulation.with_max_tokens(tokens);
    }
    let mut told = |arrived: usize| progress(arrived as f64 / count as f64);
    let mut outcome = match arrivals(options, input, play)? {
        Some(arrivals) => simulation.run(arrivals, &mut told),
        None => {
            let Input::Sessions { sessions, at_once, admitted, .. } = input else { bail!("no arrivals") };
            let EngineConfig { kv_blocks, block_tokens, .. } = options.engine;
            let kv_tokens = u64::from(kv_blocks) * u64::from(block_tokens) * u64::from(options.engines);
            let sessions = ClosedLoop::new(Arc::clone(sessions), *at_once, play.seed).admitting(*admitted, kv_tokens);
            simulation.run_sessions(sessions, &mut told)
        }
    };
    outcome.run.slots = slots;
    Ok(outcome)
}

/// The requests of a load in the order of their arrivals; `None` for sessions, whose requests arrive when others end.
fn arrivals<'a>(
    options: &'a Options,
    input: &'a Input,
    play: &Play,
) -> anyhow::Result<Option<Box<dyn Iterator<Item = TraceRequest> + 'a>>> {
    let course = options.course.as_ref();
    let finish = |mut request: TraceRequest| {
        if let (true, Some(deadline_ms)) = (request.deadline_ms.is_infinite(), options.deadline_ms) {
            request.deadline_ms = deadline_ms;
        }
        if options.deadlines_of_slo {
            request.deadline_ms = options.slo.due_ms(request.prompt_tokens, request.think_tokens);
        }
        request
    };
    // At the times that the course makes of those at a steady rate.
    let warped = move |request: TraceRequest| match course {
        Some(course) => Some(TraceRequest { arrival_s: course.time_of(request.arrival_s)?, ..request }),
        None => Some(request),
    };
    Ok(match input {
        Input::Trace { requests, .. } => {
            let requests = if play.seed == AS_IT_IS { requests.to_vec() } else { shuffled(requests, play.seed) };
            let stretch = play.own_rate / play.rate;
            let scaled = requests
                .into_iter()
                .map(move |request| TraceRequest { arrival_s: request.arrival_s * stretch, ..request });
            match course {
                Some(_) => Some(Box::new(Endless::new(scaled.collect(), play.seed).map_while(warped).map(finish))),
                None => Some(Box::new(scaled.map(finish))),
            }
        }
        Input::Sessions { .. } => None,
        Input::Generated { workload, requests, .. } => {
            let workload = Workload { requests_per_s: play.rate, ..(**workload).clone() };
            let most = if course.is_some() { usize::MAX } else { *requests };
            let generated = Generator::new(&workload, play.seed)?.take(most);
            Some(Box::new(generated.map_while(warped).map(finish)))
        }
    })
}

/// The most requests of the first load that any scheduler could serve within the service levels, as a share of them, with the
/// first seed: see [`most_in_time`]. `None` for sessions and where prompts share prefixes.
///
/// # Errors
/// Nothing to replay.
pub fn bound(options: &Options, input: &Input) -> anyhow::Result<Option<f64>> {
    let own_rate = own_rate(input)?;
    let rate = match options.rates.first() {
        Some(Rate::PerSecond(rate)) => *rate,
        Some(Rate::TimesItsOwn(times)) => own_rate * times,
        None => own_rate,
    };
    let play = Play { rate, own_rate, seed: options.seeds.first().copied().unwrap_or(AS_IT_IS) };
    let requests: Option<Vec<TraceRequest>> = arrivals(options, input, &play)?.map(Iterator::collect);
    Ok(requests.and_then(|requests| most_in_time(&options.engine, requests, &options.slo)))
}

/// The bodies of requests without a prefix change places; arrivals stay.
fn shuffled(requests: &[TraceRequest], seed: u64) -> Vec<TraceRequest> {
    let mut out = requests.to_vec();
    let free: Vec<usize> = (0..out.len()).filter(|i| out[*i].prefix == Prefix::None).collect();
    let mut order = free.clone();
    order.shuffle(&mut Pcg64::seed_from_u64(seed));
    for (to, from) in free.into_iter().zip(order) {
        out[to] = TraceRequest { arrival_s: requests[to].arrival_s, ..requests[from].clone() };
    }
    out
}

/// The rate of a trace or a workload itself, requests a second.
///
/// # Errors
/// Nothing to replay.
pub fn own_rate(input: &Input) -> anyhow::Result<f64> {
    Ok(facts(input)?.rate)
}

fn facts(input: &Input) -> anyhow::Result<TraceFacts> {
    let of_requests = |request: &TraceRequest| [request.prompt_tokens, request.think_tokens, request.output_tokens];
    Ok(match input {
        Input::Trace { name, requests } => {
            let (Some(first), Some(last)) = (requests.first(), requests.last()) else { bail!("{name}: no requests") };
            let (n, duration_s) = (requests.len() as f64, last.arrival_s - first.arrival_s);
            TraceFacts {
                source: name.clone(),
                requests: requests.len() as u64,
                duration_s,
                rate: if duration_s > 0.0 { (n - 1.0) / duration_s } else { n },
                mean_tokens: mean_tokens(requests.iter().map(of_requests)),
            }
        }
        // Sessions arrive when others end: they have no rate of their own.
        Input::Sessions { name, sessions, .. } => {
            let requests = sessions.iter().flat_map(|session| &session.requests);
            let tokens =
                |request: &SessionRequest| [request.prompt_tokens, request.think_tokens, request.output_tokens];
            TraceFacts {
                source: name.clone(),
                requests: requests.clone().count() as u64,
                duration_s: 0.0,
                rate: 0.0,
                mean_tokens: mean_tokens(requests.map(tokens)),
            }
        }
        Input::Generated { name, workload, requests } => {
            // As many as a run has, up to what is enough for a mean.
            let generated: Vec<_> = Generator::new(workload, 1)?.take((*requests).min(20_000)).collect();
            if generated.is_empty() {
                bail!("{name}: no requests");
            }
            let rate = workload.requests_per_s;
            TraceFacts {
                source: name.clone(),
                requests: *requests as u64,
                duration_s: (*requests as f64 - 1.0) / rate,
                rate,
                mean_tokens: mean_tokens(generated.iter().map(of_requests)),
            }
        }
    })
}

/// Means of prompt, thinking and answer.
fn mean_tokens(requests: impl Iterator<Item = [u32; 3]>) -> [f64; 3] {
    let (mut sums, mut count) = ([0.0; 3], 0_u64);
    for tokens in requests {
        count += 1;
        sums.iter_mut().zip(tokens).for_each(|(sum, tokens)| *sum += f64::from(tokens));
    }
    sums.map(|sum| sum / count.max(1) as f64)
}

/// Processor and cores.
#[must_use]
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {cores} cores", model.unwrap_or("unknown processor"))
}
