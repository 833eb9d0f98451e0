//! Sessions: which requests are turns of one conversation, and how long it pauses between them. All memory is bounded,
//! because the names come from outside.

use std::collections::{BTreeMap, HashMap};

use crate::clients::{is_name, next_number};

/// Number of remembered sessions; one more makes the host forget the one that was used first.
const MAX_SESSIONS: usize = 1 << 16;
/// A session that nobody has used for so long is forgotten, milliseconds.
const EXPIRES_MS: f64 = 24.0 * 3600.0 * 1e3;
/// Gaps that weigh in a mean: a session changes its habits.
const GAPS_WEIGHED: u32 = 32;
/// Gaps that weigh in the mean of all sessions.
const ALL_GAPS_WEIGHED: u32 = 4096;
/// In a name, between that of a sub-agent's session and that of the session which waits for it.
const PARENT: &str = ";parent=";
/// Sub-agents of sub-agents: as many levels are followed.
const MAX_DEPTH: u8 = 8;

/// Why a request's chain of blocks is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// It ended its turn: somebody reads its answer.
    #[default]
    Turn = 0,
    /// It ended in a call of a tool, whose result follows.
    Tool = 1,
    /// It was preempted, and resumes.
    Preempted = 2,
}

/// The facts about a session after a request of it, as the columns of an eviction policy have them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SessionFacts {
    /// Its number, from 1; 0 for none.
    pub session: u32,
    /// Its client names it.
    pub is_named: bool,
    /// Which request of it that request is, from 1; 0 for none.
    pub turn: u32,
    /// From the end of the request before to the arrival of that request, milliseconds; NaN for a first one.
    pub last_gap_ms: f32,
    /// Mean of the gaps after requests that stopped as that one, milliseconds; of all sessions where `gaps` is 0; NaN before
    /// any.
    pub gap_ms: f32,
    /// Their standard deviation, milliseconds.
    pub gap_spread_ms: f32,
    /// Number of the session's own gaps in the two.
    pub gaps: u32,
    /// That request stopped for a tool's result.
    pub stopped_for_tool: bool,
}

impl Default for SessionFacts {
    fn default() -> Self {
        Self {
            session: 0,
            is_named: false,
            turn: 0,
            last_gap_ms: f32::NAN,
            gap_ms: f32::NAN,
            gap_spread_ms: f32::NAN,
            gaps: 0,
            stopped_for_tool: false,
        }
    }
}

/// The place of a request in its session; all 0 without a session.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Turn {
    pub(crate) session: u32,
    /// From 1, in order of arrival.
    pub(crate) turn: u32,
    /// The session that waits for this one, a sub-agent's; 0 for none.
    pub(crate) parent: u32,
    /// The pause before it, milliseconds; NaN where there was none, which is 0 without a session.
    gap_ms: f32,
}

impl Session {
    fn is_at_work(&self) -> bool {
        self.live > 0 || self.at_work > 0
    }
}

/// Mean and spread of gaps, of which the latest weigh most.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    count: u32,
    mean_ms: f64,
    variance_ms2: f64,
}

impl Gaps {
    fn add(&mut self, gap_ms: f64, weighed: u32) {
        self.count = self.count.saturating_add(1);
        let weight = 1.0 / f64::from(self.count.min(weighed));
        let from_mean = gap_ms - self.mean_ms;
        self.mean_ms += weight * from_mean;
        self.variance_ms2 = (1.0 - weight) * (self.variance_ms2 + weight * from_mean * from_mean);
    }
}

#[derive(Debug)]
struct Session {
    /// Tenant and name; empty for a session that the host found.
    name: Box<str>,
    turns: u32,
    /// Requests of it that have not ended.
    live: u32,
    /// Its sub-agents with requests that have not ended, or with such sub-agents.
    at_work: u32,
    /// The session that waits for this one, a sub-agent's; 0 for none. It is older.
    parent: u32,
    /// How many such sessions there are above it.
    depth: u8,
    /// When the last of them ended, milliseconds; `None` before.
    ended_ms: Option<f64>,
    stop: Stop,
    gaps: [Gaps; 2],
    /// Number and time of its latest use.
    used: u64,
    used_ms: f64,
}

/// The sessions of one engine.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    /// By tenant and name: one tenant's names say nothing of another's.
    by_name: HashMap<Box<str>, u32>,
    by_number: HashMap<u32, Session>,
    /// The numbers in the order of their latest use.
    by_use: BTreeMap<u64, u32>,
    last_number: u32,
    uses: u64,
    /// Of every session, after each kind of stop.
    all_gaps: [Gaps; 2],
}

impl Sessions {
    /// A request of this tenant's session has arrived. `a;parent=b` is session `a`, a sub-agent's: `b` waits for it.
    pub(crate) fn arrived(&mut self, tenant: &str, name: &str, now_ms: f64) -> Turn {
        let (own, parent) = name.split_once(PARENT).unwrap_or((name, ""));
        if !is_name(name) || own.is_empty() {
            return Turn::default();
        }
        let tenant = if is_name(tenant) { tenant } else { "" };
        let key = |name| format!("{}:{tenant}{name}", tenant.len());
        let (name, parent) = (key(own), key(parent));
        let number = match self.by_name.get(name.as_str()) {
            Some(number) => *number,
            None => {
                let parent = self.by_name.get(parent.as_str()).copied().unwrap_or(0);
                let above = self.by_number.get(&parent).map(|known| known.depth).filter(|depth| *depth < MAX_DEPTH);
                let number = self.begin(name.into());
                if let Some(known) = self.by_number.get_mut(&number)
                    && let Some(above) = above
                {
                    (known.parent, known.depth) = (parent, above + 1);
                }
                number
            }
        };
        self.turn(number, now_ms)
    }

    /// Whether the session waits for a sub-agent that has a request in the engine.
    pub(crate) fn waits(&self, session: u32) -> bool {
        self.by_number.get(&session).is_some_and(|known| known.at_work > 0)
    }

    /// A request continues this session, which the host found by its prompt.
    pub(crate) fn continued(&mut self, session: u32, now_ms: f64) -> Option<Turn> {
        let is_found = self.by_number.get(&session).is_some_and(|known| known.name.is_empty());
        is_found.then(|| self.turn(session, now_ms))
    }

    /// A request without a session arrived at `arrival_ms` and ends: it is the first of one that the host may find again.
    pub(crate) fn found(&mut self, arrival_ms: f64) -> Turn {
        let number = self.begin(Box::default());
        self.turn(number, arrival_ms)
    }

    /// A request of the session ended at `now_ms`.
    pub(crate) fn ended(&mut self, session: u32, stop: Stop, now_ms: f64) {
        if let Some(known) = self.by_number.get_mut(&session) {
            let was_at_work = known.is_at_work();
            known.live = known.live.saturating_sub(1);
            known.ended_ms = Some(now_ms);
            known.stop = stop;
            self.use_it(session, now_ms);
            self.tell_parents(session, was_at_work);
        }
    }

    /// The facts after `turn`, which stopped so.
    pub(crate) fn facts(&self, turn: Turn, stop: Stop) -> SessionFacts {
        let Turn { session, turn, gap_ms, .. } = turn;
        if session == 0 {
            return SessionFacts::default();
        }
        let kind = usize::from(stop == Stop::Tool);
        let known = self.by_number.get(&session);
        let own = known.map(|known| known.gaps[kind]).unwrap_or_default();
        let gaps = if own.count > 0 { own } else { self.all_gaps[kind] };
        let or_nan = |value: f64| if gaps.count > 0 { value as f32 } else { f32::NAN };
        SessionFacts {
            session,
            is_named: known.is_some_and(|known| !known.name.is_empty()),
            turn,
            last_gap_ms: gap_ms,
            gap_ms: or_nan(gaps.mean_ms),
            gap_spread_ms: or_nan(gaps.variance_ms2.sqrt()),
            gaps: own.count,
            stopped_for_tool: stop == Stop::Tool,
        }
    }

    /// Number of remembered sessions.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.by_number.len()
    }

    fn begin(&mut self, name: Box<str>) -> u32 {
        if self.by_number.len() >= MAX_SESSIONS
            && let Some((_, first)) = self.by_use.pop_first()
        {
            self.forget(first);
        }
        loop {
            self.last_number = next_number(self.last_number);
            if !self.by_number.contains_key(&self.last_number) {
                break;
            }
        }
        let number = self.last_number;
        if !name.is_empty() {
            self.by_name.insert(name.clone(), number);
        }
        self.uses += 1;
        self.by_use.insert(self.uses, number);
        let session = Session {
            name,
            turns: 0,
            live: 0,
            at_work: 0,
            parent: 0,
            depth: 0,
            ended_ms: None,
            stop: Stop::Turn,
            gaps: Default::default(),
            used: self.uses,
            used_ms: 0.0,
        };
        self.by_number.insert(number, session);
        number
    }

    fn turn(&mut self, number: u32, now_ms: f64) -> Turn {
        self.use_it(number, now_ms);
        let Some(known) = self.by_number.get_mut(&number) else { return Turn::default() };
        known.turns = known.turns.saturating_add(1);
        let gap_ms = match known.ended_ms {
            Some(ended_ms) if known.live == 0 => {
                let gap_ms = (now_ms - ended_ms).max(0.0);
                let kind = usize::from(known.stop == Stop::Tool);
                known.gaps[kind].add(gap_ms, GAPS_WEIGHED);
                self.all_gaps[kind].add(gap_ms, ALL_GAPS_WEIGHED);
                gap_ms as f32
            }
            _ => f32::NAN,
        };
        let was_at_work = known.is_at_work();
        known.live = known.live.saturating_add(1);
        let turn = Turn { session: number, turn: known.turns, parent: known.parent, gap_ms };
        self.tell_parents(number, was_at_work);
        turn
    }

    /// The session is at work, or no longer: tell those that wait for it.
    fn tell_parents(&mut self, mut number: u32, mut was_at_work: bool) {
        while let Some(known) = self.by_number.get(&number)
            && known.is_at_work() != was_at_work
        {
            let (is_at_work, above) = (known.is_at_work(), known.parent);
            let Some(parent) = self.by_number.get_mut(&above) else { return };
            was_at_work = parent.is_at_work();
            parent.at_work =
                if is_at_work { parent.at_work.saturating_add(1) } else { parent.at_work.saturating_sub(1) };
            number = above;
        }
    }

    /// Note a use, and forget what has expired.
    fn use_it(&mut self, number: u32, now_ms: f64) {
        self.uses += 1;
        if let Some(known) = self.by_number.get_mut(&number) {
            self.by_use.remove(&known.used);
            (known.used, known.used_ms) = (self.uses, now_ms);
            self.by_use.insert(self.uses, number);
        }
        while let Some((used, first)) = self.by_use.first_key_value().map(|(used, first)| (*used, *first)) {
            let expired = |known: &Session| known.live == 0 && now_ms - known.used_ms > EXPIRES_MS;
            if first == number || !self.by_number.get(&first).is_none_or(expired) {
                break;
            }
            self.by_use.remove(&used);
            self.forget(first);
        }
    }

    fn forget(&mut self, number: u32) {
        if let Some(known) = self.by_number.get_mut(&number) {
            let was_at_work = known.is_at_work();
            (known.live, known.at_work) = (0, 0);
            self.tell_parents(number, was_at_work);
        }
        if let Some(session) = self.by_number.remove(&number) {
            self.by_name.remove(&session.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(turn: Turn) -> (u32, u32) {
        (turn.session, turn.turn)
    }

    #[test]
    fn turns_of_a_session_are_counted() {
        let mut sessions = Sessions::default();
        let long = "x".repeat(200);
        let turns = ["a", "b", "a", "", "a", &long].map(|name| place(sessions.arrived("", name, 0.0)));
        assert_eq!(turns, [(1, 1), (2, 1), (1, 2), (0, 0), (1, 3), (0, 0)]);
        assert_eq!(place(sessions.arrived("other", "a", 0.0)), (3, 1), "another tenant's");
    }

    #[test]
    fn gaps_follow_the_end_and_are_kept_by_the_kind_of_stop() {
        let mut sessions = Sessions::default();
        let first = sessions.arrived("", "a", 0.0);
        assert!(sessions.facts(first, Stop::Tool).gap_ms.is_nan() && first.gap_ms.is_nan());
        for (ended_ms, stop, arrival_ms) in
            [(100.0, Stop::Tool, 110.0), (200.0, Stop::Tool, 230.0), (300.0, Stop::Turn, 5300.0)]
        {
            sessions.ended(1, stop, ended_ms);
            sessions.arrived("", "a", arrival_ms);
        }
        sessions.ended(1, Stop::Tool, 6000.0);
        let last = sessions.arrived("", "a", 6000.0);
        let facts = sessions.facts(last, Stop::Turn);
        assert_eq!((facts.gap_ms, facts.gap_spread_ms, facts.gaps, facts.last_gap_ms), (5000.0, 0.0, 1, 0.0));
        let facts = sessions.facts(last, Stop::Tool);
        assert!((facts.gap_ms - 40.0 / 3.0).abs() < 1e-4 && facts.gaps == 3 && facts.stopped_for_tool);
        assert!((facts.gap_spread_ms - (1400.0f32 / 9.0).sqrt()).abs() < 1e-3, "{}", facts.gap_spread_ms);
        // Another session has none of its own yet.
        let other = sessions.arrived("", "b", 7000.0);
        let facts = sessions.facts(other, Stop::Turn);
        assert_eq!((facts.gap_ms, facts.gaps), (5000.0, 0));
    }

    #[test]
    fn a_request_beside_another_of_its_session_has_no_gap() {
        let mut sessions = Sessions::default();
        sessions.arrived("", "a", 0.0);
        sessions.arrived("", "a", 1.0);
        sessions.ended(1, Stop::Turn, 10.0);
        assert!(sessions.arrived("", "a", 20.0).gap_ms.is_nan(), "one has not ended");
        sessions.ended(1, Stop::Turn, 30.0);
        sessions.ended(1, Stop::Turn, 40.0);
        assert_eq!(sessions.arrived("", "a", 45.0).gap_ms, 5.0);
    }

    #[test]
    fn a_session_without_a_name_is_continued_by_its_number() {
        let mut sessions = Sessions::default();
        let named = sessions.arrived("", "a", 0.0);
        assert_eq!(sessions.continued(named.session, 0.0), None, "its client names it");
        let found = sessions.found(0.0);
        sessions.ended(found.session, Stop::Turn, 10.0);
        let next = sessions.continued(found.session, 35.0).expect("it is known");
        assert_eq!((place(next), next.gap_ms), ((2, 2), 25.0));
        assert_eq!(sessions.continued(77, 0.0), None);
    }

    #[test]
    fn a_session_waits_while_its_sub_agents_work() {
        let mut sessions = Sessions::default();
        let main = sessions.arrived("", "main", 0.0).session;
        sessions.ended(main, Stop::Tool, 1.0);
        assert!(!sessions.waits(main), "it waits for no session");
        let begins = ["a;parent=main", "b;parent=main", "deep;parent=a"].map(|name| sessions.arrived("", name, 2.0));
        let [a, b, deep] = begins.map(|turn| turn.session);
        assert_eq!(begins.map(|turn| turn.parent), [main, main, a]);
        sessions.ended(a, Stop::Tool, 4.0);
        sessions.ended(b, Stop::Turn, 5.0);
        assert!(sessions.waits(main) && sessions.waits(a), "the sub-agent of its sub-agent works");
        sessions.ended(deep, Stop::Turn, 6.0);
        assert!(!sessions.waits(main) && !sessions.waits(a));
        // Its name is the part before the parent's, and its parent is the one of its first request.
        let again = sessions.arrived("", "a", 7.0);
        assert_eq!((place(again), again.parent), ((a, 2), main));
        assert_eq!(sessions.arrived("", "main;parent=a", 7.0).parent, 0);
        assert!(sessions.waits(main));
    }

    #[test]
    fn a_parent_is_of_the_same_tenant_known_and_not_too_far_up() {
        let mut sessions = Sessions::default();
        let main = sessions.arrived("x", "main", 0.0).session;
        for name in ["a;parent=main", "b;parent=nobody", "c;parent=c", "d;parent="] {
            assert_eq!(sessions.arrived("", name, 0.0).parent, 0, "{name}");
        }
        assert!(!sessions.waits(main));
        assert_eq!(place(sessions.arrived("x", ";parent=main", 0.0)), (0, 0), "it has no name itself");
        let mut above = sessions.arrived("", "0", 0.0).session;
        for depth in 1..=u32::from(MAX_DEPTH) + 1 {
            let turn = sessions.arrived("", &format!("{depth};parent={}", depth - 1), 0.0);
            assert_eq!(turn.parent, if depth <= u32::from(MAX_DEPTH) { above } else { 0 }, "{depth}");
            above = turn.session;
        }
    }

    #[test]
    fn a_forgotten_sub_agent_keeps_nobody_waiting() {
        let mut sessions = Sessions::default();
        let main = sessions.arrived("", "main", 0.0).session;
        sessions.arrived("", "a;parent=main", 0.0);
        for i in 0..MAX_SESSIONS - 1 {
            sessions.arrived("", "main", 0.0);
            sessions.arrived("", &i.to_string(), 0.0);
        }
        assert!(!sessions.waits(main));
    }

    #[test]
    fn sessions_used_last_are_remembered() {
        let mut sessions = Sessions::default();
        for i in 0..MAX_SESSIONS {
            sessions.arrived("", &i.to_string(), 0.0);
        }
        assert_eq!(place(sessions.arrived("", "0", 1.0)), (1, 2));
        assert_eq!(place(sessions.arrived("", "new", 1.0)), (MAX_SESSIONS as u32 + 1, 1));
        assert_eq!(sessions.len(), MAX_SESSIONS);
        assert_eq!(place(sessions.arrived("", "0", 1.0)), (1, 3), "it was used since");
        assert_eq!(place(sessions.arrived("", "1", 1.0)).1, 1, "it was forgotten");
        assert_eq!(sessions.len(), MAX_SESSIONS);
    }

    #[test]
    fn sessions_expire() {
        let mut sessions = Sessions::default();
        for name in ["a", "b", "c"] {
            sessions.arrived("", name, 0.0);
        }
        sessions.ended(1, Stop::Turn, 0.0);
        sessions.ended(2, Stop::Turn, EXPIRES_MS);
        sessions.arrived("", "d", EXPIRES_MS + 1.0);
        assert_eq!((sessions.len(), sessions.by_name.len(), sessions.by_use.len()), (4, 4, 4), "c is live");
        sessions.ended(3, Stop::Turn, EXPIRES_MS + 1.0);
        sessions.arrived("", "d", EXPIRES_MS + 2.0);
        assert_eq!(sessions.len(), 3, "a is forgotten");
        assert_eq!(place(sessions.arrived("", "a", EXPIRES_MS + 3.0)), (5, 1));
    }
}
