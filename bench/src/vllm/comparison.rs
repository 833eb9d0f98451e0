use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use meridian_core::PolicySource;

use super::job::{JobEngine, JobRequest, meridian_toml};
use super::{Dtype, Job, Python, RecordedRun, RunError, STOCK, Setting};
use crate::policies::PolicySet;
use crate::replay::machine;
use crate::results::{EngineFacts, MadeBy, Results, Run, SCHEMA, Slo, TraceFacts};
use crate::trace::TraceRequest;

/// Whose scheduler a run has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contestant {
    /// In tables and file names.
    pub label: String,
    /// [`STOCK`], `native:NAME` or the path of a component.
    pub scheduler: String,
    /// Fields of `meridian.toml` that make its policies.
    pub settings: Vec<Setting>,
    /// Most tokens of a step, where it is not what the others have.
    pub max_num_batched_tokens: Option<u32>,
}

impl Contestant {
    /// vLLM's own scheduler, and with `--max-num-batched-tokens` where it is given: then the label ends with it.
    #[must_use]
    pub fn stock(max_num_batched_tokens: Option<u32>) -> Self {
        let label = max_num_batched_tokens.map_or(STOCK.to_owned(), |tokens| format!("{STOCK}:{tokens}"));
        Self { label, scheduler: STOCK.to_owned(), settings: Vec::new(), max_num_batched_tokens }
    }

    /// Meridian's scheduler with these policies; `default_dispatch` where none is named for that slot.
    ///
    /// # Errors
    /// The component's file, or options that are no JSON object.
    pub fn meridian(policies: &PolicySet, default_dispatch: &str) -> anyhow::Result<Self> {
        let mut scheduler = default_dispatch.to_owned();
        let mut settings =
            vec![("policy.dispatch.source".to_owned(), toml::Value::String(scheduler.clone()).to_string())];
        let slots = [("dispatch", &policies.dispatch), ("eviction", &policies.eviction), ("budget", &policies.budget)];
        for (slot, policy) in slots {
            let Some(policy) = policy else { continue };
            let source = match PolicySource::of(&policy.source) {
                PolicySource::Native(_) => policy.source.clone(),
                // An engine starts without waiting for a registry, and its first steps would be another policy's.
                PolicySource::Registry(reference) => {
                    bail!("{reference}: expected a file (`meridian policy pull` makes one)")
                }
                PolicySource::File(path) => {
                    Path::new(path).canonicalize().with_context(|| path.to_owned())?.display().to_string()
                }
            };
            if slot == "dispatch" {
                scheduler.clone_from(&source);
            }
            settings.push((format!("policy.{slot}.source"), toml::Value::String(source).to_string()));
            if !policy.options.is_empty() {
                let options: toml::Value = serde_json::from_str(&policy.options)
                    .with_context(|| format!("{}: options: expected one JSON object", policy.options))?;
                settings.push((format!("policy.{slot}.config"), options.to_string()));
            }
        }
        Ok(Self { label: policies.label.clone(), scheduler, settings, max_num_batched_tokens: None })
    }
}

/// How far a comparison is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// A run begins.
    Begins(&'a str),
    /// It is over, in a line.
    Ended(&'a str),
}

/// Several schedulers serve equal requests, one seed a round.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the scenario or trace.
    pub source: String,
    /// The requests of each seed.
    pub rounds: Vec<(u64, Arc<[TraceRequest]>)>,
    /// The baseline first.
    pub contestants: Vec<Contestant>,
    /// Folder of the model.
    pub model: String,
    /// Every engine's size.
    pub engine: JobEngine,
    /// Fields of `meridian.toml`, for those whose scheduler is Meridian's; before those of the contestant.
    pub settings: Vec<Setting>,
    /// Fields of `meridian.toml` from the command line, which come last.
    pub given: Vec<Setting>,
    /// Type of the model's numbers.
    pub dtype: Dtype,
    /// See [`Job::realtime`].
    pub realtime: bool,
    /// See [`Job::preserves_thinking`].
    pub preserves_thinking: bool,
    /// See [`Job::gap_s`].
    pub gap_s: f64,
    /// See [`Job::no_model`].
    pub no_model: bool,
    /// Compare the outputs with the baseline's.
    pub keeps_outputs: bool,
    /// Service levels.
    pub slo: Slo,
    /// Where every run's job, rows and log are kept.
    pub out: PathBuf,
    /// The command line, for the results.
    pub command: String,
}

impl Comparison {
    /// Run everything, one engine after the other: a round in one order, the next in the other. `tell` is told how far it is.
    ///
    /// # Errors
    /// [`RunError`]: one run that fails ends it all.
    pub fn run(&self, python: &Python, tell: &mut dyn FnMut(Progress<'_>)) -> Result<Results, RunError> {
        let (mut runs, mut notes) = (Vec::new(), Vec::new());
        let mut engine = None;
        let facts = facts(&self.source, self.rounds.first().map_or(&[][..], |(_, requests)| requests), self.realtime);
        for (round, (seed, requests)) in self.rounds.iter().enumerate() {
            let mut recorded: Vec<Option<RecordedRun>> = self.contestants.iter().map(|_| None).collect();
            let mut order: Vec<usize> = (0..self.contestants.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for at in order {
                let contestant = &self.contestants[at];
                let what = format!("{}, seed {seed}, {}", self.source, contestant.label);
                tell(Progress::Begins(&what));
                let started = Instant::now();
                let run = python.run(&what, &self.stem(*seed, contestant), &self.job(contestant, *seed, requests))?;
                let took_s = started.elapsed().as_secs_f64();
                tell(Progress::Ended(&format!("{what}: {took_s:.0} s, {}", told(&run.run(self.slo)))));
                recorded[at] = Some(run);
            }
            let recorded: Vec<RecordedRun> = recorded.into_iter().flatten().collect();
            for (at, (contestant, run)) in self.contestants.iter().zip(&recorded).enumerate() {
                engine.get_or_insert_with(|| self.engine_facts(run));
                let mut of =
                    Run { policy: contestant.label.clone(), rate: facts.rate, seed: *seed, ..run.run(self.slo) };
                if let (Some(tokens), Some(baseline)) = (&run.outputs, &recorded[0].outputs)
                    && at > 0
                {
                    let differ = tokens.iter().zip(baseline).filter(|(one, other)| one != other).count();
                    of.metrics.insert("outputs_differ".into(), differ as f64);
                }
                runs.push(of);
                let name = format!("seed {seed}, {}", contestant.label);
                let elsewhere = run.ended_elsewhere();
                if elsewhere > 0 {
                    notes.push(format!("{name}: {elsewhere} requests did not end thinking where they were to"));
                }
                if run.faults() > 0 {
                    notes.push(format!("{name}: policies faulted {} times", run.faults()));
                }
            }
        }
        if self.no_model {
            notes.push("without a model: times mean nothing".to_owned());
        }
        Ok(Results {
            schema: SCHEMA,
            made_by: MadeBy {
                version: env!("CARGO_PKG_VERSION").into(),
                command: self.command.clone(),
                machine: machine(),
            },
            trace: facts,
            engine: engine.unwrap_or_default(),
            baseline: self.contestants.first().map(|contestant| contestant.label.clone()).unwrap_or_default(),
            runs,
            given_up: Vec::new(),
            most_in_time: None,
            notes,
        })
    }

    fn stem(&self, seed: u64, contestant: &Contestant) -> PathBuf {
        self.out.join(file_name(&format!("{}-{seed}-{}", self.source, contestant.label)))
    }

    fn job(&self, contestant: &Contestant, seed: u64, requests: &[TraceRequest]) -> Job {
        let all = [&self.settings, &contestant.settings, &self.given];
        let is_stock = contestant.scheduler == STOCK;
        let settings: Vec<Setting> = all.into_iter().flatten().filter(|_| !is_stock).cloned().collect();
        Job {
            model: self.model.clone(),
            scheduler: contestant.scheduler.clone(),
            // Whoever made the comparison has checked the settings.
            meridian_toml: (!is_stock).then(|| meridian_toml(&settings).unwrap_or_default()),
            settings,
            engine: JobEngine {
                max_num_batched_tokens: contestant.max_num_batched_tokens.unwrap_or(self.engine.max_num_batched_tokens),
                ..self.engine
            },
            dtype: self.dtype,
            seed,
            realtime: self.realtime,
            preserves_thinking: self.preserves_thinking,
            gap_s: self.gap_s,
            no_model: self.no_model,
            keeps_outputs: self.keeps_outputs,
            requests: requests.iter().map(JobRequest::from).collect(),
        }
    }

    fn engine_facts(&self, run: &RecordedRun) -> EngineFacts {
        let JobEngine { block_size, max_num_seqs, max_num_batched_tokens, .. } = self.engine;
        EngineFacts {
            preset: format!("vLLM {}, {}", run.machine.vllm, self.dtype),
            engines: 1,
            router: "-".into(),
            step_model: Default::default(),
            max_num_seqs,
            max_num_batched_tokens,
            kv_blocks: run.kv_blocks(),
            block_tokens: block_size,
            slo: self.slo,
        }
    }
}

/// A name for a file, of letters, digits and little else.
#[must_use]
pub fn file_name(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    text.chars().map(plain).collect()
}

/// A run in a line.
fn told(run: &Run) -> String {
    let metric = |key: &str| run.metrics.get(key).copied().unwrap_or(0.0);
    let preemptions: f64 =
        ["prefill", "think", "output"].map(|phase| metric(&format!("preemptions_{phase}"))).iter().sum();
    format!(
        "{} requests, {:.0} tok/s, output ITL p99 {:.0} ms, {preemptions} preemptions",
        metric("requests"),
        metric("throughput_tok_s"),
        metric("itl_output_p99_ms"),
    )
}

fn facts(source: &str, requests: &[TraceRequest], realtime: bool) -> TraceFacts {
    let n = requests.len().max(1) as f64;
    let span_s = requests.last().map_or(0.0, |last| last.arrival_s - requests[0].arrival_s);
    let duration_s = if realtime { span_s } else { 0.0 };
    let mean = |of: fn(&TraceRequest) -> u32| requests.iter().map(|request| f64::from(of(request))).sum::<f64>() / n;
    TraceFacts {
        source: source.to_owned(),
        requests: requests.len() as u64,
        duration_s,
        // Requests that are all there from the start, or follow each other, have none.
        rate: if duration_s > 0.0 { (n - 1.0) / duration_s } else { 0.0 },
        mean_tokens: [mean(|r| r.prompt_tokens), mean(|r| r.think_tokens), mean(|r| r.output_tokens)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::{Scenario, meridian_config};

    fn comparison(contestants: Vec<Contestant>) -> Comparison {
        let scenario = Scenario::named("kv-tight").expect("a scenario");
        let requests: Arc<[TraceRequest]> = scenario.requests(1).into();
        Comparison {
            source: "kv-tight".into(),
            contestants,
            model: "m".into(),
            engine: JobEngine::new(scenario.engine, scenario.context_tokens(&requests)),
            rounds: vec![(1, requests)],
            settings: vec![("scheduler.max_defer_ms".into(), "100".into())],
            given: vec![("scheduler.max_defer_ms".into(), "300".into())],
            dtype: Dtype::Bfloat16,
            realtime: true,
            preserves_thinking: false,
            gap_s: 0.0,
            no_model: false,
            keeps_outputs: false,
            slo: Slo::default(),
            out: "out".into(),
            command: String::new(),
        }
    }

    #[test]
    fn stock_has_no_settings_and_the_command_line_has_the_last_word() {
        let policies = "dispatch=pascal{\"tpot_ms\": 40},eviction=prefix-value".parse().expect("policies");
        let meridian = Contestant::meridian(&policies, "native:output-first").expect("native policies");
        assert_eq!(meridian.scheduler, "native:pascal");
        let comparison = comparison(vec![Contestant::stock(None), meridian]);
        let job = |at: usize| comparison.job(&comparison.contestants[at], 1, &comparison.rounds[0].1);
        assert!(job(0).settings.is_empty());
        let config = meridian_config(&job(1).settings).expect("a configuration");
        assert_eq!(config.scheduler.max_defer_ms, 300.0);
        assert_eq!(config.policy.dispatch.source, "native:pascal");
        assert_eq!(config.policy.eviction.source, "native:prefix-value");
        assert_eq!(config.policy.dispatch.config["tpot_ms"].as_integer(), Some(40));
    }

    #[test]
    fn a_job_is_told_in_words_of_vllm() {
        let comparison = comparison(vec![Contestant::stock(None), Contestant::stock(Some(512))]);
        let tuned = comparison.job(&comparison.contestants[1], 7, &comparison.rounds[0].1);
        assert_eq!((comparison.contestants[1].label.as_str(), tuned.engine.max_num_batched_tokens), ("stock:512", 512));
        let job = comparison.job(&comparison.contestants[0], 7, &comparison.rounds[0].1);
        let told = serde_json::to_value(&job).expect("JSON");
        assert_eq!(
            (&told["scheduler"], &told["kv_blocks"], &told["max_num_seqs"]),
            (&"stock".into(), &160.into(), &64.into())
        );
        assert_eq!(told["requests"].as_array().map(Vec::len), Some(120));
        assert!(told["requests"][0]["deadline_ms"].is_null());
    }

    #[test]
    fn files_of_runs_have_plain_names() {
        let policies = "native:fcfs".parse().expect("a policy");
        let mut of = comparison(vec![Contestant::meridian(&policies, "native:fcfs").expect("a native policy")]);
        of.source = "../x y".into();
        assert_eq!(of.stem(3, &of.contestants[0]), Path::new("out/..-x-y-3-fcfs"));
    }
}
