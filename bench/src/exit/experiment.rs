use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::choose::{Tuning, tuned};
use super::configuration::{COMPONENT, FIXED, fixed, of_component, recording, reported};
use super::document::{ExitFacts, MeasuredSetting, NONE};
use super::recording::{PassShape, SolvedPass, SolvedRun};
use super::{ExitDocument, ExitFamily, ExitRecording, SCENARIO};
use crate::vllm::{Dtype, Python, RunError, Setting, meridian_config};

/// Solves the problems of one split in one engine.
const DRIVER: &str = "meridian.vllm.bench.early_exit_run";
/// Longest that one engine may take: the passes of all fixed budgets are one engine's.
const RUN_LIMIT: Duration = Duration::from_secs(1800);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// Folder of the model.
    pub model: String,
    /// Where every run and its log are kept; it has to exist.
    pub out: PathBuf,
    /// Problems that are reported on, within [`PROBLEMS`](super::PROBLEMS).
    pub problems: usize,
    /// Others, on which settings are chosen.
    pub tune: usize,
    /// Samples of each problem.
    pub repeats: usize,
    /// Think tokens of the fixed budgets, from the smallest.
    pub budgets: Vec<u32>,
    /// Components of DEER, each with a label: the engine runs each with the setting chosen for DEER.
    pub components: Vec<ExitComponent>,
    /// Of sampling.
    pub temperature: f64,
    /// Type of the model's numbers.
    pub dtype: Dtype,
    /// Of problems, sampling and intervals, within [`SEEDS`](super::SEEDS).
    pub seed: u64,
}

/// A component that decides in an engine run of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitComponent {
    /// In names of files and in titles: letters and digits.
    pub label: String,
    /// The component.
    pub file: PathBuf,
}

impl Experiment {
    /// Record, choose, measure, compare: one engine after the other. `tell` is told how far it is, in lines.
    ///
    /// # Errors
    /// [`RunError`]: one run that fails ends it all, a setting that Meridian refuses before any is started.
    pub fn run(&self, python: &Python, tell: &mut dyn FnMut(&str)) -> Result<ExitDocument, RunError> {
        check([&recording(), &fixed()])?;
        let mut engines = Engines { of: self, python, tell, started: 0, faults: BTreeMap::new() };
        let recorded = engines.record()?;
        let tuning = tuned(&recorded.thoughts).map_err(RunError::Recorded)?;
        engines.tell_choices(&tuning);
        let mut runs = reported(&tuning.choices);
        let deer = tuning.choices.iter().find(|(family, _)| *family == ExitFamily::Deer).map(|(_, chosen)| chosen.rule);
        for (ExitComponent { label, file }, rule) in self.components.iter().zip(deer.iter().cycle()) {
            runs.push((format!("{COMPONENT}{label}"), of_component(rule, file)));
        }
        check(runs.iter().map(|(_, settings)| settings))?;
        let passes: Vec<Option<u32>> = std::iter::once(None).chain(self.budgets.iter().copied().map(Some)).collect();
        let SolvedRun { machine, passes, .. } = engines.solve(FIXED, &fixed(), &passes)?;
        let mut measured: Vec<MeasuredSetting> = passes.into_iter().map(fixed_budget).collect();
        for (name, settings) in &runs {
            let family = ExitFamily::ALL.into_iter().find(|family| family.key() == *name);
            let title = match (family, name.strip_prefix(COMPONENT)) {
                (Some(family), _) => family.title().to_owned(),
                (None, Some(label)) => format!("{}, a component in {label}", ExitFamily::Deer.title()),
                (None, None) => "probes, nothing ended".to_owned(),
            };
            let passes = engines.solve(name, settings, &[None])?.passes;
            let setting = |pass| MeasuredSetting { name: name.clone(), title: title.clone(), pass };
            measured.extend(passes.into_iter().map(setting));
        }
        let facts = ExitFacts {
            problems: self.problems,
            tune: self.tune,
            repeats: self.repeats,
            budgets: self.budgets.clone(),
            temperature: self.temperature,
            dtype: self.dtype,
            seed: self.seed,
            machine,
            engine_settings: runs,
        };
        ExitDocument::new(facts, tuning, measured, engines.faults).map_err(RunError::Recorded)
    }
}

fn check<'a>(engines: impl IntoIterator<Item = &'a Vec<Setting>>) -> Result<(), RunError> {
    let check = |settings: &Vec<Setting>| meridian_config(settings).map(|_| ()).map_err(RunError::Setting);
    engines.into_iter().try_for_each(check)
}

fn fixed_budget(pass: SolvedPass) -> MeasuredSetting {
    let (name, title) = match pass.budget {
        None => (NONE.to_owned(), "no limit".to_owned()),
        Some(tokens) => (format!("{FIXED}-{tokens}"), format!("fixed budget {tokens}")),
    };
    MeasuredSetting { name, title, pass }
}

/// Which problems an engine solves, and what it writes.
#[derive(Clone, Copy)]
enum Solving<'a> {
    /// Those of the tuning split, once, with every probe.
    Recorded,
    /// Those of the report split, a pass a budget.
    Passes(&'a [Option<u32>]),
}

/// Runs of the engine, each in a process of its own and with a seed of sampling of its own.
struct Engines<'a> {
    of: &'a Experiment,
    python: &'a Python,
    tell: &'a mut dyn FnMut(&str),
    started: u64,
    faults: BTreeMap<String, u64>,
}

impl Engines<'_> {
    fn record(&mut self) -> Result<ExitRecording, RunError> {
        let started = Instant::now();
        let path = self.run("tune", &recording(), Solving::Recorded)?;
        let run = ExitRecording::read(&path).map_err(RunError::Recorded)?;
        self.ended(started, &run.faults);
        Ok(run)
    }

    fn solve(&mut self, name: &str, settings: &[Setting], passes: &[Option<u32>]) -> Result<SolvedRun, RunError> {
        let started = Instant::now();
        let path = self.run(name, settings, Solving::Passes(passes))?;
        let asked = PassShape { problems: self.of.problems, samples: self.of.repeats };
        let run = SolvedRun::read(&path, passes, asked).map_err(RunError::Recorded)?;
        for pass in &run.passes {
            let budget = pass.budget.map_or_else(String::new, |tokens| format!("budget {tokens}: "));
            let means = pass.means();
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let (right, tokens) = (100.0 * mean(&means.right), mean(&means.tokens));
            (self.tell)(&format!("  {budget}{right:.1} % right, {tokens:.1} think tokens, {:.1} s", pass.wall_s));
        }
        self.ended(started, &run.faults);
        Ok(run)
    }

    /// One engine; the file that it wrote.
    fn run(&mut self, name: &str, settings: &[Setting], solving: Solving<'_>) -> Result<PathBuf, RunError> {
        (self.tell)(&format!("{name} ..."));
        let of = self.of;
        let file = |suffix: &str| of.out.join(format!("{SCENARIO}-{name}.{suffix}"));
        let mut args: Vec<String> = Vec::new();
        let mut add = |flag: &str, value: String| args.extend([flag.to_owned(), value]);
        add("--out", file("json").display().to_string());
        add("--model", of.model.clone());
        add("--split", if matches!(solving, Solving::Recorded) { "tune" } else { "report" }.to_owned());
        add("--seed", of.seed.to_string());
        add("--temperature", of.temperature.to_string());
        add("--tune", of.tune.to_string());
        add("--problems", of.problems.to_string());
        add("--repeats", of.repeats.to_string());
        add("--dtype", of.dtype.to_string());
        add("--engine-seed", (1000 * of.seed + self.started).to_string());
        for (field, value) in settings {
            add("--set", format!("{field}={value}"));
        }
        match solving {
            Solving::Recorded => args.push("--record".to_owned()),
            Solving::Passes(budgets) => {
                for budget in budgets {
                    add("--budget", budget.map_or_else(|| "none".to_owned(), |tokens| tokens.to_string()));
                }
            }
        }
        self.started += 1;
        self.python.run_module(DRIVER, &args, name, &file("log"), RUN_LIMIT)?;
        Ok(file("json"))
    }

    fn ended(&mut self, started: Instant, faults: &BTreeMap<String, u64>) {
        for (kind, times) in faults {
            let all = self.faults.entry(kind.clone()).or_default();
            *all = all.saturating_add(*times);
        }
        (self.tell)(&format!("  {:.0} s in all", started.elapsed().as_secs_f64()));
    }

    fn tell_choices(&mut self, tuning: &Tuning) {
        let natural = &tuning.no_limit;
        let (right, tokens) = (100.0 * natural.accuracy(), natural.mean_tokens());
        (self.tell)(&format!("  {} thoughts, {right:.1} % right, {tokens:.1} think tokens", natural.thoughts()));
        for (family, chosen) in &tuning.choices {
            let margin = if chosen.within_margin { "" } else { ", none within the margin" };
            let (title, rule, right) = (family.title(), chosen.rule, 100.0 * chosen.accuracy);
            let tokens = chosen.tokens;
            (self.tell)(&format!("  {title}: {rule:?}, {right:.1} %, {tokens:.1} think tokens{margin}"));
        }
    }
}
