//! The state machine: what is seen of the engines goes in, the policy that each should have comes out. No I/O, no clock.

use std::collections::{BTreeMap, HashMap};

use meridian_core::PolicySource;
use meridian_engine::control::{LatencyReport, SlotStatus, Version};
use statrs::distribution::{DiscreteCDF, Hypergeometric};

use super::judge::{Finding, GuardVerdict, Interval, Look, judge};
use super::state::{EngineRecord, NewPolicy, Outcome, Phase, Role, RolloutState, is_same};
use crate::stats::{Metric, Sample};

/// What an engine says.
#[derive(Clone, Debug)]
pub(super) struct EngineReport {
    pub(super) slot: SlotStatus,
    pub(super) report: LatencyReport,
}

/// The engines of the fleet, and what those say that answer.
pub(super) type Engines = BTreeMap<String, Option<EngineReport>>;

/// The change that brings an engine nearer to its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Put the new policy into shadow.
    Shadow,
    /// Make it active: from the shadow, if it is there.
    Activate,
    Promote,
    StopShadow,
    /// Return to the previous version, which is the old one.
    RollBack,
    /// Put the old policy by its name.
    PutOld,
}

/// The policy that decides in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decides {
    Old,
    New,
    Other,
}

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
/// Intervals that an engine may take to return to the old policy, before the roll-out ends without it.
const PATIENCE: u32 = 20;
/// Probability below which more losses among engines with the new policy are no accident.
const LOSS_LEVEL: f64 = 0.01;
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
            self.state.intervals += 1;
            self.begin_interval(engines);
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
        if self.state.policy.is(&slot.active) {
            return Decides::New;
        }
        match self.state.engines.get(name) {
            Some(record) if is_same(&record.old, &slot.active) => Decides::Old,
            _ => Decides::Other,
        }
    }

    /// Which engines are there, and which of them somebody else has changed.
    fn take_part(&mut self, engines: &Engines) {
        let mut notes = Vec::new();
        for record in self.state.engines.values_mut() {
            record.is_listed = false;
        }
        for (name, seen) in engines {
            let is_known = self.state.engines.contains_key(name);
            if !is_known && let Some(seen) = seen {
                self.join(name, seen);
            }
            let before = self.before.get(name).map(|before| (before.decides, before.report.run.clone()));
            let decides = seen.as_ref().map(|seen| self.decides(name, &seen.slot));
            let is_quarantined = seen.as_ref().is_some_and(|seen| is_quarantined(&self.state.policy, &seen.slot));
            let Some(record) = self.state.engines.get_mut(name) else { continue };
            record.is_listed = true;
            let answered = std::mem::replace(&mut record.answers, seen.is_some());
            let Some(seen) = seen else {
                record.was_lost = true;
                if answered {
                    notes.push(format!("{name} does not answer"));
                }
                continue;
            };
            let run = &seen.report.run;
            let restarted = !record.run.is_empty() && record.run != *run;
            record.run.clone_from(run);
            record.was_lost |= restarted;
            let is_same_run = before.as_ref().is_some_and(|(_, of)| of == run);
            let foreign = match (before.map(|(decides, _)| decides), decides) {
                (_, Some(Decides::Other)) if !is_quarantined => Some(format!(
                    "decides by {} {}, which somebody else has put there",
                    seen.slot.active.name, seen.slot.active.version
                )),
                (Some(Decides::New), Some(Decides::Old)) if is_same_run && !is_quarantined => {
                    Some("returned to the old policy, which somebody else has asked for".to_owned())
                }
                _ => None,
            };
            // A roll-out that returns has asked for it itself.
            let foreign =
                foreign.filter(|_| !matches!(self.state.phase, Phase::Back { .. }) && record.foreign.is_none());
            if let Some(foreign) = foreign {
                notes.push(format!("{name}: {foreign}; it is no longer part of the roll-out"));
                record.foreign = Some(foreign);
            } else if restarted {
                notes.push(format!("{name} has restarted"));
            }
        }
        notes.into_iter().for_each(|note| self.state.note(note));
    }

    fn join(&mut self, name: &str, seen: &EngineReport) {
        let active = &seen.slot.active;
        let has_new = self.state.policy.is(active);
        let role = match self.state.phase {
            Phase::Shadow => Role::Shadow,
            Phase::Finish => Role::New,
            // Its configuration may have the new policy already.
            Phase::Step { .. } if has_new => Role::New,
            Phase::Step { .. } | Phase::Back { .. } | Phase::Over { .. } => Role::Old,
        };
        let is_other = if has_new { role == Role::Shadow } else { !is_same(active, &self.state.old) };
        let foreign = is_other.then(|| format!("decides by {} {} when it joins", active.name, active.version));
        let record = EngineRecord {
            role,
            old: self.state.old.clone(),
            foreign,
            answers: true,
            is_listed: true,
            was_lost: false,
            run: seen.report.run.clone(),
            problem: None,
        };
        let is_late = self.state.intervals > 0 || !matches!(self.state.phase, Phase::Shadow);
        self.state.engines.insert(name.to_owned(), record);
        if is_late {
            self.state.note(format!("{name} joins the fleet"));
        }
    }

    /// The reason to return to the old policy at once.
    fn alarm(&self, engines: &Engines) -> Option<String> {
        let policy = &self.state.policy;
        for (name, seen) in engines {
            let (Some(EngineReport { slot, .. }), Some(record)) = (seen, self.state.engines.get(name)) else {
                continue;
            };
            if record.foreign.is_some() {
                continue;
            }
            if is_quarantined(policy, slot) {
                return Some(format!("{name}: the new policy is in quarantine"));
            }
            if let Some(shadow) = slot.shadow.as_ref().filter(|shadow| policy.is(&shadow.version) && shadow.faults > 0)
            {
                return Some(format!("{name}: faults of the new policy in shadow: {}", shadow.faults));
            }
            let before = self.before.get(name).filter(|before| before.decides == Decides::New);
            let more = before.map_or(0, |before| faults(slot).saturating_sub(before.faults));
            if record.role == Role::New && policy.is(&slot.active) && (more > 0 || slot.strikes > 0) {
                let kinds: Vec<&str> = slot
                    .faults
                    .iter()
                    .filter(|(kind, count)| *count > 0 && kind != "load")
                    .map(|(kind, _)| kind.as_str())
                    .collect();
                let count = more.max(u64::from(slot.strikes));
                return Some(format!("{name}: faults of the new policy: {count} ({})", kinds.join(", ")));
            }
        }
        self.too_many_lost()
    }

    /// More engines with the new policy restart or vanish than chance explains: Fisher's exact test.
    fn too_many_lost(&self) -> Option<String> {
        if !matches!(self.state.phase, Phase::Step { .. }) {
            return None;
        }
        let count = |role, is_lost: bool| {
            let of_role = self.state.taking_part().filter(|(_, record)| record.role == role);
            of_role.filter(|(_, record)| !is_lost || record.was_lost).count() as u64
        };
        let (new, old) = (count(Role::New, false), count(Role::Old, false));
        let (lost_new, lost_old) = (count(Role::New, true), count(Role::Old, true));
        if lost_new == 0 {
            return None;
        }
        let chance = Hypergeometric::new(new + old, lost_new + lost_old, new).ok()?.sf(lost_new - 1);
        (chance < LOSS_LEVEL).then(|| {
            format!(
                "{lost_new} of {new} engines with the new policy restarted or vanished, and {lost_old} of {old} others"
            )
        })
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
            self.next_step(number + 1);
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
        self.state.intervals = 0;
        self.state.paused = None;
        for record in self.state.engines.values_mut() {
            record.role = Role::Old;
        }
    }

    /// The operator wants the old policy.
    pub(super) fn abort(&mut self, at_s: f64) {
        self.state.at_s = at_s;
        if !matches!(self.state.phase, Phase::Back { .. } | Phase::Over { .. }) {
            self.back(Outcome::Aborted);
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

    /// What brings an engine nearer to its role.
    pub(super) fn action(&self, name: &str, slot: &SlotStatus) -> Option<Action> {
        let record = self.state.engines.get(name).filter(|record| record.foreign.is_none())?;
        let policy = &self.state.policy;
        let has_shadow = slot.shadow.as_ref().is_some_and(|shadow| policy.is(&shadow.version));
        let decides = self.decides(name, slot);
        match record.role {
            Role::Shadow => (decides == Decides::Old && !has_shadow).then_some(Action::Shadow),
            Role::New => match (decides, has_shadow) {
                (Decides::New, true) => Some(Action::StopShadow),
                (Decides::Old, true) => Some(Action::Promote),
                (Decides::Old, false) => Some(Action::Activate),
                _ => None,
            },
            Role::Old if is_quarantined(policy, slot) => Some(self.back_action(record, slot)),
            Role::Old => match (decides, has_shadow) {
                (Decides::New, _) => Some(self.back_action(record, slot)),
                (_, true) => Some(Action::StopShadow),
                _ => None,
            },
        }
    }

    fn back_action(&self, record: &EngineRecord, slot: &SlotStatus) -> Action {
        let is_old = |version: &Version| is_same(version, &record.old);
        let has_it = slot.previous.as_ref().is_some_and(is_old);
        // In quarantine, the old one stands in.
        let stands_in = slot.quarantine.is_some() && is_old(&slot.active);
        let is_named = record.old.sha256.is_empty() || PolicySource::of(&record.old.source).registry().is_some();
        // Its own instance, with its state, before one that starts anew.
        if has_it || stands_in || !is_named { Action::RollBack } else { Action::PutOld }
    }

    /// After the changes: whether every engine has its policy. `has` are those that were seen to have it, `silent` those
    /// that did not answer or refused, with the reason.
    pub(super) fn settle(&mut self, problems: &BTreeMap<String, String>) {
        for (name, record) in &mut self.state.engines {
            record.problem = problems.get(name).cloned().filter(|_| record.is_listed && record.foreign.is_none());
        }
        let is_done = self.state.left_behind().next().is_none();
        let is_patient = self.state.intervals < PATIENCE;
        match &self.state.phase {
            Phase::Back { outcome } if is_done || !is_patient => {
                let outcome = outcome.clone();
                self.over(outcome);
            }
            Phase::Finish if (is_done && self.state.intervals >= 1) || !is_patient => self.over(Outcome::Completed),
            _ => {}
        }
    }

    fn over(&mut self, outcome: Outcome) {
        let left = self.state.left_behind().count();
        self.state.note(match (&outcome, left) {
            (Outcome::Completed, 0) => "completed: every engine decides by the new policy".to_owned(),
            (Outcome::Completed, left) => format!("completed, but for {left} engines"),
            (_, 0) => "every engine has the old policy again".to_owned(),
            (_, left) => format!("the old policy is back, but {left} engines may still have the new one"),
        });
        self.state.phase = Phase::Over { outcome };
    }
}

fn is_quarantined(policy: &NewPolicy, slot: &SlotStatus) -> bool {
    slot.quarantine.as_ref().is_some_and(|(version, _)| policy.is(version))
}

/// Faults of policies that decided. A contender that was refused is no fault of theirs.
fn faults(slot: &SlotStatus) -> u64 {
    slot.faults.iter().filter(|(kind, _)| kind != "load").map(|(_, count)| count).sum()
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
