//! Numbers for policies: of requests, and for the names of tenants and sessions that clients give. All memory is bounded,
//! because names come from outside.

use std::collections::HashMap;

/// Number of remembered tenant names; a further name counts as none. With the length of a name, it bounds the memory
/// that clients can make the host use.
const MAX_TENANTS: usize = 1 << 16;
/// Number of remembered sessions. One more makes the host forget an eighth of them, those that were used first.
const MAX_SESSIONS: usize = 1 << 16;
/// Longest name, characters.
const MAX_NAME_CHARS: usize = 128;
/// Largest number that an `f32` column holds exactly, with all below it.
const MAX_NUMBER: u32 = (1 << 24) - 1;

/// The number after this one, from 1 to [`MAX_NUMBER`].
pub(crate) fn next_number(number: u32) -> u32 {
    if number >= MAX_NUMBER { 1 } else { number + 1 }
}

/// The place of a request in its session; both are 0 without a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) session: u32,
    /// From 1, in order of arrival.
    pub(crate) turn: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Clients {
    tenants: HashMap<Box<str>, u32>,
    /// By tenant and name: one tenant's names say nothing of another's.
    sessions: HashMap<String, Session>,
    last_session: u32,
    /// Requests with a session so far.
    uses: u64,
}

#[derive(Debug)]
struct Session {
    last: Turn,
    used: u64,
}

impl Clients {
    /// The number of a tenant, in order of first appearance; 0 for none.
    pub(crate) fn tenant(&mut self, name: &str) -> u32 {
        if !is_name(name) {
            return 0;
        }
        if let Some(tenant) = self.tenants.get(name) {
            return *tenant;
        }
        if self.tenants.len() >= MAX_TENANTS {
            return 0;
        }
        let tenant = u32::try_from(self.tenants.len() + 1).expect("MAX_TENANTS fits");
        self.tenants.insert(name.into(), tenant);
        tenant
    }

    /// A request of this tenant's session has arrived.
    pub(crate) fn turn(&mut self, tenant: &str, session: &str) -> Turn {
        if !is_name(session) {
            return Turn::default();
        }
        let tenant = if is_name(tenant) { tenant } else { "" };
        let session = format!("{}:{tenant}{session}", tenant.len());
        self.uses += 1;
        if let Some(known) = self.sessions.get_mut(&session) {
            known.used = self.uses;
            known.last.turn = known.last.turn.saturating_add(1);
            return known.last;
        }
        if self.sessions.len() >= MAX_SESSIONS {
            self.forget();
        }
        self.last_session = next_number(self.last_session);
        let first = Turn { session: self.last_session, turn: 1 };
        self.sessions.insert(session, Session { last: first, used: self.uses });
        first
    }

    /// Forget the eighth of the sessions that were used first, so that the search for them is rare.
    fn forget(&mut self) {
        let mut used: Vec<u64> = self.sessions.values().map(|session| session.used).collect();
        let (_, bound, _) = used.select_nth_unstable(MAX_SESSIONS / 8);
        let bound = *bound;
        self.sessions.retain(|_, session| session.used > bound);
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().nth(MAX_NAME_CHARS).is_none()
}

/// Number of ended requests that are remembered for those who are told later.
const MAX_ENDED: usize = 1 << 16;

/// Numbers of ended requests, for readers with cursors of their own.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    numbers: Vec<u32>,
    /// Ended requests that are forgotten.
    before: u64,
}

impl Ended {
    pub(crate) fn push(&mut self, number: u32) {
        if self.numbers.len() >= 2 * MAX_ENDED {
            self.numbers.drain(..MAX_ENDED);
            self.before += MAX_ENDED as u64;
        }
        self.numbers.push(number);
    }

    /// Those since the cursor, which moves to the end.
    pub(crate) fn since(&self, cursor: &mut u64) -> &[u32] {
        let from = usize::try_from(cursor.saturating_sub(self.before)).unwrap_or(usize::MAX);
        *cursor = self.before + self.numbers.len() as u64;
        self.numbers.get(from..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_a_session_are_counted() {
        let mut clients = Clients::default();
        let long = "x".repeat(MAX_NAME_CHARS + 1);
        let turns = ["a", "b", "a", "", "a", &long].map(|session| clients.turn("", session));
        let turns = turns.map(|Turn { session, turn }| (session, turn));
        assert_eq!(turns, [(1, 1), (2, 1), (1, 2), (0, 0), (1, 3), (0, 0)]);
        assert_eq!(clients.turn("other", "a"), Turn { session: 3, turn: 1 }, "another tenant's");
    }

    #[test]
    fn sessions_used_last_are_remembered() {
        let mut clients = Clients::default();
        clients.turn("", "first");
        for i in 1..MAX_SESSIONS {
            clients.turn("", &i.to_string());
        }
        assert_eq!(clients.turn("", "first"), Turn { session: 1, turn: 2 });
        let new = clients.turn("", "new");
        assert_eq!(new, Turn { session: MAX_SESSIONS as u32 + 1, turn: 1 });
        assert!(clients.sessions.len() <= MAX_SESSIONS - MAX_SESSIONS / 8 + 1);
        assert_eq!(clients.turn("", "first"), Turn { session: 1, turn: 3 }, "it was used since");
        assert_eq!(clients.turn("", "1").turn, 1, "it was forgotten");
        assert_eq!(clients.turn("", &(MAX_SESSIONS - 1).to_string()).turn, 2);
    }

    #[test]
    fn ended_requests_are_told_once_to_each() {
        let (mut ended, mut one, mut other) = (Ended::default(), 0, 0);
        ended.push(7);
        ended.push(8);
        assert_eq!(ended.since(&mut one), [7, 8]);
        ended.push(9);
        assert_eq!((ended.since(&mut one), ended.since(&mut other)), (&[9][..], &[7, 8, 9][..]));
        assert!(ended.since(&mut one).is_empty());
        for number in 0..3 * MAX_ENDED as u32 {
            ended.push(number);
        }
        assert!(ended.numbers.len() <= 2 * MAX_ENDED);
        let since = ended.since(&mut one);
        assert!(since.len() >= MAX_ENDED && since.last() == Some(&(3 * MAX_ENDED as u32 - 1)), "the last are there");
        assert!(ended.since(&mut one).is_empty());
    }

    #[test]
    fn numbers_begin_again_after_the_last_exact_one() {
        assert_eq!((next_number(0), next_number(MAX_NUMBER)), (1, 1));
        assert_eq!(MAX_NUMBER as f32 as u32, MAX_NUMBER);
    }
}
