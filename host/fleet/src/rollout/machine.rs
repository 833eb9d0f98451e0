//! The state machine: what is seen of the engines goes in, the policy that each should have comes out. No I/O, no clock.
//! `part.rs` says which engines take part, `alarm.rs` what sends all of them back.

mod alarm;
mod part;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use meridian_core::text::printable;
use meridian_engine::control::{LatencyReport, SlotStatus};

use super::change::{Decides, Wanted};
use super::judge::{Finding, GuardVerdict, Interval, Look, judge};
use super::state::{Outcome, Phase, Role, RolloutState};
use crate::NamedPolicy;
use crate::stats::{Metric, Sample};

/// What an engine says.
#[derive(Clone, Debug)]
pub(super) struct EngineReport {
    pub(super) slot: SlotStatus,
    pub(super) report: LatencyReport,
}

/// The engines of the fleet, and what those say that answer.
pub(super) type Engines = BTreeMap<String, Option<EngineReport>>;

/// An engine at the begin of the interval.
struct Before {
    report: LatencyReport,
    decides: Decides,
    faults: u64,
}

/// A roll-out in memory.
pub(super) struct Machine {
    pub(super) state: RolloutState,
    pub(super) intervals: Vec<Interval>,
    /// Lost with the process: the interval that was under way then does not count.
    before: HashMap<String, Before>,
}

/// Times the intervals of a step that unclear guards may take, before the roll-out waits for the operator.
const MOST_EXTENDED: u32 = 3;
/// Intervals of a phase that are kept. In one that is paused for longer, only faults and losses count from then on.
const MOST_INTERVALS: u32 = 1000;
/// Intervals that an engine may take to follow the others, before the roll-out completes without it.
const PATIENCE: u32 = 20;
/// Engines that an event names.
const MOST_NAMED: usize = 5;
/// The engines that keep the old policy until the end: a twentieth, at least one.
const CONTROL_SHARE: usize = 20;

impl Machine {
    pub(super) fn new(state: RolloutState, intervals: Vec<Interval>) -> Self {
        Self { state, intervals, before: HashMap::new() }
    }

    /// A look at the engines after an interval. Returns what they did in it, if that counts.
    pub(super) fn look(&mut self, at_s: f64, engines: &Engines) -> bool {
        self.state.at_s = at_s;
        self.take_part(engines);
        if matches!(self.state.phase, Phase::Over { .. }) {
            return false;
        }
        if !matches!(self.state.phase, Phase::Back { .. })
            && let Some(why) = self.alarm(engines)
        {
            self.back(Outcome::RolledBack { why });
        }
        if matches!(self.state.phase, Phase::Back { .. }) {
            return false;
        }
        let measured = self.measure(engines);
        self.begin_interval(engines);
        let Some(mut interval) = measured.filter(|_| self.state.intervals < MOST_INTERVALS) else { return false };
        interval.keep_only(&self.metrics());
        self.intervals.push(interval);
        self.state.lines += 1;
        self.state.intervals += 1;
        match self.state.phase {
            Phase::Shadow => self.after_shadow(),
            Phase::Step { number } => self.after_interval(number),
            Phase::Finish | Phase::Back { .. } | Phase::Over { .. } => {}
        }
        true
    }

    /// The engines settled after a change: an interval begins, unless they have faulted meanwhile.
    pub(super) fn begin(&mut self, at_s: f64, engines: &Engines) {
        self.state.at_s = at_s;
        self.take_part(engines);
        if !matches!(self.state.phase, Phase::Back { .. } | Phase::Over { .. })
            && let Some(why) = self.alarm(engines)
        {
            self.back(Outcome::RolledBack { why });
        }
        self.begin_interval(engines);
    }

    /// An interval begins with what the engines say now.
    fn begin_interval(&mut self, engines: &Engines) {
        self.before = engines
            .iter()
            .filter_map(|(name, seen)| {
                let EngineReport { slot, report } = seen.as_ref()?;
                let decides = self.decides(name, slot);
                Some((name.clone(), Before { report: report.clone(), decides, faults: faults(slot) }))
            })
            .collect();
    }

    /// The metrics that are kept of each interval.
    fn metrics(&self) -> Vec<Metric> {
        self.state.settings.metrics()
    }

    fn decides(&self, name: &str, slot: &SlotStatus) -> Decides {
        Decides::of(&self.state.policy, self.state.engines.get(name).map(|record| &record.old), slot)
    }

    /// What the engines did since the begin of the interval; `None` when that is of no use.
    fn measure(&self, engines: &Engines) -> Option<Interval> {
        let mut interval = Interval::default();
        for (name, seen) in engines {
            let (Some(EngineReport { slot, report }), Some(before)) = (seen, self.before.get(name)) else { continue };
            let Some(record) = self.state.engines.get(name).filter(|record| record.foreign.is_none()) else { continue };
            let decides = self.decides(name, slot);
            if before.report.run != report.run || before.decides != decides || slot.quarantine.is_some() {
                continue;
            }
            let seconds = report.uptime_s - before.report.uptime_s;
            let Some(counts) = report.counts.since(&before.report.counts).filter(|_| seconds > 0.0) else { continue };
            let sample = Sample { counts, seconds };
            match (record.role, decides) {
                (Role::Shadow | Role::Old, Decides::Old) => interval.old.insert(name.clone(), sample),
                (Role::New, Decides::New) => interval.new.insert(name.clone(), sample),
                _ => None,
            };
        }
        // Later, time passes even where no engine can be measured: a step must not wait for ever.
        (!interval.old.is_empty() || !matches!(self.state.phase, Phase::Shadow)).then_some(interval)
    }

    fn after_shadow(&mut self) {
        self.state.before = self.state.lines;
        if self.state.intervals >= self.state.settings.intervals() && self.state.paused.is_none() {
            self.next_step(0);
        }
    }

    fn after_interval(&mut self, number: usize) {
        self.state.findings = self.findings();
        let exceeded: Vec<String> = self
            .state
            .findings
            .iter()
            .filter(|finding| finding.verdict == GuardVerdict::Exceeded)
            .map(|finding| described(finding, " is exceeded"))
            .collect();
        if !exceeded.is_empty() {
            self.back(Outcome::RolledBack { why: exceeded.join("; ") });
            return;
        }
        let planned = self.state.settings.intervals();
        if self.state.intervals < planned || self.state.paused.is_some() {
            return;
        }
        let open: Vec<String> = self
            .state
            .findings
            .iter()
            .filter(|finding| finding.guard.is_some() && finding.verdict != GuardVerdict::Kept)
            .map(|finding| described(finding, " is not yet clear"))
            .collect();
        if open.is_empty() || self.state.accepted {
            self.next_step(number.saturating_add(1));
        } else if self.state.intervals >= MOST_EXTENDED * planned {
            let why = format!("{}: resume to accept, or abort", open.join("; "));
            self.state.note(format!("paused: {why}"));
            self.state.paused = Some(why);
        } else if self.state.intervals == planned {
            self.state.note(format!("the step goes on: {}", open.join("; ")));
        }
    }

    /// The findings of the present step.
    fn findings(&self) -> Vec<Finding> {
        let settings = &self.state.settings;
        let guards: Vec<_> = settings.all_guards().collect();
        let index = |line: u64| usize::try_from(line).unwrap_or(usize::MAX).min(self.intervals.len());
        let before = &self.intervals[..index(self.state.before)];
        let step = &self.intervals[index(self.state.step_from)..];
        let shares = (guards.len() * settings.steps.len()).max(1);
        let look = Look { number: self.state.intervals, false_alarm: settings.false_alarm / shares as f64 };
        let guarded = guards.iter().map(|guard| (guard.metric, Some(*guard)));
        let also = settings.also.iter().filter(|metric| guards.iter().all(|guard| guard.metric != **metric));
        guarded
            .chain(also.map(|metric| (*metric, None)))
            .map(|(metric, guard)| judge(metric, guard, before, step, look))
            .collect()
    }

    /// Begin a step, or the next one that changes anything.
    fn next_step(&mut self, number: usize) {
        self.state.intervals = 0;
        self.state.accepted = false;
        self.state.step_from = self.state.lines;
        for record in self.state.engines.values_mut() {
            record.was_lost = false;
        }
        let names: Vec<String> =
            self.state.taking_part().filter(|(_, record)| record.answers).map(|(name, _)| name.clone()).collect();
        let control = (names.len() / CONTROL_SHARE).max(1);
        let most = names.len().saturating_sub(control);
        let has_new = names.iter().filter(|name| self.state.engines[*name].role == Role::New).count();
        let steps = self.state.settings.steps.clone();
        for (number, share) in steps.iter().enumerate().skip(number) {
            let wanted = ((share * names.len() as f64) - 1e-9).ceil().max(1.0) as usize;
            let wanted = wanted.min(most);
            if wanted <= has_new {
                continue;
            }
            let mut order: Vec<&String> = names.iter().collect();
            order.sort_by_key(|name| place(self.state.settings.seed, name));
            let chosen: Vec<String> = order
                .into_iter()
                .filter(|name| self.state.engines[*name].role != Role::New)
                .take(wanted - has_new)
                .cloned()
                .collect();
            for record in self.state.engines.values_mut().filter(|record| record.role == Role::Shadow) {
                record.role = Role::Old;
            }
            for name in &chosen {
                if let Some(record) = self.state.engines.get_mut(name) {
                    record.role = Role::New;
                }
            }
            self.state.phase = Phase::Step { number };
            self.state.findings.clear();
            self.state.note(format!("step {}%: {wanted} of {} engines", percent(*share), names.len()));
            return;
        }
        if matches!(self.state.phase, Phase::Shadow) {
            let why = format!("{} of the engines answer, and a comparison needs two", names.len());
            self.back(Outcome::RolledBack { why });
        } else {
            self.finish();
        }
    }

    fn finish(&mut self) {
        self.state.phase = Phase::Finish;
        for record in self.state.engines.values_mut() {
            record.role = Role::New;
        }
        let left = self.state.taking_part().count();
        self.state
            .note(format!("the last engines follow: {left} of {left}; faults still count, guards have no comparison"));
    }

    /// Every engine returns to the old policy.
    fn back(&mut self, outcome: Outcome) {
        match &outcome {
            Outcome::RolledBack { why } => self.state.note(format!("back to the old policy: {why}")),
            _ => self.state.note("back to the old policy: the operator has asked for it"),
        }
        self.state.phase = Phase::Back { outcome };
        self.state.paused = None;
        self.look_at_all();
    }

    /// Every engine that takes part is still to go back, or to show that it has.
    pub(super) fn look_at_all(&mut self) {
        self.state.intervals = 0;
        for record in self.state.engines.values_mut() {
            record.role = Role::Old;
            let takes_part = record.is_listed && record.foreign.is_none();
            record.problem = takes_part.then(|| "is still to go back".into());
        }
    }

    /// The engines of the fleet now, while all go back: one that is gone is waited for no longer.
    pub(super) fn list(&mut self, is_listed: impl Fn(&str) -> bool) {
        for (name, record) in &mut self.state.engines {
            record.is_listed = is_listed(name);
        }
    }

    /// The operator wants the old policy, or wants it in engines that were left behind.
    pub(super) fn abort(&mut self, at_s: f64) {
        self.state.at_s = at_s;
        match &self.state.phase {
            Phase::Back { .. } => {}
            Phase::Over { outcome } if *outcome == Outcome::Completed => {}
            Phase::Over { .. } if self.state.left_behind().next().is_none() => {}
            Phase::Over { outcome } => {
                let outcome = outcome.clone();
                self.back(outcome);
            }
            Phase::Shadow | Phase::Step { .. } | Phase::Finish => self.back(Outcome::Aborted),
        }
    }

    /// An engine refuses the new policy.
    pub(super) fn refused(&mut self, why: &str) {
        if !matches!(self.state.phase, Phase::Back { .. } | Phase::Over { .. }) {
            self.back(Outcome::RolledBack { why: format!("the new policy was refused: {why}") });
        }
    }

    /// The operator wants no further step for now, or wants to go on.
    pub(super) fn pause(&mut self, at_s: f64, is_paused: bool) {
        self.state.at_s = at_s;
        if matches!(self.state.phase, Phase::Back { .. } | Phase::Over { .. }) {
            return;
        }
        match (is_paused, self.state.paused.take()) {
            (true, None) => {
                self.state.note("paused by the operator");
                self.state.paused = Some("by the operator".into());
            }
            (true, why) => self.state.paused = why,
            (false, None) => {}
            (false, Some(_)) => {
                self.state.note("resumed by the operator");
                self.state.accepted = self.state.intervals >= MOST_EXTENDED * self.state.settings.intervals();
            }
        }
    }

    /// The policy that an engine should have; `None` of one that takes no part.
    pub(super) fn wanted(&self, name: &str, given: &Arc<NamedPolicy>) -> Option<Wanted> {
        let record = self.state.engines.get(name).filter(|record| record.foreign.is_none())?;
        let (slot, new) = (self.state.settings.slot, self.state.policy.clone());
        Some(Wanted { slot, role: record.role, old: record.old.clone(), new, given: Arc::clone(given) })
    }

    /// After the changes: whether every engine has its policy. `problems` has those that may not, with the reason.
    pub(super) fn settle(&mut self, problems: &BTreeMap<String, String>) {
        for (name, record) in &mut self.state.engines {
            let problem = problems.get(name).filter(|_| record.is_listed && record.foreign.is_none());
            record.problem = problem.map(|why| printable(why).into_owned());
        }
        let is_done = self.state.left_behind().next().is_none();
        let is_patient = self.state.intervals < PATIENCE;
        if matches!(self.state.phase, Phase::Finish) && (is_done && self.state.intervals >= 1 || !is_patient) {
            self.over(Outcome::Completed);
        }
    }

    /// After a round of changes in which the engines go back. It is over once all have, or after so many rounds.
    pub(super) fn settle_back(&mut self, problems: &BTreeMap<String, String>, most_rounds: u32) {
        self.settle(problems);
        self.state.intervals += 1;
        let is_done = self.state.left_behind().next().is_none();
        if let Phase::Back { outcome } = &self.state.phase
            && (is_done || self.state.intervals >= most_rounds)
        {
            let outcome = outcome.clone();
            self.over(outcome);
        }
    }

    fn over(&mut self, outcome: Outcome) {
        let left: Vec<&str> = self.state.left_behind().map(|(name, _)| name).collect();
        let count = left.len();
        let more = if count > MOST_NAMED { ", ..." } else { "" };
        let names = format!("{}{more}", left[..count.min(MOST_NAMED)].join(", "));
        self.state.note(match (&outcome, count) {
            (Outcome::Completed, 0) => "completed: every engine decides by the new policy".to_owned(),
            (Outcome::Completed, count) => format!("completed, but for {count} engines: {names}"),
            (_, 0) => "every engine has the old policy again".to_owned(),
            (_, count) => {
                format!("the old policy is back, but {count} engines may still have the new one: {names}; abort again")
            }
        });
        self.state.phase = Phase::Over { outcome };
    }
}

/// Faults of policies that decided. A contender that was refused is no fault of theirs.
fn faults(slot: &SlotStatus) -> u64 {
    slot.faults.iter().filter(|(kind, _)| kind != "load").fold(0_u64, |sum, (_, count)| sum.saturating_add(*count))
}

/// A share in percent, without the digits of rounding.
pub(super) fn percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}

fn described(finding: &Finding, is: &str) -> String {
    let guard = finding.guard.map_or_else(|| finding.metric.to_string(), |guard| guard.to_string());
    match &finding.measured {
        Some(of) => format!("{guard}{is}: {:.3}x ({:.3} to {:.3})", of.ratio, of.low, of.high),
        None => format!("{guard}{is}: too few values"),
    }
}

/// The place of an engine in the order of the steps: the same whatever other engines there are.
pub(super) fn place(seed: u64, name: &str) -> (u64, &str) {
    // FNV-1a, then the finalizer of SplitMix64.
    let mut hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325 ^ seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (hash ^ (hash >> 31), name)
}
